"""The wander of the speed from an hour: found where no window shows it, by stretches that each have their own mean speed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from queueing.estimation.batch_times import BatchTimes
from queueing.estimation.speed_history import STRETCH, SpeedHistory
from queueing.estimation.speeds import Speeds
from queueing.estimation.wander import Wander, wander

SIGMA, TAU, PACE = 0.08, 12.0, 0.1  # s of a batch


def batches(seed: int, seconds: float, sigma: float, start: float = 0.0, level: float = 1.0) -> BatchTimes:
    """Log speed an Ornstein-Uhlenbeck process, a gamma residual of cv 0.1 on top."""
    rng, count = np.random.default_rng(seed), round(seconds / PACE)
    decay, walk = math.exp(-PACE / TAU), np.empty(count)
    walk[0] = rng.normal()
    for i in range(1, count):
        walk[i] = decay * walk[i - 1] + math.sqrt(1 - decay**2) * rng.normal()
    ratio = level * np.exp(sigma * walk) * rng.gamma(100, 0.01, count)
    fitted, ones = rng.uniform(0.08, 0.12, count), np.ones(count)
    return BatchTimes(start + PACE * np.arange(count), ratio * fitted, fitted, ones, ones, 0.5 * ones)


def cells(number: int, seconds: float, sigma: float, seed: int = 1) -> tuple[SpeedHistory, Wander]:
    """Epochs of that length, each with a mean speed of its own."""
    history, found = SpeedHistory(), None
    for epoch in range(number):
        times = batches(1000 * seed + epoch, seconds, sigma, start=epoch * (seconds + 10.0), level=1 + 0.2 * (epoch % 2))
        found = history.add(Speeds(times), epoch)
    assert found is not None
    return history, found


def test_the_hour_knows_size_and_time_where_a_window_does_not() -> None:
    hours = [cells(30, 60.0, SIGMA, seed)[1] for seed in range(5)]
    windows = [wander(batches(seed, 60.0, SIGMA)) for seed in range(40)]
    assert all(each.significant for each in hours)
    assert all(each.sigma.value == pytest.approx(SIGMA, rel=0.2) for each in hours)
    assert all(each.sigma.covers(SIGMA) for each in hours)
    assert all(TAU / 2 < each.tau < 2 * TAU for each in hours)
    scatter = float(np.std([each.sigma.value for each in windows]))
    assert float(np.std([each.sigma.value for each in hours])) < scatter / 3, "or a window would do"


def test_a_policy_that_the_law_fits_less_well_is_no_wander() -> None:
    """The mean speed of every other epoch is 20 % apart."""
    assert sum(cells(20, 40.0, 0.0, seed)[1].significant for seed in range(5)) == 0


def test_overlapping_windows_count_a_batch_once() -> None:
    whole, times = SpeedHistory(), batches(1, 200.0, SIGMA)
    overlapping = SpeedHistory()
    one = whole.add(Speeds(times), 0)
    for end in range(20, 201, 20):
        window = times.part((times.at <= end) & (times.at > end - 60))
        other = overlapping.add(Speeds(window), 0)
    assert one is not None
    assert other is not None
    assert (other.sigma, other.tau) == (one.sigma, one.tau)


def test_what_is_older_than_the_hour_is_forgotten() -> None:
    history = SpeedHistory(seconds=600.0)
    history.add(Speeds(batches(1, STRETCH + 1, 0.2)), 0)
    assert history.add(Speeds(batches(2, 100.0, 0.0, start=300.0)), 1).significant  # type: ignore[union-attr]
    found = history.add(Speeds(batches(3, 100.0, 0.0, start=2000.0)), 2)
    assert found is not None
    assert not found.significant


def test_too_little_says_nothing() -> None:
    assert SpeedHistory().add(Speeds(batches(1, 0.5, SIGMA)), 0) is None
