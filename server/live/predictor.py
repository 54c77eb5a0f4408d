"""The predicting process, from the gateway's side: niced, one question at a time, started when first asked."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from server.pools import end_at_once

NICENESS = 10
LONGEST = 120.0  # seconds that an answer may take, the start of the process included


class Predictor:
    """Calls functions of `server.live.predicting` by name in the other process, which keeps what it saw last."""

    def __init__(self, longest: float = LONGEST) -> None:
        self.longest = longest
        self._pool: ProcessPoolExecutor | None = None
        self._one = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Whether a question is being answered."""
        return self._one.locked()

    async def ask(self, function: str, *arguments: Any) -> Any:
        """Its answer; what it raises is raised here. A process that died, or took too long, is started anew with the next question."""
        async with self._one:
            try:
                async with asyncio.timeout(self.longest):
                    return await self._asked(function, arguments)
            except (BrokenProcessPool, TimeoutError):
                await self.close()
                raise

    async def _asked(self, function: str, arguments: tuple[Any, ...]) -> Any:
        loop = asyncio.get_running_loop()
        if self._pool is None:
            self._pool = _start()
        return await loop.run_in_executor(self._pool, _call, function, arguments)

    async def close(self) -> None:
        """End the process, whatever it computes."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await end_at_once(pool)


def _start() -> ProcessPoolExecutor:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # inherited; more threads on small matrices spin, at four times the CPU
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_begin)


def _begin() -> None:
    os.nice(NICENESS)
    threading.Thread(target=_end_with_the_gateway, daemon=True, name="gateway-watch").start()


def _end_with_the_gateway() -> None:
    """A gateway that is killed tells its pool nothing: the worker would wait for ever on a pipe whose other end it holds too."""
    gateway = multiprocessing.parent_process()
    assert gateway is not None
    gateway.join()
    os._exit(1)


def _call(function: str, arguments: tuple[Any, ...]) -> Any:
    """In the predicting process: only there is the mathematics loaded."""
    from server.live import predicting  # noqa: PLC0415

    return getattr(predicting, function)(*arguments)
