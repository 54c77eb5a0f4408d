"""How sure a prediction is, by hand: powers for delays, so that every elasticity, error and band
is known exactly.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from queueing.distributions.token_distribution import TokenDistribution
from queueing.estimation.band import (
    Sensitivity,
    _elasticity,
    _jackknife,
    _log_ratio,
    _shorter,
    sensitivity,
)
from queueing.estimation.estimates import Estimates
from queueing.estimation.interval import NORMAL, UNKNOWN, symmetric, without_interval
from queueing.estimation.lengths.lengths import lengths
from queueing.estimation.speed.speed_process import Stalls
from queueing.estimation.speed.wander import Wander
from queueing.latency.law import LatencyModel
from queueing.optimization.forecast import Setting
from tests.queueing.assessed_windows import LAW, seen

RATE = 10.0


def window(**about: object) -> Estimates:
    """Rate 10 +- 1 %, speed 1 +- 0.5 %, cv 0.15 +- 0.01."""
    return dataclasses.replace(
        seen(50.0, Setting(policy="dynamic"), RATE, epoch=3).estimates, **about
    )  # type: ignore[arg-type]


class Powers:
    """W = rate^2 speed^3 E[N] e^(2 cv) E[sequences], and what was asked."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.laws: list[LatencyModel] = []

    def __call__(
        self,
        rate: float,
        lengths: TokenDistribution,
        law: LatencyModel,
        sequences: TokenDistribution | None = None,
    ) -> float:
        self.rates.append(rate / RATE)
        self.laws.append(law)
        return (
            rate**2
            * law.speed**3
            * lengths.mean
            * math.exp(2 * law.cv)
            * (1.0 if sequences is None else sequences.mean)
        )


def jackknife(means: list[float]) -> float:
    """Of five groups."""
    logs = np.log(means)
    return (
        math.sqrt(4 * float(np.mean((logs - logs.mean()) ** 2)))
        * float(stats.t.ppf(0.975, 4))
        / NORMAL
    )


def test_a_sensitivity_to_powers_is_their_exponents() -> None:
    ask, found = Powers(), window()
    slope = sensitivity(ask, found, dataclasses.replace(LAW, stall_share=0.05, stall=0.1), 0.6)
    assert (slope.rate, slope.speed) == (pytest.approx(2.0), pytest.approx(3.0))
    assert slope.cv_error == pytest.approx(2 * (0.16 - 0.14) / (2 * NORMAL))
    parts = [found.output_tokens.without(group, 5).law().mean for group in range(5)]
    assert slope.lengths_error == pytest.approx(jackknife(parts))
    assert slope.sequences_error == 0.0
    assert (slope.epoch, slope.at, slope.load) == (3, 50.0, 0.6)
    assert all((law.stall_share, law.stall) == (0.0, 0.0) for law in ask.laws), (
        "stalls have their own error"
    )
    assert {1.05, 0.95} < {round(rate, 9) for rate in ask.rates}


@pytest.mark.parametrize(
    ("load", "pole", "step"),
    [(0.5, True, 0.05), (0.9, True, 0.025), (0.9, False, 0.05), (1.2, False, 0.05)],
)
def test_the_step_to_either_side_is_a_quarter_of_what_is_free_at_most(
    load: float, pole: bool, step: float
) -> None:
    ask = Powers()
    found = sensitivity(ask, window(), LAW, load, pole=pole)
    assert {round(rate, 9) for rate in ask.rates} == {1.0, round(1 + step, 9), round(1 - step, 9)}
    assert found.rate == pytest.approx(2.0)


def test_sequences_of_a_call_have_an_error_of_their_own() -> None:
    calls = lengths([1, 2, 3, 4, 6] * 20 + [1, 1, 1])
    found = sensitivity(Powers(), window(sequences=calls), LAW, 0.6)
    assert found.sequences_error == pytest.approx(
        jackknife([calls.without(group, 5).law().mean for group in range(5)])
    )
    assert found.sequences_error > 0


def test_a_residual_that_is_not_known_adds_no_error() -> None:
    assert sensitivity(Powers(), window(cv=UNKNOWN), LAW, 0.6).cv_error == 0.0


def test_a_limit_beyond_what_a_part_knows_is_lowered_for_that_part() -> None:
    known, cut = (
        window(output_tokens=lengths([5] * 50)),
        window(output_tokens=lengths([5] * 50 + [9] * 50, [False] * 50 + [True] * 50)),
    )
    assert _shorter(None, known, 0) is None
    assert _shorter(300, known, 0) == 300
    assert _shorter(300, cut, 0) == 9
    assert _shorter(7, cut, 0) == 7


@pytest.mark.parametrize(
    ("above", "below", "ratio"),
    [
        (2.0, 1.0, math.log(2.0)),
        (math.inf, 1.0, math.inf),
        (math.inf, math.inf, math.inf),
        (1.0, math.inf, 0.0),
        (1.0, 0.0, 0.0),
        (0.0, 1.0, 0.0),
    ],
)
def test_a_ratio_of_delays_is_open_where_the_upper_one_is(
    above: float, below: float, ratio: float
) -> None:
    assert _log_ratio(above, below) == pytest.approx(ratio)


