"""The sender: every request at its own absolute instant, never later because another one was.

The event loop's timers tick in milliseconds, so the sleep ends shortly before the instant and the rest is spent
yielding to the answers that come in. A request whose instant has passed is sent at once and keeps it: what it waited
in the sender counts in its delay from the intended instant, and is reported as lateness. The loop must be asyncio's own: the clock
of uvloop stands still within a tick of a millisecond.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from loadgen.timetable import FloatArray

MARGIN = 0.0015  # seconds before the instant at which the sleep ends: the timer's tick and a little

_T = TypeVar("_T")


class Clock(Protocol):
    """The event loop, as far as pacing needs it."""

    def time(self) -> float:
        """Now, seconds."""
        ...


async def sleep_until(instant: float, clock: Clock) -> None:
    """Return at the instant, or at once (after one yield) where it has passed."""
    ahead = instant - clock.time()
    await asyncio.sleep(max(0.0, ahead - MARGIN))
    while clock.time() < instant:  # noqa: ASYNC110 - an instant, not a condition: there is no event to wait for
        await asyncio.sleep(0)


async def pace(
    instants: FloatArray, prepare: Callable[[int, float], Callable[[], Coroutine[Any, Any, _T]]], tasks: list[asyncio.Task[_T]]
) -> None:
    """Start one task per instant (absolute, on the loop's clock) and put it into `tasks`; does not wait for their ends.

    `prepare(index, instant)` does what can be done before the instant and returns what starts the request.
    """
    loop = asyncio.get_running_loop()
    for index, instant in enumerate(instants.tolist()):
        start = prepare(index, instant)
        await sleep_until(instant, loop)
        tasks.append(loop.create_task(start()))


@contextmanager
def quiet_garbage_collector() -> Iterator[None]:
    """Collect now, then not at all until the end: a collection in the run would make requests late."""
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
