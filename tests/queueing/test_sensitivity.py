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
    WanderBand,
    _elasticity,
    _jackknife,
    _log_ratio,
    _shorter,
    sensitivity,
    wander_band,
)
from queueing.estimation.estimates import Estimates
from queueing.estimation.interval import NORMAL, UNKNOWN, symmetric, without_interval
from queueing.estimation.lengths.lengths import lengths
from queueing.estimation.speed.speed_curve import SpeedCurve, speed_curve
from queueing.estimation.speed.speed_process import Stalls
from queueing.latency.law import LatencyModel
from queueing.optimization.forecast import Setting
from tests.queueing.assessed_windows import LAW, seen

RATE = 10.0
FLAT = SpeedCurve(0.0, 0.0, 1.0)


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
    assert (slope.curve.slope, slope.curve.curvature, slope.curve.pole) == pytest.approx(
        (3.0, 0.0, 0.0), abs=1e-9
    )
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


KNOWN = Sensitivity(2.0, 3.0, 0.01, 0.02, FLAT, 3, 50.0, 0.5, sequences_error=0.03)


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


def squares(factor: float) -> float:
    return 5 * factor**2


@pytest.mark.parametrize(
    ("relaxation", "window_seconds"), [(0.0, 1e9), (300.0, 1e9), (100.0, 6000.0), (100.0, 100.0)]
)
def test_the_band_of_a_square_is_that_of_a_lognormal_speed(
    relaxation: float, window_seconds: float
) -> None:
    """E f^2 = e^(s^2) and E f^4 = e^(6 s^2) of the mean speed's powers; s^2 = sigma^2 tau / (tau
    + relaxation).
    """
    variance = SIGMA**2 * TAU / (TAU + relaxation)
    found = wander_band(squares, 2.0, SIGMA, TAU, relaxation=relaxation, window=window_seconds)
    mean = 20 * math.exp(variance)
    spread = (
        20
        * math.sqrt(math.exp(6 * variance) - math.exp(2 * variance))
        * math.sqrt(min(1.0, 2 * TAU / window_seconds))
    )
    assert found.mean == pytest.approx(mean, rel=1e-6)
    assert found.high - found.mean == pytest.approx(NORMAL * spread, rel=1e-4)
    assert found.mean - found.low == pytest.approx(NORMAL * spread, rel=1e-4)


def test_a_band_does_not_go_below_zero_and_is_open_where_more_than_a_hundredth_is_unstable() -> (
    None
):
    wide = wander_band(lambda factor: factor**9, 1.0, 0.5, TAU, relaxation=0.0, window=1.0)
    assert wide.low == 0.0
    assert wide.high > wide.mean > 1.0
    # the nodes of nine: 0, +-1.02 (weights 0.41, 0.24), +-2.08 (0.05), +-3.2 (0.003) standard
    # deviations
    for limit, open_above in ((1.0, True), (1.5, True), (2.5, False), (4.0, False)):
        found = wander_band(
            lambda factor, limit=limit: 1.0 if factor < math.exp(0.1 * limit - 0.005) else math.inf,
            1.0,
            0.1,
            TAU,
            relaxation=0.0,
            window=1.0,
        )
        assert (found.mean, math.isinf(found.high)) == (pytest.approx(1.0), open_above), limit
    assert wander_band(lambda _: math.inf, 1.0, 0.1, TAU, relaxation=0.0, window=1.0) == WanderBand(
        math.inf, 0.0, math.inf
    )
    assert wander_band(squares, 2.0, 0.0, math.nan, relaxation=0.0, window=1.0) == WanderBand(
        20.0, 20.0, 20.0
    )


def test_the_curve_of_a_single_server_queue_is_its_formula() -> None:
    """W = f^2 / (1 - 0.5 f): a slope of two and a whole pole."""
    curve = speed_curve(lambda factor: factor**2 / (1 - 0.5 * factor), 0.5)
    assert (curve.slope, curve.curvature, curve.pole) == pytest.approx((2.0, 0.0, 1.0), abs=1e-6)
    assert curve.ratio(0.3, 0.5) == pytest.approx(math.exp(0.6) * 0.5 / (1 - 0.5 * math.exp(0.3)))
    assert curve.ratio(math.log(2.0), 0.5) == math.inf
    assert SpeedCurve(1.0, 2.0, 0.5).ratio(0.2, 0.4) == pytest.approx(
        math.exp(0.2 + 0.08) * (0.6 / (1 - 0.4 * math.exp(0.2))) ** 0.5
    )


def test_with_patience_a_curve_has_no_pole() -> None:
    curve = speed_curve(
        lambda factor: math.exp(1.5 * math.log(factor) + 0.7 * math.log(factor) ** 2), 0.0
    )
    assert (curve.slope, curve.curvature, curve.pole) == pytest.approx((1.5, 0.7, 0.0), abs=1e-9)


@pytest.mark.parametrize(("finite", "known"), [(4, True), (3, True), (2, False)])
def test_a_curve_needs_three_points_beside_the_one_here(finite: int, known: bool) -> None:
    """Four are asked: at +-0.3 and half of it, of the log speed."""
    highest = {4: 0.31, 3: 0.2, 2: 0.1}[finite]
    curve = speed_curve(lambda factor: factor**2 if math.log(factor) < highest else math.inf, 0.0)
    assert curve == (
        SpeedCurve(pytest.approx(2.0), pytest.approx(0.0, abs=1e-9), 0.0) if known else FLAT
    )  # type: ignore[arg-type]


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
