"""Whether the client of a call is still there.

ASGI reports it only to somebody who waits in `receive`, and a handler is not cancelled: a call
would need a task of its own for the watch, started and cancelled whether or not the client leaves.
A connection of ours (`server.http.connection`) calls back instead, at the instant at which it is
lost, for every call on it.
Other servers' connections get the task.

A client that has sent its last byte (FIN) may still wait for answers: it has half-closed its
connection, or it is gone, and the two look alike until something is sent to it. So its end of the
connection is no sign that it left; a reset is, which answers what is sent to one that has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

CONNECTION = "kendall.connection"  # key of a request's scope
TURNS = 8  # of the event loop, in which an aborted connection is lost
T = TypeVar("T")


class ClientConnection:
    """A client's connection, as the calls that came over it see it."""

    __slots__ = ("_on_lost", "_read_on", "abort", "lost")

    def __init__(
        self, read_on: Callable[[], None], abort: Callable[[], None] = lambda: None
    ) -> None:
        self._read_on, self.abort = read_on, abort
        self._on_lost: list[Callable[[], None]] = []
        self.lost = False

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call this once when the connection is lost, at once if it is."""
        if self.lost:
            on_lost()
            return
        self._on_lost.append(on_lost)
        # reading is paused behind a large body, and the end of a connection is something to read
        self._read_on()

    def unwatch(self, on_lost: Callable[[], None]) -> None:
        """Not this one any more. No effect on what is not watched."""
        if on_lost in self._on_lost:
            self._on_lost.remove(on_lost)

    def lose(self) -> None:
        """It is over."""
        self.lost = True
        watchers, self._on_lost = self._on_lost, []
        for on_lost in watchers:
            on_lost()


async def cut(scope: Scope) -> None:
    """Break the connection off: how a client learns that an answer of which a part was sent has no
    end. Returns when it is lost.
    """
    connection: ClientConnection | None = scope.get(CONNECTION)
    if connection is not None:
        connection.abort()
        for _ in range(TURNS):
            if connection.lost:
                return
            await asyncio.sleep(0)


def watch_client(
    scope: Scope, receive: Receive, on_gone: Callable[[], None]
) -> Callable[[], object]:
    """Call `on_gone` once if the client goes; what is returned ends the watch. The request's
    body has been read.
    """
    connection: ClientConnection | None = scope.get(CONNECTION)
    if connection is None:
        return asyncio.create_task(_wait(receive, on_gone)).cancel
    connection.watch(on_gone)
    return partial(connection.unwatch, on_gone)


async def _wait(receive: Receive, on_gone: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_gone()


async def while_connected(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. It is cancelled if the client goes: raises ClientDisconnect then. The
    request's body has been read.
    """
    working = asyncio.create_task(work)
    gone = False

    def on_gone() -> None:
        nonlocal gone
        gone = True
        working.cancel()

    end_watch = watch_client(scope, receive, on_gone)
    try:
        return await working
    except asyncio.CancelledError:
        if gone and working.cancelled():
            raise ClientDisconnect from None
        raise
    finally:
        end_watch()
        working.cancel()
