"""What a cell's records say: columns in the order of arrival, and how fast the engine was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.live.observation import block_speeds
from policies import parse_policy
from queueing.distributions.token_distribution import Vector
from queueing.estimation.speed.batch_times import batch_times, slot_times
from queueing.estimation.window.window import snapshot_of
from queueing.latency.law import LatencyModel
from queueing.measurement.record import Record

COLUMNS = (
    "arrived_at",
    "queueing_delay",
    "service_time",
    "sojourn_time",
    "prompt_tokens",
    "output_tokens",
    "predicted_output_tokens",
    "preemptions",
)
Columns = dict[str, list[float]]


def columns_of(records: Sequence[Record]) -> Columns:
    """Of the completed requests; instants since the first arrival, microseconds kept."""
    kept = sorted((record for record in records if record.outcome == "completed"), key=_arrived_at)
    origin = _arrived_at(kept[0]) if kept else 0.0
    found: Columns = {}
    for name in COLUMNS:
        shift = origin if name == "arrived_at" else 0.0
        found[name] = [round((getattr(record, name) or 0) - shift, 6) for record in kept]
    return found


def _arrived_at(record: Record) -> float:
    return record.arrived_at or 0.0


def quietness(
    records: Sequence[Record], policy: str, law: LatencyModel, block: float
) -> tuple[float, list[float]]:
    """Speed of the engine by the live model's estimator, over the run and in blocks of so many
    seconds: a factor on the law's time.
    """
    served = [record for record in records if record.outcome == "completed"]
    instants = [_arrived_at(record) for record in served]
    epoch = served[0].epoch or 0
    seen = snapshot_of(served, policy, min(instants) - 1, max(instants), epoch=epoch)
    each = slot_times(seen.mine, law)
    measured, fitted = (
        sum(float(getattr(times, name).sum()) for times in each) for name in ("measured", "fitted")
    )
    return measured / fitted, block_speeds(batch_times(parse_policy(policy), seen.mine, law), block)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the counted requests; seconds."""

    delay: float
    delay_p99: float
    sojourn: float
    sojourn_p99: float
    longest_tenth: float  # mean sojourn of those with the most output tokens


def figures_of(delays: Vector, sojourns: Vector, output_tokens: Vector) -> Figures:
    """Of columns in one order."""
    long = output_tokens >= np.quantile(output_tokens, 0.9)
    return Figures(
        delay=float(delays.mean()),
        delay_p99=float(np.quantile(delays, 0.99)),
        sojourn=float(sojourns.mean()),
        sojourn_p99=float(np.quantile(sojourns, 0.99)),
        longest_tenth=float(sojourns[long].mean()),
    )
