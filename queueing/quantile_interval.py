"""Intervals of quantiles of an autocorrelated run, by the order statistics around them.

A quantile at level p is where a share p of the delays lies below. That share is a mean of 0s and 1s, so batch means say how
well the run knows it (queueing.batch_means), and the order statistics translate it into seconds:

    [ Q(p - h), Q(p + h) ],   h = half width of the share of delays above Q(p),   Q = empirical quantiles

(the inverse of Heidelberger and Lewis, Oper. Res. 32, 1984; no density enters, and a level that lies in the mass of those who
do not wait has lower end 0.) The interval is None where the run cannot say: p + h >= 1, or fewer than 10 independent values'
worth beyond the quantile. Chosen by simulation against sectioning with 20 sections (Asmussen and Glynn, section III.5a), whose
quantiles of short sections are biased, and against Wilson's interval for the share. Coverage of 95 % before any refusal,
and what the rule makes of it (M/M/1 at load 0.9, 102,000 requests: the mean is known to 13 %; 400 to 1,000 runs):

            order statistics   sectioning   Wilson   None    given and wrong, of all runs
    p50     0.97               0.97         0.97     0.00    0.02
    p90     0.96               0.94         0.94     0.00    0.06
    p95     0.94               0.89         0.93     0.11    0.07
    p99     0.92               0.73         0.85     0.93    0.03
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from queueing.batch_means import FloatArray, mean_interval

LEAST_BEYOND = 10.0  # independent values beyond the quantile, on its rarer side


@dataclass(frozen=True, slots=True)
class QuantileInterval:
    """A quantile and the ends of its confidence interval, in the unit of the values."""

    level: float
    value: float
    low: float
    high: float

    def covers(self, value: float) -> bool:
        """Whether the value lies in the interval."""
        return self.low <= value <= self.high


def quantile_interval(values: FloatArray, level: float, confidence: float = 0.95) -> QuantileInterval | None:
    """Of a stationary sequence in its order; None where the run is too short to say."""
    return _interval(values, np.sort(values), level, confidence)


def quantile_intervals(values: FloatArray, levels: Iterable[float], confidence: float = 0.95) -> dict[float, QuantileInterval | None]:
    """The same of several levels, by level."""
    ordered = np.sort(values)
    return {level: _interval(values, ordered, level, confidence) for level in levels}


def _interval(values: FloatArray, ordered: FloatArray, level: float, confidence: float) -> QuantileInterval | None:
    n = values.size
    if n < 2:
        return None
    found = _at(ordered, level)
    above = mean_interval((values > found).astype(np.float64), confidence)
    half, effective = above.half_width, above.effective_n
    if level - half <= 0 or level + half >= 1 or effective * min(level, 1 - level) < LEAST_BEYOND:
        return None
    return QuantileInterval(level, float(np.quantile(values, level)), _at(ordered, level - half), _at(ordered, level + half))


def _at(ordered: FloatArray, level: float) -> float:
    """Inverse of the empirical distribution."""
    return float(ordered[min(max(int(np.ceil(level * ordered.size)) - 1, 0), ordered.size - 1)])
