"""The autopilot's choice: what is known of a window, what a setting gains, which settings may be
chosen, and when.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kendall.queueing.choosing.answer import SIMULATED
from kendall.queueing.choosing.autopilot.assessed_window import (
    LONGEST,
    AssessedWindow,
    assessed_window,
)
from kendall.queueing.choosing.autopilot.bounds import AutopilotBounds, Rules, knob_between
from kendall.queueing.choosing.autopilot.candidates import (
    candidates,
    clipped_fraction,
    lower_fraction,
    upper_fraction,
)
from kendall.queueing.choosing.autopilot.choosing import (
    Chooser,
    between,
    ranked,
)
from kendall.queueing.choosing.autopilot.controller import Autopilot
from kendall.queueing.choosing.autopilot.decision import Decision
from kendall.queueing.choosing.autopilot.knowledge import Knowledge, learn
from kendall.queueing.choosing.autopilot.state import Carried, FailedSetting, State, Trial
from kendall.queueing.choosing.candidates import preferred, sized
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.assumptions.assumption import Assumption
from kendall.queueing.estimation.assumptions.compared_window import observed_mean
from kendall.queueing.estimation.interval import UNKNOWN, Estimate, symmetric
from kendall.queueing.estimation.lengths.lengths import lengths
from kendall.queueing.estimation.stall_backlog import stall_backlog, utilisation_of
from kendall.queueing.estimation.summaries import Stalls
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.json_form import json_object
from kendall.queueing.measurement.batch_means import batch_means_interval
from kendall.queueing.simulation.experiment import simulate_run
from tests.queueing.assessed_windows import BOUNDS, LAW, SEQS, capacity, seen
from tests.queueing.estimation_runs import Engine, poisson, serve
from tests.queueing.estimation_runs import seen as window_of_run

ELASTIC, FOUR, SINGLE = (
    Setting(policy="elastic"),
    Setting(policy="capped:max_batch_size=4"),
    Setting(policy="single"),
)
RULES = Rules()


def test_what_the_controller_goes_by_unless_it_is_told() -> None:
    assert dataclasses.asdict(RULES) == {
        "threshold": 0.05,
        "floor": 1e-3,
        "margin": 0.02,
        "safer": 0.05,
        "think_every": 60.0,
        "cool_down": 60.0,
        "fewest": 200,
        "after_rollback": 4.0,
        "rescue_gap": 5.0,
        "longest_trial": 300.0,
        "forbidden": 600.0,
        "forgiven": 0.3,
        "carried": 300.0,
        "fewest_arrivals": 30,
        "fewest_ended": 10,
        "unseen_speed": 0.1,
        "repeat": 300.0,
    }
    assert LONGEST == 32_768


@pytest.mark.parametrize(
    ("value", "low", "high"), [(math.nan, 0.9, 1.1), (2.0, 0.9, 2.2), (0.5, 0.45, 1.1)]
)
def test_a_speed_that_no_interval_shows_may_be_its_value_or_the_calibrated_one(
    value: float, low: float, high: float
) -> None:
    found = known(seen(0.0, ELASTIC, 10.0, speed=replace(UNKNOWN, value=value))).speed
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.value == (value if math.isfinite(value) else 1.0)


# a look


def test_a_look_is_judged_on_two_hundred_requests_and_holds_what_was_observed() -> None:
    assert [seen(0.0, ELASTIC, 1.0, judged=count).enough for count in (199, 200)] == [False, True]
    assert not replace(seen(0.0, ELASTIC, 1.0), assumptions=()).enough
    wrong = [
        Assumption(name, False, 0.0, name) for name in ("settled", "constant_rate", "no_stalls")
    ]
    shown = replace(
        seen(0.0, ELASTIC, 1.0), assumptions=(*wrong, Assumption("open_loop", None, 0.0, ""))
    )
    assert [each.name for each in shown.failing()] == ["no_stalls"]
    assert [shown.holds(name) for name in ("settled", "open_loop", "law_shape")] == [
        False,
        None,
        None,
    ]
    assert seen(0.0, ELASTIC, 1.0).holds("stable_queue")
    apart = replace(
        shown, observed=symmetric(1.0, 0.1, 9.0), observed_sojourn=symmetric(2.0, 0.1, 9.0)
    )
    assert [
        apart.observed_of(name).value
        for name in ("queueing_delay", "sojourn_time", "time_to_first_token")
    ] == [1.0, 2.0, 1.0]  # type: ignore[arg-type]


def test_a_look_at_a_window_without_an_assessment_has_no_assumptions() -> None:
    window = replace(
        window_of_run(serve(poisson(50.0, 600, 1), Engine(most=8), 1), "elastic"), waiting=7
    )
    found = assessed_window(window, LAW, ELASTIC, QueueLimits(), None, longest=99)
    assert (found.assumptions, found.waiting, found.longest, found.judged) == (
        (),
        7,
        99,
        window.judged().size,
    )
    delays = batch_means_interval(window.judged())
    assert (found.observed.value, found.observed.high) == pytest.approx((delays.mean, delays.high))
    assert found.observed.value == pytest.approx(observed_mean(window).value)
    assert found.observed_sojourn.value == pytest.approx(window.judged(sojourn=True).mean())
    assert (
        assessed_window(window.having(window.rows[:0]), LAW, ELASTIC, QueueLimits(), None).observed
        == UNKNOWN
    )


# what is known


def known(shown: AssessedWindow, state: State | None = None) -> Knowledge:
    found = learn(shown, state or State(), RULES)
    assert isinstance(found, Knowledge)
    return found


@pytest.mark.parametrize(
    ("count", "ended", "missing"),
    [(30.0, 60, None), (29.9, 60, "30 arrivals known, 30"), (30.0, 9, "9 answers ended, 10")],
)
def test_thirty_arrivals_and_ten_answers_are_needed(
    count: float, ended: int, missing: str | None
) -> None:
    counts = lengths([5] * 60 + [4] * 40, [False] * ended + [True] * (60 - ended) + [True] * 40)
    shown = seen(0.0, Setting(policy="elastic", max_output_tokens=5), 10.0, known=counts)
    shown = replace(
        shown, estimates=replace(shown.estimates, arrival_rate=symmetric(10.0, 0.1, count))
    )
    found = learn(shown, State(), RULES)
    assert (found if isinstance(found, str) else "").startswith(missing or "")
    assert isinstance(found, Knowledge) == (missing is None)


def test_a_speed_that_was_not_seen_is_the_calibrated_one_within_a_tenth() -> None:
    found = known(seen(0.0, ELASTIC, 10.0, speed=UNKNOWN))
    assert (found.speed.value, found.speed.low, found.speed.high) == pytest.approx((1.0, 0.9, 1.1))
    assert found.speed.effective_n == 0.0
    slow = known(replace(seen(0.0, ELASTIC, 10.0, speed=UNKNOWN), shape=LAW.at_speed(2.0)))
    assert (slow.speed.value, slow.speed.high) == pytest.approx((2.0, 2.2))


def test_the_ends_of_a_load_are_those_of_rate_and_speed_together() -> None:
    found = replace(
        known(seen(0.0, ELASTIC, 10.0)),
        rate=Estimate(10.0, 8.0, 13.0, 9.0),
        speed=Estimate(2.0, 1.5, 2.2, 9.0),
    )
    assert (found.highest, found.lowest) == pytest.approx((1.3 * 1.1, 0.8 * 0.75))
    assert replace(found, rate=Estimate(10.0, -2.0, 22.0, 9.0)).lowest == 0.0


def test_the_rate_of_the_epoch_before_is_remembered_when_another_begins() -> None:
    state = State()
    known(seen(10.0, ELASTIC, 10.0, epoch=0), state)
    known(seen(20.0, ELASTIC, 11.0, epoch=0), state)
    assert (state.rate.estimate.value, state.rate.at, state.rate.epoch) == (11.0, 20.0, 0)
    assert not state.rate_before.estimate.known
    known(seen(30.0, ELASTIC, 30.0, epoch=1), state)
    assert (state.rate_before.estimate.value, state.rate_before.at) == (11.0, 20.0)
    assert (state.speed_before.estimate.value, state.rate.epoch) == (1.0, 1)


@pytest.mark.parametrize(
    ("limit", "ends"), [(None, [256, 40]), (40, [256]), (39, [256]), (41, [256, 40])]
)
def test_lengths_of_which_something_is_open_end_at_both_extremes(
    limit: int | None, ends: list[int]
) -> None:
    """Sixty of a hundred were cut at 40 tokens, ten at 30; the engine can answer 256."""
    counts = lengths([5] * 30 + [30] * 10 + [40] * 60, [False] * 30 + [True] * 70)
    found = known(seen(0.0, Setting(policy="elastic", max_output_tokens=limit), 10.0, known=counts))
    samples = [each.estimates.output_tokens for each in found.operating_points]
    assert [each.known_to for each in samples] == ends
    assert [int(np.count_nonzero(each.censored)) for each in samples] == [10] * len(ends), (
        "what was cut before stays so"
    )
    assert [
        int(np.count_nonzero(each.counts == end)) for each, end in zip(samples, ends, strict=True)
    ] == [60] * len(ends)


# bounds and candidates


def test_bounds_at_their_borders() -> None:
    bounds = AutopilotBounds(policies=("elastic",), smallest_token_limit=16, largest_token_limit=64)
    assert [bounds.allows_limit(limit) for limit in (15, 16, 64, 65, None)] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert AutopilotBounds().allows_limit(10**6)
    assert AutopilotBounds().allows_limit(None)
    assert AutopilotBounds().token_limits(33) == (16, 24, 32)
    assert AutopilotBounds().token_limits(32) == (16, 24), (
        "an answer of the longest length is never cut"
    )
    assert bounds.token_limits(49) == (16, 24, 32, 48)
    assert (
        AutopilotBounds().bound(None),
        AutopilotBounds(largest_batch_size=7).bound(None),
        AutopilotBounds(largest_batch_size=7).bound(5),
    ) == (64, 7, 5)
    assert AutopilotBounds(
        max_clipped_fraction=0.0,
        smallest_token_limit=1,
        largest_token_limit=1,
        largest_batch_size=1,
    ).token_limits(9) == (1,)
    assert [preferred(1, high) for high in (0, 1, 2, 3, 4)] == [
        (),
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 3, 4),
    ]


def test_families_have_their_size_or_the_engines() -> None:
    assert [sized("elastic", size, 8) for size in (7, 8, 9)] == [
        "elastic:max_batch_size=7",
        "elastic",
        "elastic",
    ]
    assert (sized("elastic", 9, None), sized("capped", 8, 8), sized("dynamic", 8, 8)) == (
        "elastic:max_batch_size=9",
        "capped:max_batch_size=8",
        "dynamic",
    )
    both = AutopilotBounds(policies=("capped", "elastic", "fixed:batch_size=2"))
    assert [
        each.policy for each in both.other_policies(Setting(policy="capped:max_batch_size=3"), 8)
    ] == [
        "capped:max_batch_size=8",
        "elastic:max_batch_size=3",
        "elastic",
        "fixed:batch_size=2",
    ]
    sizes = [each.policy for each in both.other_sizes(Setting(policy="dynamic"), 4)]
    assert sizes == [f"capped:max_batch_size={size}" for size in (1, 2, 3, 4)]
    assert AutopilotBounds(policies=("single",)).other_sizes(SINGLE, 8) == []
    assert AutopilotBounds(policies=("elastic",)).other_sizes(FOUR, 8) == []


@pytest.mark.parametrize(
    ("before", "after", "knob"),
    [
        (ELASTIC, replace(ELASTIC, max_output_tokens=9), "token limit"),
        (ELASTIC, Setting(policy="elastic:max_batch_size=2"), "batch size"),
        (Setting(policy="dynamic"), FOUR, "batch size"),
        (Setting(policy="dynamic"), ELASTIC, "policy"),
        (FOUR, ELASTIC, "policy"),
    ],
)
def test_a_knob_that_was_turned_is_named(before: Setting, after: Setting, knob: str) -> None:
    assert knob_between(before, after) == knob_between(after, before) == knob


@pytest.mark.parametrize("z", [1.0, 1.6448536269514722])
def test_a_share_that_is_cut_has_wilsons_interval(z: float) -> None:
    """Its ends are the shares from which the estimate is z of their own errors away."""
    found = lengths([10] * 80 + [50] * 15 + [20] * 25, [False] * 95 + [True] * 25)
    for limit, number in ((20, 120), (21, 95), (10, 120)):
        share = clipped_fraction(found, limit)
        for end in (upper_fraction(found, limit, z), lower_fraction(found, limit, z)):
            assert abs(share - end) == pytest.approx(z * math.sqrt(end * (1 - end) / number))
        assert lower_fraction(found, limit, z) < share < upper_fraction(found, limit, z)
    assert clipped_fraction(found, 10**6) == 0.0
    open_ones = lengths([5] * 9, [True] * 9)
    assert (upper_fraction(open_ones, 6), lower_fraction(open_ones, 6)) == (1.0, 0.0)


def test_in_an_unstable_queue_a_limit_is_taken_more_readily() -> None:
    """Of 150 answers 4 % go beyond 16 tokens: the upper end is 5.9 or 7.6 %, against 6.5 %."""
    counts = lengths([10] * 144 + [100] * 6)
    bounds = replace(
        BOUNDS, policies=("elastic",), max_clipped_fraction=0.065, smallest_token_limit=16
    )
    assert upper_fraction(counts, 16, 1.0) < 0.065 < upper_fraction(counts, 16)
    shown = seen(0.0, ELASTIC, 1.0, known=counts)
    for urgent in (True, False):
        limits = {each.max_output_tokens for each in candidates(shown, bounds, urgent=urgent)}
        assert (16 in limits) == urgent
    limited = seen(0.0, replace(ELASTIC, max_output_tokens=16), 1.0, known=counts)
    assert {each.max_output_tokens for each in candidates(limited, bounds, urgent=True)} == {16}, (
        "no lower one"
    )


# what a setting gains


def operating_point(rate: float = 20.0, **about: Any) -> OperatingPoint:
    shown = seen(0.0, ELASTIC, rate)
    return OperatingPoint(
        **({"estimates": shown.estimates, "shape": LAW, "limits": shown.limits} | about)
    )


def test_settings_are_ranked_by_their_simulated_delays_or_sojourns() -> None:
    of = operating_point(0.5 * capacity(ELASTIC))
    run = simulate_run(of.model(FOUR), of.rate, SIMULATED, np.random.SeedSequence(0)).after(
        SIMULATED // 10
    )
    for quantity in ("queueing_delay", "sojourn_time"):
        assert of.ranking_mean(FOUR, quantity) == getattr(run, quantity).mean()  # type: ignore[arg-type]
    crowded = operating_point(50 * capacity(ELASTIC))
    assert crowded.ranking_mean(FOUR, "queueing_delay") == math.inf


def test_the_lost_are_ranked_by_their_patience_and_slots_by_their_stalls() -> None:
    impatient = operating_point(
        2 * capacity(FOUR),
        limits=QueueLimits(patience=0.05, engine=EngineBounds(max_num_seqs=SEQS)),
    )
    run = simulate_run(
        impatient.model(FOUR), impatient.rate, SIMULATED, np.random.SeedSequence(0)
    ).after(SIMULATED // 10)
    assert 0.3 < np.mean(run.lost) < 0.7
    assert impatient.ranking_mean(FOUR, "queueing_delay") == pytest.approx(
        np.where(run.lost, 0.05, run.queueing_delay).mean()
    )
    of = operating_point(0.4 * capacity(ELASTIC))
    stalling = operating_point(
        estimates=replace(of.estimates, stalls=Stalls(9, 0.05, 1.0, None, 0.5))
    )
    slots = Setting(policy="continuous:max_batch_size=4")
    calm, with_stalls = (each.ranking_mean(slots, "sojourn_time") for each in (of, stalling))
    model = of.model(slots)
    busy = utilisation_of(model, of.rate)
    backlog = stall_backlog(stalling.estimates.stalls, model, model.load(of.rate), utilisation=busy)
    assert with_stalls - calm == pytest.approx(backlog, rel=1e-6)
    assert stalling.ranking_mean(slots, "queueing_delay") == pytest.approx(
        of.ranking_mean(slots, "queueing_delay")
    )


def test_what_is_predicted_of_a_setting_is_unknown_without_a_steady_state() -> None:
    of = operating_point(0.5 * capacity(ELASTIC))
    assert of.predicted_mean(ELASTIC, "queueing_delay") == of.forecast(ELASTIC).mean
    assert of.predicted_mean(ELASTIC, "sojourn_time") == of.forecast(ELASTIC).sojourn
    assert not operating_point(5 * capacity(ELASTIC)).predicted_mean(ELASTIC, "sojourn_time").known


# which setting


def chooser(
    rate: float,
    current: Setting = ELASTIC,
    *,
    state: State | None = None,
    bounds: AutopilotBounds = BOUNDS,
    **about: Any,
) -> Chooser:
    shown = seen(100.0, current, rate, **about)
    held = state or State()
    return Chooser(shown, known(shown, held), bounds, held, RULES)


def at_load(load: float, setting: Setting = FOUR, **about: Any) -> Chooser:
    """The rate at which that setting has that load by the estimates."""
    return chooser(load / chooser(1.0, **about).loads(setting)[0], **about)


@pytest.mark.parametrize(("load", "safe"), [(0.965, True), (0.9665, False)])
def test_a_setting_is_safe_two_hundredths_below_capacity_at_the_upper_ends(
    load: float, safe: bool
) -> None:
    """Rate and speed within 1 % and 0.5 %: a factor of 1.01505."""
    of = at_load(load)
    assert of.loads(FOUR)[0] == pytest.approx(load)
    assert of.loads(ELASTIC)[0] < load
    assert of.safe(FOUR) == safe
    assert (of.against(FOUR) is None) == safe
    if not safe:
        assert (
            of.against(FOUR)
            == f"at load {load:.2f} (up to {load * 1.01505:.2f}) the queue might become unstable"
        )
    found = of.to_bounds(FOUR, "why")
    assert (found.against is None, found.decision.reason) == (
        safe,
        "why; this is the nearest setting inside the bounds",
    )


def test_an_unstable_setting_is_left_for_one_that_is_less_so() -> None:
    of = at_load(1.3, current=FOUR)
    assert of.safe(FOUR)
    assert of.safe(ELASTIC)
    assert not of.safe(SINGLE)


def test_the_load_falls_by_a_fraction_or_it_does_not() -> None:
    of = at_load(0.5)
    ratio = of.loads(ELASTIC)[0] / of.loads(FOUR)[0]
    back = at_load(0.5, current=FOUR)
    assert back.lowers(ELASTIC, 1 - ratio - 1e-9)
    assert not back.lowers(ELASTIC, 1 - ratio + 1e-9)
    assert of.lowers(ELASTIC, 0.0)
    assert not of.lowers(ELASTIC, 1e-9)


def test_a_failure_is_said_with_its_number() -> None:
    for times, words in ((1, "1 time "), (2, "2 times ")):
        state = State(failures=(FailedSetting(knobs=FOUR, until=200.0, times=times, rate=20.0),))
        assert (chooser(20.0, state=state).failed(FOUR) or "").startswith(
            f"it did worse than predicted {words}at this load"
        )
        assert chooser(20.0, state=state).failed(ELASTIC) is None


def test_doubts_open_the_safe_direction_only() -> None:
    assert chooser(20.0).doubts() is None
    assert chooser(20.0, judged=199).doubts() == "there are not enough data for more"
    cut = lengths([5] * 30 + [40] * 70, [False] * 30 + [True] * 70)
    assert chooser(20.0, known=cut).doubts() == "there are not enough data for more", (
        "two operating points"
    )
    wrong = (
        Assumption("no_stalls", False, 0.1, "it stalls"),
        Assumption("constant_speed", False, 2.0, "it is slow"),
    )
    assert chooser(20.0, failing=wrong).doubts() == "it stalls; it is slow"


def test_a_decision_holds_both_loads_and_what_was_observed() -> None:
    observed = symmetric(0.2, 0.02, 100.0)
    of = at_load(0.6, observed=observed)
    found = of.decision(FOUR, "because", symmetric(0.1, 0.05, 9.0))
    assert (found.at, found.kind, found.knob, found.reason) == (
        100.0,
        "change",
        "policy",
        "because",
    )
    assert (found.before, found.after) == (ELASTIC, FOUR)
    assert (found.load_before, found.load_after) == (of.loads(ELASTIC)[0], pytest.approx(0.6))
    assert (found.compared, found.observed_before) == ("sojourn_time", observed)
    assert found.predicted_after == of.known.operating_points[0].forecast(FOUR).sojourn
    assert found.predicted_before == of.known.operating_points[0].forecast(ELASTIC).sojourn
    assert (
        at_load(0.6, observed=observed, judged=50).decision(FOUR, "", UNKNOWN).observed_before
        == UNKNOWN
    )
    assert between(ELASTIC, replace(ELASTIC, max_output_tokens=9)) == "queueing_delay"


def test_settings_are_ranked_by_what_compares_all_and_weighed_by_what_compares_two() -> None:
    of = at_load(0.5)
    pool = [
        FOUR,
        replace(ELASTIC, max_output_tokens=96),
        Setting(policy="elastic:max_batch_size=2"),
    ]
    found = ranked(of.known.operating_points[0], ELASTIC, pool)
    means = {
        setting: of.known.operating_points[0].ranking_mean(setting, "sojourn_time")
        for setting in pool
    }
    assert [each.setting for each in found] == sorted(pool, key=lambda setting: means[setting])
    assert {each.setting.policy: each.quantity for each in found} == {
        "capped:max_batch_size=4": "sojourn_time",
        "elastic": "queueing_delay",
        "elastic:max_batch_size=2": "queueing_delay",
    }


def test_of_an_unstable_queue_the_lowest_load_is_sought_among_those_that_did_not_fail() -> None:
    of = at_load(
        1.2,
        Setting(policy="capped:max_batch_size=8"),
        current=Setting(policy="capped:max_batch_size=8"),
    )
    found = of.rescue()
    assert found is not None
    assert found.against is None
    pool = {
        setting: of.loads(setting)[0] for setting in candidates(of.seen, of.bounds, urgent=True)
    }
    best = min(pool, key=lambda setting: pool[setting])
    assert found.decision.after == best
    load = of.loads(of.current)[0]
    ends = f"{load * of.known.lowest:.2f} to {load * of.known.highest:.2f}"
    assert found.decision.reason.startswith(
        f"the load is {load:.2f} ({ends}): the queue grows without bound; "
    )
    assert found.decision.reason.endswith(f"this has the lowest load, {pool[best]:.2f}")
    assert found.decision.predicted_gain.value == (
        1.0 if pool[best] < 1 else pytest.approx(1 - pool[best] / load)
    )
    failed = State(
        failures=(FailedSetting(knobs=best, until=1e9, times=1, rate=of.known.rate.value),)
    )
    second = replace(of, state=failed).rescue()
    assert second is not None
    assert second.decision.after == min(pool.keys() - {best}, key=lambda setting: pool[setting])
    nowhere = replace(
        of, bounds=AutopilotBounds(policies=("single",), max_clipped_fraction=0.0)
    ).rescue()
    assert nowhere is not None
    assert "no setting one knob away is known to lower the load by much" in (nowhere.against or "")
    assert nowhere.decision.after == of.current


# when


def test_an_unstable_queue_is_rescued_every_five_seconds() -> None:
    start, rate = (
        Setting(policy="dynamic"),
        3.0 * capacity(Setting(policy="elastic", max_output_tokens=96)),
    )
    for gap, again in ((4.9, False), (5.0, True)):
        pilot = Autopilot(bounds=BOUNDS, mode="act")
        first = pilot.decide(seen(10.0, start, rate))
        assert first is not None
        found = pilot.decide(seen(10.0 + gap, first.after, rate, epoch=1))
        assert (found is not None) == again


@pytest.mark.parametrize(("now", "said"), [(299.9, False), (300.0, True)])
def test_what_was_held_back_is_said_again_after_five_minutes(now: float, said: bool) -> None:
    pilot, current = Autopilot(bounds=BOUNDS, mode="advise"), Setting(policy="dynamic")
    rate = 0.5 * capacity(current)
    assert pilot.decide(seen(0.0, current, rate)) is not None
    assert (pilot.decide(seen(now, current, rate)) is not None) == said


@pytest.mark.parametrize(
    ("now", "count", "acts"), [(59.9, 1000, False), (60.0, 199, False), (60.0, 200, True)]
)
def test_after_a_change_a_minute_and_two_hundred_requests(
    now: float, count: int, acts: bool
) -> None:
    current = Setting(policy="dynamic")
    state = State(changed_at=0.0, cool_until=60.0)
    pilot = Autopilot(bounds=BOUNDS, mode="act", state=state)
    assert (
        pilot.decide(seen(now, current, 0.5 * capacity(current), count=count)) is not None
    ) == acts


def test_a_queue_is_unstable_by_its_growth_too() -> None:
    growing = Assumption("stable_queue", False, 1.0, "it grows")
    current = Setting(policy="dynamic")
    for about, rescued in (
        ({"failing": (growing,)}, True),
        ({"failing": (growing,), "judged": 100}, False),
        ({}, False),
    ):
        found = Autopilot(bounds=BOUNDS, mode="act").decide(
            seen(0.0, current, 0.7 * capacity(current), **about)
        )  # type: ignore[arg-type]
        assert (found is not None and "grows without bound" in found.reason) == rescued


@pytest.mark.parametrize(("cool_down", "rests", "thinks"), [(60.0, 240.0, 60.0), (1.25, 5.0, 5.0)])
def test_a_rollback_rests_four_times_as_long(cool_down: float, rests: float, thinks: float) -> None:
    """And the change that follows a rest begins another search a minute later."""
    change = Decision(
        at=90.0,
        kind="change",
        knob="policy",
        before=FOUR,
        after=ELASTIC,
        reason="it pays",
        predicted_after=symmetric(0.1, 0.01, 100.0),
    )
    rate = seen(100.0, ELASTIC, 1.0).estimates.arrival_rate
    autopilot = Autopilot(bounds=BOUNDS, mode="act", rules=replace(RULES, cool_down=cool_down))
    autopilot.state.trial = Trial(decision=change, rate=rate, waiting=0, unstable_before=False)
    found = autopilot.decide(seen(100.0, ELASTIC, 1.0, waiting=1000))
    assert found is not None
    assert found.kind == "rollback"
    state = autopilot.state
    assert (state.changed_at, state.cool_until, state.think_at) == (
        100.0,
        100.0 + rests,
        100.0 + thinks,
    )


# state


def test_a_state_on_another_clock_is_the_same_later() -> None:
    decision = Decision(
        at=7.0, kind="change", knob="policy", before=ELASTIC, after=FOUR, reason="r"
    )
    estimate = symmetric(10.0, 1.0, 50.0)
    state = State(
        changed_at=1.0,
        cool_until=2.0,
        think_at=3.0,
        trial=Trial(decision=decision, rate=estimate, waiting=4, unstable_before=True),
        failures=(FailedSetting(knobs=FOUR, until=5.0, times=2, rate=9.0),),
        rate=Carried(estimate, 6.0, 3),
        speed=Carried(estimate, 8.0, 3),
        rate_before=Carried(estimate, 1.5, 2),
        said=FOUR,
        said_at=9.0,
    )
    assert State.from_json(json_object(state)) == state
    later = state.shifted(100.0)
    assert (later.changed_at, later.cool_until, later.think_at, later.said, later.said_at) == (
        101.0,
        102.0,
        103.0,
        FOUR,
        109.0,
    )
    assert later.trial is not None
    assert (later.trial.decision, later.trial.waiting) == (replace(decision, at=107.0), 4)
    assert later.failures == (FailedSetting(knobs=FOUR, until=105.0, times=2, rate=9.0),)
    assert (later.rate, later.speed) == (Carried(estimate, 106.0), Carried(estimate, 108.0)), (
        "of no epoch of now"
    )
    assert not later.rate_before.estimate.known
    empty = State.from_json(json_object(State()))
    assert (empty.changed_at, empty.trial, empty.failures, empty.said) == (
        -math.inf,
        None,
        (),
        None,
    )


@pytest.mark.parametrize("epoch", [0, 1, 3])
def test_what_was_carried_over_a_restart_is_of_before_in_any_epoch(epoch: int) -> None:
    rate, speed = symmetric(10.0, 1.0, 50.0), symmetric(1.0, 0.1, 50.0)
    state = State(rate=Carried(rate, 6.0, 3), speed=Carried(speed, 8.0, 3)).shifted(100.0)
    known(seen(110.0, ELASTIC, 11.0, epoch=epoch), state)
    assert (state.rate_before, state.speed_before) == (Carried(rate, 106.0), Carried(speed, 108.0))
    assert (state.rate.epoch, state.speed.epoch) == (epoch, epoch)
