"""Watches an engine process: its death at once, its silence after a while."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable

PING_EVERY = 2.0  # seconds, while work is in flight
SECOND_CHANCE = 1.0  # seconds: the gateway itself may have been stopped while the answer waited


class Watch:
    """Calls `lost(reason)` when the process is gone or does not answer `ping(timeout)`. Made on the event loop.

    `patience()` is how long it may be silent now: an engine answers between steps, and a long prompt is a long step.
    None = there is nothing to do, do not ask.
    """

    def __init__(
        self,
        pid: int,
        ping: Callable[[float], Awaitable[bool]],
        patience: Callable[[], float | None],
        lost: Callable[[str], None],
    ) -> None:
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._pid = pid
        self._pidfd = _open(pid)
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._gone)
        self._task = asyncio.create_task(self._look(ping, patience), name="vllm-watch")

    def close(self) -> None:
        """Look no more."""
        self._task.cancel()
        self._unwatch()

    def _unwatch(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _gone(self) -> None:
        self._unwatch()
        self._lost(f"the engine process ({self._pid}) has ended")

    async def _look(self, ping: Callable[[float], Awaitable[bool]], patience: Callable[[], float | None]) -> None:
        while True:
            await asyncio.sleep(PING_EVERY)
            limit = patience()
            if limit is None or await ping(limit) or await ping(SECOND_CHANCE):
                continue
            self._lost(f"the engine process ({self._pid}) did not answer within {limit:g} s")
            return


def _open(pid: int) -> int | None:
    if hasattr(os, "pidfd_open"):  # Linux
        with contextlib.suppress(ProcessLookupError):
            return os.pidfd_open(pid)
    return None
