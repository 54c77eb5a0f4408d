"""The one way into vLLM: starts and cancels, carried out strictly in the order in which they
were asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kendall.server.engines.base import EngineRequest
from kendall.server.engines.vllm.reader import Reader


@dataclass(frozen=True, slots=True)
class Start:
    """Sequences to begin; `together` = in one engine step; `padded` = none stops before
    `longest` more tokens.
    """

    readers: Sequence[Reader]
    together: bool
    padded: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Sequences to let go."""

    readers: Sequence[Reader]


def remaining(engine_request: EngineRequest) -> int:
    """Output tokens that the limit in force still allows, at least one."""
    return max(1, engine_request.request.max_output_tokens - len(engine_request.output_token_ids))


def longest(requests: Sequence[EngineRequest]) -> int:
    """The largest limit of a batch: a padded member runs on to it."""
    return max(remaining(engine_request) for engine_request in requests)


def stop_after(engine_request: EngineRequest, padded_length: int | None, max_model_len: int) -> int:
    """How many tokens the engine is told to make.

    A forced length is read only where the engine ends the sequence by itself, never in a padded
    batch: there the gateway alone knows when the last has met its end.
    """
    room = (
        max_model_len - len(engine_request.prompt_token_ids) - len(engine_request.output_token_ids)
    )
    wanted = remaining(engine_request) if padded_length is None else padded_length
    if padded_length is None and engine_request.forced_output_tokens is not None:
        wanted = min(
            wanted, engine_request.forced_output_tokens - len(engine_request.output_token_ids)
        )
    return max(1, min(wanted, room))


class Submitter:
    """A first-in first-out line with one task at its end. Does not look at what comes back.

    Several sequences enter one engine step so: pause, adds and resume travel in order over one
    socket, hence nothing needs to be awaited between them, and the engine sees all or none.
    """

    def __init__(
        self,
        core: Any,
        begin: Callable[[Reader, int | None], Coroutine[Any, Any, None]],
        lost: Callable[[str], None],
    ) -> None:
        self._core = core
        self._begin = begin
        self._lost = lost
        self._line: asyncio.Queue[Start | Cancel] = asyncio.Queue()
        # pauses and resumes whose answers are still on the way
        self._sent: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._work_off(), name="vllm-submitter")
        self._task.add_done_callback(self._ended)

    def put(self, command: Start | Cancel) -> None:
        """Queue a command; does not wait."""
        self._line.put_nowait(command)

    async def close(self) -> None:
        """Stop; what is still in the line is dropped."""
        for task in (self._task, *self._sent):
            task.cancel()
        await asyncio.gather(self._task, *self._sent, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if (
            not task.cancelled()
        ):  # by an exception, then: what was asked of the engine does not reach it
            self._lost(f"the connection to the engine process failed: {task.exception()!r}")

    async def _work_off(self) -> None:
        while True:
            match await self._line.get():
                case Start() as start:
                    await self._start(start)
                case Cancel(readers):
                    await self._cancel(readers)

    async def _start(self, start: Start) -> None:
        length = (
            longest([reader.engine_request for reader in start.readers]) if start.padded else None
        )
        live = [reader for reader in start.readers if not reader.closed]
        gated = start.together and len(live) > 1
        if gated:
            await self._send(self._core.pause())
        try:
            for reader in live:
                if not reader.closed:
                    await self._begin(reader, length)
        finally:
            if gated:
                await self._send(self._core.resume())

    async def _cancel(self, readers: Sequence[Reader]) -> None:
        ids = [reader.internal_id for reader in readers if reader.internal_id is not None]
        if ids:
            await self._core.abort(ids)

    async def _send(self, call: Coroutine[Any, Any, None]) -> None:
        """Let a call reach the socket without waiting for its answer."""
        task = asyncio.create_task(call)
        self._sent.add(task)
        task.add_done_callback(self._forget)
        await asyncio.sleep(0)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._sent.discard(task)
        if not task.cancelled():
            task.exception()  # a dead engine is noticed elsewhere
