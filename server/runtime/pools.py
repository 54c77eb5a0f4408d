"""Work outside the event loop: its end in order, and a bound on how long it is waited for.

`ProcessPoolExecutor.shutdown(wait=False)` leaves the pool's own thread behind: if the interpreter
exits while that thread closes its pipe, Python writes a traceback (`Exception ignored in ...
_python_exit ... Bad file descriptor`) as the last lines of the log. The threads of executors are
waited for at the exit without a bound; those here are daemons.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

POOL_END = 5.0  # seconds that the end of a pool whose processes were killed may take
NICENESS = 10  # of processes that compute for the gateway
PR_SET_PDEATHSIG = 1
_T = TypeVar("_T")


def serve_the_gateway() -> None:
    """In a process that computes for the gateway: at low priority, and ended by the gateway or its
    death alone. A signal of a terminal or to the whole process group is for the gateway.
    """
    os.nice(NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def scheduled(pid: int | None) -> tuple[float, float] | None:
    """Seconds that the process's main thread ran, and that it waited for a processor (Linux); None
    where nobody says.
    """
    try:
        ran, waited = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[:2]
    except (OSError, ValueError):
        return None
    return int(ran) * 1e-9, int(waited) * 1e-9


async def in_a_thread(work: Callable[[], _T], longest: float, name: str = "in-a-thread") -> _T:
    """What it returns or raises. Raises TimeoutError after `longest` seconds; the thread is then
    left to itself.
    """
    async with asyncio.timeout(longest):
        return await asyncio.shield(in_daemon(work, name))


def in_daemon(work: Callable[[], _T], name: str) -> asyncio.Future[_T]:
    """What `work()` will have returned or raised, in a daemon thread: unlike one of asyncio's
    pool it holds up no exit.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()
    future.add_done_callback(
        lambda done: done.cancelled() or done.exception()
    )  # one that nobody waits for any more is not logged

    def settle(call: Callable[[], None]) -> None:
        if not future.done():
            call()

    def run() -> None:
        outcome: Callable[[], None]
        try:
            outcome = partial(future.set_result, work())
        except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
            outcome = partial(future.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def end_at_once(pool: Executor) -> None:
    """Kill its processes, whatever they compute, and return when its thread has ended; the event
    loop is not held up.
    """
    if not isinstance(pool, ProcessPoolExecutor):
        pool.shutdown(wait=False)
        return
    for process in list((pool._processes or {}).values()):
        process.kill()
    with suppress(TimeoutError):
        await in_a_thread(partial(pool.shutdown, wait=True, cancel_futures=True), POOL_END)
