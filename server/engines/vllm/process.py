"""The processes around vLLM: environment, fork server, CPUs. Imports no vLLM."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing as mp
import os
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from kendall.server.engines.hugging_face import MADE_HERE
from kendall.server.engines.vllm.options import on_cpu

# environment variables by which the gateway speaks to the EngineCore process that it starts
GATEWAY_PID = "KENDALL_GATEWAY_PID"
ERROR_FILE = "KENDALL_ENGINE_ERROR_FILE"
_PRELOAD = [
    "vllm.engine.arg_utils",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.model_executor.models.llama",
    "kendall.server.engines.vllm.executor",
]


# errors are still heard
_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",  # "Triton not available"
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # "NUMA binding"
    # in the fork server: vLLM reads names that torch has deprecated
    "PYTHONWARNINGS": "ignore::FutureWarning",
}


def prepare(model: str = "") -> None:
    """Set the environment and start the fork server, which imports vLLM beside the gateway's own
    start (6 s saved).

    Call it first, from the main thread, before any socket exists. The fork server keeps crashed
    engines' successors from inheriting the gateway's connections, and restarts one in 2 s. A second
    call changes nothing.
    """
    if os.environ.get(GATEWAY_PID) == str(os.getpid()):
        return
    os.environ[GATEWAY_PID] = str(os.getpid())
    notes = tempfile.mkdtemp(prefix="kendall-")
    atexit.register(_remove_notes, notes, os.getpid())
    os.environ[ERROR_FILE] = str(Path(notes) / "engine-error")
    for name, value in environment_of(model).items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="vllm"
    )  # as in _QUIET, for this process
    mp.set_forkserver_preload(_PRELOAD + (["vllm.v1.worker.cpu_worker"] if on_cpu() else []))
    kill_fork_server()  # one that runs already was started without this environment
    _fork_server()._stop()
    with deaf_to_ctrl_c():
        forkserver.ensure_running()


@contextlib.contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """A process started in here, and those below it, do not get SIGINT: a terminal sends it to
    all, and only the gateway may act on it.
    """
    resource_tracker.ensure_running()  # as it begins it lets the signal through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _remove_notes(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)


def environment_of(model: str) -> dict[str, str]:
    """Variables of the processes below, where they are not set: no reports of use, no questions to
    the hub for a model that is here, and on CPUs one thread each.
    """
    chosen = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    chosen |= _QUIET
    if model in MADE_HERE or (model and Path(model).is_dir()):
        chosen["HF_HUB_OFFLINE"] = "1"
    if on_cpu():
        # one thread: a second one gains little and spins against the gateway
        chosen |= {"OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    return chosen


def engine_error() -> str:
    """What EngineCore's own log said last time it could not start; forgotten once read."""
    path = Path(os.environ.get(ERROR_FILE, "/nonexistent"))
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return ""
    path.unlink(missing_ok=True)
    return text


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and to all below it, which ends those that are stopped, too. No error
    for those that are gone.
    """
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def kill_fork_server(*, idle: bool = False) -> None:
    """With all that it has forked, or only an `idle` one; the next start begins another one, and
    takes some seconds more.
    """
    if (pid := _fork_server()._forkserver_pid) is not None and not (idle and descendants(pid)):
        kill_tree(pid)
        _wait_for_end(pid)


def _wait_for_end(pid: int) -> None:
    """Until a killed child has ended, a second at most: a start meanwhile would still use it. It is
    left for `multiprocessing` to collect.
    """
    with contextlib.suppress(ChildProcessError):  # collected already
        for _ in range(100):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return
            time.sleep(0.01)


def _fork_server() -> Any:
    return vars(forkserver)["_forkserver"]  # nothing public tells its process or ends it


def descendants(pid: int) -> list[int]:
    """Every process below this one, the nearest first; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(
                stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[1]
            )
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, line = [], [pid]
    while line:
        below = children.get(line.pop(0), [])
        found += below
        line += below
    return found


def parse_cpus(text: str) -> frozenset[int]:
    """CPU numbers as the kernel writes them: `3` or `2-3,7`."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def pin(pid: int, cpus: Iterable[int]) -> None:
    """Bind all threads of a process to these CPUs; threads made later inherit it."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), set(cpus))


class CpuSplit:
    """The engine on CPUs of its own, the gateway on the others, until `undo`."""

    def __init__(self) -> None:
        self._before: frozenset[int] | None = None

    def make(self, engine_pid: int, cpus: frozenset[int]) -> None:
        """The engine onto `cpus`."""
        here = frozenset(os.sched_getaffinity(0))
        pin(engine_pid, cpus)
        if here - cpus:
            self._before = here
            pin(os.getpid(), here - cpus)

    def undo(self) -> None:
        """The gateway back onto all of its own."""
        if self._before is not None:
            pin(os.getpid(), self._before)
            self._before = None
