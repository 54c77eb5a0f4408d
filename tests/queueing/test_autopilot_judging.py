"""What may be changed, and what became of a change: each rule at its border."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from kendall.queueing.choosing.autopilot.assessed_window import AssessedWindow
from kendall.queueing.choosing.autopilot.bounds import AutopilotBounds, Rules
from kendall.queueing.choosing.autopilot.choosing import Chooser, RankedSetting
from kendall.queueing.choosing.autopilot.decision import Decision
from kendall.queueing.choosing.autopilot.judging import (
    judge,
    measured_gain,
    overwhelmed,
)
from kendall.queueing.choosing.autopilot.knowledge import Knowledge, learn
from kendall.queueing.choosing.autopilot.state import Carried, State, Trial
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.estimation.assumptions.assumption import Assumption
from kendall.queueing.estimation.interval import UNKNOWN, Estimate, symmetric
from kendall.queueing.estimation.lengths.lengths import lengths
from kendall.queueing.estimation.window_queue import QueueLimits
from tests.queueing.assessed_windows import seen

START, AFTER = Setting(policy="elastic"), Setting(policy="elastic", max_output_tokens=96)
RATE = symmetric(10.0, 1.0, 500.0)
UNSETTLED = Assumption("settled", False, 0.5, "the queue needs 300 s")
CHANGE = Decision(
    at=1000.0,
    kind="change",
    knob="token limit",
    before=START,
    after=AFTER,
    reason="it pays",
    load_before=0.9,
    load_after=0.7,
    predicted_after=symmetric(0.4, 0.1, 100.0),
    observed_before=symmetric(0.2, 0.04, 100.0),
)


def trial(*, unstable: bool = False, **about: object) -> Trial:
    decision = dataclasses.replace(CHANGE, **about)  # type: ignore[arg-type]
    return Trial(decision=decision, rate=RATE, waiting=5, unstable_before=unstable)


def later(now: float = 100.0, **about: object) -> AssessedWindow:
    """`now` seconds after the change."""
    return seen(
        1000.0 + now, AFTER, 10.0, epoch=1, **{"observed": symmetric(0.3, 0.03, 100.0)} | about
    )  # type: ignore[arg-type]


def kind_of(
    assessed: AssessedWindow,
    *,
    rate: Estimate = RATE,
    predicted: Estimate = UNKNOWN,
    unstable: bool = False,
    **about: object,
) -> str | None:
    found = judge(assessed, trial(unstable=unstable, **about), rate, predicted, Rules())
    return None if found is None else found.kind


@pytest.mark.parametrize(
    ("waiting", "about", "unstable", "too_many"),
    [
        # three times what waits at the upper ends, 11/s over 0.5 s and the 5 of then, and 50
        (81, {}, False, False),
        (82, {}, False, True),
        # a longer delay was observed before: 11/s over 1 s
        (98, {"observed_before": symmetric(1.0, 0.5, 100.0)}, False, False),
        (99, {"observed_before": symmetric(1.0, 0.5, 100.0)}, False, True),
        (81, {"observed_before": UNKNOWN}, False, False),
        (82, {"observed_before": UNKNOWN}, False, True),
        # nothing to compare with
        (10**6, {"predicted_after": UNKNOWN}, False, False),
        (10**6, {}, True, False),
    ],
)
def test_a_queue_has_grown_beyond_three_times_its_prediction_and_fifty(
    waiting: int, about: dict[str, object], unstable: bool, too_many: bool
) -> None:
    assert overwhelmed(later(waiting=waiting), trial(unstable=unstable, **about)) == too_many


@pytest.mark.parametrize(
    ("observed", "predicted", "before", "kind"),
    [
        # 0.3 +- 0.03 against half widths of 0.04: 0.05 apart is beyond both
        (
            symmetric(0.3, 0.03, 100.0),
            symmetric(0.2499, 0.04, 100.0),
            symmetric(0.2, 0.04, 100.0),
            "rollback",
        ),
        (
            symmetric(0.3, 0.03, 100.0),
            symmetric(0.2501, 0.04, 100.0),
            symmetric(0.2, 0.04, 100.0),
            "kept",
        ),
        (
            symmetric(0.3, 0.03, 100.0),
            symmetric(0.2, 0.04, 100.0),
            symmetric(0.2499, 0.04, 100.0),
            "rollback",
        ),
        (
            symmetric(0.3, 0.03, 100.0),
            symmetric(0.2, 0.04, 100.0),
            symmetric(0.2501, 0.04, 100.0),
            "kept",
        ),
        # better than either
        (
            symmetric(0.1, 0.01, 100.0),
            symmetric(0.2, 0.01, 100.0),
            symmetric(0.05, 0.01, 100.0),
            "kept",
        ),
        (
            symmetric(0.1, 0.01, 100.0),
            symmetric(0.05, 0.01, 100.0),
            symmetric(0.2, 0.01, 100.0),
            "kept",
        ),
        # against what is not known
        (symmetric(0.3, 0.03, 100.0), UNKNOWN, symmetric(0.1, 0.01, 100.0), "kept"),
        (symmetric(0.3, 0.03, 100.0), symmetric(0.1, 0.01, 100.0), UNKNOWN, "kept"),
    ],
)
def test_a_change_is_rolled_back_where_it_does_clearly_worse_than_predicted_and_than_before(
    observed: Estimate, predicted: Estimate, before: Estimate, kind: str
) -> None:
    found = judge(later(observed=observed), trial(observed_before=before), RATE, predicted, Rules())
    assert found is not None
    assert (found.kind, found.at, found.observed_after) == (kind, 1100.0, observed)
    back = kind == "rollback"
    assert (found.before, found.after) == ((AFTER, START) if back else (START, AFTER))
    assert (found.load_before, found.load_after) == ((0.7, 0.9) if back else (0.9, 0.7))
    if before.known:
        assert found.measured_gain.value == pytest.approx(1 - observed.value / before.value)


@pytest.mark.parametrize(
    ("now", "about", "kind"),
    [
        (59.0, {}, None),
        (60.0, {}, "rollback"),
        (100.0, {"judged": 199}, None),
        (100.0, {"judged": 200}, "rollback"),
        (100.0, {"failing": (UNSETTLED,)}, None),
        (299.0, {"failing": (UNSETTLED,)}, None),
        (300.0, {"failing": (UNSETTLED,)}, "kept"),
        (300.0, {}, "rollback"),
        (100.0, {"observed": UNKNOWN}, None),
    ],
)
def test_a_change_is_judged_after_a_minute_by_200_requests_of_a_settled_queue_or_kept_after_five(
    now: float, about: dict[str, object], kind: str | None
) -> None:
    """Clearly worse."""
    assert kind_of(later(now, **about), predicted=symmetric(0.1, 0.01, 100.0)) == kind


@pytest.mark.parametrize(
    ("rate", "kind"),
    [
        (symmetric(13.4, 1.3, 500.0), "rollback"),  # by 29 %
        (symmetric(13.6, 1.3, 500.0), "kept"),  # by 31 %, and the intervals part: 12.3 and 11
        (symmetric(13.6, 2.7, 500.0), "rollback"),  # they meet
        (symmetric(13.6, 2.6, 500.0), "rollback"),  # at 11 alone
        (symmetric(7.0, 2.0, 500.0), "rollback"),  # at 9
        (symmetric(7.5, 0.5, 500.0), "rollback"),
        (symmetric(7.3, 0.5, 500.0), "kept"),
    ],
)
def test_a_change_is_not_compared_where_the_rate_has_moved_by_three_tenths(
    rate: Estimate, kind: str
) -> None:
    assert kind_of(later(), rate=rate, predicted=symmetric(0.1, 0.01, 100.0)) == kind
    grown = later(20.0, waiting=1000, judged=20)
    assert kind_of(grown, rate=rate) == ("rollback" if kind == "rollback" else None)


def test_what_had_no_steady_state_before_is_kept() -> None:
    worse = symmetric(0.1, 0.01, 100.0)
    assert kind_of(later(), predicted=worse, unstable=True) == "kept"
    found = judge(later(), trial(unstable=True), RATE, worse, Rules())
    assert found is not None
    assert not found.measured_gain.known


def test_the_measured_gain_has_the_sign_of_the_change_and_the_doubts_of_both_means() -> None:
    one, half, double = (
        symmetric(value, 0.1 * value, n) for value, n in ((1.0, 50.0), (0.5, 80.0), (2.0, 80.0))
    )
    factor = math.exp(math.hypot(0.1, 0.1))
    better, worse = measured_gain(one, half), measured_gain(one, double)
    assert (better.value, better.low, better.high) == pytest.approx(
        (0.5, 1 - 0.5 * factor, 1 - 0.5 / factor)
    )
    assert (worse.value, worse.low, worse.high) == pytest.approx(
        (-1.0, 1 - 2 * factor, 1 - 2 / factor)
    )
    assert better.effective_n == 50.0
    for before, after in (
        (one, UNKNOWN),
        (UNKNOWN, one),
        (symmetric(0.0, 0.1, 9.0), one),
        (one, symmetric(0.0, 0.1, 9.0)),
    ):
        assert not measured_gain(before, after).known


def test_a_failure_speaks_against_a_setting_for_ten_minutes_then_twenty_near_its_rate() -> None:
    state, rules = State(), Rules()
    state.remember(AFTER, 10.0, 1000.0, rules)
    (first,) = state.failures
    assert (first.knobs, first.until, first.times, first.rate) == (AFTER, 1600.0, 1, 10.0)
    assert state.failure_of(AFTER, 10.0, 1599.0, rules) is first
    assert state.failure_of(AFTER, 10.0, 1600.0, rules) is None
    assert state.failure_of(START, 10.0, 1001.0, rules) is None
    for rate, speaks in ((13.4, True), (13.6, False), (7.5, True), (7.3, False)):
        assert (state.failure_of(AFTER, rate, 1001.0, rules) is first) == speaks
    state.remember(AFTER, 12.0, 2000.0, rules)
    (second,) = state.failures
    assert (second.until, second.times, second.rate) == (3200.0, 2, 12.0)
    state.remember(START, 12.0, 2000.0, rules)
    assert [(each.knobs, each.until, each.times) for each in state.failures] == [
        (AFTER, 3200.0, 2),
        (START, 2600.0, 1),
    ]


def weighed(mean: float | None, load: float = 0.5) -> RankedSetting:
    return RankedSetting(START, load, math.inf if mean is None else mean)


@pytest.mark.parametrize(
    ("before", "after", "worth"),
    [
        # five per cent, and a millisecond
        (weighed(1.0), weighed(0.949), True),
        (weighed(1.0), weighed(0.951), False),
        (weighed(0.01), weighed(0.00899), True),
        (weighed(0.01), weighed(0.00901), False),
        (weighed(1.0), weighed(1.5), False),
        # over no steady state any; between two without one five per cent of the load
        (weighed(None, 1.2), weighed(1e9), True),
        (weighed(None, 1.2), weighed(None, 1.139), True),
        (weighed(None, 1.2), weighed(None, 1.141), False),
        (weighed(1.0), weighed(None, 1.2), False),
    ],
)
def test_a_gain_is_worth_a_new_epoch_from_five_per_cent_and_a_millisecond_on(
    before: RankedSetting, after: RankedSetting, worth: bool
) -> None:
    assert after.beats(before, Rules()) == worth


@pytest.mark.parametrize(
    ("before", "after", "threshold"),
    [
        (weighed(1.0), weighed(0.5), {"threshold": 0.5}),
        (weighed(1.0), weighed(0.5), {"floor": 0.5}),
        (weighed(None, 1.5), weighed(None, 0.75), {"safer": 0.5}),
    ],
)
def test_a_gain_as_large_as_a_threshold_is_worth_it(
    before: RankedSetting, after: RankedSetting, threshold: dict[str, float]
) -> None:
    assert after.beats(before, Rules(**threshold))
    ((name, value),) = threshold.items()
    assert not after.beats(before, Rules(**{name: value + 1e-9}))


@pytest.mark.parametrize(
    ("own", "age", "value"),
    [
        # the earlier rate of 10 +- 0.1, sharper than this epoch's, stands in as long as it is fresh
        # and does not contradict it
        (symmetric(10.5, 1.0, 20.0), 60.0, 10.0),
        (symmetric(10.5, 1.0, 20.0), 299.0, 10.5),  # widened by 5 % a minute it is no sharper
        (symmetric(10.5, 4.0, 20.0), 299.0, 10.0),
        (symmetric(10.5, 4.0, 20.0), 300.0, 10.0),
        (symmetric(10.5, 4.0, 20.0), 301.0, 10.5),
        (symmetric(12.0, 1.0, 20.0), 60.0, 12.0),  # 11 to 13 against 9.5 to 10.5
        (symmetric(8.0, 1.0, 20.0), 60.0, 8.0),
        (symmetric(10.5, 0.05, 20.0), 0.0, 10.5),
        (symmetric(9.4, 0.5, 20.0), 0.0, 10.0),  # they meet at 9.9 alone, and at 10.1
        (symmetric(10.6, 0.5, 20.0), 0.0, 10.0),
        (UNKNOWN, 60.0, 10.0),
        (symmetric(0.0, 1.0, 20.0), 60.0, 10.0),
    ],
)
def test_of_two_rates_the_sharper_counts_unless_they_part(
    own: Estimate, age: float, value: float
) -> None:
    earlier = Carried(symmetric(10.0, 0.1, 700.0), 1000.0, 0)
    found = earlier.or_sharper(own, 1000.0 + age, Rules())
    assert found.value == value
    if value == 10.0:
        assert found.effective_n == 700.0
        assert found.high - 10.0 == pytest.approx(math.hypot(0.1, 0.5 * age / 60))
    assert Carried().or_sharper(own, 1000.0, Rules()) is own


def knowing(*loads: Mapping[Setting, float]) -> Knowledge:
    """Of operating points with these loads; rate and speed are known to 5 and 2 %, so a load may be
    7.1 % higher and 6.9 % lower.
    """
    operating_points: list[Any] = [
        SimpleNamespace(load=lambda setting, each=each: each[setting]) for each in loads
    ]
    return Knowledge(
        tuple(operating_points), symmetric(10.0, 0.5, 500.0), symmetric(1.0, 0.02, 500.0)
    )


def choosing(*loads: Mapping[Setting, float]) -> Chooser:
    return Chooser(seen(0.0, START, 10.0), knowing(*loads), AutopilotBounds(), State(), Rules())


@pytest.mark.parametrize(
    ("now", "then", "safe"),
    [
        # 2 % below saturation at the upper ends
        (0.5, 0.915, True),
        (0.5, 0.9151, False),
        # or no higher a load than now
        (0.95, 0.95, True),
        (0.95, 0.9501, False),
        (1.2, 1.1, True),
    ],
)
def test_a_setting_is_safe_with_a_margin_at_the_upper_ends_or_nearer_to_stability(
    now: float, then: float, safe: bool
) -> None:
    assert choosing({START: now, AFTER: then}).safe(AFTER) == safe
    assert choosing({START: now, AFTER: then}, {START: 0.5, AFTER: 0.1}).safe(AFTER) == safe, (
        "the cautious operating point decides"
    )


@pytest.mark.parametrize(("then", "lower"), [(0.949, True), (0.951, False)])
def test_the_safe_direction_is_a_load_lower_by_a_twentieth_whatever_the_situation(
    then: float, lower: bool
) -> None:
    by = Rules().safer
    assert choosing({START: 1.0, AFTER: then}).lowers(AFTER, by) == lower
    assert choosing({START: 0.5, AFTER: 0.1}, {START: 1.0, AFTER: then}).lowers(AFTER, by) == lower


@pytest.mark.parametrize(("load", "unstable"), [(1.074, False), (1.0742, True)])
def test_a_queue_is_surely_unstable_where_its_load_is_above_1_at_the_lower_ends(
    load: float, unstable: bool
) -> None:
    assert choosing({START: load}).unstable == unstable
    assert choosing({START: 2.0}, {START: load}).unstable == unstable, "at every operating point"
    of = choosing({START: 2.0})
    patient = dataclasses.replace(of.seen, limits=QueueLimits(patience=1.0))
    assert not dataclasses.replace(of, seen=patient).unstable
    grows = Assumption("stable_queue", False, 0.99, "it grows")
    for judged in (199, 200):
        growing = seen(0.0, START, 10.0, judged=judged, failing=(grows,))
        of = dataclasses.replace(choosing({START: 0.9}), seen=growing)
        assert of.unstable == (judged == 200)


@pytest.mark.parametrize(
    ("arrivals", "ended", "missing"),
    [
        (30.0, 10, None),
        (29.0, 10, "29 arrivals known, 30 are needed"),
        (30.0, 9, "9 answers ended, 10 are needed"),
    ],
)
def test_nothing_is_known_before_thirty_arrivals_and_ten_answers(
    arrivals: float, ended: int, missing: str | None
) -> None:
    """Sixty answers, of which some have ended after five tokens and the others go on; the speed
    was seen nowhere.
    """
    going = 60 - ended
    assessed = seen(
        0.0,
        START,
        10.0,
        known=lengths([5] * ended + [6] * going, [False] * ended + [True] * going),
        speed=UNKNOWN,
    )
    estimates = dataclasses.replace(assessed.estimates, arrival_rate=symmetric(10.0, 1.0, arrivals))
    found = learn(dataclasses.replace(assessed, estimates=estimates), State(), Rules())
    if missing is not None:
        assert found == missing
        return
    assert isinstance(found, Knowledge)
    assert (found.rate.value, found.speed) == (10.0, symmetric(1.0, 0.1, 0.0))
    assert len(found.operating_points) == 2, (
        "what has not ended may end at once or at the context's end"
    )
