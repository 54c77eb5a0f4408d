"""One start of vLLM: a thread that blocks in it, the processes that it forks, and how both are
ended when the start is given up.

Imports no vLLM. vLLM waits for its EngineCore without a limit, and a thread cannot be interrupted:
what ends it is the death of the process that it waits for. The threads are daemons, so that one
that never ends does not hold up the exit of the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing as mp
import os
import threading
from collections.abc import Callable
from multiprocessing import popen_forkserver
from multiprocessing.context import ForkServerProcess
from typing import Any, Generic, Protocol, TypeVar

from kendall.server.engines.vllm.process import deaf_to_ctrl_c, kill_fork_server, kill_tree
from kendall.server.runtime.pools import in_daemon

log = logging.getLogger("kendall.engine")
AGAIN = 0.1  # seconds between looks for a process that was forked only now
# seconds in which the thread ends once the engine's process is killed; it takes 0.1
ENGINE_ENDS = 3.0
FORK_SERVER_ENDS = 2.0  # once the fork server is, which may hang as well, or still import vLLM
RETURNS = 0.2  # seconds in which a thread that has told its result returns
GIVEN_UP = "the start was cancelled"
BOOTS, STOPS = "vllm-boot", "vllm-stop"  # names of threads


class Stoppable(Protocol):
    """The result of a start."""

    def shutdown(self) -> None:
        """End it."""


T = TypeVar("T", bound=Stoppable)


class _Popen(popen_forkserver.Popen):
    """Reads the exit code once: multiprocessing's, asked by two threads at once, reads past it
    and takes 255 for it.
    """

    def __init__(self, process: Any) -> None:
        self._reading = threading.Lock()
        super().__init__(process)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        with self._reading:
            return super().poll(flag)


class _EngineProcess(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        return _Popen(process_obj)


class Forks:
    """The multiprocessing context that vLLM forks by; knows the processes that it made, and
    makes none once it is given up.
    """

    def __init__(self) -> None:
        self.given_up = False
        self._lock = threading.Lock()
        self._context = mp.get_context("forkserver")
        self._processes: list[Any] = []
        self._killed: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Process(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802 - multiprocessing's name
        """See multiprocessing. Raises RuntimeError once it is given up."""
        with self._lock:
            if self.given_up:
                raise RuntimeError(GIVEN_UP)
            self._processes.append(_EngineProcess(*args, **kwargs))
            return self._processes[-1]

    def give_up(self) -> bool:
        """Make no more; whether any was made."""
        with self._lock:
            self.given_up = True
            return bool(self._processes)

    def kill(self) -> None:
        """Each process once, with those below it."""
        for process in self._processes:
            with contextlib.suppress(ValueError):  # closed by vLLM already
                if process.pid is not None and process.pid not in self._killed:
                    self._killed.add(process.pid)
                    kill_tree(process.pid)


class Boot(Generic[T]):
    """Begun when it is made, on the event loop; `make` starts vLLM and blocks."""

    def __init__(
        self, make: Callable[[Forks], T], alone: Callable[[], bool] = lambda: True
    ) -> None:
        self._forks = Forks()
        self._alone = alone  # whether the fork server has no other engine
        self._core = in_daemon(lambda: self._run(make), BOOTS)

    async def core(self) -> T:
        """What came up. Raises what vLLM raised. Being cancelled does not end the start:
        `give_up` does.
        """
        return await asyncio.shield(self._core)

    async def give_up(self) -> T | None:
        """End the start within a bounded time; returns the core if it came up in spite of that."""
        forked = self._forks.give_up()
        if forked:
            ended = await self._ends(ENGINE_ENDS, self._forks.kill) or await self._ends(
                FORK_SERVER_ENDS, lambda: kill_fork_server(idle=not self._alone())
            )
        else:  # it still imports vLLM, which nothing can end, and would fail where it forks
            ended = await self._ends(RETURNS, lambda: kill_fork_server(idle=True))
        if forked and not ended:
            log.error(
                "the thread that starts vLLM did not end; an engine that it starts later is "
                "killed at once"
            )
        return None if not ended or self._core.exception() is not None else self._core.result()

    async def _ends(self, limit: float, kill: Callable[[], None]) -> bool:
        for _ in range(round(limit / AGAIN)):
            kill()
            if (await asyncio.wait({self._core}, timeout=AGAIN))[0]:
                return True
        return False

    def _run(self, make: Callable[[Forks], T]) -> T:
        with deaf_to_ctrl_c():  # a fork server that was killed is started again in here
            core = make(self._forks)
        if self._forks.given_up:
            core.shutdown()
            raise RuntimeError(GIVEN_UP)
        return core


def left_behind() -> bool:
    """Whether one of these threads still runs: an interpreter that tidies up around it may
    abort.
    """
    ours = [thread for thread in threading.enumerate() if thread.name in {BOOTS, STOPS}]
    for thread in ours:
        thread.join(RETURNS)
    return any(thread.is_alive() for thread in ours)
