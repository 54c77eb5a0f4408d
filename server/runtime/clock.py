"""The clock of an event loop, at full resolution."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """`loop.time`, or the same monotonic clock read directly where the loop caches it in
    milliseconds (uvloop).
    """
    if type(loop).__module__.startswith("uvloop"):
        return time.monotonic  # noqa: TID251 - the very clock that uvloop rounds
    return loop.time
