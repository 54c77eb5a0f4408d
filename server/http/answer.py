"""One HTTP call on its way: its sequences in the queue, its bytes on the way out, its client
watched throughout.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from queueing.measurement.record import Outcome
from server.engines.base import EngineRequest, Token
from server.errors import DROPPED_REASON, EVICTED, ApiError, failure_error
from server.http.client_connection import watch_client
from server.http.formats import DONE, Format, usage_of, with_usage
from server.http.headers import delay_headers, early_headers
from server.queue.batcher import Batcher
from server.queue.sequence import SequenceState
from server.supervision.deadlines import Deadlines, Timeouts
from server.telemetry.cost.stages import Timing

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
)


@dataclass(slots=True, kw_only=True, eq=False)
class AnswerOptions:
    """What the writer needs to know of the call."""

    request_id: str
    arrived_at: float  # before a form was compiled: time limits count from here
    stream: bool
    include_usage: bool
    continuous_usage: bool  # vLLM gives it with `include_usage` only
    n: int
    client_limit: int | None
    # the error of a sequence that fails, by its code and message
    failure: Callable[[str, str], ApiError] = failure_error
    timeouts: Timeouts | None = None  # of the call
    error_body: Callable[[ApiError], dict[str, Any]] = ApiError.body


class Choice:
    """The consumer of one sequence: one choice of the answer."""

    __slots__ = ("_call", "_offset", "done", "index", "sequence", "text", "tokens")

    def __init__(self, call: Answer, index: int) -> None:
        self._call = call
        self._offset = 0
        self.index = index
        self.sequence: SequenceState | None = None
        self.text: list[str] = []
        self.tokens: list[Token] = []
        self.done = False

    def on_dispatched(self) -> None:
        """One sequence less to wait for."""
        call = self._call
        call.undispatched -= 1
        if call.stream and not call.undispatched:  # a whole answer has nothing to write yet
            call.wake()

    def on_text(self, text: str, tokens: Sequence[Token]) -> None:
        """Build the chunk once; the writer sends what has gathered."""
        call = self._call
        if call.stream:
            every_token = call.format.every_token
            if text or every_token:
                chunk = call.format.text(self.index, text, tokens, self._offset)
                if call.continuous_usage:
                    chunk = call.with_usage_of(self, chunk)
                call.chunks.append(chunk)
                if (
                    every_token
                ):  # of the tokens' text: some of it may be held back for a stop string
                    self._offset += sum(len(token.text) for token in tokens)
                if call.sleeping is not None:
                    call.wake()
        else:
            self.text.append(text)
            self.tokens += tokens

    def on_release(self) -> None:
        """The answer is whole."""
        self.done = True
        self._call.finished.append(self)
        self._call.wake()

    def on_failed(self, outcome: Outcome, code: str, message: str) -> None:
        """Nothing more will come."""
        del outcome
        self._call.error = self._call.error or self._call.failure(code, message)
        self._call.wake()


class Answer(Response):
    """Submits the call's sequences, then writes; a client that goes takes its sequences with it,
    streamed or not.
    """

    def __init__(
        self,
        batcher: Batcher,
        requests: list[EngineRequest],
        answer_format: Format,
        options: AnswerOptions,
    ) -> None:
        self.background = None
        self.format = answer_format
        self.stream = options.stream
        self.continuous_usage = options.continuous_usage
        self.undispatched = len(requests)
        self.chunks: list[bytes] = []
        self.finished: list[Choice] = []  # whole, not yet sent
        self.error: ApiError | None = None
        self.failure = options.failure
        self.timing: Timing | None = None  # of the few calls that are measured
        self._batcher = batcher
        self._requests = requests
        self._options = options
        self._choices = [Choice(self, index) for index in range(len(requests))]
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

    def with_usage_of(self, choice: Choice, chunk: bytes) -> bytes:
        """The chunk with the choice's usage so far."""
        sequence = choice.sequence
        if sequence is None:
            return chunk
        prompt, output = (
            sequence.engine_request.request.prompt_tokens,
            sequence.stop_detector.output_tokens,
        )
        return with_usage(
            chunk,
            {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
        )

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
                sequence.cancel()  # no effect on those with an outcome
            for choice in self._choices:
                # else call, choices and sequences hold one another until they are collected
                choice.sequence = None
            self._choices, self.finished = [], []

    def _submit(self) -> list[SequenceState]:
        if self.timing is not None:
            self.timing.begin()
        sequences = self._batcher.submit(self._requests, self._choices, self._options.client_limit)
        for choice, sequence in zip(self._choices, sequences, strict=True):
            choice.sequence = sequence
            sequence.timing = self.timing
        if self._options.timeouts is not None:
            self._deadlines = Deadlines(
                self._batcher, self._options.timeouts, self._choices, self._options.arrived_at
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

    def _may_begin(self) -> bool:
        return not self.undispatched if self.stream else len(self.finished) == len(self._choices)

    def _has_more(self) -> object:
        return self.chunks or self.finished

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._until(self._may_begin)
        if self._gone:
            return
        if self.error:
            await self._write_error(scope, receive, send)
        elif self.stream:
            with contextlib.suppress(ConnectionError):
                await self._write_stream(send)
        else:
            await self._write_whole(send)

    async def _write_error(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.error is not None
        headers = self.error.headers() | {"x-request-id": self._options.request_id}
        for sequence in (choice.sequence for choice in self._choices):
            if sequence is not None:
                sequence.cancel()
                if sequence.at.dispatched is not None and DROPPED_REASON in headers:
                    headers[DROPPED_REASON] = EVICTED
        body = self._options.error_body(self.error)
        await JSONResponse(body, self.error.status, headers)(scope, receive, send)

    async def _write_whole(self, send: Send) -> None:
        choices, sequences = [], []
        for choice in self._choices:
            assert choice.sequence is not None
            sequences.append(choice.sequence)
            detector = choice.sequence.stop_detector
            assert detector.finish_reason is not None
            whole = self.format.choice(
                choice.index,
                "".join(choice.text),
                choice.tokens,
                detector.finish_reason,
                detector.stop_reason,
            )
            choices.append(self.format.with_ids(whole, choice.tokens, self._prompt(choice)))
        delays = self._delays()
        body = self.format.whole(choices, usage_of(sequences, self._options.n, delays))
        headers = [
            *delay_headers(*delays),
            *early_headers(self._options.request_id, self._choices[-1].sequence),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        if not self._gone:
            self._release()

    async def _write_stream(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    *delay_headers(self._delays()[0]),
                    *early_headers(self._options.request_id, self._choices[-1].sequence),
                    *STREAM_HEADERS,
                ],
            }
        )
        await self._write_events(send)

    async def _write_events(self, send: Send) -> None:
        self.chunks[:0] = [
            self.format.first(choice.index, self._prompt(choice)) for choice in self._choices
        ]
        left = len(self._choices)
        while left:
            await self._until(self._has_more)
            if self._gone:
                return
            left -= len(self.finished)
            for choice in self.finished:
                chunk = self._finish(choice)
                self.chunks.append(
                    self.with_usage_of(choice, chunk) if self.continuous_usage else chunk
                )
            if self.error:
                self.chunks.append(b"data: " + JSONResponse(self.error.body()).body + b"\n\n")
                left = 0
            if not left:
                self.chunks.append(self._tail())
            body, self.chunks = b"".join(self.chunks), []
            sent, self.finished = self.finished, []
            await send({"type": "http.response.body", "body": body, "more_body": left > 0})
            if self._gone:
                return  # it left while this waited for it to read: none of it went out
            self._release(sent)

    def _prompt(self, choice: Choice) -> Sequence[int] | None:
        """The prompt's ids, where they are to be returned."""
        return (
            choice.sequence.engine_request.prompt_token_ids
            if self.format.token_ids and choice.sequence is not None
            else None
        )

    def _finish(self, choice: Choice) -> bytes:
        assert choice.sequence is not None
        detector = choice.sequence.stop_detector
        assert detector.finish_reason is not None
        return self.format.finish(choice.index, detector.finish_reason, detector.stop_reason)

    def _tail(self) -> bytes:
        if self._options.include_usage and not self.error:
            sequences = [choice.sequence for choice in self._choices if choice.sequence is not None]
            usage = usage_of(sequences, self._options.n, self._delays())
            return self.format.usage(usage) + DONE
        return DONE

    def _release(self, choices: Sequence[Choice] | None = None) -> None:
        for choice in self._choices if choices is None else choices:
            if choice.sequence is not None:
                choice.sequence.released()

    def _delays(self) -> tuple[float, float]:
        """Queueing delay and service so far of the sequence that waited longest, milliseconds."""
        now = self._batcher.now()
        last = -math.inf
        for choice in self._choices:
            if choice.sequence is not None:
                begun = choice.sequence.at.dispatched
                last = max(last, now if begun is None else begun)
        return _milliseconds(last - self._requests[0].request.arrived_at), _milliseconds(now - last)


def _milliseconds(seconds: float) -> float:
    """To three digits, as `round` has it but for ties, in a fifth of its time."""
    return math.floor(seconds * 1e6 + 0.5) / 1e3
