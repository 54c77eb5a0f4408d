"""The arrival rate's interval covers the truth, and a change of rate is found when there is one,
not when there is none.
"""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from scipy import stats

from kendall.queueing.estimation.arrivals import arrival_rate, dispersion, inflation
from kendall.queueing.estimation.assumptions.assumption import factor
from kendall.queueing.estimation.change import Change, burstiness, changes, local_variation
from tests.queueing.estimation_runs import gamma, modulated, poisson
from tests.queueing.estimation_windows import arrival_assumptions

RUNS = 200


@pytest.mark.parametrize("half_life", [math.inf, 60.0])
def test_the_interval_of_the_rate_covers_the_truth_of_poisson_arrivals(half_life: float) -> None:
    found = [
        arrival_rate(instants, 0.0, 200.0, half_life=half_life)
        for instants in _fixed_time(7.0, 200.0)
    ]
    assert sum(estimate.covers(7.0) for estimate in found) >= 0.88 * RUNS
    assert np.mean([estimate.relative for estimate in found]) < (
        0.07 if math.isinf(half_life) else 0.13
    )


def test_the_interval_of_a_few_arrivals_covers_too() -> None:
    found = [arrival_rate(instants, 0.0, 2.0) for instants in _fixed_time(3.0, 2.0)]
    assert sum(estimate.covers(3.0) for estimate in found) >= 0.88 * RUNS


def test_the_interval_widens_by_the_dispersion_of_bursty_arrivals() -> None:
    """Gamma gaps of shape 0.3: the count's variance is 3.3 times Poisson's; the plain interval
    misses.
    """
    bursty = [gamma(7.0, 1500, seed, 0.3) for seed in range(RUNS)]
    found = [arrival_rate(instants, 0.0, float(instants[-1])) for instants in bursty]
    assert sum(estimate.covers(7.0) for estimate in found) >= 0.88 * RUNS
    plain = [
        abs(instants.size / instants[-1] - 7.0) < 1.96 * 7.0 / math.sqrt(instants.size)
        for instants in bursty
    ]
    assert sum(plain) < 0.8 * RUNS
    assert np.mean(
        [dispersion(instants, 0.0, float(instants[-1])).value for instants in bursty]
    ) == pytest.approx(1 / 0.3, rel=0.1)


@pytest.mark.parametrize("count", [1, 10, 400])
def test_the_interval_of_evenly_spread_arrivals_is_the_exact_one_of_a_poisson_count(
    count: int,
) -> None:
    """Garwood's: no narrower because the arrivals are regular."""
    found = arrival_rate((np.arange(count) + 0.5) * 20.0 / count, 0.0, 20.0)
    assert (found.value, found.effective_n) == (pytest.approx(count / 20), pytest.approx(count))
    assert found.low == pytest.approx(stats.chi2.ppf(0.025, 2 * count) / 2 / 20)
    assert found.high == pytest.approx(stats.chi2.ppf(0.975, 2 * count + 2) / 2 / 20)


def test_arrivals_outside_the_window_do_not_count() -> None:
    instants = np.array([0.0, 1.0, 2.0, 10.0, 10.5])
    assert arrival_rate(instants, 0.0, 10.0).value == pytest.approx(0.3)
    assert arrival_rate(instants, 1.0, 11.0).value == pytest.approx(0.3)


def test_the_dispersion_of_counts_has_the_interval_of_a_chi_square() -> None:
    """Twenty parts with 4 and 8 arrivals in turn: variance 80 / 19, mean 6."""
    instants = np.concatenate(
        [part + (np.arange(count) + 0.5) / count for part, count in enumerate([4, 8] * 10)]
    )
    found = dispersion(instants, 0.0, 20.0)
    assert (found.value, found.effective_n) == (pytest.approx(80 / 19 / 6), 19.0)
    assert found.low == pytest.approx(found.value * 19 / stats.chi2.ppf(0.975, 19))
    assert found.high == pytest.approx(found.value * 19 / stats.chi2.ppf(0.025, 19))
    assert not dispersion(instants[:9], 0.0, 20.0).known, "ten arrivals make two parts"
    assert dispersion(instants[:10], 0.0, 20.0).effective_n == 1.0


