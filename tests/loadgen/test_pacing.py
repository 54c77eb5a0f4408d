"""The sender keeps absolute instants, whatever came before."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

import kendall.loadgen.sending.pacing
from kendall.loadgen.sending.pacing import (
    Alarms,
    Clock,
    Spin,
    TimerFd,
    pace,
    pacing_clock,
    quiet_garbage_collector,
)
from tests.virtual_time import VirtualTimeLoop, run_virtual

CLOCKS = [Spin, TimerFd] if sys.platform == "linux" else [Spin]


@pytest.mark.parametrize("kind", CLOCKS)
def test_a_clock_never_returns_early_and_at_once_when_late(kind: Callable[[], Clock]) -> None:
    async def main() -> None:
        loop, clock = asyncio.get_running_loop(), kind()
        for ahead in (0.0, 0.0004, 0.003, 0.01, 0.0, -1.0):
            instant = loop.time() + ahead
            await clock.until(instant)
            assert loop.time() >= instant
        late = clock.until(loop.time() - 5.0)
        assert late.send(None) is None, "one yield"
        with pytest.raises(StopIteration):
            late.send(None)

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLOCKS)
def test_a_clock_keeps_instants_far_below_the_tick_of_the_loops_timers(
    kind: Callable[[], Clock],
) -> None:
    """Least lateness of forty: what the clock can do, whatever else the machine does."""

    async def main() -> list[float]:
        loop, clock = asyncio.get_running_loop(), kind()
        late = []
        for _ in range(40):
            instant = loop.time() + 0.0023
            await clock.until(instant)
            late.append(loop.time() - instant)
        return late

    assert sorted(asyncio.run(main()))[10] < 0.0004


@pytest.mark.parametrize("kind", CLOCKS)
def test_one_clock_wakes_many_waiters_each_at_its_own_instant(kind: Callable[[], Clock]) -> None:
    """Set in any order, one of them given up; never before the instant and in the order of the
    instants.
    """

    async def main() -> list[int]:
        loop, alarms = asyncio.get_running_loop(), Alarms(kind())
        woken: list[int] = []

        async def wait(place: int) -> None:
            instant = began + 0.01 * place
            await alarms.until(instant)
            assert loop.time() >= instant
            woken.append(place)

        began = loop.time()
        waiters = {place: asyncio.create_task(wait(place)) for place in (3, 1, 4, 2, 0, 3)}
        await asyncio.sleep(0)
        waiters.pop(1).cancel()
        await asyncio.gather(*waiters.values())
        waiters[5] = asyncio.create_task(wait(5))
        await waiters[5]
        return woken

    assert asyncio.run(main()) == [0, 2, 3, 3, 4, 5]


def test_the_descriptor_is_given_back() -> None:
    async def main() -> None:
        with pacing_clock() as clock:
            await clock.until(asyncio.get_running_loop().time() + 0.001)
            if sys.platform != "linux":
                return
            assert isinstance(clock, TimerFd)
            os.fstat(clock._fd)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(clock._fd)

    asyncio.run(main())


def test_a_cancelled_wait_leaves_the_clock_usable() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pacing_clock() as clock:
            waiting = asyncio.ensure_future(clock.until(loop.time() + 60.0))
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            instant = loop.time() + 0.005
            await clock.until(instant)
            assert instant <= loop.time()

    asyncio.run(main())


class Sleep:
    """A clock for virtual time."""

    async def until(self, instant: float) -> None:
        await asyncio.sleep(max(0.0, instant - asyncio.get_running_loop().time()))


def test_a_slow_preparation_does_not_shift_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute instants: after 55 ms lost to the second before the first was due, later ones
    leave at their own time again.
    """
    left: list[float] = []

    def prepare(index: int, instant: float) -> Callable[[], None]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.stand(0.055 if index == 1 else 0.0)
        return lambda: left.append(loop.time() - instant)

    async def main() -> None:
        await pace(0.02 + np.arange(20) * 0.01, prepare)

    monkeypatch.setattr(
        kendall.loadgen.sending.pacing, "pacing_clock", lambda: contextlib.nullcontext(Sleep())
    )
    run_virtual(main())
    assert left == pytest.approx([0.035, 0.025, 0.015, 0.005, *[0.0] * 16], abs=1e-9)


