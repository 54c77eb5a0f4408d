"""The end of a pool of processes, in order.

`shutdown(wait=False)` leaves the pool's own thread behind: if the interpreter exits while that thread closes its pipe, Python writes a
traceback (`Exception ignored in ... _python_exit ... Bad file descriptor`) as the last lines of the log.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, ProcessPoolExecutor


async def end_at_once(pool: Executor) -> None:
    """Kill its processes, whatever they compute, and return when its thread has ended; the event loop is not held up."""
    if not isinstance(pool, ProcessPoolExecutor):
        pool.shutdown(wait=False)
        return
    for process in list((pool._processes or {}).values()):
        process.kill()
    await asyncio.to_thread(pool.shutdown, wait=True, cancel_futures=True)
