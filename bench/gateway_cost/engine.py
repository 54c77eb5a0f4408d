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
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.gateway_cost.judging import LEAST_BEFORE, Finding, difference_of, mean_of, ratio_of
from bench.gateway_cost.servers import ONE_PROCESS, QUIET, Server, child, serving, used, vllm_serve
from bench.gateway_cost.wire import Pool, post
from server.engines.tiny import make_tiny
from server.engines.vllm.machine import Machine
from server.engines.vllm.options import engine_arguments, on_cpu

PEERS = ("default", "uni")
OURS, BEFORE = "gateway", "before"  # this checkout, and an earlier one
PROMPT_TOKENS = 64
SHORTEST, LONGEST = 32, 96  # output tokens, uniform
SATURATING, CONNECTIONS = 384, 96  # requests of the closed loop; more at once than there are slots
SLOTS = 64
RATE, SECONDS = (
    10.0,
    20.0,
)  # of the moderate load: requests/s, seconds; a busy machine must bear it too
LEAST = {"default": 1.0, "uni": 0.95, BEFORE: LEAST_BEFORE}  # of the other's throughput
MOST_TTFT = 2.0  # milliseconds more than the peer's, upper end
NOT_THE_PEERS = {
    "model",
    "use_tqdm_on_load",
    "distributed_executor_backend",
}  # arguments of the gateway's own


@dataclass(frozen=True, slots=True)
class Round:
    """One server in one round."""

    server: str
    throughput: float  # output tokens a second, saturated
    cpu_by_token: float  # microseconds, all processes, saturated
    front_by_token: float  # microseconds of the process that speaks HTTP
    ttft: float  # p50, milliseconds, moderate rate
    latency: float  # p50 of the whole answer, milliseconds


def request(tokens: int, rng: np.random.Generator) -> bytes:
    """A stream of exactly so many tokens, of a prompt of its own."""
    prompt = rng.integers(10, 1000, PROMPT_TOKENS).tolist()
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
    }
    return post("/v1/completions", body)


def timetable(rng: np.random.Generator, rate: float, seconds: float) -> list[tuple[float, bytes]]:
    """Poisson arrivals."""
    instants = np.cumsum(rng.exponential(1 / rate, round(rate * seconds))).tolist()
    return [(at, request(int(rng.integers(SHORTEST, LONGEST + 1)), rng)) for at in instants]


def load(server: Server, seed: np.random.SeedSequence) -> Round:
    """Both loads; the same for every server that gets this seed."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(SHORTEST, LONGEST + 1, SATURATING)
    asked = [request(int(length), rng) for length in lengths]
    with Pool(server.port, CONNECTIONS) as pool:
        pool.keep_asking(asked[:CONNECTIONS])  # warm
        before = server.cpu()
        found = pool.keep_asking(asked)
        front, everything = used(before, server.cpu())
        answers = np.array(pool.ask_at(timetable(rng, RATE, SECONDS)))
    ttft, latency = np.median(answers, axis=0) * 1e3
    tokens = int(lengths.sum())
    return Round(
        server.name,
        tokens / found.seconds,
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


def measure(folder: Path, rounds: int, seed: int, before: Path | None = None) -> Iterator[Round]:
    """Every round, the servers in random order; `before`: an earlier checkout, which is one of
    them then.
    """
    rng = np.random.default_rng(seed)
    with ExitStack() as stack:
        servers = [stack.enter_context(each) for each in _servers(folder, before)]
        for number in range(rounds):
            for index in rng.permutation(len(servers)).tolist():
                yield load(servers[index], np.random.SeedSequence([seed, number]))


def _servers(folder: Path, before: Path | None) -> Iterator[Any]:
    model, parent = str(make_tiny()), str(os.getpid())
    flags = ["--disable-uvicorn-access-log", *peer_flags(model)]
    options = [
        parent,
        "serve",
        "tiny",
        "--policy",
        "continuous",
        "--max-num-seqs",
        str(SLOTS),
        "--port",
        "{port}",
    ]
    yield vllm_serve("default", flags, folder)
    one = [*flags, "--distributed-executor-backend", "uni"]
    yield vllm_serve("uni", one, folder, ONE_PROCESS)
    yield serving(OURS, [child(), *options], folder, QUIET)
    if before is not None:
        yield serving(BEFORE, [child(before), *options], folder, QUIET, before)


def findings(rounds: list[Round]) -> list[Finding]:
    """Each server's numbers, then ours beside each peer's."""
    names = (*PEERS, OURS, *([BEFORE] if any(each.server == BEFORE for each in rounds) else []))
    by_server = {name: [each for each in rounds if each.server == name] for name in names}
    found: list[Finding] = []
    for name, some in by_server.items():
        label = _label(name)
        found += [
            Finding(
                f"{label}: output tokens a second, saturated",
                mean_of([each.throughput for each in some]),
                "/s",
            ),
            Finding(
                f"{label}: processor time by token, all processes",
                mean_of([each.cpu_by_token for each in some]),
                "us",
            ),
            Finding(
                f"{label}: processor time by token, the process that speaks HTTP",
                mean_of([each.front_by_token for each in some]),
                "us",
            ),
            Finding(
                f"{label}: p50 time to first token at {RATE:g}/s",
                mean_of([each.ttft for each in some]),
                "ms",
            ),
            Finding(
                f"{label}: p50 time to the end at {RATE:g}/s",
                mean_of([each.latency for each in some]),
                "ms",
            ),
        ]
    for name in names:
        if name != OURS:
            found += _beside(by_server[OURS], by_server[name], name)
    return found


def _label(name: str) -> str:
    return {OURS: OURS, BEFORE: "before"}.get(name, f"vllm serve, {name}")


def _beside(ours: list[Round], theirs: list[Round], name: str) -> list[Finding]:
    label = f"gateway / {_label(name)}"
    throughput = ratio_of([each.throughput for each in ours], [each.throughput for each in theirs])
    cpu = ratio_of([each.cpu_by_token for each in ours], [each.cpu_by_token for each in theirs])
    ttft = difference_of([each.ttft for each in ours], [each.ttft for each in theirs])
    latency = difference_of([each.latency for each in ours], [each.latency for each in theirs])
    return [
        Finding(f"{label}: throughput", throughput, at_least=LEAST[name]),
        Finding(f"{label}: processor time by token", cpu),
        Finding(
            f"gateway - {_label(name)}: p50 time to first token",
            ttft,
            "ms",
            upper_end_at_most=MOST_TTFT,
        ),
        Finding(f"gateway - {_label(name)}: p50 time to the end", latency, "ms"),
    ]


def configuration(rounds: int) -> dict[str, Any]:
    """What was asked."""
    return {
        "engine_arguments": peer_flags(str(make_tiny())),
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": [SHORTEST, LONGEST],
        "saturating_requests": SATURATING,
        "connections": CONNECTIONS,
        "rate": RATE,
        "seconds": SECONDS,
        "rounds": rounds,
    }


def installed() -> bool:
    """Whether vLLM is here."""
    return importlib.util.find_spec("vllm") is not None