@pytest.mark.parametrize("kind", CLOCKS)
def test_other_tasks_run_while_the_sender_waits(kind: Callable[[], Clock]) -> None:
    """Five turns of the loop, long before the instant."""

    async def main() -> bool:
        waiting = asyncio.create_task(kind().until(asyncio.get_running_loop().time() + 30))  # type: ignore[arg-type]
        for _ in range(5):
            await asyncio.sleep(0)
        over = waiting.done()
        waiting.cancel()
        return over

    assert not asyncio.run(main())


@pytest.mark.slow
def test_the_collector_is_put_back_after_a_failure() -> None:
    def fail() -> None:
        with quiet_garbage_collector():
            assert not gc.isenabled()
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert gc.isenabled()


def test_spinning_begins_before_the_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def kept(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    async def main() -> None:
        monkeypatch.setattr(asyncio, "sleep", kept)
        await Spin().until(asyncio.get_running_loop().time() + 0.02)
        monkeypatch.setattr(asyncio, "sleep", sleep)

    asyncio.run(main())
    assert 0 < slept[0] < 0.02
    assert set(slept[1:]) == {0}


@pytest.mark.skipif(sys.platform != "linux", reason="timerfd is Linux's")
def test_the_kernel_wakes_the_sender_shortly_before_the_instant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> list[float]:
        with pacing_clock() as clock:
            assert isinstance(clock, TimerFd)
            set_to, kernel = list[float](), clock._set
            monkeypatch.setattr(clock, "_set", lambda at: (set_to.append(at - instant), kernel(at)))
            instant = asyncio.get_running_loop().time() + 0.01
            await clock.until(instant)
            return set_to

    ahead = asyncio.run(main())
    assert ahead
    assert all(-0.005 < each < 0 for each in ahead)


def test_alarms_wait_on_their_clock_one_at_a_time() -> None:
    """An earlier instant takes the place of a later one, which is waited for again."""

    class Counted(Sleep):
        waiting = most = 0

        async def until(self, instant: float) -> None:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            try:
                await super().until(instant)
            finally:
                self.waiting -= 1

    async def main() -> tuple[int, int, list[float]]:
        loop, clock = asyncio.get_running_loop(), Counted()
        alarms, woken = Alarms(clock), list[float]()

        async def wait(instant: float) -> None:
            await alarms.until(instant)
            woken.append(loop.time())

        waiters = []
        for instant in (3.0, 2.0, 1.0, 2.5):
            waiters.append(asyncio.create_task(wait(instant)))
            await asyncio.sleep(0.1)
        await asyncio.gather(*waiters)
        return clock.most, clock.waiting, woken

    assert run_virtual(main()) == (1, 0, [1.0, 2.0, 2.5, 3.0])


@pytest.mark.skipif(sys.platform != "linux", reason="timerfd is Linux's")
def test_a_timer_that_the_kernel_refuses_is_an_error_and_any_descriptor_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Number 0 is free where a program has closed its standard input."""

    async def watched(number: int) -> list[int]:
        found = list[int]()
        libc = SimpleNamespace(timerfd_create=lambda *_: number)
        with monkeypatch.context() as patch:
            patch.setattr(kendall.loadgen.sending.pacing.ctypes, "CDLL", lambda *_, **__: libc)
            patch.setattr(
                asyncio.get_running_loop(), "add_reader", lambda each, _: found.append(each)
            )
            ctypes.set_errno(errno.EMFILE)
            TimerFd()
        return found

    assert [asyncio.run(watched(number)) for number in (0, 7)] == [[0], [7]]
    with pytest.raises(OSError, match="Too many open files"):
        asyncio.run(watched(-1))
