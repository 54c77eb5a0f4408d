"""The first part of a call in a thread: a coroutine is begun there, on an event loop of its own,
and goes on here.

vLLM checks a call, converts it and renders it in one coroutine that goes on to the call's answer. A
large call takes seconds for that, in Python that lets other threads have their turn. Nothing that
belongs to the thread's event loop is left when the coroutine awaits `HERE`: what it awaited there
is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import suppress
from contextvars import Context
from typing import Any

from kendall.server.runtime.errors import ApiError
from kendall.server.runtime.pools import in_daemon
from kendall.server.runtime.turns import Turns

PLACES = 2  # large calls at once: the processors are the event loop's too
MOST_WAITING = 64
LONGEST = 10.0  # seconds of one call
THREADS = "front-calls"  # their name


class _Here:
    """Awaited where a coroutine is to go on elsewhere; its task never sees it."""

    def __await__(self) -> Generator[Any, None, None]:
        yield self


HERE = _Here()


class Rest:
    """A coroutine that is begun by `there` and continued by `here`."""

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine
        self._over = False

    def __await__(self) -> Generator[Any, Any, None]:
        """Run to its next `HERE`, or its end."""
        error: BaseException | None = None
        answer: Any = None
        while not self._over:
            try:
                if error is None:
                    waits_for = self._coroutine.send(answer)
                else:
                    waits_for = self._coroutine.throw(error)
            except BaseException as raised:
                self._over = True
                if isinstance(raised, StopIteration):
                    return
                raise
            if waits_for is HERE:
                return
            error = None
            try:
                answer = yield waits_for
            except BaseException as raised:  # noqa: BLE001 - it is the coroutine's, a cancellation too
                error = raised

    async def there(self) -> None:
        """Its first part."""
        await self

    async def here(self) -> None:
        """The rest."""
        await self

    def close(self) -> None:
        """It is not continued."""
        self._over = True
        self._coroutine.close()


class Apart:
    """Runs the first part of a caller's call."""

    def __init__(self, turns: Turns, caller: str) -> None:
        self._turns, self._caller = turns, caller

    async def run(self, rest: Rest, context: Context) -> None:
        """In a thread. Raises ApiError: 503 where too many wait, 400 where it takes too long. Its
        thread keeps its place until it has ended.
        """
        if self._turns.waiting_of(self._caller) >= MOST_WAITING:
            rest.close()
            raise ApiError(503, "engine_unavailable", "too many large calls wait to be rendered")
        try:
            await self._turns.take(self._caller)
        except BaseException:
            rest.close()
            raise
        thread = _Thread(rest, context)
        running = in_daemon(thread.run, THREADS)
        running.add_done_callback(lambda _: self._turns.give(self._caller))
        try:
            async with asyncio.timeout(LONGEST):
                await asyncio.shield(running)
        except TimeoutError:
            thread.end()
            raise ApiError(
                400,
                "invalid_request",
                f"got messages or tools that take more than {LONGEST:g} s to render; "
                "expected fewer or smaller ones",
            ) from None
        except asyncio.CancelledError:  # the client left
            thread.end()
            raise


class _Thread:
    def __init__(self, rest: Rest, context: Context) -> None:
        self._rest, self._context = rest, context
        self._loop = asyncio.SelectorEventLoop()
        self._ended = False
        self._task: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Run until the coroutine asks for the event loop, or ends."""
        try:
            self._task = self._loop.create_task(self._rest.there(), context=self._context)
            if self._ended:
                self._task.cancel()
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            self._rest.close()
        finally:
            self._loop.close()

    def end(self) -> None:
        """At the next time that it waits."""
        self._ended = True
        task = self._task
        if task is not None:
            with suppress(RuntimeError):  # its loop is closed: it has ended
                self._loop.call_soon_threadsafe(task.cancel)
