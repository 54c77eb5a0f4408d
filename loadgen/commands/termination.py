"""SIGTERM as Ctrl-C: it cancels the work, which ends early and keeps what it has."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

_T = TypeVar("_T")


async def until_sigterm(work: Awaitable[_T]) -> _T:
    """Await it; SIGTERM cancels this task until it is done."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    with suppress(
        NotImplementedError, RuntimeError, ValueError
    ):  # not on Windows, not beside the main thread
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await work
    finally:
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.remove_signal_handler(signal.SIGTERM)
