"""The gateway's own work beside the framework's: an engine that takes no time against a handler
that has its answer ready.

Servers share one core, the sender has another. Each round starts every server anew, in random
order, since the layout of a process's memory alone moves its speed by 1 or 2 %, and its place in
that order by more. It loads them by turns with one kind of request and then with the other, in
slices so short that neighbours of the machine meet all servers alike. A rate is answers (or events)
by processor second of the process that speaks HTTP, so that what else ran on the machine falls out;
the wall-clock rate stands beside it, and the share of its core that the server had: below 0.9 the
sender or the machine was in its way.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bench.gateway_cost.bare import TOKENS
from bench.gateway_cost.judging import LEAST_BEFORE, Finding, mean_of, ratio_of
from bench.gateway_cost.servers import Server, child, serving, used
from bench.gateway_cost.wire import Load, Pool, WireError, post

LAW = "k1=0,k2=0,k3=0,k4=1e-9"  # seconds: every step is over when it begins
PROMPT = list(range(100, 116))
KINDS = ("whole", "stream")
CONNECTIONS = 32
WARM_UP, SECONDS, SLICES = (
    1.0,
    0.15,
    16,
)  # before the slices of a kind; of a slice; of each server and kind in a round
LEAST_REQUESTS, LEAST_TOKENS = 1 / 3, 0.6  # of the bare handler's rates
BOUND = "1000"  # of the queue: far away, but looked at twice a request
LEAST_SHARE = 0.9  # of its core


@dataclass(frozen=True, slots=True)
class Counted:
    """The slices of one server and kind in one round."""

    server: str
    kind: str  # "whole": requests are counted; "stream": tokens
    count: int
    seconds: float
    cpu: float  # processor seconds, of the process that speaks HTTP or of all

    @property
    def by_cpu(self) -> float:
        """Counted by processor second."""
        return self.count / self.cpu

    @property
    def by_clock(self) -> float:
        """Counted by second."""
        return self.count / self.seconds

    @property
    def share(self) -> float:
        """Of one core, that the server had."""
        return self.cpu / self.seconds


_Counted = TypeVar("_Counted", bound=Counted)


@dataclass(frozen=True, slots=True)
class Run(Counted):
    """`cpu` is that of the process that speaks HTTP."""

    cpu_all: float  # and of those it started
    sender_cpu: float


def requests() -> dict[tuple[str, str], tuple[bytes, int]]:
    """By server and kind: the request, and the events of its answer."""
    call = {"model": "tiny", "prompt": PROMPT, "ignore_eos": True, "temperature": 0.0}
    whole, stream = call | {"max_tokens": 1}, call | {"max_tokens": TOKENS, "stream": True}
    found = {
        ("bare", "whole"): (post("/whole", whole), 0),
        ("bare", "stream"): (post("/stream", stream), TOKENS + 1),
    }
    for name in ("gateway", "before"):
        found[name, "whole"] = post("/v1/completions", whole), 0
        found[name, "stream"] = post("/v1/completions", stream), TOKENS + 2
    return found


def load(server: Server, pool: Pool, kind: str, seconds: float) -> Run:
    """One slice: a closed loop; what is in flight at the end is waited for and counted, as its
    processor time is.
    """
    request, events = requests()[server.name, kind]
    before = server.cpu()
    found = pool.keep_asking(itertools.repeat(request), seconds)
    cpu, cpu_all = used(before, server.cpu())
    _check(server.name, kind, found, events)
    count = found.answers * (TOKENS if kind == "stream" else 1)
    return Run(server.name, kind, count, found.seconds, cpu, cpu_all, found.sender_cpu)


def together(slices: Sequence[_Counted]) -> _Counted:
    """Of one server and kind, as one run."""
    first, *_ = slices
    names = [field.name for field in fields(first) if field.name not in ("server", "kind")]
    sums = {name: sum(getattr(each, name) for each in slices) for name in names}
    return replace(first, **sums)


def _check(name: str, kind: str, found: Load, events: int) -> None:
    if found.sizes != {events}:
        raise WireError(
            f"{name}, {kind}: got answers of {sorted(found.sizes)} events; expected {events} in "
            "each"
        )


def measure(
    folder: Path, rounds: int, seconds: float, seed: int, before: Path | None = None
) -> Iterator[Run]:
    """Every round, all servers and both kinds of request; `before`: an earlier checkout, served
    too.
    """
    rng = np.random.default_rng(seed)
    cpus = sorted(os.sched_getaffinity(0))
    try:
        for _ in range(rounds):
            os.sched_setaffinity(0, cpus[:1])
            with ExitStack() as stack:
                # who starts first is slower: 7 % between two gateways of the same code
                found = launches(folder, before)
                servers = [
                    stack.enter_context(found[place])
                    for place in rng.permutation(len(found)).tolist()
                ]
                os.sched_setaffinity(0, cpus[1:2] or cpus)
                pools = {
                    server.name: stack.enter_context(Pool(server.port, CONNECTIONS))
                    for server in servers
                }
                for kind in KINDS:
                    slices: dict[str, list[Run]] = {server.name: [] for server in servers}
                    for server in servers:
                        load(server, pools[server.name], kind, WARM_UP)
                    for index in (
                        index
                        for _ in range(SLICES)
                        for index in rng.permutation(len(servers)).tolist()
                    ):
                        server = servers[index]
                        slices[server.name].append(load(server, pools[server.name], kind, seconds))
                    yield from map(together, slices.values())
    finally:
        os.sched_setaffinity(0, cpus)


def launches(folder: Path, before: Path | None) -> list[AbstractContextManager[Server]]:
    """The servers of a round, not yet started."""
    law = ["--engine", "emulated", "--latency", LAW, "--policy", "continuous:max_batch_size=64"]
    options = [
        str(os.getpid()),
        "serve",
        "tiny",
        *law,
        "--max-num-queued-reqs",
        BOUND,
        "--port",
        "{port}",
    ]
    found: list[AbstractContextManager[Server]] = [
        serving("bare", ["bench.gateway_cost.bare", "{port}"], folder),
        serving("gateway", [child(), *options], folder),
    ]
    if before is not None:
        found.append(serving("before", [child(before), *options], folder, checkout=before))
    return found


def findings(runs: list[Run]) -> list[Finding]:
    """Rates of both, and their ratios."""
    found: list[Finding] = []
    for kind, unit, least in (
        ("whole", "requests", LEAST_REQUESTS),
        ("stream", "tokens", LEAST_TOKENS),
    ):
        bare, ours = (_of(runs, name, kind) for name in ("bare", "gateway"))
        for name, some in (("bare FastAPI handler", bare), ("gateway", ours)):
            found.append(
                Finding(
                    f"{name}: {unit} by processor second",
                    mean_of([run.by_cpu for run in some]),
                    "/s",
                )
            )
            found.append(
                Finding(
                    f"{name}: {unit} by second of the clock",
                    mean_of([run.by_clock for run in some]),
                    "/s",
                )
            )
            found.append(
                Finding(f"{name}: share of its core, {kind}", mean_of([run.share for run in some]))
            )
        found.append(
            Finding(
                f"gateway: processor time of one of the {unit}",
                mean_of([1e6 * run.cpu / run.count for run in ours]),
                "us",
            )
        )
        ratio = ratio_of([run.by_cpu for run in ours], [run.by_cpu for run in bare])
        found.append(Finding(f"gateway / bare: {unit} by processor second", ratio, at_least=least))
        clock = ratio_of([run.by_clock for run in ours], [run.by_clock for run in bare])
        found.append(Finding(f"gateway / bare: {unit} by second of the clock", clock))
        if earlier := _of(runs, "before", kind):
            ratio = ratio_of([run.by_cpu for run in ours], [run.by_cpu for run in earlier])
            found.append(
                Finding(
                    f"gateway / before: {unit} by processor second", ratio, at_least=LEAST_BEFORE
                )
            )
    return found


def _of(runs: list[Run], server: str, kind: str) -> list[Run]:
    return [run for run in runs if (run.server, run.kind) == (server, kind)]


def configuration(rounds: int, seconds: float) -> dict[str, Any]:
    """What was asked."""
    return {
        "law": LAW,
        "prompt_tokens": len(PROMPT),
        "tokens_of_a_stream": TOKENS,
        "connections": CONNECTIONS,
        "rounds": rounds,
        "slices": SLICES,
        "seconds": seconds,
        "warm_up": WARM_UP,
    }
