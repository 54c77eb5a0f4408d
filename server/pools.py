"""Work outside the event loop: its end in order, and a bound on how long it is waited for.

`ProcessPoolExecutor.shutdown(wait=False)` leaves the pool's own thread behind: if the interpreter exits while that thread closes its
pipe, Python writes a traceback (`Exception ignored in ... _python_exit ... Bad file descriptor`) as the last lines of the log. The
threads of executors are waited for at the exit without a bound; those here are daemons.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

POOL_END = 5.0  # seconds that the end of a pool whose processes were killed may take
_T = TypeVar("_T")


async def in_a_thread(function: Callable[[], _T], longest: float) -> _T:
    """What it returns or raises. Raises TimeoutError after `longest` seconds; the thread is then left to itself."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[_T] = loop.create_future()

    def tell(value: _T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(value)  # type: ignore[arg-type]
        else:
            result.set_exception(error)

    def run() -> None:
        value: _T | None = None
        failure: BaseException | None = None
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            failure = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, value, failure)

    threading.Thread(target=run, name="in-a-thread", daemon=True).start()
    async with asyncio.timeout(longest):
        return await result


async def end_at_once(pool: Executor) -> None:
    """Kill its processes, whatever they compute, and return when its thread has ended; the event loop is not held up."""
    if not isinstance(pool, ProcessPoolExecutor):
        pool.shutdown(wait=False)
        return
    for process in list((pool._processes or {}).values()):
        process.kill()
    with suppress(TimeoutError):
        await in_a_thread(partial(pool.shutdown, wait=True, cancel_futures=True), POOL_END)
