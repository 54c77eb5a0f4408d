"""A service-level objective on one quantity of a run: `p99_queueing_delay=2s`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kendall.loadgen.measures.metrics import time_per_output_token
from kendall.policies.text import SpecError
from kendall.queueing.measurement.record import Record, read_run
from kendall.queueing.measurement.slo import QUANTITIES, read_slo
from kendall.queueing.measurement.statistics import warm_up
from kendall.queueing.result import Prediction

ANSWERED = (*QUANTITIES, "service_time", "batch_forming_delay", "time_per_output_token")
SATURATION = "saturation"  # the goal of a search without an SLO


@dataclass(frozen=True, slots=True)
class ObservedSlo:
    """A statistic of a duration that must not exceed `bound` seconds."""

    text: str
    stat: str
    level: float | None  # of a quantile; None: the mean
    quantity: str
    bound: float

    def holds(self, folder: Path, done: dict[str, Any]) -> bool:
        """Whether a cell kept it, by the gateway's records after warm-up; a request that was not
        completed did not keep it.
        """
        name = next(name for name in done["files"] if name.endswith(".gateway.jsonl"))
        records = sorted(read_run(folder / name)[1], key=lambda record: record.arrived_at or 0.0)
        return self.observed(records[warm_up(len(records)) :]) <= self.bound

    def observed(self, records: list[Record]) -> float:
        """The statistic over records; infinite durations for what was not completed."""
        values = np.array([self._value(record) for record in records], dtype=np.float64)
        if not values.size:
            return float("inf")
        return (
            float(values.mean())
            if self.level is None
            else float(np.quantile(values, self.level, method="inverted_cdf"))
        )

    def predicted(self, prediction: Prediction) -> float | None:
        """The statistic as a prediction has it; None where it has not."""
        return getattr(getattr(prediction, self.quantity, None), self.stat, None)

    def _value(self, record: Record) -> float:
        if record.outcome != "completed":
            return float("inf")
        if self.quantity == "time_to_first_token":
            if record.first_token_at is None or record.arrived_at is None:
                return float("inf")
            return record.first_token_at - record.arrived_at
        value = (
            time_per_output_token(record) or 0.0
            if self.quantity == "time_per_output_token"
            else getattr(record, self.quantity)
        )
        return float("inf") if value is None else float(value)


def slo_of(goal: str) -> ObservedSlo | None:
    """The SLO of a search; None where it looks for saturation."""
    return None if goal == SATURATION else parse_slo(goal)


def parse_slo(text: str) -> ObservedSlo:
    """Read `STAT_QUANTITY=DURATION`. Raises SpecError."""
    read = read_slo(text)
    if read.quantity not in ANSWERED:
        raise SpecError(
            f"got --slo {text!r}; expected one of {', '.join(ANSWERED)}: a gateway's records have "
            f"no {read.quantity}"
        )
    return ObservedSlo(text, read.statistic, read.level, read.quantity, read.seconds)
