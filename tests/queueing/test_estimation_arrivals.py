"""The arrival rate's interval covers the truth, and a change of rate is found when there is one, not when there is none."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from scipy import stats

from queueing.estimation.arrivals import arrival_rate, dispersion
from queueing.estimation.assumption import factor
from queueing.estimation.change import Change, burstiness, changes, local_scv
from queueing.estimation.client_assumptions import arrival_assumptions
from tests.queueing.estimation_runs import gamma, modulated, poisson

RUNS = 200


@pytest.mark.parametrize("half_life", [math.inf, 60.0])
def test_the_interval_of_the_rate_covers_the_truth_of_poisson_arrivals(half_life: float) -> None:
    found = [arrival_rate(instants, 0.0, 200.0, half_life=half_life) for instants in _fixed_time(7.0, 200.0)]
    assert sum(estimate.covers(7.0) for estimate in found) >= 0.88 * RUNS
    assert np.mean([estimate.relative for estimate in found]) < (0.07 if math.isinf(half_life) else 0.13)


def test_the_interval_of_a_few_arrivals_covers_too() -> None:
    found = [arrival_rate(instants, 0.0, 2.0) for instants in _fixed_time(3.0, 2.0)]
    assert sum(estimate.covers(3.0) for estimate in found) >= 0.88 * RUNS


def test_the_interval_widens_by_the_dispersion_of_bursty_arrivals() -> None:
    """Gamma gaps of shape 0.3: the count's variance is 3.3 times Poisson's; the plain interval misses."""
    bursty = [gamma(7.0, 1500, seed, 0.3) for seed in range(RUNS)]
    found = [arrival_rate(instants, 0.0, float(instants[-1])) for instants in bursty]
    assert sum(estimate.covers(7.0) for estimate in found) >= 0.88 * RUNS
    plain = [abs(instants.size / instants[-1] - 7.0) < 1.96 * 7.0 / math.sqrt(instants.size) for instants in bursty]
    assert sum(plain) < 0.8 * RUNS
    assert np.mean([dispersion(instants, 0.0, float(instants[-1])).value for instants in bursty]) == pytest.approx(1 / 0.3, rel=0.1)


@pytest.mark.parametrize("count", [1, 10, 400])
def test_the_interval_of_evenly_spread_arrivals_is_the_exact_one_of_a_poisson_count(count: int) -> None:
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
    instants = np.concatenate([part + (np.arange(count) + 0.5) / count for part, count in enumerate([4, 8] * 10)])
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
    """A rate that doubled a minute ago: the plain mean lies between, the weighted one near the new rate."""
    instants = np.concatenate([np.arange(0.05, 100.0, 0.1), np.arange(100.0, 160.0, 0.05)])
    assert arrival_rate(instants, 0.0, 160.0).value == pytest.approx(13.75, rel=0.01)
    assert arrival_rate(instants, 0.0, 160.0, half_life=15.0).value == pytest.approx(19.4, rel=0.02)


def test_false_alarms_of_a_constant_rate_are_as_rare_as_stated() -> None:
    """M = 2000 arrivals between two, at least: 10^6 arrivals may alarm 500 times."""
    rng = np.random.default_rng(4)
    alarms = sum(len(changes(np.cumsum(rng.exponential(1.0, 50_000)), between_false_alarms=2000.0)) for _ in range(20))
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
    instants = np.concatenate([poisson(1.0, 1000, 3), poisson(1.0, 1000, 3)[-1] + poisson(2.0, 1000, 4)])
    plain, scaled = changes(instants), changes(instants * 1e-3)
    assert [change.at * 1e-3 for change in plain] == pytest.approx([change.at for change in scaled])
    assert len(plain) == 1


def test_modulated_arrivals_change_often() -> None:
    assert np.mean([len(changes(modulated((2.0, 18.0), (20.0, 20.0), 3000, seed))) for seed in range(20)]) > 3


def test_the_variation_of_gaps_is_judged_by_neighbours() -> None:
    """A change of rate in the middle does not raise it, as it does the plain one."""
    rng = np.random.default_rng(1)
    gaps = np.concatenate([rng.exponential(1.0, 20_000), rng.exponential(0.1, 20_000)])
    assert local_scv(gaps)[0] == pytest.approx(1.0, abs=0.05)
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
def test_the_size_of_a_change_of_rate_is_said_in_three_digits(rates: tuple[float, float], word: str) -> None:
    rng = np.random.default_rng(1)
    instants = np.cumsum(np.concatenate([rng.exponential(1 / rate, 300) for rate in rates]))
    said = arrival_assumptions(instants)[0].says
    assert re.match(rf"the arrival rate {word} by a factor of (\d{{3}}|1,\d\d0), ", said), said


def test_factors() -> None:
    found = [factor(ratio) for ratio in (1.9684, 1 / 1.9684, 2.0, 465.53, 999.4, 999.6, 1045.62, 1 / 1045.62, 2.3456e6)]
    assert found == ["1.97", "1.97", "2", "466", "999", "1,000", "1,050", "1,050", "2,350,000"]
