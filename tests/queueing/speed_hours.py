"""Batches of a machine whose speed wanders, for an hour of epochs."""

from __future__ import annotations

import math

import numpy as np

from kendall.queueing.estimation.speed.batch_times import BatchTimes
from kendall.queueing.estimation.speed.speed_history import SpeedHistory
from kendall.queueing.estimation.speed.speeds import Speeds
from kendall.queueing.estimation.summaries import SpeedDrift

SIGMA, TAU, PACE = 0.08, 12.0, 0.1  # s of a batch


def batches(
    seed: int, seconds: float, sigma: float, start: float = 0.0, level: float = 1.0
) -> BatchTimes:
    """Log speed an Ornstein-Uhlenbeck process, a gamma residual of cv 0.1 on top."""
    rng, count = np.random.default_rng(seed), round(seconds / PACE)
    decay, walk = math.exp(-PACE / TAU), np.empty(count)
    walk[0] = rng.normal()
    for i in range(1, count):
        walk[i] = decay * walk[i - 1] + math.sqrt(1 - decay**2) * rng.normal()
    ratio = level * np.exp(sigma * walk) * rng.gamma(100, 0.01, count)
    fitted, ones = rng.uniform(0.08, 0.12, count), np.ones(count)
    return BatchTimes(
        start + PACE * np.arange(count), ratio * fitted, fitted, ones, ones, 0.5 * ones
    )


def cells(
    number: int, seconds: float, sigma: float, seed: int = 1
) -> tuple[SpeedHistory, SpeedDrift]:
    """Epochs of that length, each with a mean speed of its own."""
    history, found = SpeedHistory(), None
    for epoch in range(number):
        times = batches(
            1000 * seed + epoch,
            seconds,
            sigma,
            start=epoch * (seconds + 10.0),
            level=1 + 0.2 * (epoch % 2),
        )
        found = history.add(Speeds(times), epoch)
    assert found is not None
    return history, found
