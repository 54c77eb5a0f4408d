"""How fast the machine was in a run, against the law: one factor and the scatter around it.

    speed = sum of measured service times / sum of the law's, for the same batches with their actual
    lengths
    cv    = sqrt(sum (measured - speed fitted)^2 / sum (speed fitted)^2),   over batches

The shape k1..k4 is never fitted here: slow periods grow batches, so a run's own batches give
nonsense constants.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.batch_means import FloatArray, batch_means_interval


@dataclass(frozen=True, slots=True)
class Speed:
    """Factor on every duration (> 1: slower than the law) and the residual's coefficient of
    variation.
    """

    factor: float
    cv: float
    n: int  # batches (continuous: requests) it was taken from
    half_width: float = math.inf  # of the factor, relative (95 %)

    def law(self, law: LatencyModel) -> LatencyModel:
        """The law as the run had it."""
        return dataclasses.replace(law, speed=self.factor, cv=self.cv)


def residual_cv(measured: FloatArray, fitted: FloatArray) -> float:
    """Of a batch's residual, such that the law has the squares of these times: a hiccup on a short
    batch weighs as many seconds as it took.

    Both in seconds, of about the same sum; 0 for a single batch, which shows no scatter.
    """
    if measured.size < 2:
        return 0.0
    return math.sqrt(
        float(np.sum((measured - fitted) ** 2))
        / float(np.sum(fitted**2))
        * measured.size
        / (measured.size - 1)
    )


def measured_speed(measured: FloatArray, fitted: FloatArray) -> Speed | None:
    """From measured service times and the law's, seconds; None where there are none."""
    if not measured.size:
        return None
    factor = float(measured.sum() / fitted.sum())
    lawful = factor * fitted
    half_width = batch_means_interval(measured - lawful).half_width / float(lawful.mean())
    return Speed(factor, residual_cv(measured, lawful), measured.size, half_width)
