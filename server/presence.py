"""Whether the client of a call is still there.

ASGI tells it only to somebody who waits in `receive`, and uvicorn does not cancel a plain handler: a call would need a task of its
own for the watch, started and cancelled whether or not anybody leaves. A connection of ours (`server.receiving`) calls back instead,
at the instant at which it is lost, and tells every call on it: uvicorn marks the last of pipelined ones only. Elsewhere the task it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from starlette.types import Receive, Scope

CONNECTION = "kendall.connection"  # key of a request's scope


class Connection:
    """A client's connection, as the calls that came over it see it."""

    __slots__ = ("_on_lost", "_read_on", "lost")

    def __init__(self, read_on: Callable[[], None]) -> None:
        self._read_on = read_on
        self._on_lost: list[Callable[[], None]] = []
        self.lost = False

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call this once when the connection is lost, at once if it is."""
        if self.lost:
            on_lost()
            return
        self._on_lost.append(on_lost)
        self._read_on()  # reading is paused behind a large body, and the end of a connection is something to read

    def leave_alone(self, on_lost: Callable[[], None]) -> None:
        """Not this one any more. No effect on what is not watched."""
        if on_lost in self._on_lost:
            self._on_lost.remove(on_lost)

    def lose(self) -> None:
        """It is over."""
        self.lost = True
        told, self._on_lost = self._on_lost, []
        for on_lost in told:
            on_lost()


def watch_client(scope: Scope, receive: Receive, on_gone: Callable[[], None]) -> Callable[[], object]:
    """Call `on_gone` once if the client goes; what is returned ends the watch. The request's body has been read."""
    connection: Connection | None = scope.get(CONNECTION)
    if connection is None:
        return asyncio.create_task(_wait(receive, on_gone)).cancel
    connection.watch(on_gone)
    return partial(connection.leave_alone, on_gone)


async def _wait(receive: Receive, on_gone: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_gone()
