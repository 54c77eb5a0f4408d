"""That a client closed its connection, also while nobody reads from it."""

from __future__ import annotations

import asyncio
import contextlib
import select
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar


@dataclass(slots=True)
class _WatchedConnection:
    gone: Callable[[], None]
    half_closed: Callable[[], None] | None


class HangUps:
    """Reports that a client closed its connection, also while the server does not read from it
    (Linux only).

    An event loop sees the end of a connection when it reads it, and it does not read while
    pipelined requests wait for their turn, nor after the peer's last byte. epoll reports both
    without a byte being read. One epoll a loop, open while there is something to watch.
    """

    _of_loop: ClassVar[dict[asyncio.AbstractEventLoop, HangUps]] = {}

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._watched: dict[int, _WatchedConnection] = {}
        loop.add_reader(self._epoll.fileno(), self._look)

    @classmethod
    def watch(
        cls,
        loop: asyncio.AbstractEventLoop,
        descriptor: int,
        gone: Callable[[], None],
        half_closed: Callable[[], None] | None = None,
    ) -> None:
        """Call `gone` once when the connection is reset, and before that `half_closed` once when
        the peer has sent its last byte.
        """
        if sys.platform != "linux":
            return
        with contextlib.suppress(OSError):  # no descriptor is left: reading finds the end, later
            if (found := cls._of_loop.get(loop)) is None:
                found = cls._of_loop[loop] = cls(loop)
            found._add(descriptor, _WatchedConnection(gone, half_closed))

    @classmethod
    def forget(cls, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        """Watch it no more. No effect on what is not watched. Before its descriptor is closed:
        epoll keeps one that has a copy.
        """
        if (found := cls._of_loop.get(loop)) is not None:
            found._remove(descriptor)

    def _add(self, descriptor: int, watched: _WatchedConnection) -> None:
        # resets are reported in any case
        events = 0 if watched.half_closed is None else select.EPOLLRDHUP
        if descriptor in self._watched:
            self._epoll.modify(descriptor, events)
        else:
            self._epoll.register(descriptor, events)
        self._watched[descriptor] = watched

    def _remove(self, descriptor: int) -> None:
        if self._watched.pop(descriptor, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(descriptor)
        if not self._watched:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            del self._of_loop[self._loop]

    def _look(self) -> None:
        for descriptor, events in self._epoll.poll(0):
            watched = self._watched.get(descriptor)
            if watched is None:
                continue
            if events & (select.EPOLLHUP | select.EPOLLERR):
                self._remove(descriptor)
                watched.gone()
            elif watched.half_closed is not None:
                half_closed, watched.half_closed = watched.half_closed, None
                self._epoll.modify(descriptor, 0)
                half_closed()