def test_an_elasticity_is_symmetric_in_both_steps() -> None:
    assert _elasticity(lambda factor: 7 * factor**1.5, 0.2) == pytest.approx(1.5)
    assert _elasticity(lambda factor: 1 / factor, 0.1) == pytest.approx(-1.0)


def test_a_part_without_a_steady_state_leaves_the_error_open_and_delays_of_nobody_have_none() -> (
    None
):
    assert _jackknife(np.array([1.0, math.inf, 2.0])) == math.inf
    assert _jackknife(np.array([1.0, 0.0, 2.0])) == 0.0
    assert _jackknife(np.array([3.0, 3.0, 3.0])) == 0.0
    assert _jackknife(np.array([1.0, 2.0, 4.0, 2.0, 1.5])) == pytest.approx(
        jackknife([1.0, 2.0, 4.0, 2.0, 1.5])
    )


KNOWN = Sensitivity(2.0, 3.0, 0.01, 0.02, 3, 50.0, 0.5, sequences_error=0.03)


def test_the_interval_of_a_prediction_adds_all_errors_as_squares() -> None:
    stalling = window(stalls=Stalls(4, 0.02, 1.0, None, 0.5))
    error = math.hypot(2 * 0.01 / NORMAL, 3 * 0.005 / NORMAL, 0.01, 0.02, 0.03, 0.2 / math.sqrt(4))
    found = KNOWN.interval(0.4, stalling, 0.2)
    factor = math.exp(NORMAL * error)
    assert (found.value, found.low, found.high) == pytest.approx((0.4, 0.4 / factor, 0.4 * factor))
    assert found.effective_n == 500.0
    alone = KNOWN.interval(0.4, window(), 0.2)
    assert alone.high == pytest.approx(
        0.4 * math.exp(NORMAL * math.hypot(0.02 / NORMAL, 0.015 / NORMAL, 0.01, 0.02, 0.03, 0.2))
    )
    assert KNOWN.interval(0.4, stalling).high < found.high


def test_a_prediction_from_what_is_not_known_has_an_open_interval() -> None:
    for found in (
        KNOWN.interval(0.4, window(speed=UNKNOWN)),
        KNOWN.interval(0.4, window(arrival_rate=UNKNOWN)),
    ):
        assert found == without_interval(0.4)
        plain = found.at_least(2e-4).of_duration().to_dict()
        assert (plain["low"], plain["high"]) == (None, None), "no end that a floor has made"
    endless = KNOWN.interval(math.inf, window())
    assert (endless.low, endless.high) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("epoch", "now", "load", "fresh"),
    [
        (3, 50.0, 0.5, True),
        (3, 109.9, 0.5, True),
        (3, 110.0, 0.5, False),
        (3, 49.9, 0.5, False),
        (4, 50.0, 0.5, False),
        # a fifth of what is free at the new load: 0.0834 of 0.4166 upwards, 0.125 of 0.625
        # downwards
        (3, 60.0, 0.583, True),
        (3, 60.0, 0.584, False),
        (3, 60.0, 0.376, True),
        (3, 60.0, 0.374, False),
    ],
)
def test_a_sensitivity_is_kept_for_a_minute_and_a_fifth_of_what_is_free(
    epoch: int, now: float, load: float, fresh: bool
) -> None:
    assert KNOWN.fresh(epoch, now, load) == fresh


def test_near_saturation_two_hundredths_count_as_free() -> None:
    near = dataclasses.replace(KNOWN, load=0.99)
    assert near.fresh(3, 50.0, 0.9939)
    assert not near.fresh(3, 50.0, 0.9941)


SIGMA, TAU = 0.1, 300.0


def test_an_estimate_in_other_units_and_with_a_floor() -> None:
    found = symmetric(2.0, 0.5, 9.0)
    assert (found.relative, found.scaled(10.0)) == (0.25, symmetric(20.0, 5.0, 9.0))
    assert found.at_least(0.0) is found
    raised = found.at_least(1.8)
    assert (raised.value, raised.low, raised.high, raised.effective_n) == (2.0, 1.8, 2.5, 9.0)
    assert (found.at_least(3.0).value, found.at_least(3.0).high) == (3.0, 3.0)
    assert symmetric(-2.0, 0.5, 9.0).relative == 0.25
    assert symmetric(0.0, 0.5, 9.0).relative == math.inf
    assert [found.covers(value) for value in (1.49, 1.5, 2.5, 2.51)] == [False, True, True, False]
    below = symmetric(0.1, 0.3, 9.0).of_duration()
    assert (below.value, below.low, below.high) == (0.1, 0.0, 0.4)
    assert UNKNOWN.of_duration() is UNKNOWN


def test_the_wander_moves_the_mean_by_what_neither_the_queue_nor_the_window_averages() -> None:
    slow = Wander(symmetric(0.1, 0.02, 50.0), 30.0, 0.1, significant=True)
    estimates = window(start=0.0, now=600.0, wander=slow)
    found = KNOWN.wander_effect(estimates, 10.0)
    assert found == pytest.approx(NORMAL * 3.0 * 0.1 * math.sqrt(30 / 40 * 60 / 600))
    assert KNOWN.wander_effect(estimates, math.inf) == 0.0
