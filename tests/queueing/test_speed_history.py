"""The wander of the speed from an hour: found where no window shows it, by stretches that each
have their own mean speed.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kendall.queueing.estimation.speed.batch_times import BatchTimes
from kendall.queueing.estimation.speed.drift import SIGMAS, block_speeds, most_likely, wander
from kendall.queueing.estimation.speed.speed_change import speed_change
from kendall.queueing.estimation.speed.speed_history import STRETCH, SpeedHistory
from kendall.queueing.estimation.speed.speeds import Speeds
from tests.queueing.speed_hours import PACE, SIGMA, TAU, batches, cells


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


@pytest.mark.parametrize(("start", "known"), [(3700.0, True), (3900.0, False)])
def test_an_hour_is_remembered(start: float, known: bool) -> None:
    """The wander of the first four minutes."""
    history = SpeedHistory()
    history.add(Speeds(batches(1, STRETCH + 1, 0.2)), 0)
    found = history.add(Speeds(batches(3, 100.0, 0.0, start=start)), 1)
    assert found is not None
    assert found.significant == known


def test_too_little_says_nothing() -> None:
    assert SpeedHistory().add(Speeds(batches(1, 0.5, SIGMA)), 0) is None


@pytest.mark.parametrize("start", [0.0, 5000.0])
def test_a_stretch_ends_after_four_minutes_wherever_the_clock_stands(start: float) -> None:
    history, whole = SpeedHistory(), batches(1, 600.0, 0.0, start=start)
    for end in range(20, 601, 20):
        history.add(
            Speeds(whole.part((whole.at <= start + end) & (whole.at > start + end - 60))), 0
        )
    ends = [each.end - start for each in history.over]
    assert ends == pytest.approx([250.0, 510.0], abs=21.0)
    assert [each.count for each in history.over] == pytest.approx([2500, 2600], abs=210)


def test_the_wander_of_a_stretch_is_known_before_the_stretch_is_over() -> None:
    assert SpeedHistory().add(Speeds(batches(1, 200.0, SIGMA)), 0) is not None
    history = SpeedHistory()
    over = history.add(Speeds(batches(1, STRETCH + 5, SIGMA)), 0)
    assert over is not None
    assert (len(history.over), history.open) == (1, [])
    assert over.sigma.effective_n == pytest.approx(max(2.0, STRETCH / (2 * over.tau)))


def test_scatter_of_stretches_is_weighed_by_their_batches() -> None:
    """What is not slow: of many batches of one cv and of a few of another."""
    history = SpeedHistory()
    for epoch, (seconds, cv) in enumerate(((200.0, 0.1), (50.0, 0.4))):
        rng, count = np.random.default_rng(epoch), round(seconds / PACE)
        fitted, ones = np.full(count, 0.1), np.ones(count)
        ratio = np.exp(cv * rng.normal(size=count))
        found = history.add(
            Speeds(
                BatchTimes(
                    1000.0 * epoch + PACE * np.arange(count),
                    ratio * fitted,
                    fitted,
                    ones,
                    ones,
                    ones,
                )
            ),
            epoch,
        )
    assert found is not None
    assert found.fast_cv == pytest.approx(math.sqrt((4 * 0.1**2 + 0.4**2) / 5), rel=0.1)


def test_what_came_before_a_step_of_the_speed_is_dropped() -> None:
    history = SpeedHistory()
    before = batches(1, 100.0, 0.0)
    history.add(Speeds(before), 0)
    after = batches(2, 100.0, 0.0, start=100.0, level=2.0)
    both = BatchTimes(
        *(
            np.concatenate([getattr(part, name) for part in (before, after)])
            for name in BatchTimes.__dataclass_fields__
        )
    )
    history.add(Speeds(both), 0)
    assert min(part.at[0] for part in history.open if part.count) == pytest.approx(100.0, abs=5.0)


def times_of(ratio: np.ndarray) -> BatchTimes:
    ones = np.ones(ratio.size)
    return BatchTimes(np.arange(ratio.size) * 1.0, ratio, ones, ones, ones, ones)


def test_the_likeliest_process_of_a_table_with_its_profile() -> None:
    """Likelihoods that fall by one a place of sigma from the tenth of the third row; an interval
    of what is less than 1.92 below.
    """
    taus = np.array([1.0, 10.0, 100.0, 1000.0])
    table = -np.abs(np.arange(SIGMAS.size) - 10)[None, :] - np.array([5.0, 3.0, 0.0, 4.0])[:, None]
    found = most_likely(table, taus, span=5000.0, fast_cv=0.2)
    assert (found.sigma.value, found.tau, found.fast_cv) == (SIGMAS[10], 100.0, 0.2)
    assert (found.sigma.low, found.sigma.high) == (SIGMAS[8], SIGMAS[12]), (
        "one place of the grid beyond the profile"
    )
    assert found.sigma.effective_n == 5000.0 / 200.0
    assert most_likely(table, taus, span=100.0, fast_cv=0.2).sigma.effective_n == 2.0


@pytest.mark.parametrize(("below", "significant"), [(6.4, False), (6.6, True)])
def test_a_wander_is_significant_where_none_is_less_likely_by_six_and_a_half(
    below: float, significant: bool
) -> None:
    table = np.zeros((2, SIGMAS.size))
    table[:, 0] = -below
    assert (
        most_likely(table, np.array([1.0, 2.0]), span=100.0, fast_cv=0.1).significant == significant
    )


@pytest.mark.parametrize(("drop", "places"), [(1.9, 1), (1.94, 0)])
def test_the_interval_of_the_wander_holds_what_is_less_likely_by_up_to_1_92(
    drop: float, places: int
) -> None:
    table = np.full((1, SIGMAS.size), -50.0)
    table[0, 9:12] = -drop, 0.0, -drop
    found = most_likely(table, np.array([1.0]), span=100.0, fast_cv=0.1)
    assert (found.sigma.low, found.sigma.high) == (SIGMAS[9 - places], SIGMAS[11 + places])


def test_the_ends_of_the_grid_bound_the_interval() -> None:
    table = np.zeros((1, SIGMAS.size))
    found = most_likely(table, np.array([1.0]), span=100.0, fast_cv=0.1)
    assert (found.sigma.low, found.sigma.high) == (0.0, SIGMAS[-1])


@pytest.mark.parametrize(("count", "known"), [(31, False), (32, True)])
def test_the_wander_is_judged_of_eight_blocks_of_four_batches(count: int, known: bool) -> None:
    ratio = np.exp(0.1 * np.random.default_rng(1).normal(size=count))
    assert (block_speeds(times_of(ratio)) is not None) == known
    assert wander(times_of(ratio)).sigma.known == known


def test_blocks_are_equal_stretches_of_time_with_their_means_and_noise() -> None:
    """Forty batches in ten blocks; a pause of the length of two makes one empty."""
    rng = np.random.default_rng(2)
    ratio = np.exp(0.1 * rng.normal(size=40))
    times = times_of(ratio)
    blocks = block_speeds(times, 10)
    assert blocks is not None
    logs = np.log(ratio)
    fast = float(np.mean(np.diff(logs) ** 2)) / 2
    assert blocks.width == pytest.approx(3.9)
    assert blocks.at == pytest.approx(3.9 * (np.arange(10) + 0.5))
    members = [
        np.flatnonzero((times.at >= 3.9 * k - 1e-9) & (times.at < 3.9 * (k + 1) + (k == 9)))
        for k in range(10)
    ]
    assert blocks.level == pytest.approx([logs[each].mean() for each in members])
    assert blocks.noise == pytest.approx([fast / each.size for each in members])
    assert blocks.fast_cv == pytest.approx(math.sqrt(fast))
    gone = replace(times, at=np.where(times.at < 20, times.at, times.at + 20.0))
    paused = block_speeds(gone, 10)
    assert paused is not None
    assert paused.level.size < 10
    assert not np.isnan(paused.level).any()


def test_likelihoods_are_those_of_a_normal_sample_with_its_mean_integrated_out() -> None:
    """By determinants: the covariance of the module's head, REML; differences to sigma = 0, as
    constants are left out.
    """
    rng = np.random.default_rng(3)
    blocks = block_speeds(times_of(np.exp(0.1 * rng.normal(size=60))), 12)
    assert blocks is not None
    tau, found = 15.0, blocks.likelihoods(np.array([15.0]))[0]
    d, x = blocks.width, tau / blocks.width
    lost = 1 - math.exp(-d / tau)
    apart = np.abs(np.subtract.outer(blocks.at, blocks.at))
    shape = x**2 * lost**2 * np.exp(-(apart - d) / tau)
    np.fill_diagonal(shape, 2 * x * (1 - x * lost))

    def reml(sigma: float) -> float:
        covariance = sigma**2 * shape + np.diag(blocks.noise)
        inverse = np.linalg.inv(covariance)
        ones = np.ones(blocks.level.size)
        weight = ones @ inverse @ ones
        rest = blocks.level - (ones @ inverse @ blocks.level) / weight
        return float(
            -0.5 * (np.linalg.slogdet(covariance)[1] + rest @ inverse @ rest + math.log(weight))
        )

    for place in (1, 10, 20, 28):
        assert found[place] - found[0] == pytest.approx(
            reml(SIGMAS[place]) - reml(0.0), rel=1e-6, abs=1e-9
        )


@pytest.mark.parametrize(
    ("step", "found"), [(0.09, False), (0.11, True), (-0.09, False), (-0.11, True)]
)
def test_a_step_of_a_tenth_is_a_change(step: float, found: bool) -> None:
    rng = np.random.default_rng(4)
    ratio = np.exp(0.01 * rng.normal(size=480) + step * (np.arange(480) >= 240))
    change = speed_change(times_of(ratio))
    assert (change is not None) == found
    if change is not None:
        assert (change.at, change.ratio) == (
            pytest.approx(240, abs=21),
            pytest.approx(math.exp(step), rel=0.01),
        )


def test_a_staircase_is_no_step_and_a_step_with_a_little_else_is() -> None:
    """Two equal steps: the likelier one explains three quarters of the spread, and four fifths
    are asked for.
    """
    rng, at = np.random.default_rng(5), np.arange(480)
    noise = 0.01 * rng.normal(size=480)
    assert speed_change(times_of(np.exp(noise + 0.2 * (at >= 160) + 0.2 * (at >= 320)))) is None
    assert (
        speed_change(times_of(np.exp(noise + 0.2 * (at >= 160) + 0.02 * (at >= 320)))) is not None
    )


@pytest.mark.parametrize("window", [300.0, 1e9])
def test_slots_of_a_steady_engine_show_no_wander_however_often_they_are_looked_at(
    window: float,
) -> None:
    """64 slots at 10 requests/s, in a window that slides or grows: its groups begin elsewhere at
    each look, and none shares a slot with an earlier one.
    """
    rng, history, significant = np.random.default_rng(5), SpeedHistory(), 0
    count, ones = 6000, np.ones(6000)
    ratio, fitted = rng.gamma(25, 1 / 25, count), rng.uniform(5.0, 7.0, count)
    slots = BatchTimes(0.1 * np.arange(count), ratio * fitted, fitted, 64 * ones, ones, ones)
    for now in np.arange(50.0, 600.0, 5.0):
        seen = slots.part((slots.at <= now) & (slots.at > now - window))
        found = history.add(Speeds(seen.grouped(), (seen,)), 0)
        significant += found is not None and found.significant
    assert (
        sum(part.count for part in history.open) + sum(each.count for each in history.over)
        <= count // 256
    )
    assert significant == 0
