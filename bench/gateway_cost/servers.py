"""The servers that are compared, each a session of processes of its own: started, awaited, their
processor time read, stopped.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kendall.loadgen.gateway.gateway_process import free_port
from kendall.server.engines.tiny import make_tiny

ROOT = Path(__file__).parents[2]
# of vLLM
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
ONE_PROCESS = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
START_LIMIT = 240.0  # seconds
STOP_LIMIT = 20.0


@dataclass(frozen=True)
class Server:
    """A running server."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu(self) -> dict[int, float]:
        """Processor seconds so far, by process of its session; the first is the one that speaks
        HTTP.
        """
        spent = {self.process.pid: 0.0}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    session = (entry / "stat").read_text().rpartition(") ")[2].split()[3]
                    if int(session) == self.process.pid:
                        spent[int(entry.name)] = cpu_seconds(int(entry.name))
        return spent

    def wait(self) -> None:
        """Until it is ready. Raises RuntimeError with the end of its log where it does not come
        up.
        """
        deadline = time.perf_counter() + START_LIMIT
        while self.process.poll() is None and time.perf_counter() < deadline:
            # ours first: our /health is 200 while the engine starts
            ready = self._status("/ready")
            if ready == 200 or (ready == 404 and self._status("/health") == 200):
                return
            time.sleep(0.2)
        last = self.log.read_text(errors="replace").strip().splitlines()[-3:]
        raise RuntimeError(f"{self.name} did not come up: {' | '.join(last)}")

    def _status(self, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to whatever is left of its group."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_LIMIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process, nanoseconds exact where `stat` counts ticks of
    10 ms. Raises OSError.
    """
    return time.clock_gettime((~pid << 3) | 2)  # the clock that clock_getcpuclockid(3) names


def used(before: Mapping[int, float], after: Mapping[int, float]) -> tuple[float, float]:
    """Processor seconds between two readings: of the process that speaks HTTP, and of all."""
    (first, *_) = after
    spent = {pid: seconds - before.get(pid, 0.0) for pid, seconds in after.items()}
    return spent[first], sum(spent.values())


@contextmanager
def serving(
    name: str,
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    checkout: Path = ROOT,
) -> Iterator[Server]:
    """Run `python -m ARGUMENTS` with the code of a checkout until the block is left."""
    path = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": path, **(environment or {})}
    with running(name, [sys.executable, "-m", *arguments], folder, own, checkout) as server:
        yield server


def vllm_serve(
    name: str, flags: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> AbstractContextManager[Server]:
    """Plain `vllm serve` with the tiny model."""
    arguments = ["bench.gateway_cost.peer", str(os.getpid()), "serve", str(make_tiny())]
    arguments += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", "{port}"]
    return serving(name, [*arguments, *flags], folder, {**QUIET, **(environment or {})})


def small_vllm(
    folder: Path,
    slots: int,
    name: str = "vllm",
    *,
    context: int = 2048,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> AbstractContextManager[Server]:
    """The same in one process with one thread and little memory: several fit a machine."""
    flags = ["--max-num-seqs", str(slots), "--max-model-len", str(context), "--enforce-eager"]
    flags += ["--dtype", "bfloat16", "--load-format", "dummy", "--block-size", "32"]
    flags += ["--distributed-executor-backend", "uni"]
    given = ONE_PROCESS | {"VLLM_CPU_KVCACHE_SPACE": "1"} | dict(environment or {})
    return vllm_serve(name, [*flags, *arguments], folder, given)


@contextmanager
def running(
    name: str,
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    where: Path = ROOT,
    *,
    port: int | None = None,
) -> Iterator[Server]:
    """A program until the block is left; nothing of it stays behind. `{port}` in its arguments
    becomes a free one, unless it has its `port` from elsewhere.
    """
    port = free_port(0) if port is None else port
    log = folder / f"{name.replace(' ', '-')}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [text.replace("{port}", str(port)) for text in command],
            stdout=file,
            stderr=file,
            env=dict(os.environ, **(environment or {})),
            cwd=where,
            start_new_session=True,
        )
    server = Server(name, port, process, log)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def child(checkout: Path | None = None) -> str:
    """The module by which this checkout, or another of any time, runs a gateway that ends with its
    parent. Raises LookupError.
    """
    names = ("kendall.loadgen.gateway", "loadgen.gateway", "loadgen")  # now, and in earlier ones
    for name in (f"{folder}.gateway_child" for folder in names):
        if ((checkout or ROOT) / f"{name.replace('.', '/')}.py").is_file():
            return name
    raise LookupError(f"got {checkout}; expected the folder of a checkout of Kendall")