def test_a_window_without_arrivals_bounds_the_rate() -> None:
    nothing = arrival_rate(np.empty(0), 0.0, 10.0)
    assert (nothing.value, nothing.low) == (0.0, 0.0)
    assert nothing.high == pytest.approx(0.3689, rel=1e-3)  # -ln(0.025) / 10
    assert math.isnan(arrival_rate(np.empty(0), 5.0, 5.0).value)


def test_old_arrivals_count_less() -> None:
    """A rate that doubled a minute ago: the plain mean lies between, the weighted one near the
    new rate.
    """
    instants = np.concatenate([np.arange(0.05, 100.0, 0.1), np.arange(100.0, 160.0, 0.05)])
    assert arrival_rate(instants, 0.0, 160.0).value == pytest.approx(13.75, rel=0.01)
    assert arrival_rate(instants, 0.0, 160.0, half_life=15.0).value == pytest.approx(19.4, rel=0.02)


def test_false_alarms_of_a_constant_rate_are_as_rare_as_stated() -> None:
    """M = 2000 arrivals between two, at least: 10^6 arrivals may alarm 500 times."""
    rng = np.random.default_rng(4)
    alarms = sum(
        len(changes(np.cumsum(rng.exponential(1.0, 50_000)), between_false_alarms=2000.0))
        for _ in range(20)
    )
    assert 0 < alarms <= 500


def test_bursts_at_a_constant_rate_are_no_change() -> None:
    assert sum(len(changes(gamma(5.0, 2000, seed, 0.3))) for seed in range(50)) <= 2
    assert burstiness(np.diff(gamma(5.0, 2000, 0, 0.3))) == pytest.approx(1 / 0.3, rel=0.25)


@pytest.mark.parametrize("ratio", [0.5, 1.5, 2.0, 4.0])
def test_a_change_of_rate_is_found_soon_and_dated(ratio: float) -> None:
    found = [_one_change(ratio, seed) for seed in range(100)]
    hits = [change for change in found if change is not None]
    assert len(hits) >= 98
    late = [change.detected_at - 1000.0 for change in hits]
    assert np.median(late) * max(ratio, 1.0) < 300  # arrivals after the change
    assert abs(np.median([change.at for change in hits]) - 1000.0) < 30
    assert np.median([change.ratio for change in hits]) == pytest.approx(ratio, rel=0.35)


def test_a_change_shows_whatever_the_unit_of_time() -> None:
    instants = np.concatenate(
        [poisson(1.0, 1000, 3), poisson(1.0, 1000, 3)[-1] + poisson(2.0, 1000, 4)]
    )
    plain, scaled = changes(instants), changes(instants * 1e-3)
    assert [change.at * 1e-3 for change in plain] == pytest.approx([change.at for change in scaled])
    assert len(plain) == 1


def test_modulated_arrivals_change_often() -> None:
    assert (
        np.mean(
            [len(changes(modulated((2.0, 18.0), (20.0, 20.0), 3000, seed))) for seed in range(20)]
        )
        > 3
    )


def test_the_variation_of_gaps_is_judged_by_neighbours() -> None:
    """A change of rate in the middle does not raise it, as it does the plain one."""
    rng = np.random.default_rng(1)
    gaps = np.concatenate([rng.exponential(1.0, 20_000), rng.exponential(0.1, 20_000)])
    assert local_variation(gaps).scv == pytest.approx(1.0, abs=0.05)
    assert gaps.var() / gaps.mean() ** 2 > 2


def test_too_few_arrivals_say_nothing_of_a_change() -> None:
    assert list(changes(np.array([1.0, 2.0]))) == []
    assert list(changes(np.empty(0))) == []


