"""Rates and delays of the proxies before one stub.

The proxies share one core; the stub and the sender have the other. In each round all are started
anew, in random order. Closed loops load them by turns, in short slices. A rate is calls, or tokens
of streams, by processor second of all processes of a proxy. What a proxy adds to the delay of a
call is measured at half of its own rate, at most `FASTEST`: Poisson arrivals, the same through the
proxy and straight to the stub.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.gateway_cost.edge import Counted, together
from bench.gateway_cost.judging import Finding, difference_of, mean_of, ratio_of
from bench.gateway_cost.servers import Server, serving, used
from bench.gateway_cost.wire import Pool, WireError, post
from bench.proxying.proxies import ENVOY, LITELLM, OURS
from bench.proxying.stub import MODEL, TOKENS

Launch = Callable[[Path, int], AbstractContextManager[Server]]  # folder, port of the stub
KINDS = {"whole": "calls", "stream": "tokens"}
PATH = "/v1/chat/completions"
CONNECTIONS = 32
WARM_UP, SECONDS, SLICES = 1.0, 0.5, 4  # before a kind; of a slice; of each proxy and kind
# seconds of Poisson arrivals; calls a second that the sender keeps; connections for a stall
MODERATE, FASTEST, AT_ONCE = 5.0, 3000.0, 512
OPENED = 0.5  # seconds for a proxy to take that many connections, before the first call
LEAST = {LITELLM: 10.0}  # of its rates
MOST_ADDED = {"p50": 1.0, "p99": 5.0}  # milliseconds, of ours
LEVELS = {"p50": 0.5, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Added:
    """Delays of whole answers at one rate: through a proxy, and straight."""

    proxy: str
    rate: float  # calls a second
    through: Mapping[str, float]  # milliseconds, by quantile
    straight: Mapping[str, float]


def _call(kind: str) -> bytes:
    messages = [{"role": "user", "content": "one two three four five six seven eight nine ten"}]
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0.0}
    more = {"max_tokens": TOKENS, "stream": True} if kind == "stream" else {"max_tokens": 1}
    return post(PATH, body | more)


def measure(
    launches: Mapping[str, Launch], folder: Path, rounds: int, seed: int
) -> Iterator[Counted | Added]:
    """Every round, all proxies."""
    rng = np.random.default_rng(seed)
    cpus = sorted(os.sched_getaffinity(0))
    rest = cpus[1:2] or cpus
    try:
        for _ in range(rounds):
            with ExitStack() as stack:
                os.sched_setaffinity(0, rest)
                stub = ["bench.proxying.stub", "{port}"]
                straight = stack.enter_context(serving("stub", stub, folder))
                os.sched_setaffinity(0, cpus[:1])
                proxies = [
                    stack.enter_context(launch(folder, straight.port))
                    for launch in _shuffled(list(launches.values()), rng)
                ]
                os.sched_setaffinity(0, rest)
                yield from _round(straight, proxies, rng)
    finally:
        os.sched_setaffinity(0, cpus)


def _shuffled(some: Sequence[Any], rng: np.random.Generator) -> list[Any]:
    return [some[place] for place in rng.permutation(len(some)).tolist()]


def _round(
    straight: Server, proxies: Sequence[Server], rng: np.random.Generator
) -> Iterator[Counted | Added]:
    with ExitStack() as stack:
        pools = {
            server.name: stack.enter_context(Pool(server.port, CONNECTIONS)) for server in proxies
        }
        found: dict[tuple[str, str], Counted] = {}
        for kind in KINDS:
            for server in proxies:
                _load(server, pools[server.name], kind, WARM_UP)
            slices: dict[str, list[Counted]] = {server.name: [] for server in proxies}
            for server in itertools.chain.from_iterable(
                _shuffled(proxies, rng) for _ in range(SLICES)
            ):
                slices[server.name].append(_load(server, pools[server.name], kind, SECONDS))
            found |= {(name, kind): together(some) for name, some in slices.items()}
        yield from found.values()
        for server in proxies:
            rate = min(FASTEST, found[server.name, "whole"].by_clock / 2)
            yield _added(server, straight, rate, rng)


def _load(server: Server, pool: Pool, kind: str, seconds: float) -> Counted:
    before = server.cpu()
    found = pool.keep_asking(itertools.repeat(_call(kind)), seconds)
    _, cpu = used(before, server.cpu())
    least = TOKENS if kind == "stream" else 0
    if min(found.sizes) < least:
        raise WireError(
            f"{server.name}: got answers of {min(found.sizes)} events; expected at least {least}"
        )
    count = found.answers * (TOKENS if kind == "stream" else 1)
    return Counted(server.name, kind, count, found.seconds, cpu)


def _added(server: Server, straight: Server, rate: float, rng: np.random.Generator) -> Added:
    call, gaps = _call("whole"), rng.exponential(1 / rate, round(rate * MODERATE))
    timetable = [(OPENED + at, call) for at in np.cumsum(gaps).tolist()]
    through, direct = (_delays(each.port, timetable) for each in (server, straight))
    return Added(server.name, rate, through, direct)


def _delays(port: int, timetable: Sequence[tuple[float, bytes]]) -> dict[str, float]:
    with Pool(port, AT_ONCE) as pool:
        ends = [1e3 * end for _, end in pool.ask_at(timetable)]
    return {name: float(np.quantile(ends, level)) for name, level in LEVELS.items()}


def findings(measured: Sequence[Counted | Added]) -> list[Finding]:
    """Rates of each, ours beside the others', and what each adds to a call."""
    passed = [each for each in measured if isinstance(each, Counted)]
    added = [each for each in measured if isinstance(each, Added)]
    names = [name for name in (OURS, LITELLM, ENVOY) if any(name == each.server for each in passed)]
    found: list[Finding] = []
    for kind, unit in KINDS.items():
        runs = {name: [p for p in passed if (p.server, p.kind) == (name, kind)] for name in names}
        for name, some in runs.items():
            found += [
                Finding(f"{name}: {unit} by {which}", mean_of(rates), "/s")
                for which, rates in (
                    ("processor second", [each.by_cpu for each in some]),
                    ("second of the clock", [each.by_clock for each in some]),
                )
            ]
        for name in names[1:]:
            ratio = ratio_of([p.by_cpu for p in runs[OURS]], [p.by_cpu for p in runs[name]])
            what = f"{OURS} / {name}: {unit} by processor second"
            found.append(Finding(what, ratio, at_least=LEAST.get(name)))
    for name in names:
        found += _delayed(name, [each for each in added if each.proxy == name])
    return found


def _delayed(name: str, some: Sequence[Added]) -> list[Finding]:
    rate = sum(each.rate for each in some) / len(some)
    return [
        Finding(
            f"{name}: added to the {level} of a call, at {rate:.0f}/s",
            difference_of([a.through[level] for a in some], [a.straight[level] for a in some]),
            "ms",
            upper_end_at_most=MOST_ADDED[level] if name == OURS else None,
        )
        for level in LEVELS
    ]


def configuration(rounds: int) -> dict[str, Any]:
    """What was asked."""
    return {
        "tokens_of_a_stream": TOKENS,
        "connections": CONNECTIONS,
        "rounds": rounds,
        "slices": SLICES,
        "seconds": SECONDS,
        "warm_up": WARM_UP,
        "moderate_seconds": MODERATE,
    }
