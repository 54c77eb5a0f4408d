"""The speed of the run, the scatter around it and the stalls: the law's shape is given, never
fitted to the run's own batches.

    speed   f = sum of measured / sum of fitted times, of all batches
            z_i = measured_i - f fitted_i
    stall   measured > `STALL` median(r) fitted, r = measured / fitted, and in excess by an average
            batch at least; it leaves e_i = measured_i - g fitted_i, g the speed of all others
    law     q = sum e / sum measured, s = sum e^2 / sum e: stalls have their share of E[H] and of
            E[H^2] (queueing.latency.stalls)
    cv^2    = sum z^2 / sum (g fitted)^2,   z by g, of all others

So the law's sums of times and of their squares are those of the run, whatever the residual's form.
A batch that is no stall moves the sum of squares by what four batches of its length add, or an
average one, at most: however short, it has no more weight.

Slow moments come in stretches, so the errors are those of block means (20 blocks in order of time,
Student's t): of z for f, and of the linear part of ln cv, (z^2 / mean z^2 - fitted^2 / mean
fitted^2) / 2, for cv.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kendall.queueing.estimation.interval import UNKNOWN, Estimate, symmetric, without_interval
from kendall.queueing.estimation.speed.batch_times import FEWEST, BatchTimes
from kendall.queueing.estimation.summaries import Stalls
from kendall.queueing.latency.speed import residual_cv as scatter
from kendall.queueing.measurement.statistics import batch_means_interval

FEW = 5  # groups of slots, of which a speed has a value, without an interval
FloatArray = npt.NDArray[np.float64]

STALL = 3.0  # times the median ratio; a gamma residual of cv 0.25 gets there once in 10^9
EXCESS = 1.0  # average batches; what costs a short batch less is scatter


def speed(times: BatchTimes) -> Estimate:
    """Factor on the law's durations, > 1: slower; the interval respects autocorrelation."""
    if times.count < FEWEST:
        return UNKNOWN
    factor = float(times.measured.sum() / times.fitted.sum())
    errors = batch_means_interval(times.measured - factor * times.fitted)
    return symmetric(
        factor,
        errors.half_width / float(times.fitted.mean()),
        _effective(errors.effective_n, times),
    )


def rough_speed(groups: BatchTimes) -> Estimate:
    """A value alone, of fewer groups of slots: each is of as many requests as there are slots."""
    if groups.count < FEW:
        return UNKNOWN
    return without_interval(float(groups.measured.sum() / groups.fitted.sum()))


def residual_cv(times: BatchTimes) -> Estimate:
    """Coefficient of variation of the residual over batches without stalls, slow wander
    included.
    """
    if times.count < FEWEST:
        return UNKNOWN
    fitted = float(times.measured.sum() / times.fitted.sum()) * times.fitted
    value = scatter(times.measured, fitted)
    if not value > 1e-9:
        return Estimate(0.0, 0.0, 0.0, float(times.count))
    squares = (times.measured - fitted) ** 2
    errors = batch_means_interval((squares / squares.mean() - fitted**2 / np.mean(fitted**2)) / 2)
    factor = math.exp(errors.half_width)
    return Estimate(value, value / factor, value * factor, _effective(errors.effective_n, times))


def _effective(found: float, times: BatchTimes) -> float:
    return min(found, float(times.count))


def stalls(times: BatchTimes) -> Stalls:
    """Engine stalls: rare, long, not a matter of speed."""
    slow = stalled(times)
    if not slow.any():
        return Stalls(0, 0.0, 0.0, None)
    pace = float(times.measured[~slow].sum() / times.fitted[~slow].sum())
    excess = times.measured[slow] - pace * times.fitted[slow]
    return Stalls(
        count=int(slow.sum()),
        time_share=float(excess.sum() / times.measured.sum()),
        longest=float(excess.max()),
        last_at=float(times.at[slow][-1]),
        size=float(excess @ excess / excess.sum()),
    )


def stalled(times: BatchTimes) -> npt.NDArray[np.bool_]:
    """Which batches met a stall; fewer than half."""
    if not times.count:
        return np.zeros(0, dtype=bool)
    median = float(np.median(times.ratio))
    excess = times.measured - median * times.fitted
    return np.asarray(
        (times.ratio > STALL * median) & (excess > EXCESS * median * float(times.fitted.mean()))
    )


def without_outliers(times: BatchTimes) -> BatchTimes:
    """Those within `STALL` times the median ratio, for what is judged by ratios; the same object
    where all are.
    """
    kept = (
        times.ratio <= STALL * float(np.median(times.ratio))
        if times.count
        else np.ones(0, dtype=bool)
    )
    return times if kept.all() else times.part(kept)
