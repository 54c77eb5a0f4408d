"""The speed of the run and the scatter around it: the law's shape is given, never fitted to the run's own batches.

    speed f = sum of measured / sum of fitted times                         z_i = measured_i - f fitted_i
    cv      = standard deviation / mean of r_i = measured_i / fitted_i

Slow moments come in stretches, so the errors are those of block means (20 blocks in order of time, Student's t): of z for f, and
of the linear part of ln cv, ((r - m) / s)^2 / 2 - (r - m) / m, for cv. Stalls are batches far beyond the law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from queueing.estimation.batch_times import BatchTimes
from queueing.estimation.interval import UNKNOWN, Estimate, symmetric
from queueing.statistics import batch_means_interval

FEWEST = 20  # batches
STALL = 3.0  # times the median ratio; a gamma residual of cv 0.25 gets there once in 10^9


def speed(times: BatchTimes) -> Estimate:
    """Factor on the law's durations, > 1: slower; the interval respects autocorrelation."""
    if times.count < FEWEST:
        return UNKNOWN
    factor = float(times.measured.sum() / times.fitted.sum())
    errors = batch_means_interval(times.measured - factor * times.fitted)
    return symmetric(factor, errors.half_width / float(times.fitted.mean()), _effective(errors.effective_n, times))


def residual_cv(times: BatchTimes) -> Estimate:
    """Coefficient of variation of measured / fitted over batches, slow wander included."""
    if times.count < FEWEST:
        return UNKNOWN
    ratio = times.ratio
    mean, deviation = float(ratio.mean()), float(ratio.std(ddof=1))
    if not deviation > 1e-9 * mean:
        return Estimate(0.0, 0.0, 0.0, float(times.count))
    centred = (ratio - mean) / deviation
    errors = batch_means_interval(centred**2 / 2 - centred * deviation / mean)
    value = deviation / mean
    factor = math.exp(errors.half_width)
    return Estimate(value, value / factor, value * factor, _effective(errors.effective_n, times))


def _effective(found: float, times: BatchTimes) -> float:
    return min(found, float(times.count))


@dataclass(frozen=True, slots=True)
class Stalls:
    """Batches that took more than `STALL` times the run's median ratio."""

    count: int
    time_share: float  # of the busy time, in excess of the median
    longest: float  # seconds in excess
    last_at: float | None


def stalls(times: BatchTimes) -> Stalls:
    """Engine stalls: rare, long, not a matter of speed."""
    if not times.count:
        return Stalls(0, 0.0, 0.0, None)
    ratio = times.ratio
    median = float(np.median(ratio))
    slow = ratio > STALL * median
    if not slow.any():
        return Stalls(0, 0.0, 0.0, None)
    excess = times.measured[slow] - median * times.fitted[slow]
    return Stalls(int(slow.sum()), float(excess.sum() / times.measured.sum()), float(excess.max()), float(times.at[slow][-1]))


def without_stalls(times: BatchTimes) -> BatchTimes:
    """The others; the same object where there are none."""
    kept = times.ratio <= STALL * float(np.median(times.ratio)) if times.count else np.ones(0, dtype=bool)
    return times if kept.all() else times.part(kept)
