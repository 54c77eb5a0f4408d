"""What one load run was like for its clients, from its records alone; durations count from the INTENDED instant.

Means carry a 95 % interval from batch means, for successive delays in a queue are alike (queueing.statistics). The
first requests, which met an emptier system, are left out of every duration; counts, rates, lengths and the sender's
lateness are of the whole run. What nobody measured is None, never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from loadgen.goodput import Goodput, Limit, duration, goodput
from loadgen.little_check import LittleCheck, little_check
from loadgen.metrics import LATENESS, ORDER, began_at, percentile_name, values
from loadgen.run import LoadResult
from loadgen.timetable import delivered_rate
from queueing.record import Record
from queueing.statistics import FloatArray, mean_interval, warm_up

PERCENTILES = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One quantity: mean with half the width of its 95 % interval (infinite below two values), spread and quantiles."""

    mean: float
    half_width: float
    std: float
    max: float
    n: int
    effective_n: float  # independent values that would tell as much about the mean
    correlated: bool  # batch means hang together: the run is too short for its own interval
    quantiles: Mapping[str, float]  # by p50, p99.9, ...

    def as_object(self) -> dict[str, Any]:
        """For JSON: the quantiles stand beside the mean."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "quantiles"} | dict(self.quantiles)


def measure(found: FloatArray, percentiles: Sequence[float] = PERCENTILES) -> Measure | None:
    """Of a sequence in its order; None of nothing."""
    if not found.size:
        return None
    interval = mean_interval(found)
    quantiles = np.percentile(found, percentiles).tolist()
    return Measure(
        mean=interval.mean,
        half_width=interval.half_width,
        std=float(found.std()),
        max=float(found.max()),
        n=interval.n,
        effective_n=interval.effective_n,
        correlated=bool(interval.correlated),
        quantiles=dict(zip(map(percentile_name, percentiles), quantiles, strict=True)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """Rates per second, durations in seconds, lengths in tokens; None where nothing was measured."""

    asked_rate: float | None
    drawn_rate: float  # of the timetable's own instants
    delivered_rate: float  # of the instants of sending
    completed_rate: float  # completed requests over the duration
    duration: float  # from the first intended instant to the last end
    outcomes: Mapping[str, int]
    warm_up: int  # requests left out of every duration, the first ones
    durations: Mapping[str, Measure]  # by the names of loadgen.metrics; only what was measured
    percentiles: tuple[float, ...]
    prompt_tokens: Measure | None  # of completed requests
    output_tokens: Measure | None
    output_tokens_per_second: float
    tokens_per_second: float  # prompts and answers
    goodput: Goodput | None
    little: LittleCheck | None
    errors: Mapping[str, int]  # texts of what failed, most frequent first, at most five
    interrupted: bool

    @property
    def sent(self) -> int:
        """Requests, however they ended."""
        return sum(self.outcomes.values())

    @property
    def completed(self) -> int:
        """Requests answered in full."""
        return self.outcomes.get("completed", 0)

    @property
    def lateness(self) -> Measure | None:
        """How late the sender was."""
        return self.durations.get(LATENESS)

    def as_object(self) -> dict[str, Any]:
        """For JSON: every duration under its own name, null where it was not measured."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in {"durations", "percentiles"}}
        lengths = {name: None if plain[name] is None else plain[name].as_object() for name in ("prompt_tokens", "output_tokens")}
        found = {name: self.durations[name].as_object() if name in self.durations else None for name in ORDER}
        return plain | lengths | found


def summarise_load(
    result: LoadResult, asked_rate: float | None = None, *, percentiles: Sequence[float] = PERCENTILES, limits: Sequence[Limit] = ()
) -> LoadSummary:
    """Everything about a run in one value; `limits` ask for its goodput."""
    return summarise_records(result.records, asked_rate, percentiles=percentiles, limits=limits, interrupted=result.interrupted)


def summarise_records(
    records: Sequence[Record],
    asked_rate: float | None = None,
    *,
    percentiles: Sequence[float] = PERCENTILES,
    limits: Sequence[Limit] = (),
    interrupted: bool = False,
) -> LoadSummary:
    """The same of a run file's records."""
    records = sorted(records, key=_order)
    left_out = warm_up(len(records))
    done = [record for record in records if record.outcome == "completed"]
    prompt, output = (_lengths(done, name) for name in ("prompt_tokens", "output_tokens"))
    span = duration(records)
    return LoadSummary(
        asked_rate=asked_rate,
        drawn_rate=delivered_rate(_instants(records, "intended_at")),
        delivered_rate=delivered_rate(_instants(records, "sent_at")),
        completed_rate=_per_second(len(done), span),
        duration=span,
        outcomes=dict(Counter(record.outcome for record in records)),
        warm_up=left_out,
        durations=_durations(records, left_out, percentiles),
        percentiles=tuple(percentiles),
        prompt_tokens=measure(prompt, percentiles),
        output_tokens=measure(output, percentiles),
        output_tokens_per_second=_per_second(float(output.sum()), span),
        tokens_per_second=_per_second(float(prompt.sum() + output.sum()), span),
        goodput=goodput(records[left_out:], limits) if limits else None,
        little=little_check(records, left_out),
        errors=dict(Counter(record.error for record in records if record.error).most_common(5)),
        interrupted=interrupted,
    )


def _durations(records: Sequence[Record], left_out: int, percentiles: Sequence[float]) -> dict[str, Measure]:
    steady = [record for record in records[left_out:] if record.outcome == "completed"]
    every = {name: measure(values(name, records if name == LATENESS else steady), percentiles) for name in ORDER}
    return {name: found for name, found in every.items() if found is not None}


def _order(record: Record) -> float:
    at = began_at(record)
    return np.inf if at is None else at


def _instants(records: Sequence[Record], name: str) -> FloatArray:
    return np.array([at for record in records if (at := getattr(record, name)) is not None], dtype=np.float64)


def _lengths(records: Sequence[Record], name: str) -> FloatArray:
    return _instants(records, name)


def _per_second(count: float, span: float) -> float:
    return count / span if span > 0 else 0.0
