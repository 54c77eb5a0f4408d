"""Does the rate that `kendall optimize --slo` gives hold on a real engine?

Starts a gateway with the tiny model, `continuous` with 64 slots, prompts of 32 to 1,024 tokens and
geometric answers, and calibrates it. Two pilots under load give the live law, the second one near
the rate that was found with the first: an engine is slower at a higher load. The largest rate that
keeps the SLO under that law is then sent at 0.9 of it, which should keep the SLO, and at 1.1, which
should break it. A quiet machine is needed; 7 minutes.

    .venv/bin/python bench/slo_rate.py [--slo "p99_ttft<=100ms,p99_itl<=50ms"] [--seconds 100]
                                       [--json FILE]

Exit status: 0 kept and broken as said, 1 not, or the gateway could not go on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.several.cells import looked, sent
from loadgen.gateway.gateway_process import GatewayClient, GatewayError, GatewayProcess, free_port
from policies import parse_policy
from queueing.choosing.answer import Prices
from queueing.choosing.objective import Objective, Slo, parse_slos
from queueing.choosing.rates import largest_rate
from queueing.distributions.token_distribution import parse_distribution
from queueing.latency.law import LatencyModel
from queueing.measurement.machine import hardware, versions
from queueing.model import Model

POLICY, SLOTS, LONGEST = "continuous:max_batch_size=64", 64, 512
LENGTHS, PROMPTS = "geometric:mean=40", "uniform:low=32,high=1024"
LOAD = ("--output-tokens", LENGTHS, "--prompt-tokens", PROMPTS, "--token-times")
GUESS, NEAR = 10.0, 0.85  # requests/s of the first pilot; of the rate that it found, the second's
PILOT = 40.0  # seconds; the last third is looked at
AROUND = (0.9, 1.1)
MEASURED = {"time_to_first_token": "ttft", "inter_token_latency": "itl"}
PLAN = {"repeats": 12, "max_batch_size": SLOTS, "max_output_tokens": 96}
Plain = dict[str, Any]


def queue(law: Plain) -> Model:
    """Of the cells, under a law as the gateway shows it."""
    return Model(
        policy=parse_policy(POLICY),
        output_tokens=parse_distribution(LENGTHS, LONGEST),
        prompt_tokens=parse_distribution(PROMPTS),
        law=LatencyModel(**law),
        max_num_seqs=SLOTS,
    )


def rate_within(slos: str, law: Plain) -> float:
    """Requests/s, as `kendall optimize --target arrival-rate` finds it."""
    goal = Objective(name="slo", **parse_slos(slos))
    prices = Prices(goal.slos)
    found = largest_rate(queue(law), goal, predict=prices.quick, full=prices.full)
    return float(found.best["arrival_rate"])


async def pilot(gateway: GatewayClient, rate: float, seed: int, limit: int) -> Plain:
    """The live prediction under load. Raises GatewayError where there is none."""
    change = {"policy": POLICY, "max_output_tokens": limit}  # another limit: a new epoch
    epoch = int((await gateway.ask("PUT", "/admin/policy", change))["epoch"])
    sending = await sent(gateway.url, rate, PILOT, seed, LOAD)
    await asyncio.sleep(PILOT - 2)
    found = await looked(gateway, epoch)
    await sending.communicate()
    return found


async def cell(gateway: GatewayClient, rate: float, seconds: float, seed: int) -> Plain:
    """What the clients saw of load at this rate."""
    change = {"policy": POLICY, "max_output_tokens": LONGEST}
    await gateway.ask("PUT", "/admin/policy", change)
    sending = await sent(gateway.url, rate, seconds, seed, LOAD)
    said, _ = await sending.communicate()
    found: Plain = json.loads(said)
    return found


def kept(slos: tuple[Slo, ...], seen: Plain) -> Plain:
    """Of each SLO the measured value in seconds with its interval, and whether it is within."""
    found = {}
    for slo in slos:
        measure = seen[MEASURED[slo.field]]
        value = measure[slo.metric]
        ends = [measure.get(f"{slo.metric}_{end}") for end in ("low", "high")]
        found[slo.name] = {
            "bound": slo.seconds,
            "measured": value,
            "interval": ends,
            "kept": value <= slo.seconds,
        }
    return found


async def measure(given: argparse.Namespace, folder: Path) -> list[Plain]:
    """The cells. Raises GatewayError."""
    options = ["tiny", "--engine", "vllm", "--max-num-seqs", str(SLOTS), "--policy", POLICY]
    options += ["--prediction-interval", "5", "--prediction-window", "120"]
    options += ["--what-if-interval", "100000", "--max-output-tokens", str(LONGEST)]
    slos = Objective(name="slo", **parse_slos(given.slo)).slos
    async with GatewayProcess(options, free_port(0), folder / "gateway.log") as gateway:
        await gateway.ready()
        await gateway.ask("POST", "/admin/calibrate", dict(PLAN))
        rate, seed = GUESS, given.seed
        for place in range(2):
            seen = await pilot(gateway, rate, seed + place, LONGEST - 1 - place)
            found = rate_within(given.slo, seen["law"])
            print(
                f"pilot at {rate:.3g}/s: load {seen['load']:.2f}, speed {seen['speed']:.2f}; "
                f"the SLO holds up to {found:.4g}/s",
                flush=True,
            )
            rate = NEAR * found
        cells = []
        for place, part in enumerate(AROUND):
            seen = await cell(gateway, part * found, given.seconds, seed + 10 + place)
            cells.append({"part": part, "rate": part * found, "sent": seen["outcomes"]})
            cells[-1] |= {"slos": kept(slos, seen)}
            print(said(cells[-1]), flush=True)
        return cells


def said(cell: Plain) -> str:
    """A line."""
    parts = [
        f"{name} {each['measured'] * 1e3:.4g} ms of {each['bound'] * 1e3:g} "
        f"({'kept' if each['kept'] else 'broken'})"
        for name, each in cell["slos"].items()
    ]
    return f"{cell['part']:g} of it, {cell['rate']:.4g}/s: {', '.join(parts)}"


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slo", default="p99_ttft<=100ms,p99_itl<=50ms")
    parser.add_argument("--seconds", type=float, default=100.0, help="of a cell")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    given = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as name:
            cells = asyncio.run(measure(given, Path(name)))
    except (GatewayError, RuntimeError) as error:
        print(f"bench/slo_rate.py: {error}", file=sys.stderr)
        return 1
    if given.json:
        report = {"hardware": hardware(), "versions": versions(), "seed": given.seed}
        report |= {"slo": given.slo, "cells": cells}
        given.json.write_text(json.dumps(report, indent=1))
    below, above = ([one["kept"] for one in each["slos"].values()] for each in cells)
    return 0 if all(below) and not all(above) else 1


if __name__ == "__main__":
    sys.exit(main())
