"""Intervals of means and quantiles against the formulas of their modules, computed another way."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from kendall.queueing.measurement.batch_means import (
    Interval,
    autoregression_inflation,
    batch_means,
    batch_means_interval,
    replications_interval,
    student,
    variance_of_mean,
)
from kendall.queueing.measurement.delay_variance import AsymptoticVariance
from kendall.queueing.measurement.mean_interval import (
    correlation_variance,
    mean_interval,
    plug_in,
    run_factor,
    widened,
    widest_interval,
)
from kendall.queueing.measurement.quantile_interval import (
    order_statistic,
    quantile_interval,
    quantile_intervals,
)

FloatArray = NDArray[np.float64]


def delays(n: int, seed: int = 1, load: float = 0.7) -> FloatArray:
    rng = np.random.default_rng(seed)
    walk = np.concatenate(
        [[0.0], np.cumsum(rng.exponential(load, n - 1) - rng.exponential(1.0, n - 1))]
    )
    found: FloatArray = walk - np.minimum.accumulate(walk)
    return found


def own_variance(values: FloatArray, parts: int) -> tuple[float, float]:
    """Of the mean by batches, with their correlation."""
    edges = [values.size * k // parts for k in range(parts + 1)]
    means = np.array([values[a:b].mean() for a, b in itertools.pairwise(edges)])
    centred = means - means.mean()
    correlation = (centred[:-1] * centred[1:]).sum() / (centred**2).sum()
    phi = min(max(correlation + 1 / parts, 0.0), 0.9)
    return means.var(ddof=1) / parts * (1 + phi) / (1 - phi), correlation


@pytest.mark.parametrize("n", [2000, 2013])
@pytest.mark.parametrize("load", [0.3, 0.9])
def test_the_interval_of_batch_means_is_that_of_a_first_order_autoregression(
    n: int, load: float
) -> None:
    values = delays(n, load=load)
    variance, correlation = own_variance(values, 20)
    found = batch_means_interval(values)
    assert (found.mean, found.n, found.correlation) == (
        pytest.approx(values.mean()),
        n,
        pytest.approx(correlation),
    )
    assert found.half_width == pytest.approx(stats.t.ppf(0.975, 19) * math.sqrt(variance))
    assert found.effective_n == pytest.approx(min(values.var(ddof=1) / variance, n))
    assert variance_of_mean(values, 20)[0] == pytest.approx(variance)
    assert batch_means_interval(values, 0.8).half_width == pytest.approx(
        stats.t.ppf(0.9, 19) * math.sqrt(variance)
    )
    few = own_variance(values, 8)[0]
    assert batch_means_interval(values, batches=8).half_width == pytest.approx(
        stats.t.ppf(0.975, 7) * math.sqrt(few)
    )


def test_independent_values_are_at_most_their_number() -> None:
    alternating = np.array([1.0, -1.0] * 100) + np.arange(200) * 1e-9
    assert batch_means_interval(alternating).effective_n == 200.0
    assert batch_means_interval(np.array([])).effective_n == 0.0
    assert batch_means_interval(np.array([5.0])).effective_n == 1.0


@pytest.mark.parametrize(
    ("correlation", "factor"),
    [
        (math.nan, 1.0),
        (-0.5, 1.0),
        (-0.05, 1.0),
        (0.0, 1.05 / 0.95),
        (0.45, 3.0),
        (0.85, 19.0),
        (0.99, 19.0),
    ],
)
def test_correlated_batches_tell_less(correlation: float, factor: float) -> None:
    assert autoregression_inflation(correlation, 20) == pytest.approx(factor)


def test_blocks_are_as_equal_as_they_can_be() -> None:
    assert batch_means(np.arange(10.0), 4).tolist() == [0.5, 3.0, 5.5, 8.0]
    assert batch_means(np.arange(3.0), 3).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("degrees", "exact"),
    [(1, 12.706), (19, 2.093), (999, 1.96234), (1000, 1.95996), (10**6, 1.95996)],
)
def test_students_quantile_is_the_normal_one_from_a_thousand_degrees_on(
    degrees: int, exact: float
) -> None:
    assert student(degrees, 0.95) == pytest.approx(exact, rel=2e-5)


@pytest.mark.parametrize(
    ("correlation", "correlated"), [(0.367, False), (0.369, True), (math.nan, False)]
)
def test_batches_are_correlated_beyond_one_sided_chance(
    correlation: float, correlated: bool
) -> None:
    assert Interval(1.0, 0.1, 100, 50.0, correlation).correlated == correlated


def test_the_parts_of_an_interval() -> None:
    found = Interval(-2.0, 0.5, 1000, 250.0, 0.0)
    assert (found.low, found.high, found.relative, found.memory) == (-2.5, -1.5, 0.25, 4.0)
    assert [found.covers(value) for value in (-2.51, -2.5, -1.5, -1.49)] == [
        False,
        True,
        True,
        False,
    ]
    assert not found.too_short
    assert Interval(1.0, 0.25, 1000, 100.0, 0.0).too_short is False
    assert Interval(0.0, 0.5, 9, 0.0, 0.0).relative == math.inf
    assert Interval(0.0, 0.5, 9, 0.0, 0.0).memory == math.inf


def test_replications_weigh_alike_and_tell_as_much_as_their_scatter_says() -> None:
    runs = [
        np.array([1.0, 3.0, 2.0]),
        np.array([]),
        np.array([4.0, 6.0]),
        np.array([2.0, 2.5, 3.0, 0.5]),
    ]
    means, every = np.array([2.0, 5.0, 2.0]), np.concatenate(runs)
    found = replications_interval(runs, 0.9)
    error = means.std(ddof=1) / math.sqrt(3)
    assert (found.mean, found.n, found.correlation) == (3.0, 9, 0.0)
    assert found.half_width == pytest.approx(stats.t.ppf(0.95, 2) * error)
    assert found.effective_n == pytest.approx(every.var(ddof=1) / error**2)
    same = replications_interval([np.array([1.0, 3.0]), np.array([2.0, 2.0])])
    assert (same.half_width, same.effective_n) == (0.0, 4.0)
    near = replications_interval([np.array([1.0, 3.0]), np.array([2.0, 2.0 + 1e-9])])
    assert near.effective_n == 4.0


def own_memory_variance(values: FloatArray) -> float:
    """By the largest distance 1, 2, 4, .. (below a quarter of the run) over which delays
    correlate by a half.
    """
    centred, memory, distance = values - values.mean(), 0.0, 1
    while 4 * distance < values.size:
        c = (centred[distance:] * centred[:-distance]).mean() / centred.var()
        if c < 0.5:
            break
        memory, distance = distance * (4 - 3 * math.sqrt(1 - c)) / (1 - c), 2 * distance
    return float(memory * centred.var() / values.size)


@pytest.mark.parametrize("load", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("n", [33, 500, 4000])
def test_the_widest_interval_is_that_of_all_scales(n: int, load: float) -> None:
    values = delays(n, 3, load) if load else np.random.default_rng(3).exponential(1.0, n)
    local = own_memory_variance(values)
    assert correlation_variance(values) == pytest.approx(local)
    widths, variances, parts = [stats.norm.ppf(0.975) * math.sqrt(local)], [local], min(20, n)
    while parts <= n:
        variance, correlation = own_variance(values, parts)
        if parts == 20 or correlation <= 0.6:
            degrees = parts - 1
            widths.append(
                (stats.t.ppf(0.975, degrees) if degrees < 1000 else stats.norm.ppf(0.975))
                * math.sqrt(variance)
            )
            variances.append(variance)
        parts *= 2
    found = widest_interval(values)
    assert found.half_width == pytest.approx(max(widths))
    assert found.effective_n == pytest.approx(min(values.var(ddof=1) / max(variances), n))
    assert found.mean == pytest.approx(values.mean())
    printed = mean_interval(values)
    assert printed.half_width == pytest.approx(widened(max(widths) / values.mean()) * values.mean())
    assert printed.effective_n == found.effective_n


def test_a_linear_trend_remembers_up_to_a_quarter_of_the_run() -> None:
    values = np.arange(64.0)
    assert correlation_variance(values) == pytest.approx(own_memory_variance(values))
    assert own_memory_variance(values) > 0
    assert correlation_variance(np.ones(50)) == 0.0


@pytest.mark.parametrize(("n", "distance"), [(28, 4), (36, 4), (44, 8)])
def test_a_step_is_remembered_over_a_fifth_of_the_run(n: int, distance: int) -> None:
    """Of the n - d pairs at a distance of d, d lie on either side of it."""
    correlation = (n - 3 * distance) / (n - distance)
    memory = distance * (4 - 3 * math.sqrt(1 - correlation)) / (1 - correlation)
    values = np.repeat([-1.0, 1.0], n // 2)
    assert correlation_variance(values) == pytest.approx(memory / n)


@pytest.mark.parametrize("relative", [0.01, 0.1, 0.2, 0.2173])
def test_a_lucky_mean_iswidened_to_what_it_does_not_exclude(relative: float) -> None:
    """w = mean (1 + u) is where w - mean = 1.15 r w^2 / mean."""
    u = widened(relative)
    assert u == pytest.approx(1.15 * relative * (1 + u) ** 2)
    assert plug_in(u) == pytest.approx(relative)


def test_beyond_a_quarter_the_width_goes_on_in_proportion() -> None:
    assert widened(0.25 / 1.15) == pytest.approx(1.0)
    assert widened(1.0) == pytest.approx(4.6)
    assert plug_in(4.6) == pytest.approx(1.0)
    assert plug_in(1.0) == pytest.approx(0.25 / 1.15)
    assert widened(1e-7) == pytest.approx(1.15e-7)
    assert widened(0.0) == 0.0


@pytest.mark.parametrize(
    ("relative", "effective_n", "factor"),
    [(0.1, 200.0, 1.0), (0.25, 100.0, 1.0), (0.25, 50.0, 2.0), (0.25, 1e9, 1.0)],
)
def test_a_run_is_long_enough_by_its_width_and_by_its_memories(
    relative: float, effective_n: float, factor: float
) -> None:
    assert run_factor(relative, effective_n) == pytest.approx(factor)


def test_a_run_of_twice_the_width_needs_more_than_four_times_as_long() -> None:
    behind = [relative / (1 + relative) ** 2 for relative in (0.5, 0.25)]
    assert run_factor(0.5, 1e9) == pytest.approx((behind[0] / behind[1]) ** 2)
    assert run_factor(2.0, 1e9) == pytest.approx((0.5 / behind[1]) ** 2)


def test_theory_gives_the_width_unless_batch_means_are_wider() -> None:
    values = np.random.default_rng(7).exponential(1.0, 400)
    plain = batch_means_interval(values)
    for variance, memory in ((9.0, 30.0), (1e-6, 2.0)):
        r = stats.norm.ppf(0.975) * math.sqrt(variance / 400)
        found = mean_interval(values, theory=AsymptoticVariance(variance, memory))
        assert found.half_width == pytest.approx(
            max(plain.half_width, 1.2 * r * (1 + r) * plain.mean)
        )
        assert found.effective_n == pytest.approx(min(plain.effective_n, 400 / memory))
    assert mean_interval(-values, theory=AsymptoticVariance(9.0, 30.0)) == batch_means_interval(
        -values
    )
    assert mean_interval(np.zeros(50)) == batch_means_interval(np.zeros(50))
    touching = np.append(values, -1e-9)
    assert mean_interval(touching) == batch_means_interval(touching)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_a_quantiles_ends_are_the_order_statistics_at_the_ends_of_its_share(level: float) -> None:
    values = np.random.default_rng(8).random(20_000)
    found = quantile_interval(values, level)
    assert found is not None
    ordered = np.sort(values)
    above = widest_interval((values > ordered[math.ceil(level * 20_000) - 1]).astype(float))
    half = 1.2 * above.half_width
    assert found.low == ordered[math.ceil((level - half) * 20_000) - 1]
    assert found.high == ordered[math.ceil((level + half) * 20_000) - 1]
    assert found.value == np.quantile(values, level)
    assert quantile_intervals(values, [level])[level] == found
    assert [
        found.covers(value)
        for value in (found.low - 1e-9, found.low, found.high, found.high + 1e-9)
    ] == [False, True, True, False]


def test_the_inverse_of_an_empirical_distribution() -> None:
    ordered = np.array([1.0, 2.0, 3.0, 4.0])
    assert [
        order_statistic(ordered, level) for level in (0.0, 0.25, 0.26, 0.5, 0.75, 0.76, 1.0, 1.2)
    ] == [
        1.0,
        1.0,
        2.0,
        2.0,
        3.0,
        4.0,
        4.0,
        4.0,
    ]


@pytest.mark.parametrize(
    ("n", "level", "given"),
    [(300, 0.5, True), (300, 0.99, False), (1500, 0.01, False), (1, 0.5, False), (60, 0.9, False)],
)
def test_a_quantile_has_an_interval_where_twenty_values_lie_beyond_it(
    n: int, level: float, given: bool
) -> None:
    """Of independent values, on the rarer side."""
    assert (quantile_interval(np.random.default_rng(9).random(n), level) is not None) == given
