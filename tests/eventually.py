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
LEAST_LOOKS = 20  # a machine that stood still past the limit has not looked
PAUSE = 0.01


async def eventually(look: Callable[[], Any | Awaitable[Any]], seconds: float = LIMIT) -> Any:
    """The first answer of `look`, which may be awaited, that is true. Raises AssertionError with
    the last one that was not.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    looks = 0
    while True:
        looks += 1
        found = look()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert looks < LEAST_LOOKS or loop.time() < deadline, _failure(seconds, looks, found)
        await asyncio.sleep(PAUSE)


def eventually_here(look: Callable[[], Any], seconds: float = LIMIT) -> Any:
    """The same where no event loop runs."""
    deadline = time.perf_counter() + seconds
    looks = 0
    while True:
        looks += 1
        if found := look():
            return found
        assert looks < LEAST_LOOKS or time.perf_counter() < deadline, _failure(
            seconds, looks, found
        )
        time.sleep(PAUSE)


def _failure(seconds: float, looks: int, last: object) -> str:
    return f"not within {seconds:g} s and {looks} looks; last: {last!r}"
