"""Goodput: the share of requests that were answered in full and within EVERY limit, and how many a
second.

The share is of all requests sent: what failed, was refused, gave up or was cut off kept nothing.
Its interval respects that neighbours in a queue share their luck: the variance of the 0/1 sequence
comes from batch means, n is replaced by the number of independent requests that would tell as much,
and Wilson's interval is taken with it (with Student's t, as for batch means). It stays within 0..1
and does not shrink to nothing where every request kept its limits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kendall.loadgen.measures.metrics import METRICS, began_at
from kendall.policies.durations import seconds_or_nan
from kendall.policies.text import SpecError
from kendall.queueing.measurement.batch_means import student
from kendall.queueing.measurement.record import Record
from kendall.queueing.measurement.slo import SIGN, load_test_name
from kendall.queueing.measurement.statistics import BATCHES, FloatArray, batch_means_interval


@dataclass(frozen=True, slots=True)
class Limit:
    """One service level objective: a metric of loadgen.measures.metrics and the most it may be,
    seconds.
    """

    metric: str
    seconds: float

    @classmethod
    def parse(cls, text: str) -> Limit:
        """From `NAME:DURATION`, a bare number in milliseconds. Raises SpecError."""
        name, _, number = text.partition(":")
        metric = load_test_name(name)
        if metric not in METRICS:
            raise SpecError(
                f"got goodput limit {text!r}; expected NAME:DURATION with one of "
                f"{', '.join([*METRICS, 'queue', 'service'])}, which every request is to keep"
            )
        try:
            seconds = float(number) / 1e3
        except ValueError:
            seconds = seconds_or_nan(number)
        if not 0 <= seconds < math.inf:
            raise SpecError(
                f"got goodput limit {text!r}; expected a duration after the colon, for example "
                f"{name}:100ms; a bare 100 is 100 ms"
            )
        return cls(metric, seconds)

    def __str__(self) -> str:
        return f"{self.metric} <= {self.seconds * 1e3:g} ms"

    def value(self, record: Record) -> float | None:
        """The metric of a completed request, seconds. A single token has no time per token, which
        counts as 0, as in vLLM.
        """
        if self.metric == "tpot" and record.output_tokens is not None and record.output_tokens < 2:
            return 0.0
        return METRICS[self.metric].of(record)

    def kept(self, record: Record) -> bool:
        """Whether a completed request kept it; false where its value is unknown."""
        value = self.value(record)
        return value is not None and value <= self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Share of the requests sent that kept all limits, with the ends of its 95 % interval; kept
    per second.
    """

    limits: tuple[str, ...]
    # not a number where nothing was sent or the server does not report a quantity that has a limit
    share: float
    low: float
    high: float
    rate: float
    n: int
    effective_n: float


def parse_goodput(texts: Iterable[str]) -> tuple[Limit, ...]:
    """Limits from `["ttft:100", "e2el<=1s, queue<=50ms"]`; a bare number is milliseconds, as in
    vLLM's --goodput. Raises SpecError.
    """
    limits = tuple(
        Limit.parse(pair)
        for text in texts
        for pair in re.sub(rf"{SIGN}|\s*:\s*", ":", text).replace(",", " ").split()
    )
    if not limits:
        raise SpecError("got no limit; expected NAME:DURATION, for example ttft:100ms")
    twice = {
        limit.metric
        for limit in limits
        if [other.metric for other in limits].count(limit.metric) > 1
    }
    if twice:
        raise SpecError(f"got two limits of {', '.join(sorted(twice))}; expected one")
    return limits


def goodput(records: Sequence[Record], limits: Sequence[Limit]) -> Goodput:
    """Goodput of records in the order of sending, without the warm-up."""
    done = [record for record in records if record.outcome == "completed"]
    known = all(any(limit.value(record) is not None for record in done) for limit in limits)
    kept = np.array(
        [
            record.outcome == "completed" and all(limit.kept(record) for limit in limits)
            for record in records
        ],
        dtype=np.float64,
    )
    share, low, high, effective_n = math.nan, math.nan, math.nan, 0.0
    if records and (known or not done):
        share, low, high, effective_n = share_interval(kept)
    span = duration(records)
    return Goodput(
        limits=tuple(str(limit) for limit in limits),
        share=share,
        low=low,
        high=high,
        rate=share * kept.size / span if span > 0 else math.nan,
        n=kept.size,
        effective_n=effective_n,
    )


def share_interval(kept: FloatArray) -> tuple[float, float, float, float]:
    """The share of ones in a sequence of 0 and 1, the ends of its 95 % interval, and the number of
    independent values that would tell as much.
    """
    interval = batch_means_interval(kept)
    n = min(max(interval.effective_n, 1.0), float(kept.size))
    t = student(max(min(BATCHES, kept.size) - 1, 1), 0.95)
    share, weight = interval.mean, t * t / n
    centre = (share + weight / 2) / (1 + weight)
    half = math.sqrt(weight * (share * (1 - share) + weight / 4)) / (1 + weight)
    return share, max(0.0, centre - half), min(1.0, centre + half), n


def duration(records: Iterable[Record]) -> float:
    """Seconds from the first intended instant to the last end; not a number without both."""
    begins, ends = [], []
    for record in records:
        if (begin := began_at(record)) is not None:
            begins.append(begin)
        if record.released_at is not None:
            ends.append(record.released_at)
    return max(ends) - min(begins) if begins and ends else math.nan
