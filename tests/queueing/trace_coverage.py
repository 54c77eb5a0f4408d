"""Does the check hold on recorded traffic?

    python -m tests.queueing.trace_coverage FILE ... [--load 0.5 --load 0.8] [--policy TEXT ...]

An hour of each trace, thinned at random to the engine's capacity, served by the gateway's batcher
and the emulated engine on virtual time; in windows of five minutes, each beginning with what waits
and runs then, the requests that came beside the model of the same ones.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from pathlib import Path

from bench.live.thinned import thinned
from policies import Request, parse_policy
from queueing.arrivals.timetable import Timetable
from queueing.arrivals.traces import read_trace
from queueing.estimation.assess import Limits, assess
from queueing.estimation.window.snapshot import Snapshot
from queueing.latency.law import LatencyModel
from queueing.measurement.check import Check
from server.engines.emulated import EmulatedEngine
from server.queue.batcher import Batcher
from tests.server.autopiloted import Fed
from tests.server.harness import engine_request_of, submitted
from tests.virtual_time import run_virtual

LAW = LatencyModel(k1=0.002, k2=0.004, k3=0.0003, k4=0.006, kp=2e-6, cv=0.15)
POLICIES = ("dynamic", "capped:max_batch_size=8", "continuous:max_batch_size=16")
MOST, LONGEST, CONTEXT = 16, 1_024, 16_384  # requests at once, tokens
BATCH = 32_768  # tokens of the prompts of a batch
BOUNDS = {"max_num_seqs": MOST, "max_model_len": CONTEXT, "max_num_batched_tokens": BATCH}
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


def checks(path: Path, policy: str, load: float) -> list[Check]:
    """Of the windows that have one."""
    limits = Limits(max_output_tokens=LONGEST, max_num_seqs=MOST, batch_tokens=BATCH)
    given = {"most": MOST, "longest": LONGEST, "context": CONTEXT}
    table = thinned(read_trace(path), policy, load, LAW, **given)
    found = [assess(seen, LAW, limits).compared.check for seen in windows(table, policy)]
    return [each for each in found if each is not None and math.isfinite(each.half_width)]


def holds(check: Check) -> bool:
    """Within 10 %, or its interval."""
    return abs(check.difference) <= max(check.half_width, WITHIN * check.modelled)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--load", action="append", type=float)
    parser.add_argument("--policy", action="append")
    asked = parser.parse_args()
    every: list[Check] = []
    for path in asked.files:
        for policy in asked.policy or POLICIES:
            for load in asked.load or (0.5, 0.8):
                found = checks(path, policy, load)
                every += found
                off = [100 * (each.ratio - 1) for each in found]
                print(  # noqa: T201
                    f"{path.stem:26} {policy:28} {load:.1f}  {sum(map(holds, found))} of "
                    f"{len(found)} hold; {', '.join(f'{each:+.1f}' for each in off)} %",
                    flush=True,
                )
    print(f"{sum(map(holds, every))} of {len(every)} windows hold")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
