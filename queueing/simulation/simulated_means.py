"""Means, standard errors and quantiles of simulated runs: the error from the replications, of
one run from 20 batch means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from queueing.distributions.token_distribution import Vector
from queueing.result import LEVELS, Quantiles

BATCH_MEANS = 20


def summary_of_runs(series: Sequence[Vector]) -> Quantiles:
    """Of one value a request, an array for each run."""
    values = np.concatenate(series)
    if not len(values):
        return Quantiles()
    quantiles = dict(zip(LEVELS, np.quantile(values, list(LEVELS.values())).tolist(), strict=True))
    mean, error = mean_of_runs(series)
    return Quantiles(mean, **quantiles, standard_error=error)


def mean_of_runs(series: Sequence[Vector]) -> tuple[float | None, float | None]:
    """Mean, and its standard error from the replications; of one run, from batch means of
    consecutive values.
    """
    values = np.concatenate(series)
    parts = series if len(series) > 1 else np.array_split(series[0], BATCH_MEANS)
    if not len(values) or any(len(part) == 0 for part in parts):
        return (float(values.mean()) if len(values) else None), None
    means = np.array([part.mean() for part in parts])
    return float(values.mean()), float(means.std(ddof=1) / math.sqrt(len(means)))
