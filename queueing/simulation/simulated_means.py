"""Means, standard errors and quantiles of simulated runs: the error from the replications, of
one run from 20 batch means. And which means say nothing, however long the run: those of durations
that a tail of the lengths leaves without a variance.

Without a second moment of the lengths the delay behind one server has no mean, and a mean that
exists elsewhere, as of a sojourn, has no standard error. With patience a delay is bounded, and so
settles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from queueing.distributions.token_distribution import Vector
from queueing.model import Model
from queueing.result import LEVELS, Prediction, Quantiles

BATCH_MEANS = 20
_BOUNDED = ("queueing_delay", "served_queueing_delay", "time_to_first_token")  # by the patience


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


def no_second_moment(model: Model) -> str:
    """Of lengths that have none."""
    return f"the lengths have no second moment (tail index {model.tail_index:g}, at most 2)"


def tail_notes(model: Model) -> tuple[str, ...]:
    """What a tail of the lengths does to simulated means."""
    if model.tail_index <= 2:
        which = "no means of durations" if model.patience is None else "no mean of the sojourn time"
        return (
            f"{which}: {no_second_moment(model)}, so that a simulated mean does not settle, "
            "however long the run",
        )
    if model.tail_index <= 3:
        return (
            "simulated means settle slowly: the delays have no variance (tail index "
            f"{model.tail_index:g}, at most 3)",
        )
    return ()


def without_unsettled(simulated: Prediction, model: Model) -> Prediction:
    """Quantiles only, of the durations whose mean does not settle."""
    if model.tail_index > 2:
        return simulated
    bare = simulated.without_means(
        "sojourn_time", *(() if model.patience is not None else _BOUNDED)
    )
    if not simulated.stations:
        return bare
    *before, decode = simulated.stations
    delay = dataclasses.replace(decode.queueing_delay, mean=None, standard_error=None)
    return dataclasses.replace(
        bare, stations=(*before, dataclasses.replace(decode, queueing_delay=delay))
    )
