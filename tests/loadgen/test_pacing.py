"""The sender keeps absolute instants, whatever came before."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable

import numpy as np
import pytest

from loadgen.pacing import Alarms, Clock, Spin, TimerFd, pace, pacing_clock, quiet_garbage_collector

CLOCKS = [Spin, TimerFd] if sys.platform == "linux" else [Spin]


@pytest.mark.parametrize("kind", CLOCKS)
def test_a_clock_never_returns_early_and_at_once_when_late(kind: Callable[[], Clock]) -> None:
    async def main() -> None:
        loop, clock = asyncio.get_running_loop(), kind()
        for ahead in (0.0, 0.0004, 0.003, 0.01, 0.0, -1.0):
            instant = loop.time() + ahead
            await clock.until(instant)
            assert loop.time() >= instant
        began = loop.time()
        await clock.until(began - 5.0)
        assert loop.time() - began < 4.0

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLOCKS)
def test_a_clock_keeps_instants_far_below_the_tick_of_the_loops_timers(kind: Callable[[], Clock]) -> None:
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
    """Set in any order, one of them given up; never before the instant and in the order of the instants."""

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
    async def main() -> int:
        before = len(os.listdir("/proc/self/fd"))
        with pacing_clock() as clock:
            await clock.until(asyncio.get_running_loop().time() + 0.001)
        return len(os.listdir("/proc/self/fd")) - before

    if sys.platform == "linux":
        assert asyncio.run(main()) == 0


def test_a_cancelled_wait_leaves_the_clock_usable() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pacing_clock() as clock:
            waiting = asyncio.ensure_future(clock.until(loop.time() + 5.0))
            await asyncio.sleep(0.01)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            instant = loop.time() + 0.005
            await clock.until(instant)
            assert instant <= loop.time() < instant + 1.0

    asyncio.run(main())


def test_a_slow_preparation_does_not_shift_what_follows() -> None:
    """Absolute instants: after 50 ms lost to the first, later ones leave at their own time again."""
    left: list[float] = []

    def prepare(index: int, instant: float) -> Callable[[], None]:
        loop = asyncio.get_running_loop()
        busy_until = loop.time() + (0.05 if index == 1 else 0.0)
        while loop.time() < busy_until:
            pass

        return lambda: left.append(loop.time() - instant)

    async def main() -> None:
        await pace(asyncio.get_running_loop().time() + 0.02 + np.arange(20) * 0.01, prepare)

    asyncio.run(main())
    assert len(left) == 20
    assert min(left) >= 0
    assert max(left[1:4]) > 0.02
    assert min(left[8:]) < 0.02


@pytest.mark.parametrize("kind", CLOCKS)
def test_other_tasks_run_while_the_sender_waits(kind: Callable[[], Clock]) -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await kind().until(loop.time() + 0.02)
        task.cancel()
        return turns

    assert asyncio.run(main()) > 3


def test_the_collector_is_put_back_after_a_failure() -> None:
    def fail() -> None:
        with quiet_garbage_collector():
            assert not gc.isenabled()
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert gc.isenabled()
