"""When Python looks for reference cycles, seldom and never among what came up with the engine, and
when memory is given back.

A full collection walks every object of the process, some hundred thousand once vLLM is imported,
while the event loop stands still. What exists when the gateway is ready lives as long as it does:
it is collected once and then set aside. The thresholds leave what a burst of connections left in
cycles to a collection that may never come, and the C library keeps freed pages: both are dealt with
after the burst, at a quiet moment.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

# allocations between collections of the young, collections of the young between those of the
# middle-aged, and so on; Python's own are 700, 10, 10: a few dozen requests
THRESHOLDS = (10_000, 20, 50)
PERIOD = 2.0  # seconds between two looks at the resident memory
GROWTH = 8 << 20  # bytes above the least that was ever resident: worth a collection
AGAIN = 2 << 20  # bytes above what the last collection left: worth another
_STATM = Path("/proc/self/statm")


def settle() -> None:
    """Once everything is up: later collections leave alone what is there now. Takes some tenths
    of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


def collect_everything() -> None:
    """What was set aside too: an engine that was let go stands in cycles. May run in a thread."""
    gc.unfreeze()
    gc.collect()


def resident() -> int:
    """Bytes of this process that are in memory; 0 where the system does not say (Linux does)."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


async def give_back(quiet: Callable[[], bool]) -> None:
    """Until cancelled: where the memory has grown, collect and return free pages to the system, at
    a quiet moment.

    A gateway whose memory stays larger, because it is in use, pays once.
    """
    least = left = resident()
    while True:
        await asyncio.sleep(PERIOD)
        now = resident()
        least, left = min(least, now), min(left, now)
        if now > max(least + GROWTH, left + AGAIN) and quiet():
            gc.collect()
            await asyncio.to_thread(_trim)
            left = resident()


def _trim() -> None:
    """glibc keeps freed pages below the top of its heaps until it is asked."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
