"""An event loop on virtual time: when nothing is ready, its clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None and self.loop._executor_shutdown_called:
            return super().select(None)  # at its end the loop waits for the threads that it had
        if timeout is None:
            raise RuntimeError("deadlock on virtual time: nothing is ready and no timer is set")
        if timeout > 0:
            self.loop.jump()
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and moves only from timer to timer, exactly."""

    _executor_shutdown_called: bool  # asyncio's

    selector: type[_Selector] = _Selector

    def __init__(self) -> None:
        selector = self.selector()
        self._virtual_now = 0.0
        super().__init__(selector)
        selector.loop = self
        self._clock_resolution = 1e-11  # asyncio runs what is due strictly before now + resolution

    def time(self) -> float:
        return self._virtual_now

    def stand(self, seconds: float) -> None:
        """The process does not run for so long: what is due meanwhile comes late."""
        self._virtual_now += seconds

    def jump(self) -> None:
        self._virtual_now = max(self._virtual_now, self._scheduled[0].when())


class _PolledSelector(_Selector):
    """What is on the sockets comes before the clock moves."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        return ready if ready or timeout == 0 else super().select(timeout)


class SocketTimeLoop(VirtualTimeLoop):
    """With sockets between parts of this process: what one of them writes to a Unix socket can be
    read at once, at the instant at which it was written.
    """

    selector = _PolledSelector


def run_with_sockets(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose parts talk over Unix sockets on virtual time."""
    with asyncio.Runner(loop_factory=SocketTimeLoop) as runner:
        return runner.run(main)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
