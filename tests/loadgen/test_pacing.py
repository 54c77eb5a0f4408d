"""The sender keeps absolute instants, whatever came before."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from loadgen.pacing import pace, quiet_garbage_collector, sleep_until


def test_sleep_until_never_returns_early_and_at_once_when_late() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        for ahead in (0.0, 0.0004, 0.003, 0.01, -1.0):
            instant = loop.time() + ahead
            await sleep_until(instant, loop)
            assert loop.time() >= instant
        began = loop.time()
        await sleep_until(began - 5.0, loop)
        assert loop.time() - began < 0.2

    asyncio.run(main())


def test_a_slow_preparation_does_not_shift_what_follows() -> None:
    """Absolute instants: after 50 ms lost to the first, the last of twenty leaves at its own time again."""
    left: list[float] = []

    def prepare(index: int, instant: float) -> Callable[[], Coroutine[Any, Any, None]]:
        loop = asyncio.get_running_loop()
        busy_until = loop.time() + (0.05 if index == 1 else 0.0)
        while loop.time() < busy_until:
            pass

        async def start() -> None:
            left.append(loop.time() - instant)

        return start

    async def main() -> None:
        tasks: list[asyncio.Task[None]] = []
        await pace(asyncio.get_running_loop().time() + 0.02 + np.arange(20) * 0.01, prepare, tasks)
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert len(left) == 20
    assert min(left) >= 0
    assert max(left[1:4]) > 0.02
    assert min(left[-5:]) < 0.02


def test_other_tasks_run_while_the_sender_waits() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await sleep_until(loop.time() + 0.02, loop)
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
