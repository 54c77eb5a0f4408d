"""Does the check hold on recorded traffic?

    python -m tests.queueing.trace_coverage FILE ... [--load 0.5 --load 0.8] [--policy TEXT ...]

An hour of each trace, thinned at random to the engine's capacity, served by the gateway's batcher
and the emulated engine on virtual time; in windows of five minutes, each beginning with what waits
and runs then, the requests that came beside the model of the same ones, and what was said of each
window before it came.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.live_check import thinned
from kendall.policies import Request, parse_policy
from kendall.queueing.arrivals.timetable import Timetable
from kendall.queueing.arrivals.traces import read_trace
from kendall.queueing.control.assess import assess
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.checked import cut_at
from kendall.queueing.estimation.interval import UNKNOWN, Estimate
from kendall.queueing.estimation.outlook import RecentArrivals, band, forecast_error, outlook
from kendall.queueing.estimation.speed.speed_history import SpeedHistory
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.check import Check
from kendall.server.engines.emulated import EmulatedEngine
from kendall.server.queue.batcher import Batcher
from tests.server.autopiloted import Fed
from tests.server.harness import engine_request_of, submitted
from tests.virtual_time import run_virtual

LAW = LatencyModel(k1=0.002, k2=0.004, k3=0.0003, k4=0.006, kp=2e-6, cv=0.15)
POLICIES = ("dynamic", "capped:max_batch_size=8", "continuous:max_batch_size=16")
MOST, LONGEST, CONTEXT = 16, 1_024, 16_384  # requests at once, tokens
APART = 1e-6  # seconds: of requests that a trace has at one instant, one comes first
BATCH = 32_768  # tokens of the prompts of a batch
BOUNDS = {
    "max_num_seqs": MOST,
    "max_model_len": CONTEXT,
    "max_num_batched_tokens": BATCH,
    "kv_cache_tokens": 2**24,
}
WINDOW = 300.0  # seconds
WITHIN = 0.10


def windows(table: Timetable, policy: str) -> list[Snapshot]:
    """Of five minutes each."""

    async def main() -> list[Snapshot]:
        engine = EmulatedEngine(LAW, seed=1, **BOUNDS)
        fed = Fed()
        batcher = Batcher(engine, await engine.start(), parse_policy(policy), [fed])
        loop, found, due = asyncio.get_running_loop(), list[Snapshot](), WINDOW
        rows = zip(
            table.intended_at.tolist(),
            table.prompt_tokens.tolist(),
            table.output_tokens.tolist(),
            strict=True,
        )
        for number, (at, prompt, tokens) in enumerate(rows):
            while at > due:
                await asyncio.sleep(max(0.0, due - loop.time()))
                seen = fed.window.snapshot(
                    batcher.policy_text,
                    loop.time(),
                    in_service=fed.in_service(),
                    waiting=batcher.queue_length,
                )
                found.append(seen.since(loop.time() - WINDOW))
                due += WINDOW
            await asyncio.sleep(max(0.0, at - loop.time()))
            request = Request(
                id=str(number),
                arrived_at=loop.time(),
                prompt_tokens=prompt,
                max_output_tokens=LONGEST,
            )
            submitted(batcher, [engine_request_of(request, tokens)])
        return found

    return run_virtual(main())


@dataclass(frozen=True)
class Told:
    """Of a window its check, and of the next one the observed mean beside what was said of it."""

    check: Check | None
    observed: float  # seconds; nan: nobody was served
    band: Estimate
    steady: Estimate  # of Poisson arrivals; unknown without a steady state


def told(found: Sequence[Snapshot], shape: LatencyModel, limits: QueueLimits) -> Iterator[Told]:
    """Of consecutive windows."""
    recent, speeds = RecentArrivals(), SpeedHistory()
    for number, seen in enumerate(found):
        recent.add(seen)
        sojourn = parse_policy(seen.policy).joins_running
        assessed = assess(seen, shape, limits, history=speeds)
        check, model = assessed.compared.check, assessed.model
        check = check if check is not None and math.isfinite(check.half_width) else None
        after = found[number + 1].judged(sojourn=sojourn) if number + 1 < len(found) else []
        band_, error = UNKNOWN, forecast_error(assessed.estimates, speeds)
        ahead = model and outlook(seen, cut_at(model, limits.engine.batch_tokens), recent, error)
        means = ahead and ahead.means(cut_at(model, limits.engine.batch_tokens))
        if means is not None:
            band_ = band(means[1 if sojourn else 0])
        observed = float(np.mean(after)) if len(after) else math.nan
        yield Told(check, observed, band_, assessed.compared.predicted)


def tables(path: Path, policy: str, load: float) -> list[Told]:
    """Of an hour on virtual time."""
    limits = QueueLimits(
        max_output_tokens=LONGEST, engine=EngineBounds(max_num_seqs=MOST, batch_tokens=BATCH)
    )
    given = {"slots": MOST, "longest": LONGEST, "context": CONTEXT, "batch_tokens": BATCH}
    table = thinned(read_trace(path), policy, load, LAW, **given)
    apart = table.intended_at + APART * np.arange(len(table))
    table = dataclasses.replace(table, intended_at=apart)
    return list(told(windows(table, policy), LAW, limits))


def holds(check: Check) -> bool:
    """Within 10 %, or its interval."""
    return abs(check.difference) <= max(check.half_width, WITHIN * check.modelled)


def says(found: Sequence[Told]) -> str:
    """Checks that hold; next windows in the forecast's band, and in the steady state's interval."""
    checks = [each.check for each in found if each.check is not None]
    ahead = [e for e in found if math.isfinite(e.observed) and math.isfinite(e.band.high)]
    inside, steady = (
        sum(getattr(e, name).low <= e.observed <= getattr(e, name).high for e in ahead)
        for name in ("band", "steady")
    )
    return (
        f"checks {sum(map(holds, checks))} of {len(checks)}; next five minutes {inside} of "
        f"{len(ahead)}, steady state {steady}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--load", action="append", type=float)
    parser.add_argument("--policy", action="append")
    asked = parser.parse_args()
    every: list[Told] = []
    for path in asked.files:
        for policy in asked.policy or POLICIES:
            for load in asked.load or (0.5, 0.8):
                found = tables(path, policy, load)
                every += found
                off = [100 * (e.check.ratio - 1) for e in found if e.check is not None]
                ahead = [
                    f"{e.observed:.2f} in {e.band.low:.2f}-{e.band.high:.2f}" for e in found[:-1]
                ]
                print(  # noqa: T201
                    f"{path.stem:26} {policy:28} {load:.1f}  {says(found)}\n"
                    f"    {', '.join(f'{each:+.1f}' for each in off)} %; {', '.join(ahead)} s",
                    flush=True,
                )
    print(says(every))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
