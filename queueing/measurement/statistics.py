"""What a finite, autocorrelated run says: how much of its beginning to leave out, means and
quantiles with intervals, or "too short".

queueing.measurement.warm_up            how many of the first requests are left out, and why
queueing.measurement.mean_interval      mean delay's interval, effective sample size, "too short"
queueing.measurement.batch_means        intervals of differences, errors and shares; replications
queueing.measurement.delay_variance     what theory knows of the mean's variance before the delays
                                        are seen
queueing.measurement.quantile_interval  p50 .. p99 with intervals, None where the run cannot say
queueing.simulation.run_length          before the run: how long it has to be
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kendall.queueing.measurement.batch_means import (
    BATCHES,
    TOO_WIDE,
    FloatArray,
    Interval,
    batch_means_interval,
    lag_correlation,
    replications_interval,
)
from kendall.queueing.measurement.mean_interval import mean_interval
from kendall.queueing.measurement.quantile_interval import (
    QuantileInterval,
    quantile_interval,
    quantile_intervals,
)
from kendall.queueing.measurement.warm_up import WARM_UP, WarmUp, find_warm_up, warm_up

__all__ = [
    "BATCHES",
    "TOO_WIDE",
    "WARM_UP",
    "FloatArray",
    "Interval",
    "QuantileInterval",
    "Summary",
    "WarmUp",
    "batch_means_interval",
    "find_warm_up",
    "lag_correlation",
    "mean_interval",
    "quantile_interval",
    "quantile_intervals",
    "replications_interval",
    "summarise",
    "warm_up",
]


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


def summarise(values: FloatArray) -> Summary:
    """Mean, quantiles and maximum."""
    if not values.size:
        nan = math.nan
        return Summary(nan, nan, nan, nan, nan, nan, 0)
    p50, p90, p95, p99 = np.quantile(values, (0.5, 0.9, 0.95, 0.99)).tolist()
    return Summary(float(values.mean()), p50, p90, p95, p99, float(values.max()), values.size)
