"""Watches an engine process: its death at once, its silence after a while.

Silence is measured in pings that were not answered in time, and not every second of it counts
alike. One in which this event loop itself was late counts nothing: the answer may lie unread. One
in which the engine's main thread computed, or stood in line for a processor, counts a `WORKING`
part: it is busy or starved, not stopped (a machine with a load of 20 once made a healthy engine
silent for 5 s). Only where the kernel says nothing of the thread do all count in full.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from kendall.server.runtime.background import going_on
from kendall.server.runtime.pools import scheduled

PING_EVERY = 2.0  # seconds, while work is in flight
# while there is none: nobody who comes then has to find out that the engine hangs
IDLE_PING_EVERY = 10.0
PING = 1.0  # seconds that one of several pings waits for its answer, at most
PINGS = 4  # at least so many go unanswered before an engine is lost
LATE = 0.5  # seconds: a ping that took so much longer than it was to wait was held up here
# an engine that computes is given so many times the patience: it may be in a step that has no end
WORKING = 6.0
NOT_KNOWN = 255  # the exit code that multiprocessing gives where nobody could read it
AT_WORK = 0.05  # share of a silent second that the main thread ran or stood in line


class Patience(NamedTuple):
    """Seconds that an engine may be silent now (it answers between steps, and a long prompt is a
    long step), and between pings.
    """

    silence: float
    every: float


class EngineWatch:
    """Calls `lost(reason)` when the process is gone or does not answer `ping(timeout)`. Made on the
    event loop.

    `used(pid)` = processor seconds that it had or waited for so far; `exit_code()` =
    multiprocessing's of a process that has ended.
    """

    def __init__(
        self,
        pid: int,
        ping: Callable[[float], Awaitable[bool]],
        patience: Callable[[], Patience],
        lost: Callable[[str], None],
        *,
        used: Callable[[int], float | None] | None = None,
        exit_code: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._lost = lost
        self._ping = ping
        self._used = used or processor_seconds
        self._exit_code = exit_code
        self._loop = asyncio.get_running_loop()
        self._pid = pid
        self._pidfd = _open(pid)
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._gone)
        looking = going_on("the watch of the engine process", partial(self._look, patience))
        self._task = asyncio.create_task(looking, name="vllm-watch")

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
        self._lost(f"the engine process ({self._pid}) {how_it_ended(self._exit_code())}")

    async def _look(self, patience: Callable[[], Patience]) -> None:
        answered_at = self._loop.time()
        while True:
            await asyncio.sleep(PING_EVERY)
            silence, every = patience()
            if self._loop.time() - answered_at < every - PING_EVERY / 2:  # timers are not exact
                continue
            if not await self._answers(silence):
                self._lost(f"the engine process ({self._pid}) did not answer within {silence:g} s")
                return
            answered_at = self._loop.time()

    async def _answers(self, limit: float) -> bool:
        """Whether one of the pings is answered before the silence that counts is longer than
        `limit`.
        """
        silence = 0.0
        wait = min(PING, limit / PINGS)
        while silence < limit:
            began, used = self._loop.time(), self._used(self._pid)
            if await self._ping(wait):
                return True
            silence += self._counts(self._loop.time() - began, wait, used)
        return False

    def _counts(self, took: float, wait: float, used_before: float | None) -> float:
        if took > wait + LATE:
            return 0.0
        used = self._used(self._pid)
        worked = None if used is None or used_before is None else used - used_before
        took = max(took, wait)  # a connection that refuses at once is no faster way to be lost
        return took if worked is None or worked < AT_WORK * took else took / WORKING


def how_it_ended(exit_code: int | None) -> str:
    """How a process ended, by multiprocessing's exit code: negative for a signal."""
    if exit_code is None or exit_code == NOT_KNOWN:
        return "has ended"
    if exit_code >= 0:
        return f"has ended with status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # one without a name
        return f"was ended by signal {-exit_code}"
    memory = (
        "; if nobody sent it, the machine ran out of memory" if exit_code == -signal.SIGKILL else ""
    )
    return f"was ended by {name} ({(signal.strsignal(-exit_code) or name).lower()}{memory})"


def processor_seconds(pid: int) -> float | None:
    """Seconds that the process's main thread ran or waited for a processor (Linux); None where
    nobody says.
    """
    seconds = scheduled(pid)
    return None if seconds is None else sum(seconds)


def _open(pid: int) -> int | None:
    if hasattr(os, "pidfd_open"):  # Linux
        with contextlib.suppress(ProcessLookupError):
            return os.pidfd_open(pid)
    return None
