"""A wait that ends at its limit, even where the call does not end when it is cancelled.

`asyncio.timeout` and `asyncio.wait_for` cancel the call and then wait until it has ended, which may
be for ever: an engine's start that waits for a process, for example.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class OverdueError(TimeoutError):
    """The call reached its limit and was cancelled."""


class UnendingError(OverdueError):
    """The call reached its limit, was cancelled, and still runs."""


async def within(call: Coroutine[Any, Any, _T], limit: float, grace: float) -> _T:
    """The result of `call`, which is cancelled after `limit` seconds, or with this wait, and then
    has `grace` seconds to end.

    Raises what the call raised, OverdueError or UnendingError; RuntimeError where it was cancelled
    by somebody else.
    """
    task = asyncio.ensure_future(call)
    overdue = True
    try:
        overdue = not (await asyncio.wait({task}, timeout=limit))[0]
    finally:
        if overdue:
            task.add_done_callback(_hear)
            task.cancel()
            await asyncio.wait({task}, timeout=grace)
    if not task.done():
        raise UnendingError(
            f"not done within {limit:.3g} s, and still running {grace:g} s after its cancellation"
        )
    if overdue and (task.cancelled() or task.exception() is not None):
        raise OverdueError(f"not done within {limit:.3g} s")
    if task.cancelled():
        raise RuntimeError("it was cancelled")
    return task.result()


def _hear(task: asyncio.Future[Any]) -> None:
    """An exception that comes too late is nobody's; asyncio would log it."""
    if not task.cancelled():
        task.exception()
