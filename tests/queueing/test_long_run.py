"""How long a forecast of the steady state stands, and what its interval is made of."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kendall.queueing.choosing.answer import precise
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.criterion import Criterion
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.control.long_run import KEPT, MOVED, SCATTER, STEP, LongRun, long_run
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.interval import UNKNOWN, symmetric, without_interval
from kendall.queueing.estimation.lengths.lengths import lengths
from kendall.queueing.estimation.summaries import Stalls, WithinCalls
from kendall.queueing.estimation.window_queue import QueueLimits
from tests.queueing.assessed_windows import LAW, capacity, seen

FOUR, SLOTS = (
    Setting(policy="capped:max_batch_size=4"),
    Setting(policy="continuous:max_batch_size=4"),
)


def point(setting: Setting, load: float = 0.5, **about: Any) -> OperatingPoint:
    """Rate +- 1 %, speed +- 0.5 %, cv 0.15 +- 0.01, at 50 s."""
    rate = load * capacity(setting)
    found = replace(seen(50.0, setting, rate).estimates, **about)
    return OperatingPoint(
        estimates=found, shape=LAW, limits=QueueLimits(engine=EngineBounds(max_num_seqs=8))
    )


def at(of: OperatingPoint, setting: Setting, before: LongRun | None = None) -> LongRun:
    load = of.model(setting).load(of.rate)
    return long_run(of, setting, of.model(setting), symmetric(load, 0.01, 500.0), before=before)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("changed", "stands"),
    [
        ({}, True),
        ({"now": 50.0 + KEPT - 0.1}, True),
        ({"now": 50.0 + KEPT}, False),
        ({"now": 49.9}, False),
        ({"epoch": 1}, False),
        ({"rate": 1 + STEP - 0.001}, True),
        ({"rate": 1 + STEP + 0.001}, False),
        ({"rate": 1 - STEP - 0.001}, False),
        ({"speed": 1 + STEP - 0.001}, True),
        ({"speed": 1 + STEP + 0.001}, False),
        ({"cv": math.sqrt(0.15**2 + 0.9 * SCATTER)}, True),
        ({"cv": math.sqrt(0.15**2 + 1.1 * SCATTER)}, False),
        ({"stalls": Stalls(3, 0.02, 1.0, None, 0.5)}, False),
    ],
)
def test_it_stands_for_a_while_as_long_as_the_estimates_move_little(
    changed: dict[str, Any], stands: bool
) -> None:
    first = at(point(FOUR), FOUR)
    known = first.estimates
    about = dict(changed)
    rate, speed = about.pop("rate", 1.0), about.pop("speed", 1.0)
    about |= {
        "arrival_rate": known.arrival_rate.scaled(rate),
        "speed": known.speed.scaled(speed),
        "cv": symmetric(about.pop("cv", known.cv.value), 0.01, 500.0),
    }
    again = at(replace(first.point, estimates=replace(known, **about)), FOUR, first)
    assert (again is first) == stands


@pytest.mark.parametrize(("moved", "stands"), [(0.9, True), (1.1, False)])
def test_near_saturation_it_stands_within_a_fifth_of_what_is_free(
    moved: float, stands: bool
) -> None:
    first = at(point(FOUR, 0.96), FOUR)
    load, rate = first.load.value, first.estimates.arrival_rate
    there = load + moved * MOVED / (1 + MOVED) * (1 - load)  # of what is free there
    other = replace(first.estimates, arrival_rate=rate.scaled(there / load))
    assert (at(replace(first.point, estimates=other), FOUR, first) is first) == stands


def test_servers_and_the_lengths_of_calls_that_differ_in_another_way_are_another_queue() -> None:
    two = Setting(policy=FOUR.policy, servers=2)
    of = replace(point(FOUR), factors={0: 1.0, 1: 1.1})
    first = at(of, two)
    assert first.model.engine.server_speeds == (1.0, 1.1)
    assert at(replace(of, factors={0: 1.0, 1: 1.11}), two, first) is first
    assert at(replace(of, factors={0: 1.0, 1: 1.2}), two, first) is not first
    assert at(replace(of, factors={}), two, first) is not first


def test_without_a_steady_state_nothing_is_said_but_the_load() -> None:
    found = at(point(FOUR, 1.2), FOUR)
    assert (found.prediction, found.mean, found.answered, found.stalled) == (None,) * 4
    assert found.interval == UNKNOWN
    assert (found.speed_elasticity, found.with_independent_lengths) == (0.0, 1.0)
    assert found.load.value == pytest.approx(1.2, rel=0.01)


@pytest.mark.parametrize("name", ["speed", "arrival_rate"])
def test_an_estimate_without_an_interval_leaves_that_of_the_mean_open(name: str) -> None:
    whole = point(FOUR)
    value = getattr(whole.estimates, name).value
    vague = replace(whole.estimates, **{name: replace(UNKNOWN, value=value)})
    found = at(replace(whole, estimates=vague), FOUR)
    assert found.interval == without_interval(found.mean)  # type: ignore[arg-type]
    assert at(whole, FOUR).interval.known


def test_the_sojourn_of_continuous_is_compared_and_elsewhere_the_delay_of_the_dispatched() -> None:
    batches, slots = at(point(FOUR), FOUR), at(point(SLOTS, policy="continuous"), SLOTS)
    assert batches.prediction is not None
    assert slots.prediction is not None
    assert batches.mean == batches.prediction.served_queueing_delay.mean
    assert slots.mean == slots.prediction.sojourn_time.mean
    assert batches.interval == batches.point.forecast(FOUR).mean
    assert slots.interval == slots.point.forecast(SLOTS).sojourn


def test_stalls_cost_what_the_same_machine_without_them_lacks() -> None:
    stalls = Stalls(3, 0.02, 1.0, None, 0.5)
    found = at(point(FOUR, 0.4, stalls=stalls), FOUR)
    told, queue = found.stalled, found.model
    assert told is not None
    assert queue.engine.law.stall_share == 0.02
    calm = precise(queue.but(law=queue.engine.law.without_stalls()), found.point.rate)
    assert told.smooth == pytest.approx(calm.served_queueing_delay.mean)
    assert told.mean == found.mean > told.smooth
    behind = at(point(SLOTS, 0.4, policy="continuous", stalls=stalls), SLOTS)
    assert behind.stalled is not None
    backlog = behind.point.backlog(behind.model, behind.point.rate)
    assert behind.stalled.price == pytest.approx(backlog)
    assert at(point(FOUR), FOUR).stalled is None


def test_a_slower_machine_and_more_requests_change_the_delay_alike() -> None:
    """Scaling time scales the delay."""
    of, measure = point(FOUR), Criterion()
    rate, here = (of.sensitivity.at_rate(FOUR, measure, factor) for factor in (0.95, 1.0))
    by_rate = math.log(here / rate) / -math.log(0.95)
    assert at(of, FOUR).speed_elasticity == pytest.approx(1 + by_rate, rel=0.02)


def test_sequences_of_a_call_and_their_likeness_have_errors_of_their_own() -> None:
    known = WithinCalls(symmetric(0.5, 0.01, 1e3), symmetric(0.5, 0.01, 1e3))

    def width(count: int, within: WithinCalls = known) -> float:
        sizes = np.random.default_rng(3).choice([1, 2, 3, 4, 6], count)
        of = point(FOUR, 0.15, sequences=lengths(sizes), within_calls=within)
        return at(of, FOUR).interval.relative

    assert width(60) > 1.2 * width(6000)
    vague = WithinCalls(symmetric(0.5, 0.5, 9.0), symmetric(0.5, 0.5, 9.0))
    assert width(6000, vague) > 1.2 * width(6000)


def test_batches_have_no_quantiles_of_answers() -> None:
    found = at(point(FOUR), FOUR)
    assert found.answered is found.prediction is not None
