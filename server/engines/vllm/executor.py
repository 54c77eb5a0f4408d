"""Loaded inside vLLM's EngineCore process (engine argument `distributed_executor_backend`); never
in the gateway's own code.

The model runs in the EngineCore itself (no Worker process between), and the process lives and dies
with the gateway: vLLM leaves an orphan when its parent is killed (vLLM issue 55510), and a signal
for the whole process group (Ctrl-C, a service manager) would end it while the gateway still drains.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import os
import select
import signal
import threading
from pathlib import Path

import torch
from tqdm import tqdm  # type: ignore[import-untyped]
from vllm.v1.executor import uniproc_executor

from kendall.server.engines.vllm.options import on_cpu
from kendall.server.engines.vllm.process import ERROR_FILE, GATEWAY_PID


def _die_with(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        gateway = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(gateway, select.POLLIN)
        poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


class _GatewayWatch:
    """Begun when the process is forked: a gateway killed in the middle of an engine's start
    leaves no orphan either.
    """

    begun_in: int | None = None

    @classmethod
    def begin(cls) -> None:
        """Once in a process; not where nobody said which process the gateway is."""
        pid = os.environ.get(GATEWAY_PID)
        if (
            pid
            and int(pid) != os.getpid()
            and cls.begun_in != os.getpid()
            and hasattr(os, "pidfd_open")
        ):
            cls.begun_in = os.getpid()
            threading.Thread(
                target=_die_with, args=(int(pid),), daemon=True, name="gateway-watch"
            ).start()


os.register_at_fork(after_in_child=_GatewayWatch.begin)


class _FirstError(logging.Handler):
    """Leaves the first exception that vLLM logs where the gateway can read it: over the socket
    comes "see above".
    """

    def emit(self, record: logging.LogRecord) -> None:
        path = os.environ.get(ERROR_FILE)
        if path and record.exc_info and record.exc_info[1] is not None and not Path(path).exists():
            error = record.exc_info[1]
            Path(path).write_text(str(error) or type(error).__name__, encoding="utf-8")


def _request_amx() -> None:
    """Ask Linux for the AMX tile registers, which a process may not touch before it has asked.

    vLLM's attention kernel for the CPU uses them and never asks: an engine whose first request is
    short dies of SIGILL. A large matrix product asks on its own, by way of oneDNN. Nothing happens
    on a CPU without AMX.
    """
    torch.cpu._init_amx()


class InProcessExecutor(uniproc_executor.UniProcExecutor):  # type: ignore[misc]  # vLLM is not followed by mypy
    """One rank, inside EngineCore, that ends when the gateway process does."""

    def _init_executor(self) -> None:
        logging.getLogger("vllm").addHandler(_FirstError(logging.ERROR))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        _GatewayWatch.begin()  # where it was not forked from a process that had this module
        # locks without a name in the system: nothing is left over, and complained of, when the
        # process is killed
        uniproc_executor.Lock = mp.get_context("fork").Lock
        tqdm.set_lock(threading.RLock())
        if on_cpu() and self.vllm_config.model_config.enforce_eager:
            # the sampler compiles a helper at the first `logprobs`: seconds of silence that look
            # like a hang
            torch.compiler.set_stance("force_eager")
        if on_cpu():
            _request_amx()
        super()._init_executor()