def _fixed_time(rate: float, length: float) -> list[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    found = []
    for seed in range(RUNS):
        instants = poisson(rate, int(rate * length * 2 + 50), seed)
        found.append(instants[instants <= length])
    return found


def _one_change(ratio: float, seed: int) -> Change | None:
    rng = np.random.default_rng(seed)
    before = np.cumsum(rng.exponential(1.0, 4000))
    after = 1000.0 + np.cumsum(rng.exponential(1 / ratio, 1500))
    found = changes(np.concatenate([before[before < 1000.0], after]))
    return found[0] if found else None


@pytest.mark.parametrize(("rates", "word"), [((0.05, 52.0), "rose"), ((52.0, 0.05), "fell")])
def test_the_size_of_a_change_of_rate_is_said_in_three_digits(
    rates: tuple[float, float], word: str
) -> None:
    rng = np.random.default_rng(1)
    instants = np.cumsum(np.concatenate([rng.exponential(1 / rate, 300) for rate in rates]))
    said = arrival_assumptions(instants)[0].says
    assert re.match(rf"the arrival rate {word} by a factor of (\d{{3}}|1,\d\d0), ", said), said


def test_factors() -> None:
    found = [
        factor(ratio)
        for ratio in (1.9684, 1 / 1.9684, 2.0, 465.53, 999.4, 999.6, 1045.62, 1 / 1045.62, 2.3456e6)
    ]
    assert found == ["1.97", "1.97", "2", "466", "999", "1,000", "1,050", "1,050", "2,350,000"]


def test_what_nothing_can_say_of_a_rate_or_a_dispersion_is_open() -> None:
    none, few = arrival_rate(np.empty(0), 5.0, 5.0), dispersion(np.arange(4.0), 0.0, 20.0)
    for found in (none, few):
        assert (found.low, found.high, found.effective_n) == (-math.inf, math.inf, 0.0)
    assert arrival_rate(np.empty(0), 0.0, 10.0).effective_n == 0.0
    assert inflation(np.arange(4.0), 0.0, 20.0) == 1.0
    assert arrival_rate(np.array([0.1, 0.2, 0.4]), 0.0, 0.5).value == pytest.approx(6.0), (
        "a window of half a second"
    )


def test_the_count_of_bursty_arrivals_is_divided_by_their_dispersion_as_twenty_parts_tell_it() -> (
    None
):
    """Parts with 2 and 10 arrivals in turn: variance 320 / 19, mean 6."""
    instants = np.concatenate(
        [part + (np.arange(count) + 0.5) / count for part, count in enumerate([2, 10] * 10)]
    )
    excess = 320 / 19 / 6 * (stats.t.ppf(0.975, 19) / stats.norm.ppf(0.975)) ** 2
    assert inflation(instants, 0.0, 20.0) == pytest.approx(excess)
    found = arrival_rate(instants, 0.0, 20.0)
    assert found.effective_n == pytest.approx(120 / excess)
    assert found.high == pytest.approx(
        6 * stats.chi2.ppf(0.975, 2 * 120 / excess + 2) / (2 * 120 / excess)
    )


def test_weights_fall_by_half_every_half_life() -> None:
    """Arrivals of 0, 10 and 20 s ago, a half life of 10 s: 1.75 over the integral, and (1.75)^2
    / (1 + 1/4 + 1/16) as good as.
    """
    found = arrival_rate(np.array([10.0, 20.0, 30.0]), 0.0, 30.0, half_life=10.0)
    integral = 10 / math.log(2) * (1 - 1 / 8)
    assert found.value == pytest.approx(1.75 / integral)
    assert found.effective_n == pytest.approx(1.75**2 / 1.3125)


def _first_alarm(gaps: np.ndarray, ratio: float, scale: float, threshold: float) -> int | None:
    """The equations of queueing.estimation.change, one gap after the other: index of the gap
    that gives the change away.
    """
    total, up, down = float(gaps[0]), 0.0, 0.0
    for index, gap in enumerate(gaps[1:].tolist(), 1):
        unit = index * math.log(1 + gap / total)
        total += gap
        up = max(0.0, up + (math.log(ratio) - (ratio - 1) * unit) / scale)
        down = max(0.0, down + (-math.log(ratio) + (1 - 1 / ratio) * unit) / scale)
        if max(up, down) >= threshold:
            return index
    return None


@pytest.mark.parametrize("factor", [0.4, 2.5])
@pytest.mark.parametrize(
    "options",
    [{}, {"dispersion": 1.0}, {"dispersion": 2.0}, {"ratio": 2.0, "between_false_alarms": 500.0}],
)
def test_the_sums_alarm_where_their_equations_do_and_split_where_it_is_likeliest(
    factor: float, options: dict[str, float]
) -> None:
    rng = np.random.default_rng(5)
    gaps = np.concatenate([rng.exponential(1.0, 400), rng.exponential(1 / factor, 600)])
    instants = np.concatenate([[0.0], np.cumsum(gaps)])
    found = changes(instants, **options)[0]
    threshold = math.log(2 * options.get("between_false_alarms", 100_000))
    alarm = _first_alarm(
        np.diff(instants), options.get("ratio", 1.3), options.get("dispersion", 1.0), threshold
    )
    assert alarm is not None
    assert found.detected_at == instants[alarm + 1]
    seen = np.diff(instants)[: alarm + 1]
    likelihoods = [
        -k * math.log(seen[:k].mean()) - (seen.size - k) * math.log(seen[k:].mean())
        for k in range(1, seen.size)
    ]
    split = 1 + int(np.argmax(likelihoods))
    assert found.at == instants[split]
    assert found.ratio == pytest.approx(seen[:split].mean() / seen[split:].mean())


def test_after_a_change_the_sums_begin_anew() -> None:
    rng = np.random.default_rng(6)
    instants = np.cumsum(
        np.concatenate([rng.exponential(1 / rate, 500) for rate in (1.0, 4.0, 1.0)])
    )
    found = changes(instants)
    assert len(found) == 2
    assert [change.at for change in found] == pytest.approx(
        [instants[499], instants[999]], abs=15.0
    )
    assert found[0].ratio > 3
    assert found[1].ratio < 1 / 3


def test_neighbours_say_how_bursty_gaps_are() -> None:
    """((1 - 3) / 4)^2 = 1/4 of each pair, the fifth alone left out: (1/2) / (3/4)."""
    found = local_variation(np.array([1.0, 3.0, 3.0, 1.0, 9.0]))
    assert found.scv == pytest.approx(2 / 3)
    assert found.distance == pytest.approx((1 / 4 - 1 / 3) / math.sqrt(4 / 45 / 2))
    assert burstiness(np.array([1.0, 0.0] * 50)) == 100.0
    assert burstiness(np.array([1.0, 0.8] * 50)) == 1.0
    assert math.isnan(local_variation(np.zeros(4)).scv)
    # three standard errors above the third that Poisson gaps have: 23 of 50 pairs that are as
    # unlike as can be
    for unlike, bursty in ((22, False), (24, True)):
        gaps = np.array([1.0, 0.0] * unlike + [1.0, 1.0] * (50 - unlike))
        assert (burstiness(gaps) > 1) == bursty == (local_variation(gaps).distance > 3)


@pytest.mark.parametrize(("count", "judged"), [(99, False), (100, True)])
def test_a_hundred_arrivals_are_judged(count: int, judged: bool) -> None:
    constant, poisson_ones = arrival_assumptions(poisson(1.0, count, 3))
    assert (constant.holds is not None, poisson_ones.holds is not None) == (judged, judged)
    assert [each.holds for each in arrival_assumptions(poisson(1.0, count, 3), explained=True)] == [
        None,
        None,
    ]


def test_a_change_is_told_with_its_time_before_the_last_arrival() -> None:
    rng = np.random.default_rng(1)
    gaps = np.concatenate([rng.exponential(1.0, 400), rng.exponential(0.1, 400)])
    instants = np.cumsum(gaps)
    constant, steady = arrival_assumptions(instants)
    assert (constant.holds, steady.holds) == (False, True)
    assert constant.measure == pytest.approx(10.0, rel=0.2)
    said = re.fullmatch(
        r"the arrival rate rose by a factor of \S+, (\S+) s before the last arrival", constant.says
    )
    assert said
    assert float(said[1]) == pytest.approx(gaps[400:].sum(), rel=0.1)


def test_a_rate_that_changes_three_times_bursts_and_twice_changes() -> None:
    def judged(*rates: float) -> tuple[bool | None, bool | None]:
        rng = np.random.default_rng(2)
        constant, steady = arrival_assumptions(
            np.cumsum(np.concatenate([rng.exponential(1 / rate, 400) for rate in rates]))
        )
        return constant.holds, steady.holds

    assert judged(1.0, 4.0, 16.0) == (False, True)
    assert judged(1.0, 4.0, 16.0, 4.0) == (None, False)
    assert judged(1.0) == (True, True)
