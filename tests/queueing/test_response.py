"""How far a forecast and a gain may be off, against closed forms; and the words of both."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kendall.queueing.choosing.advice.sentence import percent
from kendall.queueing.choosing.gain.estimation_error import Evaluation, Response
from kendall.queueing.choosing.phrases import HALF_A_PERCENT, bounded, seconds, share, small_share
from kendall.queueing.estimation.interval import UNKNOWN, Estimate, symmetric
from kendall.queueing.json_form import from_json, json_object


def response(
    load: float,
    *,
    rate: float = 0.1,
    smooth: float = 0.0,
    pole: bool = True,
    stable: bool = True,
    own: float = 0.0,
) -> Response:
    """Of one estimate, whose half width moves ln load by `rate` and ln g by `smooth`."""
    return Response(
        smooth=np.array([smooth]),
        loads=np.array([rate]),
        load=load,
        pole=pole,
        needs_stability=stable,
        own=own,
    )


def test_a_delay_with_a_pole_moves_as_one_over_the_free_capacity() -> None:
    found = response(0.5).interval(2.0, 77.0)
    assert (found.value, found.effective_n) == (2.0, 77.0)
    assert found.low == pytest.approx(2.0 * 0.5 / (1 - 0.5 * math.exp(-0.1)))
    assert found.high == pytest.approx(2.0 * 0.5 / (1 - 0.5 * math.exp(0.1)))


@pytest.mark.parametrize(("load", "bounded"), [(0.9, True), (0.91, False)])
def test_the_interval_is_open_where_a_step_leaves_no_steady_state(
    load: float, bounded: bool
) -> None:
    """0.9 e^0.1 = 0.995, 0.91 e^0.1 = 1.006."""
    found = response(load).interval(2.0, 77.0)
    assert math.isfinite(found.high) == bounded
    assert 0 < found.low < 2.0 < found.high
    free = response(load, pole=False, stable=False, smooth=0.3).interval(2.0, 77.0)
    assert free.high == pytest.approx(2.0 * math.exp(0.3))


@pytest.mark.parametrize("smooth", [0.2, -0.2])
def test_without_a_pole_only_the_smooth_part_counts_in_either_direction(smooth: float) -> None:
    found = response(0.5, pole=False, smooth=smooth).interval(3.0, 77.0)
    assert (found.low, found.high) == pytest.approx((3.0 * math.exp(-0.2), 3.0 * math.exp(0.2)))
    still = response(0.5, pole=False).interval(3.0, 77.0)
    assert (still.low, still.high) == (3.0, 3.0)


def test_the_methods_own_error_adds_up_as_squares() -> None:
    found = response(0.5, pole=False, smooth=0.3, own=0.1).interval(1.0, 77.0)
    half = math.hypot(0.3, 1.96 * 0.1)
    assert (found.low, found.high) == pytest.approx((math.exp(-half), math.exp(half)), rel=1e-4)


def test_several_estimates_move_it_in_the_direction_in_which_it_moves_most() -> None:
    found = Response(
        smooth=np.array([0.3, 0.4]), loads=np.zeros(2), load=0.5, pole=False, needs_stability=True
    ).interval(1.0, 77.0)
    assert (found.low, found.high) == pytest.approx((math.exp(-0.5), math.exp(0.5)))


def test_where_either_step_moves_a_delay_one_way_its_interval_ends_at_the_value() -> None:
    """At load 0.5 a tenth more or less work moves 1 / (1 - load) by 11.1 or -9.1 %; what is
    smooth takes 10 % back.
    """
    valley = response(0.5, smooth=-0.0999)
    up, down = (math.log(0.5 / (1 - 0.5 * math.exp(by))) - 0.999 * by for by in (0.1, -0.1))
    assert min(up, down) > 0
    found = valley.interval(2.0, 77.0)
    assert (found.low, found.high) == (2.0, pytest.approx(2.0 * math.exp(max(up, down))))
    flat = response(0.5, pole=False, rate=0.0)
    gain = flat.gain(1.0, valley, 2.0, 77.0)
    assert gain.low == gain.value == pytest.approx(0.5)
    assert gain.high == pytest.approx(1 - 0.5 * math.exp(-max(up, down)))


def test_a_setting_gains_surely_nothing_over_itself() -> None:
    found = response(0.8).gain(2.0, response(0.8), 2.0, 77.0)
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def test_a_gain_shares_the_errors_of_both_settings() -> None:
    """Loads 0.5 and 0.8, the same doubt of 5 % about the rate."""

    def moved(load: float, by: float) -> float:
        return math.log((1 - load) / (1 - load * math.exp(by)))

    more, less = (moved(0.5, by) - moved(0.8, by) for by in (0.05, -0.05))
    assert more < 0 < less
    found = response(0.5, rate=0.05).gain(1.0, response(0.8, rate=0.05), 2.0, 77.0)
    assert found.value == pytest.approx(0.5)
    assert (found.low, found.high) == pytest.approx(
        (1 - 0.5 * math.exp(less), 1 - 0.5 * math.exp(more))
    )
    loss = response(0.8, rate=0.05).gain(2.0, response(0.5, rate=0.05), 1.0, 77.0)
    assert loss.value == pytest.approx(-1.0)
    assert (loss.low, loss.high) == pytest.approx(
        (1 - 2 * math.exp(-more), 1 - 2 * math.exp(-less))
    )


def test_a_gain_is_open_towards_the_setting_that_may_lose_its_steady_state() -> None:
    safe, near = response(0.5), response(0.95)
    won = safe.gain(1.0, near, 2.0, 77.0)
    assert (won.value, won.high) == (pytest.approx(0.5), 1.0)
    assert -math.inf < won.low < 0.5
    lost = near.gain(1.0, safe, 2.0, 77.0)
    assert (lost.value, lost.low) == (pytest.approx(0.5), -math.inf)
    assert 0.5 < lost.high < 1
    both = near.gain(1.0, response(0.96), 2.0, 77.0)
    assert math.isfinite(both.low)


@pytest.mark.parametrize("pole", [True, False])
@pytest.mark.parametrize("power", [-1.0, 0.0, 2.0])
def test_the_slope_of_a_power_of_the_load_is_its_exponent(power: float, pole: bool) -> None:
    """g = load^power, over 1 - load where there is a pole."""

    def at(load: float) -> Evaluation:
        return Evaluation(load**power / ((1 - load) if pole else 1.0), load)

    assert at(0.6).slope(at(0.6 * 0.95), 0.05, pole=pole) == pytest.approx(power, abs=1e-6)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.004, "0"),
        (0.344, "34"),
        (0.346, "35"),
        (0.994, "99"),
        (0.996, "99.6"),
        (0.9996, "99.96"),
        (0.99999, "99.999"),
        (0.9999999, "over 99.9999"),
        (1.0, "100"),
        (1.5, "150"),
        (-0.004, "0"),
        (-0.25, "-25"),
    ],
)
def test_a_share_is_never_rounded_to_all(value: float, text: str) -> None:
    assert share(value) == text


def test_a_small_share_is_never_rounded_to_none() -> None:
    assert [small_share(value) for value in (None, 0.0, 0.0049, 0.0051, 0.02)] == [
        "an unknown share",
        "0 %",
        "under 0.5 %",
        "1 %",
        "2 %",
    ]


@given(st.floats(0, 1) | st.floats(0.0049, 0.0051) | st.floats(0, 1e-300))
@example(HALF_A_PERCENT)
@example(math.nextafter(HALF_A_PERCENT, 0))
@example(math.nextafter(HALF_A_PERCENT, 1))
def test_a_fraction_that_is_not_0_is_never_shown_as_0_percent(value: float) -> None:
    """And what is shown in its place is true of it."""
    shown = small_share(value)
    assert (shown == "0 %") == (value == 0)
    assert (shown == "under 0.5 %") == (0 < value < HALF_A_PERCENT)
    if value >= HALF_A_PERCENT:
        assert shown.startswith("over") or float(shown.removesuffix(" %")) == pytest.approx(
            100 * value, abs=0.5 + 1e-9
        )


@given(st.floats(-10, 10))
@example(HALF_A_PERCENT)
@example(math.nextafter(HALF_A_PERCENT, 0))
@example(0.025)
def test_gains_and_losses_of_one_size_are_rounded_alike(value: float) -> None:
    """Halves away from 0, which the bound of "no change is worth making" relies on."""
    if abs(value) < 0.99:
        assert float(share(value)) == -float(share(-value))
    assert (float(share(min(value, 0.9))) <= 0) == (min(value, 0.9) < HALF_A_PERCENT)


def test_a_duration_is_said_in_milliseconds_below_a_second() -> None:
    assert [seconds(value) for value in (None, 0.0124, 0.9, 1.0, 1.5)] == [
        "without bound",
        "12.4 ms",
        "900 ms",
        "1 s",
        "1.5 s",
    ]


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (Estimate(0.34, 0.28, 0.4, 9.0), "34 % less (95 %: 28 to 40 % less)"),
        (Estimate(-0.25, -0.5, 0.1, 9.0), "25 % more (95 %: -50 to 10 % less)"),
        (Estimate(-0.004, -0.02, 0.02, 9.0), "0 % less (95 %: -2 to 2 % less)"),
        (Estimate(0.5, -math.inf, 1.0, 9.0), "50 % less (95 %: minus much to 100 % less)"),
    ],
)
def test_a_gain_is_said_with_its_sign_and_both_ends(gain: Estimate, words: str) -> None:
    assert percent(gain) == words


def test_an_estimate_knows_itself() -> None:
    found = symmetric(-2.0, 0.5, 30.0)
    assert (found.low, found.high, found.relative) == (-2.5, -1.5, 0.25)
    assert [found.covers(each) for each in (-2.51, -2.49, -1.51, -1.49)] == [
        False,
        True,
        True,
        False,
    ]
    assert found.scaled(2.0) == Estimate(-4.0, -5.0, -3.0, 30.0)
    assert symmetric(0.2, 0.3, 30.0).of_duration() == Estimate(0.2, 0.0, 0.5, 30.0)
    assert symmetric(0.2, 0.3, 30.0).at_least(0.1) == Estimate(0.2, 0.1, 0.5, 30.0)
    assert symmetric(0.2, 0.1, 30.0).at_least(0.5) == Estimate(0.5, 0.5, 0.5, 30.0)
    assert symmetric(-2.0, 0.5, 30.0).at_least(0.0) == symmetric(-2.0, 0.5, 30.0)
    assert found.known
    assert not UNKNOWN.known
    assert UNKNOWN.covers(1e9)
    assert symmetric(0.0, 1.0, 30.0).relative == math.inf
    assert from_json(json_object(found), Estimate) == found
    assert set(json_object(UNKNOWN).values()) == {None, 0.0}
    again = from_json(json_object(UNKNOWN), Estimate)
    assert math.isnan(again.value)
    assert (again.low, again.high) == (-math.inf, math.inf)


def test_a_duration_that_is_not_finite_is_said_in_words() -> None:
    endless = Estimate(math.inf, 0.5, math.inf, 10.0)
    assert bounded(endless) == "without bound"
    assert bounded(endless, "unknown") == "unknown"
    assert bounded(Estimate(0.5, -0.1, math.inf, 10.0)) == "500 ms (0 ms to unbounded)"
