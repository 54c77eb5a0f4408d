"""The sender's clock: every request at its own absolute instant, never later because another one
was.

On Linux the instant is given to the kernel (`timerfd`, absolute, CLOCK_MONOTONIC: the event loop's
own clock) and the loop wakes on it as on any answer, within 0.1 ms; asyncio's own timers tick in
milliseconds. Elsewhere the sleep ends shortly before the instant and the rest is spent yielding to
the answers that come in. Measured side by side (bench/pacing_clocks.py at revision e9b4e9dc): a
spin keeps the instants as well, but takes the processor from the gateway beside it.

A request whose instant has passed is sent at once and keeps it: what it waited in the sender counts
in its delay from the intended instant, and is reported as lateness. The loop must be asyncio's own:
the clock of uvloop stands still within a tick of a millisecond.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

from kendall.queueing.arrivals.timetable import FloatArray

# seconds before the instant at which the sleep of `Spin` ends: asyncio's tick and a little
MARGIN = 0.0015
AHEAD = 16  # requests prepared beforehand
SLACK = 0.0003  # seconds before an instant from which on nothing more is prepared
BURST = 16  # late requests sent one after the other
# seconds that it takes to wake up, and a little. Who is woken AT the instant leaves 0.06 ms late,
# but who is awake already leaves on time: at 1,000 requests/s short gaps then shrink and 2,500
# arrivals are no longer Poisson (p = 0.0003)
WAKING = 0.0001
CLOCK_MONOTONIC = 1
TFD_TIMER_ABSTIME = 1


class Clock(Protocol):
    """Waits for instants on the event loop's clock."""

    async def until(self, instant: float) -> None:
        """Return at the instant, never before; where it has passed, at once after one yield."""
        ...


class Spin:
    """A sleep that ends shortly before the instant, then yields until it is there."""

    async def until(self, instant: float) -> None:
        now = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, instant - now() - MARGIN))
        while now() < instant:  # noqa: ASYNC110 - an instant, not a condition: there is no event to wait for
            await asyncio.sleep(0)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Timer(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class TimerFd:
    """The kernel's timer as a file descriptor that the loop watches (`man timerfd_create`); for
    one waiter at a time.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._rung: asyncio.Future[None] | None = None
        self._loop.add_reader(self._fd, self._ring)

    async def until(self, instant: float) -> None:
        now = self._loop.time
        if now() >= instant:
            await asyncio.sleep(0)
        while now() < instant - WAKING:
            self._rung = self._loop.create_future()
            self._set(instant - WAKING)
            await self._rung
        while now() < instant:
            pass

    def _set(self, instant: float) -> None:
        nanoseconds = int(instant * 1e9) + 1  # never before the instant
        timer = _Timer(_Timespec(0, 0), _Timespec(*divmod(nanoseconds, 10**9)))
        if self._libc.timerfd_settime(self._fd, TFD_TIMER_ABSTIME, ctypes.byref(timer), None):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # set anew since the loop was woken
            os.read(self._fd, 8)
            if self._rung is not None and not self._rung.done():
                self._rung.set_result(None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


@contextmanager
def pacing_clock() -> Iterator[Clock]:
    """The best clock that the system has."""
    if sys.platform != "linux":
        yield Spin()
        return
    timer = TimerFd()
    try:
        yield timer
    finally:
        timer.close()


class Alarms:
    """Wakes many waiters, each at its own instant, with one clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._waiting: list[
            tuple[float, int, asyncio.Future[None]]
        ] = []  # a heap, the earliest first
        self._count = count()
        self._ringing: asyncio.Task[None] | None = None

    async def until(self, instant: float) -> None:
        rung = self._loop.create_future()
        heappush(self._waiting, (instant, next(self._count), rung))
        if self._waiting[0][2] is rung:
            self.close()
            self._ringing = self._loop.create_task(self._ring())
        await rung

    async def _ring(self) -> None:
        while self._waiting:
            await self._clock.until(self._waiting[0][0])
            while self._waiting and self._waiting[0][0] <= self._loop.time():
                _, _, rung = heappop(self._waiting)
                if not rung.done():
                    rung.set_result(None)
            await asyncio.sleep(0)  # who was woken goes first

    def close(self) -> None:
        if self._ringing is not None:
            self._ringing.cancel()


async def pace(instants: FloatArray, prepare: Callable[[int, float], Callable[[], None]]) -> None:
    """Start one request per instant (absolute, on the loop's clock); does not wait for their ends.

    `prepare(index, instant)` does what can be done before the instant and returns what starts the
    request. Some are prepared while there is time, so that requests a few microseconds apart leave
    so; a sender that is behind lets the loop read answers after every `BURST` of them.
    """
    loop = asyncio.get_running_loop()
    times = instants.tolist()
    upcoming = enumerate(times)
    ready: deque[Callable[[], None]] = deque()
    with pacing_clock() as clock:
        for index, instant in enumerate(times):
            while (
                len(ready) < AHEAD
                and (not ready or loop.time() < instant - SLACK)
                and (following := next(upcoming, None))
            ):
                ready.append(prepare(*following))
            if loop.time() < instant:
                await clock.until(instant)
            elif index % BURST == 0:
                await asyncio.sleep(0)
            ready.popleft()()


@contextmanager
def quiet_garbage_collector() -> Iterator[None]:
    """Collect now, then not at all until the end: a collection in the run would make requests
    late.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
