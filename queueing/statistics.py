"""What a finite, autocorrelated run says about a mean.

Delays in a queue remember: a long one is followed by long ones, and an interval that takes them as independent covers
the truth in 28-36 % of runs at utilisation 0.7 where it promises 95 %. Here the run is cut, in order of arrival, into
`batches` equal blocks; their means are nearly independent where a block is long against the queue's memory:

    half width = t(batches - 1) * s / sqrt(batches),  s = standard deviation of the block means

(non-overlapping batch means; Law, Simulation Modeling and Analysis, section 9.5.3.) The correlation of successive
block means is reported: well above zero, the run is too short for its own interval.

Warm-up is a fixed share, stated before the data are seen. MSER-5 was tried and left: on M/M/1 waits it looks for a
cut that leaves little variance, drops early busy periods and so biases the mean by -4 to -11 % (utilisation 0.5-0.9,
500-2000 requests), where a fixed 5 % stays within the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

FloatArray = NDArray[np.float64]
BATCHES = 20
WARM_UP = 0.05  # share of a run


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and half the width of its confidence interval; infinite where there are too few values to tell."""

    mean: float
    half_width: float
    n: int
    effective_n: float  # independent values that would tell as much
    correlation: float  # of successive batch means, lag 1

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half_width

    @property
    def relative(self) -> float:
        """Half width over the mean."""
        return self.half_width / abs(self.mean) if self.mean else math.inf

    @property
    def correlated(self) -> bool:
        """Whether successive batch means hang together (one-sided 5 %): the run is too short for its own interval."""
        return self.correlation > 1.645 / math.sqrt(BATCHES)

    def covers(self, value: float) -> bool:
        """Whether the value lies in the interval."""
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean and quantiles of one quantity; not-a-number where nothing was measured."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    n: int


def mean_interval(values: FloatArray, confidence: float = 0.95, batches: int = BATCHES) -> Interval:
    """Mean of a stationary sequence, in its order, with an interval from non-overlapping batch means."""
    n = values.size
    if n < 2:
        mean = float(values[0]) if n else math.nan
        return Interval(mean, math.inf, n, float(n), math.nan)
    parts = min(batches, n)
    edges = np.linspace(0, n, parts + 1).astype(np.int64)
    shifted = values - values[0]  # equal values then differ by exactly nothing
    means = np.add.reduceat(shifted, edges[:-1]) / np.diff(edges)
    variance = float(means.var(ddof=1)) / parts
    half_width = float(stdtrit(parts - 1, (1 + confidence) / 2)) * math.sqrt(variance)
    effective_n = float(shifted.var(ddof=1)) / variance if variance else float(n)
    return Interval(float(values.mean()), half_width, n, effective_n, lag_correlation(means))


def lag_correlation(values: FloatArray) -> float:
    """Correlation of each value with the next one; not a number where they do not vary."""
    centred = values - values.mean()
    total = float(centred @ centred)
    return float(centred[:-1] @ centred[1:]) / total if total else math.nan


def warm_up(count: int, share: float = WARM_UP) -> int:
    """How many of the first `count` values to leave out: a fixed share."""
    return int(count * share)


def summarise(values: FloatArray) -> Summary:
    """Mean, quantiles and maximum."""
    if not values.size:
        nan = math.nan
        return Summary(nan, nan, nan, nan, nan, nan, 0)
    p50, p90, p95, p99 = np.quantile(values, (0.5, 0.9, 0.95, 0.99)).tolist()
    return Summary(float(values.mean()), p50, p90, p95, p99, float(values.max()), values.size)
