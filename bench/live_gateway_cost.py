"""What the live model costs a running gateway at 500 requests/s: the predicting process's CPU, and
how late the event loop runs.

The same load, an emulated engine, two gateways in turn: one predicts every 5 s and asks what-ifs
every minute, the other never predicts. In each, a thread pings the event loop every 2 ms. Compared
are the last seconds of each run, behind the start of the predicting process and one round of
what-ifs; differences are of medians over the rounds, printed beside each round.

    predicting    CPU seconds of the predicting process per second of the run, from /proc
    gateway       the same of the gateway's own process; its difference is what handing over costs
                  (and the machine's noise)
    late p99      of the pings, milliseconds; its difference is what is added to the event loop

What the gateway pays per request for feeding the live model is paid by both: bench/live_cost.py
measures it alone.

    .venv/bin/python bench/live_gateway_cost.py [--rounds 3] [--seconds 75] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.live.pinged_gateway import PINGS_FILE, PingedGateway
from loadgen.gateway.gateway_process import free_port
from loadgen.sending.client.target import Target
from loadgen.sending.run import run_load
from queueing.arrivals.timetable import draw
from queueing.distributions.token_distribution import parse_distribution
from queueing.measurement.machine import hardware

RATE = 500.0  # requests/s
LAW = "k1=1e-5,k2=1e-3,k3=1e-6,k4=1e-3,cv=0.1"
LENGTHS, LONGEST = parse_distribution("uniform:low=1,high=15"), 15
PROMPTS = parse_distribution("deterministic:value=16")
WARM = 15.0  # seconds: the predicting process starts, its window fills
ALLOWED, ALLOWED_LATE = 0.03, 1e-3  # of one core; seconds
TICKS = os.sysconf("SC_CLK_TCK")
LIVE = ["--prediction-interval", "5", "--what-if-interval", "60"]


def cpu(pid: int) -> float:
    """Seconds that a process has had, threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def helpers(gateway: int) -> Iterator[int]:
    """The processes of the gateway's session besides itself."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                entry.name.isdigit()
                and int(entry.name) != gateway
                and os.getsid(int(entry.name)) == gateway
            ):
                yield int(entry.name)


async def one(folder: Path, seconds: float, *, predicts: bool, seed: int) -> dict[str, float]:
    """One run; shares of a core, lateness in seconds."""
    pings = folder / f"pings-{seed}-{predicts}.bin"
    os.environ[PINGS_FILE] = str(pings)
    arguments = [
        "tiny",
        "--engine",
        "emulated",
        "--latency",
        LAW,
        "--policy",
        "capped:max_batch_size=32",
        "--allow-forced-lengths",
    ]
    arguments += LIVE if predicts else ["--prediction-interval", "0"]
    async with PingedGateway(arguments, free_port(0), pings.with_suffix(".log")) as gateway:
        await gateway.ready()
        timetable = draw(RATE, int(RATE * (WARM + seconds)), seed, PROMPTS, LENGTHS)
        load = asyncio.create_task(
            run_load(
                Target(base_url=gateway.url, model="tiny", max_tokens=LONGEST), timetable, seed=seed
            )
        )
        await asyncio.sleep(WARM)
        began, others = time.perf_counter(), list(helpers(gateway.pid))
        before = cpu(gateway.pid), sum(map(cpu, others))
        await asyncio.sleep(seconds - 2.0)
        took, after = time.perf_counter() - began, (cpu(gateway.pid), sum(map(cpu, others)))
        assert not load.done(), "the load ended before the measurement did"
        await load
    late = np.fromfile(pings).reshape(-1, 2)
    late = late[(late[:, 0] >= began) & (late[:, 0] < began + took), 1]
    return {
        "predicting": (after[1] - before[1]) / took,
        "gateway": (after[0] - before[0]) / took,
        "late_p50": float(np.quantile(late, 0.5)),
        "late_p99": float(np.quantile(late, 0.99)),
        "late_max": float(late.max()),
        "pings": float(late.size),
    }


async def rounds(count: int, seconds: float, folder: Path) -> list[dict[bool, dict[str, float]]]:
    """Each of the two in turn, the first one alternating."""
    found = []
    for number in range(count):
        this = {}
        for predicts in (True, False) if number % 2 else (False, True):
            this[predicts] = run = await one(folder, seconds, predicts=predicts, seed=number)
            name = "predicts" if predicts else "does not"
            shares = f"predicting {run['predicting']:6.2%}  gateway {run['gateway']:6.2%}"
            lateness = (
                f"late p50 {run['late_p50'] * 1e3:.3f}  p99 {run['late_p99'] * 1e3:.3f}  "
                f"max {run['late_max'] * 1e3:.1f} ms"
            )
            print(f"round {number + 1}  {name}  {shares}  {lateness}", flush=True)
        found.append(this)
    return found


def summary(found: list[dict[bool, dict[str, float]]]) -> dict[str, Any]:
    """Medians over the rounds."""
    added = {
        name: median(each[True][name] - each[False][name] for each in found)
        for name in ("predicting", "gateway", "late_p99")
    }
    return {"rate": RATE, "rounds": found, "added": added, "hardware": hardware()}


def main() -> int:
    """Measure, print; 1 where it costs more than is allowed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=75.0, help="of each measurement")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole = summary(asyncio.run(rounds(options.rounds, options.seconds, Path(folder))))
    added = whole["added"]
    good = added["predicting"] < ALLOWED and added["late_p99"] < ALLOWED_LATE
    shares = (
        f"predicting process {added['predicting']:.2%} of a core, gateway {added['gateway']:+.2%}"
    )
    late, verdict = (
        f"event loop p99 {added['late_p99'] * 1e3:+.3f} ms",
        "within" if good else "NOT within",
    )
    print(f"added at {RATE:g} requests/s: {shares}, {late}: {verdict} 3 % and 1 ms")
    if options.json:
        options.json.write_text(json.dumps(whole, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
