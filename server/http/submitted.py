"""One HTTP call with its sequences in the queue: submitted, its client watched throughout, every
sequence with an outcome afterwards. What is written is its subclasses' affair.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import Struct
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kendall.server.engines.base import EngineRequest
from kendall.server.http.client_connection import watch_client
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.sequence import Consumer, SequenceState
from kendall.server.runtime.errors import DROPPED_REASON, EVICTED, ApiError, failure_error
from kendall.server.supervision.deadlines import Deadlines, Timeouts
from kendall.server.telemetry.cost.stages import StageTiming

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
)


class AnswerOptions(Struct, kw_only=True, eq=False):
    """Facts of the call that the writer of its answer needs."""

    request_id: str
    arrived_at: float  # before a form was compiled: time limits count from here
    stream: bool
    include_usage: bool
    continuous_usage: bool  # vLLM gives it with `include_usage` only
    n: int
    # the error of a sequence that fails, by its code and message
    failure: Callable[[str, str], ApiError] = failure_error
    timeouts: Timeouts | None = None  # of the call
    error_body: Callable[[ApiError], dict[str, Any]] = ApiError.body


class AnswerPart(Consumer, Protocol):
    """The consumer of one sequence of a call; `done` once its answer is whole."""

    sequence: SequenceState | None
    done: bool


class Submitted(Response):
    """Submits the call's sequences, then writes; a client that goes takes its sequences with it,
    streamed or not.
    """

    def __init__(
        self, batcher: Batcher, requests: list[EngineRequest], options: AnswerOptions
    ) -> None:
        self.background = None
        self.error: ApiError | None = None
        self.failure = options.failure
        self.timing: StageTiming | None = None  # of the few calls that are measured
        self._batcher = batcher
        self._requests = requests
        self._options = options
        self._parts: Sequence[AnswerPart] = ()  # one for each request
        self._loop = asyncio.get_running_loop()
        # the writer, while there is nothing for it to do
        self.sleeping: asyncio.Future[None] | None = None
        self._gone = False
        self._deadlines: Deadlines | None = None

    def wake(self) -> None:
        """Something changed for the writer."""
        sleeping = self.sleeping
        if sleeping is not None:
            self.sleeping = None
            if not sleeping.done():
                sleeping.set_result(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the call to its end; every sequence has an outcome afterwards."""
        end_watch = watch_client(scope, receive, self._on_gone)
        sequences: list[SequenceState] = []
        try:
            sequences = self._submit()
            if self.timing is not None:
                send = self.timing.writing(send)
            await self._write(scope, receive, send)
        except Exception:
            for sequence in sequences:
                self._batcher.fail(
                    sequence,
                    "failed",
                    "internal_error",
                    "internal error of the gateway; its log has the details",
                )
            raise
        finally:
            end_watch()
            if self._deadlines is not None:
                self._deadlines.close()
            for sequence in sequences:
                if sequence.outcome is None:
                    sequence.cancel()
            for part in self._parts:
                # else call, parts and sequences hold one another until they are collected
                part.sequence = None
            self._let_go()

    def _submit(self) -> list[SequenceState]:
        if self.timing is not None:
            self.timing.begin()
        sequences = self._batcher.submit(self._requests, self._parts)
        for part, sequence in zip(self._parts, sequences, strict=True):
            part.sequence = sequence
            sequence.timing = self.timing
        if self._options.timeouts is not None:
            self._deadlines = Deadlines(
                self._batcher, self._options.timeouts, self._parts, self._options.arrived_at
            )
        if self.timing is not None:
            self.timing.end("submit")
        return sequences

    def _on_gone(self) -> None:
        self._gone = True
        self.wake()

    async def _until(self, condition: Callable[[], object]) -> None:
        """Looks before it sleeps, and nothing can happen between the two: no wake is missed."""
        while not (condition() or self._gone or self.error):
            await self._next_change()

    def _next_change(self) -> asyncio.Future[None]:
        self.sleeping = self._loop.create_future()
        return self.sleeping

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    def _let_go(self) -> None:
        """Forget the parts."""
        self._parts = ()

    async def _write_error(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.error is not None
        headers = self.error.headers() | {"x-request-id": self._options.request_id}
        for sequence in (part.sequence for part in self._parts):
            if sequence is not None:
                sequence.cancel()
                if sequence.at.dispatched is not None and DROPPED_REASON in headers:
                    headers[DROPPED_REASON] = EVICTED
        body = self._options.error_body(self.error)
        await JSONResponse(body, self.error.status, headers)(scope, receive, send)

    def _delays(self) -> tuple[float, float]:
        """Queueing delay and service so far of the sequence that waited longest, milliseconds: all
        its waits, and all its time in service.
        """
        delays = [
            part.sequence.queueing_delay() for part in self._parts if part.sequence is not None
        ]
        longest = max(delays)
        sojourn = self._batcher.now() - self._requests[0].request.arrived_at
        return _milliseconds(longest), _milliseconds(sojourn - longest)


def _milliseconds(seconds: float) -> float:
    """Milliseconds with three digits, as `round` gives but for ties, in a fifth of its time."""
    return math.floor(seconds * 1e6 + 0.5) / 1e3
