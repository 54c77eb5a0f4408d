"""Intervals cover the truth although waits are autocorrelated."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from queueing.statistics import lag_correlation, mean_interval, summarise, warm_up


def mm1_waits(utilisation: float, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Lindley's recursion with service rate 1 / utilisation and arrival rate 1, from an empty system."""
    steps = rng.exponential(utilisation, n - 1) - rng.exponential(1.0, n - 1)
    walk = np.concatenate([[0.0], np.cumsum(steps)])
    waits: NDArray[np.float64] = walk - np.minimum.accumulate(walk)
    return waits


@pytest.mark.parametrize(("utilisation", "n"), [(0.5, 4000), (0.7, 15_000)])
def test_the_interval_covers_the_mean_wait_of_an_mm1_queue(utilisation: float, n: int) -> None:
    exact = utilisation**2 / (1 - utilisation)
    covered = correlated = 0
    for seed in range(200):
        waits = mm1_waits(utilisation, n, np.random.default_rng(seed))
        interval = mean_interval(waits[warm_up(n) :])
        covered += interval.covers(exact)
        correlated += interval.correlated
        assert interval.relative < 0.5  # an interval that covers everything says nothing
    assert covered >= 176
    assert correlated < 40


def test_an_interval_that_takes_waits_as_independent_misses() -> None:
    """The check above can fail: the textbook interval does not pass it."""
    covered = 0
    for seed in range(200):
        waits = mm1_waits(0.7, 15_000, np.random.default_rng(seed))[750:]
        covered += abs(waits.mean() - 0.49 / 0.3) < 1.96 * waits.std() / np.sqrt(waits.size)
    assert covered < 100


def test_the_effective_sample_of_independent_values_is_their_number_and_of_waits_far_less() -> None:
    rng = np.random.default_rng(0)
    sizes = [mean_interval(rng.exponential(1.0, 5000)).effective_n for _ in range(100)]
    assert np.median(sizes) == pytest.approx(5000, rel=0.25)
    assert mean_interval(mm1_waits(0.7, 15_000, rng)).effective_n < 1500


def test_a_run_too_short_for_its_memory_is_marked() -> None:
    waits = mm1_waits(0.95, 2000, np.random.default_rng(3))
    assert mean_interval(waits).correlated


def test_the_interval_of_batches_of_one_is_students() -> None:
    values = np.random.default_rng(1).normal(3.0, 1.0, 20)
    expected = stats.t.interval(0.9, 19, values.mean(), values.std(ddof=1) / np.sqrt(20))
    interval = mean_interval(values, confidence=0.9)
    assert (interval.low, interval.high) == pytest.approx(expected)


def test_too_few_values_give_an_infinite_interval() -> None:
    assert mean_interval(np.array([])).n == 0
    assert np.isnan(mean_interval(np.array([])).mean)
    one = mean_interval(np.array([2.0]))
    assert (one.mean, one.half_width) == (2.0, np.inf)
    assert mean_interval(np.array([1.0, 3.0])).half_width > 2


def test_values_that_do_not_vary_have_no_width() -> None:
    interval = mean_interval(np.full(190, 0.02))
    assert (interval.mean, interval.effective_n) == (pytest.approx(0.02), 190.0)
    assert interval.half_width == 0.0
    assert not interval.correlated


def test_lag_correlation_of_alternating_values_is_minus_one() -> None:
    assert lag_correlation(np.array([1.0, -1.0] * 50)) == pytest.approx(-0.99)


def test_warm_up_is_a_share_stated_beforehand() -> None:
    assert [warm_up(n) for n in (0, 1, 100, 1019)] == [0, 0, 5, 50]


def test_a_summary_of_nothing_is_not_a_number() -> None:
    assert np.isnan(summarise(np.array([])).mean)
    summary = summarise(np.arange(101.0))
    assert (summary.mean, summary.p50, summary.p99, summary.max, summary.n) == (50.0, 50.0, 99.0, 100.0, 101)
