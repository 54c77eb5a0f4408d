"""Each threshold of an assumption and of a self-check: what lies just inside holds, what lies just outside does not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from queueing.estimation.checks import conservation, little_law, utilisation_law
from queueing.estimation.client_assumptions import no_retries
from queueing.estimation.engine_assumptions import StalledDelay, _no_stalls, constant_speed, settled, stable_queue
from queueing.estimation.interval import Estimate
from queueing.estimation.snapshot import Snapshot
from queueing.estimation.speed_process import Stalls
from tests.queueing.test_estimation_speed import _wandering

QUIET = np.random.default_rng(0).exponential(size=1000)
WINDOW = Snapshot(policy="single", epoch=0, epoch_at=0.0, start=0.0, now=1000.0, arrivals=np.arange(1000.0), rows=np.empty((0, 11)))


@pytest.mark.parametrize(("retries", "holds"), [(0, True), (19, True), (20, False), (500, False)])
def test_retries_are_tolerated_below_two_in_a_hundred(retries: int, holds: bool) -> None:
    found = no_retries(replace(WINDOW, retries=retries))
    assert (found.holds, found.measure) == (holds, retries / 1000)
    assert no_retries(replace(WINDOW, arrivals=np.empty(0))).holds is None


@pytest.mark.parametrize(
    ("share", "delay", "holds"),
    [
        # without a prediction by their share of the busy time
        (0.0199, None, True),
        (0.0201, None, False),
        # with one by what they add to it: a tenth of it, and a millisecond
        (0.5, StalledDelay(mean=0.02, smooth=0.0181), True),
        (0.0001, StalledDelay(mean=0.02, smooth=0.0179), False),
        (0.5, StalledDelay(mean=0.009, smooth=0.0081), True),
        (0.5, StalledDelay(mean=0.009, smooth=0.0079), False),
        (0.5, StalledDelay(mean=0.0, smooth=0.0), True),
    ],
)
def test_stalls_are_tolerated_by_their_share_or_by_what_they_cost(share: float, delay: StalledDelay | None, holds: bool) -> None:
    stalls = Stalls(3, share, 2.0, None)
    found = _no_stalls(100, stalls, delay)
    assert found.holds == holds
    assert found.measure == pytest.approx(share if delay is None else delay.effect)
    assert "3 stalls hold" in found.says
    assert _no_stalls(0, stalls, delay).holds is None
    assert _no_stalls(100, Stalls(0, 0.0, 0.0, None), delay).holds


@pytest.mark.parametrize(("effect", "holds"), [(0.0, True), (0.0999, True), (0.1001, False), (None, False)])
def test_a_speed_that_wanders_is_tolerated_as_long_as_it_moves_the_delay_by_less_than_a_tenth(effect: float | None, holds: bool) -> None:
    """By 8 %: without a computed effect three times that counts."""
    found = constant_speed(_wandering(1, 0.08, 40.0), effect)
    assert found.holds == holds
    assert found.measure == pytest.approx(0.08, rel=0.5)
    assert constant_speed(_wandering(1, 0.0, 40.0), effect).holds


@pytest.mark.parametrize(
    ("value", "low", "delays", "holds"),
    [
        (0.99, 0.97, QUIET, True),
        (1.2, 0.999, QUIET, True),
        (1.2, 1.001, QUIET, False),
        # a growing queue counts near saturation only, and only where it doubles
        (0.94, 0.9, np.arange(1000.0), True),
        (0.96, 0.9, np.arange(1000.0), False),
        (0.96, 0.9, np.arange(99.0), True),
        (0.96, 0.9, np.arange(100.0), False),
        (0.96, 0.9, np.arange(1000.0)[::-1], True),
        (0.96, 0.9, np.linspace(1, 4.9, 1000), True),  # 3.925 in the later half, 1.975 in the earlier
        (0.96, 0.9, np.linspace(1, 5.1, 1000), False),
    ],
)
def test_a_queue_is_unstable_by_its_load_or_by_its_growth(value: float, low: float, delays: np.ndarray, holds: bool) -> None:
    load = Estimate(value, low, 2 * value - low, 100.0)
    found = stable_queue(load, delays)
    assert (found.holds, found.measure) == (holds, value)
    assert stable_queue(load, delays, patience=True).holds
    assert ("grows without bound" in found.says) != holds


@pytest.mark.parametrize(
    ("relaxation", "about", "holds"),
    [
        # three relaxation times against a fifth of the window of 100 s
        (6.6, {}, True),
        (6.7, {}, False),
        # and the time to serve those who waited when the epoch began: 10 s
        (3.3, {"waiting_before": 100, "free_rate": 10.0}, True),
        (3.4, {"waiting_before": 100, "free_rate": 10.0}, False),
        (6.6, {"waiting_before": 0, "free_rate": 0.0}, True),
        # less what had gone by when the window began
        (8.3, {"since_epoch": 5.0}, True),
        (8.4, {"since_epoch": 5.0}, False),
    ],
)
def test_a_window_is_settled_as_long_as_a_fifth_of_it_or_less_remembers(relaxation: float, about: dict[str, float], holds: bool) -> None:
    given = {"since_epoch": 0.0} | about
    found = settled(100.0, relaxation=relaxation, **given)  # type: ignore[arg-type]
    assert found.holds == holds
    assert found.measure == pytest.approx(0.2, abs=0.01)
    assert (found.says == "settled") == holds
    assert settled(0.0, relaxation=relaxation, **given).holds is False  # type: ignore[arg-type]
    assert settled(100.0, relaxation=math.inf, **given).holds is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "holds"), [(0.0, True), (0.99, True), (-0.99, True), (1.01, False), (-1.01, False)])
def test_littles_law_and_the_utilisation_may_be_off_by_the_slack_of_each_event(seconds: float, holds: bool) -> None:
    """Five requests, two seconds each, in a window of 20 s: ten events, each of which may be seen half a millisecond too late."""
    arrived = np.arange(0.0, 20.0, 4.0)
    left, off = arrived + 2.0, seconds * 10 * 0.0005 / 20
    check = little_law(0.5 + off, arrived, left, 0.0, 20.0)
    assert (check.expected, check.tolerance) == (pytest.approx(0.5), pytest.approx(10 * 0.0005 / 20))
    assert check.holds == holds
    used = utilisation_law(0.5 + off, (arrived, left, np.zeros(5)), 0.0, 20.0)
    assert (used.expected, used.tolerance) == (pytest.approx(0.5), pytest.approx(10 * 0.0005 / 20))
    assert used.holds == holds
    assert utilisation_law(0.25, (arrived, left, np.zeros(5)), 0.0, 20.0, servers=2).holds


def test_intervals_that_cross_the_edges_of_the_window_are_cut_there() -> None:
    """From 3 to 9 s: one second of the first request, all of the second, one of the third, which is still there; two at once count once."""
    arrived, left = np.array([0.0, 5.0, 8.0, 8.5, 20.0]), np.array([4.0, 7.0, math.inf, math.inf, 30.0])
    assert little_law(0.0, arrived, left, 3.0, 9.0).expected == pytest.approx((1 + 2 + 1 + 0.5) / 6)
    assert utilisation_law(0.0, (arrived, left, np.zeros(5)), 3.0, 9.0).expected == pytest.approx((1 + 2 + 1) / 6)
    assert utilisation_law(0.0, (arrived, left, np.array([0, 0, 0, 1, 1])), 3.0, 9.0, servers=2).expected == pytest.approx(4.5 / 12)


def test_one_request_too_many_or_too_few_is_seen() -> None:
    assert conservation(10, {"completed": 6, "failed": 1}, 2, 1).holds
    for arrived in (9, 11):
        check = conservation(arrived, {"completed": 6, "failed": 1}, 2, 1)
        assert not check.holds
        assert (check.expected, check.measured) == (arrived, 10)
