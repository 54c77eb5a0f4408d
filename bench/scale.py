"""What does a waiting call cost? Calls that wait all at once, before the gateway and before a bare
FastAPI handler that never answers: memory, descriptors and processor time of each, how long
/health takes while they arrive and leave, and how much of the memory comes back.

Each server is started anew for each number of calls. A call's prompt has 16 tokens; the first one
occupies the emulated engine, whose policy is `single`. Clients are on several loopback addresses.
The limit on open files is raised to the hard one; where it is too low for the largest number, as
many calls wait as it permits, and that is said.

    .venv/bin/python bench/scale.py [--waiting 500 8000 30000] [--before CHECKOUT] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.gateway_cost.servers import Server, child, cpu_seconds, serving
from bench.gateway_cost.wire import post
from kendall.queueing.measurement.machine import hardware, versions

WAITING = (500, 8000, 30000)
LAW = "k1=0,k2=0,k3=0,k4=1000"  # seconds: nobody's turn comes
PROMPT = list(range(100, 116))
PER_ADDRESS = 20_000  # connections from one loopback address: it has 28,000 ports
SPARE = 300  # descriptors of each side that are no call's
PATIENCE = 120.0  # seconds for calls to arrive, or to leave
IP_BIND_ADDRESS_NO_PORT = 24  # Linux; Python's socket module names it from 3.12 on
LOOKS = 0.05  # seconds between two looks at /health
GIVEN_BACK = 10.0  # seconds after which the memory is looked at again


@dataclass(frozen=True)
class Crowd:
    """What calls that waited at once cost, each of them."""

    server: str
    waiting: int
    kibibytes: float
    descriptors: float
    arriving: float  # microseconds of processor time of the process that speaks HTTP
    leaving: float
    health_p99: float  # milliseconds, while they arrived and left
    given_back: float  # share of the memory, after GIVEN_BACK


def launches(folder: Path, before: Path | None) -> dict[str, AbstractContextManager[Server]]:
    """The servers, not yet started."""
    options = [str(os.getpid()), "serve", "tiny", "--engine", "emulated", "--latency", LAW]
    options += ["--policy", "single", "--max-num-queued-reqs", "100000"]
    options += ["--prediction-interval", "0", "--port", "{port}"]
    found: dict[str, AbstractContextManager[Server]] = {
        "bare": serving("bare", ["bench.gateway_cost.bare", "{port}"], folder),
        "gateway": serving("gateway", [child(), *options], folder),
    }
    if before is not None:
        found["before"] = serving("before", [child(before), *options], folder, checkout=before)
    return found


def measured(server: Server, calls: int) -> Crowd:
    """One crowd. Raises TimeoutError where it does not arrive or leave."""
    path = "/wait" if server.name == "bare" else "/v1/completions"
    call = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True}
    asked = post(path, call)
    pid = server.process.pid
    with crowd(server, asked, 10):  # what is loaded on first use
        pass
    memory, files, cpu = resident(pid), descriptors(pid), cpu_seconds(pid)
    with looks_at(server) as took:
        with crowd(server, asked, calls):
            arrived, cost = cpu_seconds(pid), resident(pid) - memory
            held = descriptors(pid) - files
        left = cpu_seconds(pid)
    time.sleep(GIVEN_BACK)
    return Crowd(
        server=server.name,
        waiting=calls,
        kibibytes=cost / calls / 1024,
        descriptors=held / calls,
        arriving=1e6 * (arrived - cpu) / calls,
        leaving=1e6 * (left - arrived) / calls,
        health_p99=1e3 * float(np.quantile(took, 0.99)),
        given_back=1.0 - (resident(pid) - memory) / cost,
    )


@contextlib.contextmanager
def crowd(server: Server, asked: bytes, calls: int) -> Iterator[None]:
    """So many calls that wait; they have left when the block is left."""
    before = waiting(server)
    clients: list[socket.socket] = []
    try:
        for number in range(calls):
            client = socket.socket()
            clients.append(client)
            client.settimeout(PATIENCE)
            # the port is chosen with the destination: those of earlier crowds are free
            client.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
            client.bind((f"127.0.0.{2 + number // PER_ADDRESS}", 0))
            client.connect(("127.0.0.1", server.port))
            client.sendall(asked)
        until(lambda: waiting(server) >= before + calls)
        yield
    finally:
        for client in clients:
            client.close()
    until(lambda: waiting(server) <= before)


def waiting(server: Server) -> int:
    """Calls without an answer, by the server's own count."""
    path = "/waiting" if server.name == "bare" else "/load"
    return int(re.findall(rb"\d+", asked_for(server, path))[0])


def asked_for(server: Server, path: str) -> bytes:
    """The body of an answer. Raises OSError, also where there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != 200:
            raise ConnectionError(f"{path} answered {answer.status}")
        return answer.read()
    finally:
        connection.close()


def until(true: Callable[[], bool]) -> None:
    """Raises TimeoutError where it is not so within PATIENCE."""
    deadline = time.perf_counter() + PATIENCE
    while not true():
        if time.perf_counter() > deadline:
            raise TimeoutError(f"not within {PATIENCE:g} s")
        time.sleep(0.05)


@contextlib.contextmanager
def looks_at(server: Server) -> Iterator[list[float]]:
    """Seconds that /health takes, asked for again and again meanwhile."""
    took: list[float] = []
    ended = threading.Event()

    def look() -> None:
        path = "/ready" if server.name == "bare" else "/health"
        while not ended.wait(LOOKS):
            began = time.perf_counter()
            asked_for(server, path)
            took.append(time.perf_counter() - began)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield took
    finally:
        ended.set()
        thread.join()


def resident(pid: int) -> int:
    """Bytes of a process that are in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    """Files that a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def permitted(asked: Sequence[int]) -> list[int]:
    """The numbers of calls for which there are descriptors; the largest one in place of more."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = hard - SPARE
    if max(asked) > most:
        print(f"at most {most} calls: a process may have {hard} files open here", file=sys.stderr)
    return sorted({min(each, most) for each in asked})


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--waiting", type=int, nargs="+", default=WAITING, help="calls at once")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="an earlier version, too")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args()
    rows: list[Crowd] = []
    print(
        "server    waiting  KiB each  files each  us arriving  us leaving  health p99  given back"
    )
    for calls in permitted(options.waiting):
        for name in ("bare", "gateway", *(["before"] if options.before else [])):
            with tempfile.TemporaryDirectory() as folder:
                where = options.before and options.before.resolve()
                with launches(Path(folder), where)[name] as server:
                    try:
                        row = measured(server, calls)
                    except (TimeoutError, OSError) as error:
                        print(f"{name:9s} {calls:7d}  {error}", flush=True)
                        continue
            rows.append(row)
            print(
                f"{row.server:9s} {row.waiting:7d}  {row.kibibytes:8.1f}  {row.descriptors:10.2f}  "
                f"{row.arriving:11.0f}  {row.leaving:10.0f}  {row.health_p99:7.0f} ms  "
                f"{row.given_back:10.0%}",
                flush=True,
            )
    if options.json:
        report = {"rows": [asdict(row) for row in rows], "law": LAW, "prompt_tokens": len(PROMPT)}
        report |= {"hardware": hardware(), "versions": versions(("fastapi", "uvicorn", "uvloop"))}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
