"""Waits for what another task, thread or process does: until it is so, within a bound that no
machine that works meets.

What is asked for is a state that stays, or that the test itself ends: one that passes by may be
gone before anybody looks.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

LIMIT = 30.0  # seconds: what has not come by then does not come
PAUSE = 0.01


async def eventually(look: Callable[[], Any | Awaitable[Any]], seconds: float = LIMIT) -> Any:
    """The first answer of `look`, which may be awaited, that is true. Raises AssertionError with
    the last one that was not.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        found = look()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert loop.time() < deadline, f"not within {seconds:g} s; last: {found!r}"
        await asyncio.sleep(PAUSE)


def eventually_here(look: Callable[[], Any], seconds: float = LIMIT) -> Any:
    """The same where no event loop runs."""
    deadline = time.perf_counter() + seconds
    while not (found := look()):
        assert time.perf_counter() < deadline, f"not within {seconds:g} s; last: {found!r}"
        time.sleep(PAUSE)
    return found
