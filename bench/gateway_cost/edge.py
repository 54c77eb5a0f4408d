"""The gateway's own work beside the framework's: an engine that takes no time against a handler
that has its answer ready.

Each round starts every server anew, in random order, since the layout of a process's memory alone
moves its speed by 1 or 2 %, and its place in that order by more. A rate is answers (or events) by
processor second of the process that speaks HTTP, in which what else ran on the machine cancels; the
wall-clock rate stands beside it, and the share of its core that the server had: below 0.9 the
sender or the machine was in its way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from bench.gateway_cost import turns
from bench.gateway_cost.bare import TOKENS
from bench.gateway_cost.judging import LEAST_BEFORE, Finding, mean_of, ratio_of
from bench.gateway_cost.servers import Server, child, serving
from bench.gateway_cost.turns import Cores, Counted, closed_loop, in_turns, sharing_a_core
from bench.gateway_cost.wire import Pool, WireError, post

TITLE = "On an engine that takes no time, beside a bare FastAPI handler"
ROUNDS, SECONDS, SLICES = 10, 0.15, 16  # of each slice; of each server and kind in a round
PACKAGES = ("fastapi", "starlette", "uvicorn", "uvloop", "pydantic", "msgspec", "prometheus-client")
LAW = "k1=0,k2=0,k3=0,k4=1e-9"  # seconds: every step is over when it begins
PROMPT = list(range(100, 116))
KINDS = {"whole": "requests", "stream": "tokens"}
LEAST = {"whole": 1 / 3, "stream": 0.6}  # of the bare handler's rates
QUEUE_BOUND = "1000"  # far away, but looked at twice a request


def request(server: str, kind: str) -> tuple[bytes, int]:
    """A request, and the events of its answer."""
    call = {"model": "tiny", "prompt": PROMPT, "ignore_eos": True, "temperature": 0.0}
    call |= {"max_tokens": TOKENS, "stream": True} if kind == "stream" else {"max_tokens": 1}
    if server == "bare":
        return post(f"/{kind}", call), TOKENS + 1 if kind == "stream" else 0
    return post("/v1/completions", call), TOKENS + 2 if kind == "stream" else 0


def ask(server: Server, pool: Pool, kind: str, seconds: float) -> Counted:
    """Load a server for one slice."""
    asked, events = request(server.name, kind)
    load, cpu, cpu_all = closed_loop(server, pool, asked, seconds)
    if load.sizes != {events}:
        raise WireError(
            f"{server.name}, {kind}: got answers of {sorted(load.sizes)} events; expected {events} "
            "in each"
        )
    count = load.answers * (TOKENS if kind == "stream" else 1)
    return Counted(server.name, kind, count, load.seconds, cpu, cpu_all, load.sender_cpu)


def measure(
    folder: Path, rounds: int, seed: int, *, seconds: float = SECONDS, before: Path | None = None
) -> Iterator[Counted]:
    """Every round, all servers and both kinds of request; `before`: an earlier checkout, which is
    served too.
    """
    rng = np.random.default_rng(seed)
    with Cores() as cores:
        for _ in range(rounds):
            with sharing_a_core(launches(folder, before), cores, rng) as servers:
                yield from in_turns(
                    servers, tuple(KINDS), ask, slices=SLICES, seconds=seconds, rng=rng
                )


def launches(folder: Path, before: Path | None) -> list[AbstractContextManager[Server]]:
    """The servers of a round, not yet started."""
    options = [str(os.getpid()), "serve", "tiny", "--engine", "emulated", "--latency", LAW]
    options += ["--policy", "continuous:max_batch_size=64", "--max-num-queued-reqs", QUEUE_BOUND]
    options += ["--port", "{port}"]
    servers: list[AbstractContextManager[Server]] = [
        serving("bare", ["bench.gateway_cost.bare", "{port}"], folder),
        serving("gateway", [child(), *options], folder),
    ]
    if before is not None:
        servers.append(serving("before", [child(before), *options], folder, checkout=before))
    return servers


def findings(measured: Sequence[Counted]) -> list[Finding]:
    """Rates of both, and their ratios."""
    results: list[Finding] = []
    for kind, unit in KINDS.items():
        bare, ours, earlier = (
            [one for one in measured if (one.server, one.kind) == (name, kind)]
            for name in ("bare", "gateway", "before")
        )
        for name, some in (("bare FastAPI handler", bare), ("gateway", ours)):
            by_cpu = mean_of([one.by_cpu for one in some])
            by_clock = mean_of([one.by_clock for one in some])
            share = mean_of([one.share for one in some])
            results.append(Finding(f"{name}: {unit} by processor second", by_cpu, "/s"))
            results.append(Finding(f"{name}: {unit} by second of the clock", by_clock, "/s"))
            results.append(Finding(f"{name}: share of its core, {kind}", share))
        cost = mean_of([1e6 * one.cpu / one.count for one in ours])
        results.append(Finding(f"gateway: processor time of one of the {unit}", cost, "us"))
        our_rates = [one.by_cpu for one in ours]
        ratio = ratio_of(our_rates, [one.by_cpu for one in bare])
        what = f"gateway / bare: {unit} by processor second"
        results.append(Finding(what, ratio, at_least=LEAST[kind]))
        clock = ratio_of([one.by_clock for one in ours], [one.by_clock for one in bare])
        results.append(Finding(f"gateway / bare: {unit} by second of the clock", clock))
        if earlier:
            ratio = ratio_of(our_rates, [one.by_cpu for one in earlier])
            what = f"gateway / before: {unit} by processor second"
            results.append(Finding(what, ratio, at_least=LEAST_BEFORE))
    return results


def configuration() -> dict[str, Any]:
    """The constants of a run."""
    return {
        "law": LAW,
        "prompt_tokens": len(PROMPT),
        "tokens_of_a_stream": TOKENS,
        "connections": turns.CONNECTIONS,
        "slices": SLICES,
        "warm_up": turns.WARM_UP,
    }
