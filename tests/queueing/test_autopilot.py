"""The controller alone: looks made by hand, decisions read."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from kendall.policies import SpecError
from kendall.queueing.choosing.autopilot.bounds import AutopilotBounds, knob_between
from kendall.queueing.choosing.autopilot.candidates import candidates, lowest_limit, repairs
from kendall.queueing.choosing.autopilot.choosing import RankedSetting, gain_or_load
from kendall.queueing.choosing.autopilot.controller import Autopilot
from kendall.queueing.choosing.autopilot.decision import Decision
from kendall.queueing.choosing.autopilot.judging import measured_gain
from kendall.queueing.choosing.autopilot.state import State
from kendall.queueing.choosing.candidates import batch_sizes, preferred
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.criterion import Criterion
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.choosing.objective import Objective
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.assumptions.assumption import Assumption
from kendall.queueing.estimation.interval import UNKNOWN, Estimate, symmetric
from kendall.queueing.estimation.lengths.lengths import lengths
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.json_form import from_json, json_object
from tests.queueing.assessed_windows import (
    BOUNDS,
    LAW,
    LAWFUL,
    LONGEST,
    SEQS,
    capacity,
    sample,
    seen,
)

BEST = Setting(
    policy="elastic", max_output_tokens=96
)  # for BOUNDS: P(N > 64) = 7 %, P(N > 96) = 2.4 %


def pilot(bounds: AutopilotBounds = BOUNDS, **options: object) -> Autopilot:
    return Autopilot(bounds=bounds, mode="act", **options)  # type: ignore[arg-type]


def around(value: float, relative: float = 0.1) -> Estimate:
    return symmetric(value, relative * value, 100.0)


# bounds


def test_sizes_and_limits_are_preferred_numbers_inside_the_bounds() -> None:
    assert preferred(3, 20) == (3, 4, 6, 8, 12, 16)
    assert batch_sizes(10) == (1, 2, 3, 4, 6, 8, 10)
    bounds = AutopilotBounds(
        policies=("elastic",), largest_batch_size=4, smallest_token_limit=16, largest_token_limit=64
    )
    assert bounds.token_limits(2048) == (16, 24, 32, 48, 64)
    assert bounds.bound(8) == 4
    sizes = [each.policy for each in bounds.other_sizes(Setting(policy="elastic"), 8)]
    assert sizes == [
        f"elastic:max_batch_size={size}" for size in (1, 2, 3, 4)
    ]  # the bare name would be the engine's 8
    wider = AutopilotBounds(policies=("elastic",))
    assert [
        each.policy for each in wider.other_sizes(Setting(policy="elastic:max_batch_size=6"), 8)
    ][-1] == "elastic"


@pytest.mark.parametrize("others", [AutopilotBounds.other_sizes, AutopilotBounds.other_policies])
def test_another_batch_size_leaves_the_other_keys_of_the_policy_as_they_are(
    others: Callable[[AutopilotBounds, Setting, int], list[Setting]],
) -> None:
    """Without `max_wait` the last requests before a pause would wait for ever."""
    found = [
        each.policy
        for each in others(
            AutopilotBounds(policies=("fixed",)),
            Setting(policy="fixed:batch_size=4,max_wait=0.5"),
            8,
        )
    ]
    assert found
    assert all(text.endswith(",max_wait=0.5") for text in found), found
    assert "fixed:batch_size=8,max_wait=0.5" in found


def test_a_text_with_keys_allows_only_itself() -> None:
    bounds = AutopilotBounds(policies=("capped:max_batch_size=4",))
    others = bounds.other_policies(Setting(policy="dynamic"), 8)
    assert [each.policy for each in others] == ["capped:max_batch_size=4"]
    assert bounds.other_sizes(others[0], 8) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"policies": ()},
        {"policies": ("elastik",)},
        {"policies": ("capped:size=3",)},
        {"max_clipped_fraction": 1.0},
        {"largest_batch_size": 0},
        {"smallest_token_limit": 0},
        {"smallest_token_limit": 9, "largest_token_limit": 8},
    ],
)
def test_bounds_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SpecError, match=r"got .*expected"):
        AutopilotBounds(**wrong)  # type: ignore[arg-type]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(SpecError, match="off, advise, act"):
        Autopilot(mode="on")  # type: ignore[arg-type]


def test_a_limit_surely_cuts_no_more_than_allowed() -> None:
    """P(N > 64) = 7.4 %, P(N > 96) = 2.4 %: with 2,000 answers 96 is known to be inside 5 %,
    with 40 it is not.
    """
    assert 0.05 < LAWFUL.survival[64] < 0.09
    assert LAWFUL.survival[96] < 0.03
    assert lowest_limit(sample(), BOUNDS, LONGEST) == 96
    few = lowest_limit(sample(40), BOUNDS, LONGEST)
    assert few is None or few > 96
    assert lowest_limit(sample(), AutopilotBounds(max_clipped_fraction=0.0), LONGEST) is None


def test_a_limit_that_cuts_too_much_is_raised() -> None:
    current = Setting(policy="elastic", max_output_tokens=48)
    wrong = repairs(seen(0.0, current, 10.0), BOUNDS)
    assert wrong is not None
    assert wrong[0].max_output_tokens == 96
    assert "more than the 5.0% allowed" in wrong[1]
    assert repairs(seen(0.0, BEST, 10.0), BOUNDS) is None
    found = pilot().decide(seen(100.0, current, 0.5 * capacity(BEST)))
    assert found is not None
    assert (found.kind, found.knob, found.after.max_output_tokens) == ("change", "token limit", 96)


@pytest.mark.parametrize(
    ("bounds", "limit", "target"),
    [
        # above the largest: the lowest that cuts few enough, else the largest that may be set
        ({"largest_token_limit": 128}, 200, 96),
        ({"largest_token_limit": 64}, 128, 64),
        ({"largest_token_limit": 128}, None, 96),
        ({"largest_token_limit": 64}, None, 64),
        # below the smallest, though it cuts few enough
        ({"smallest_token_limit": 32, "max_clipped_fraction": 0.9}, 16, 32),
        # inside, with more than the allowed cut: the lowest that cuts few enough, else the next one
        # above
        ({}, 48, 96),
        ({"largest_token_limit": 64}, 48, 64),
    ],
)
def test_a_limit_outside_the_bounds_is_moved_to_the_nearest_that_they_allow(
    bounds: dict[str, float], limit: int, target: int
) -> None:
    """P(N > 16) = 61 %, P(N > 64) = 7 %, P(N > 96) = 2.4 %, against 5 % unless told otherwise."""
    current = Setting(policy="elastic", max_output_tokens=limit)
    found = repairs(seen(0.0, current, 10.0), dataclasses.replace(BOUNDS, **bounds))
    assert found is not None
    assert found[0] == dataclasses.replace(current, max_output_tokens=target)
    assert ("no token limit" if limit is None else f"the token limit {limit}") in found[1]


@pytest.mark.parametrize(
    ("bounds", "limit"),
    [
        ({"largest_token_limit": 64, "max_clipped_fraction": 0.2}, 64),
        ({"smallest_token_limit": 8, "max_clipped_fraction": 0.99}, 8),
        ({}, None),
        (
            {"largest_token_limit": 64},
            64,
        ),  # it cuts too much, but the operator allows no larger one
        (
            {"smallest_token_limit": 300, "largest_token_limit": 400},
            None,
        ),  # beyond what the engine can answer: none to set
    ],
)
def test_a_limit_inside_the_bounds_or_without_an_allowed_other_stays(
    bounds: dict[str, float], limit: int | None
) -> None:
    current = Setting(policy="elastic", max_output_tokens=limit)
    assert repairs(seen(0.0, current, 10.0), dataclasses.replace(BOUNDS, **bounds)) is None


def test_a_limit_is_lifted_where_every_one_cuts_too_much_or_lies_beyond_the_engine() -> None:
    halves = lengths([250] * 100 + [10] * 100)
    cut = repairs(
        seen(0.0, Setting(policy="elastic", max_output_tokens=200), 10.0, known=halves), BOUNDS
    )
    assert cut is not None
    assert cut[0].max_output_tokens is None
    assert "cuts 50.0% of the answers" in cut[1]
    beyond = dataclasses.replace(BOUNDS, smallest_token_limit=300, largest_token_limit=400)
    outside = repairs(seen(0.0, Setting(policy="elastic", max_output_tokens=500), 10.0), beyond)
    assert outside is not None
    assert outside[0].max_output_tokens is None


def test_a_limit_that_is_required_is_set() -> None:
    bounds = AutopilotBounds(policies=("elastic",), largest_token_limit=128)
    found = pilot(bounds).decide(seen(0.0, Setting(policy="elastic"), 0.3 * capacity(BEST)))
    assert found is not None
    assert found.after.max_output_tokens is not None
    assert found.after.max_output_tokens <= 128


# where to


def test_an_unstable_queue_is_left_at_once_by_the_lowest_load() -> None:
    start = Setting(policy="dynamic")
    found = pilot().decide(
        seen(10.0, start, 0.9 * capacity(BEST), relative=0.1, judged=0, count=30, known=sample(60))
    )
    assert found is not None
    assert (found.kind, found.knob) == ("change", "policy")
    assert found.after.policy == "elastic"
    assert "grows without bound" in found.reason
    assert not math.isfinite(found.predicted_before.value)


@pytest.mark.parametrize(("later", "acts"), [(4.9, False), (5.0, True)])
def test_an_unstable_queue_is_changed_again_after_five_seconds(later: float, acts: bool) -> None:
    autopilot, rate = pilot(), 1.3 * capacity(Setting(policy="elastic"))
    first = autopilot.decide(seen(10.0, Setting(policy="dynamic"), rate))
    assert first is not None
    assert first.kind == "change"
    again = autopilot.decide(seen(10.0 + later, first.after, rate, epoch=1, judged=0, count=5))
    assert (again is not None) == acts


def test_it_goes_to_the_best_setting_one_knob_at_a_time_and_stays_there() -> None:
    """From a stable start: every step changes one knob and gains; at the end no neighbour is 5 %
    better by the same model.
    """
    autopilot, current, now = pilot(), Setting(policy="capped:max_batch_size=6"), 0.0
    rate = 0.85 * capacity(current)
    steps: list[Decision] = []
    for epoch in range(12):
        found = autopilot.decide(
            seen(now := now + 400, current, rate, epoch=epoch, observed=around(0.1))
        )
        if found is not None and found.kind == "change":
            assert knob_between(found.before, found.after) == found.knob
            assert (found.before.policy == found.after.policy) or (
                found.before.max_output_tokens == found.after.max_output_tokens
            )
            assert found.predicted_gain.low > 0
            assert found.predicted_gain.value > autopilot.rules.threshold
            assert found.load_after < 1
            steps.append(found)
            current = found.after
    assert current == BEST
    assert 2 <= len(steps) <= 4
    assert len({step.after for step in steps}) == len(steps)


def test_nothing_is_turned_for_a_gain_that_is_not_sure() -> None:
    """Smaller full batches form sooner, but at the upper end of a vague rate they would wait
    longer: the same gain is held back.
    """
    current = Setting(policy="fixed:batch_size=4")
    rate, bounds = (
        0.5 * capacity(current),
        AutopilotBounds(policies=("fixed",), max_clipped_fraction=0.0),
    )
    sharp, vague = (
        pilot(bounds).decide(seen(0.0, current, rate, relative=relative))
        for relative in (0.01, 0.35)
    )
    assert sharp is not None
    assert vague is not None
    assert sharp.after == vague.after == Setting(policy="fixed:batch_size=3")
    assert sharp.predicted_gain.value == vague.predicted_gain.value > 0.05
    assert (sharp.kind, vague.kind) == ("change", "held back")
    assert "its interval holds 0" in vague.reason


def test_small_gains_are_not_worth_a_new_epoch() -> None:
    current = Setting(policy="elastic", max_output_tokens=128)
    rate = 0.3 * capacity(current)
    eager, lazy = pilot(), pilot()
    lazy.rules = dataclasses.replace(lazy.rules, threshold=0.9)
    found = eager.decide(seen(0.0, current, rate))
    assert found is not None
    assert found.after == BEST
    assert found.predicted_gain.value < 0.9
    assert lazy.decide(seen(0.0, current, rate)) is None
    floored = pilot()
    floored.rules = dataclasses.replace(floored.rules, floor=10.0)
    assert floored.decide(seen(0.0, current, rate)) is None


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]
)
def test_no_change_makes_a_stable_queue_unstable(seed: int) -> None:
    """Random settings, loads and intervals: stable with the margin at the upper ends, or nearer
    to stability than before.
    """
    rng = np.random.default_rng(seed)
    changes = 0
    for _ in range(5):
        autopilot = pilot(
            AutopilotBounds(
                policies=("single", "capped", "elastic", "continuous"), smallest_token_limit=8
            )
        )
        size = int(rng.integers(1, SEQS + 1))
        text = str(
            rng.choice(
                [
                    f"capped:max_batch_size={size}",
                    f"elastic:max_batch_size={size}",
                    "single",
                    "dynamic",
                ]
            )
        )
        current = Setting(
            policy=text,
            max_output_tokens=None if rng.random() < 0.5 else int(rng.integers(96, 200)),
        )
        rate, relative = rng.uniform(0.2, 0.97) * capacity(current), rng.uniform(0.005, 0.3)
        known = sample(int(rng.integers(60, 3000)))
        found = autopilot.decide(seen(0.0, current, rate, relative=relative, known=known))
        if found is None or found.kind != "change":
            continue
        changes += 1
        worst = found.load_after * (1 + relative) * 1.005
        assert worst <= 1 - autopilot.rules.margin or found.load_after <= found.load_before
    assert changes


def test_a_setting_near_saturation_is_held_back_where_the_rate_is_vague() -> None:
    """Single requests at a light load: smaller batches wait less only if they stay stable at the
    upper end of the rate.
    """
    bounds = AutopilotBounds(policies=("fixed", "capped"), max_clipped_fraction=0.0)
    current = Setting(policy="fixed:batch_size=8")
    near = Setting(policy="capped:max_batch_size=1")
    rate = 0.9 * capacity(near)
    autopilot = pilot(bounds)
    found = autopilot.decide(seen(0.0, current, rate, relative=0.02))
    assert found is not None
    assert found.load_after * 1.03 < 0.98


def test_with_failing_assumptions_only_the_load_may_fall() -> None:
    """The engine changed its speed: a token limit, which lowers the load, is set; smaller
    batches, which raise it, are not.
    """
    slow = Assumption(
        "constant_speed", False, 2.0, "the engine became slower by a factor of 2.00 at 50 s"
    )
    bounds = AutopilotBounds(policies=("fixed", "capped"), max_clipped_fraction=0.0)
    filling = Setting(
        policy="fixed:batch_size=8"
    )  # waits for company: smaller batches wait less, at a higher load
    rate = 0.3 * capacity(Setting(policy="capped:max_batch_size=2"))
    free = pilot(bounds).decide(seen(0.0, filling, rate))
    assert free is not None
    assert free.kind == "change"
    assert free.load_after > free.load_before or free.after.policy == "capped:max_batch_size=8"
    current = Setting(policy="elastic")
    found = pilot().decide(seen(0.0, current, 0.85 * capacity(current), failing=(slow,)))
    assert found is not None
    assert found.after == BEST
    assert "only the safe direction" in found.reason
    assert "slower by a factor of 2.00" in found.reason


def test_few_data_open_the_safe_direction_only() -> None:
    current = Setting(policy="dynamic")
    rate = 0.6 * capacity(current)
    found = pilot().decide(seen(0.0, current, rate, judged=50))
    assert found is not None
    assert "not enough data" in found.reason
    assert found.load_after < 0.95 * found.load_before


def test_without_a_rate_or_lengths_nothing_is_said() -> None:
    current = Setting(policy="dynamic")
    assert pilot().decide(seen(0.0, current, 0.0)) is None
    assert pilot().decide(seen(0.0, current, 10.0, known=lengths([5] * 60, [True] * 60))) is None


def test_lengths_beyond_the_longest_seen_are_taken_both_ways() -> None:
    """All long answers are still in service: what they will be is not known, and elastic is
    better either way.
    """
    counts = LAWFUL.sample(np.random.default_rng(2), 400)
    censored = counts >= 40
    known = lengths(np.minimum(counts, 40), censored)
    current = Setting(policy="dynamic")
    found = pilot().decide(seen(0.0, current, 0.5 * capacity(current), known=known, judged=100))
    assert found is not None
    assert found.after.policy == "elastic"
    assert found.after.max_output_tokens is None
    assert all(
        each.max_output_tokens is None
        for each in candidates(seen(0.0, current, 1.0, known=known), BOUNDS)
    )


# when


def test_after_a_change_nothing_for_so_many_seconds_and_requests() -> None:
    autopilot, current = (
        pilot(AutopilotBounds(policies=("elastic",), smallest_token_limit=8)),
        Setting(policy="dynamic"),
    )
    rate = 0.5 * capacity(current)
    first = autopilot.decide(seen(0.0, current, rate))
    assert first is not None
    assert first.kind == "change"
    after = first.after
    assert after != BEST
    for now, count in ((30.0, 1000), (70.0, 150)):
        assert autopilot.decide(seen(now, after, rate, epoch=1, count=count, judged=100)) is None
    found = [autopilot.decide(seen(now, after, rate, epoch=1)) for now in (140.0, 145.0, 150.0)]
    assert [each.after for each in found if each is not None and each.kind == "change"] == [BEST]


def test_while_stable_it_searches_once_a_minute() -> None:
    autopilot = pilot()
    rate = 0.5 * capacity(BEST)
    assert autopilot.decide(seen(0.0, BEST, rate)) is None
    assert autopilot.state.think_at == 60.0
    unsettled = Setting(policy="dynamic")
    assert (
        autopilot.decide(seen(59.9, unsettled, 0.5 * capacity(unsettled))) is None
    )  # not before the minute is over
    assert autopilot.decide(seen(60.0, unsettled, 0.5 * capacity(unsettled))) is not None


@pytest.mark.parametrize(("later", "said"), [(299.9, False), (300.0, True)])
def test_the_same_advice_is_given_again_after_five_minutes(later: float, said: bool) -> None:
    autopilot, current = Autopilot(bounds=BOUNDS, mode="advise"), Setting(policy="dynamic")
    rate = 0.5 * capacity(current)
    first, again = (autopilot.decide(seen(now, current, rate)) for now in (0.0, later))
    assert first is not None
    assert (again is not None) == said
    assert again is None or again.after == first.after


def test_advice_alone_turns_nothing_and_says_so_once() -> None:
    autopilot, current = Autopilot(bounds=BOUNDS, mode="advise"), Setting(policy="dynamic")
    rate = 0.5 * capacity(current)
    found = autopilot.decide(seen(0.0, current, rate))
    assert found is not None
    assert not found.acts
    assert found.kind == "held back"
    assert "only advises" in found.says
    assert autopilot.decide(seen(61.0, current, rate)) is None
    assert autopilot.state.trial is None
    assert autopilot.decide(seen(400.0, current, rate)) is not None


def test_off_says_nothing() -> None:
    assert (
        Autopilot(bounds=BOUNDS).decide(
            seen(0.0, Setting(policy="dynamic"), 0.5 * capacity(Setting(policy="dynamic")))
        )
        is None
    )


def test_with_patience_no_queue_is_unstable() -> None:
    current = Setting(policy="dynamic")
    limits = QueueLimits(patience=1.0, engine=EngineBounds(max_num_seqs=SEQS))
    found = pilot().decide(seen(0.0, current, 1.5 * capacity(current), limits=limits))
    assert found is None or "grows without bound" not in found.reason


# what became of it


def changed(autopilot: Autopilot, rate: float, observed: Estimate) -> Decision:
    found = autopilot.decide(seen(0.0, Setting(policy="elastic"), rate, observed=observed))
    assert found is not None
    assert (found.kind, found.after) == ("change", BEST)
    return found


RATE = 0.85 * capacity(Setting(policy="elastic"))


def test_a_change_that_does_as_predicted_is_kept_with_its_measured_gain() -> None:
    autopilot = pilot()
    first = changed(autopilot, RATE, around(first_delay := 0.2))
    assert first.observed_before.value == first_delay
    found = autopilot.decide(seen(300.0, BEST, RATE, epoch=1, observed=first.predicted_after))
    assert found is not None
    assert found.kind == "kept"
    assert found.measured_gain.value == pytest.approx(1 - first.predicted_after.value / first_delay)
    assert found.measured_gain.low < found.measured_gain.value < found.measured_gain.high
    assert "observed queueing delay" in found.says
    assert autopilot.state.trial is None


def test_a_change_worse_than_predicted_and_than_before_is_rolled_back_and_remembered() -> None:
    autopilot, start = pilot(), Setting(policy="elastic")
    changed(autopilot, RATE, around(0.05))
    found = autopilot.decide(seen(300.0, BEST, RATE, epoch=1, observed=around(0.5)))
    assert found is not None
    assert (found.kind, found.before, found.after) == ("rollback", BEST, start)
    assert found.acts
    assert found.measured_gain.high < 0
    assert autopilot.state.cool_until == 300.0 + 4 * 60.0
    again = [
        autopilot.decide(seen(now, start, RATE, epoch=2, observed=around(0.05)))
        for now in (400.0, 700.0, 800.0)
    ]
    assert all(each is None or each.after != BEST or not each.acts for each in again)
    assert any(each is not None and "did worse than predicted" in each.reason for each in again)


def test_a_setting_that_failed_is_tried_again_after_a_growing_time() -> None:
    autopilot, start = pilot(), Setting(policy="elastic")
    changed(autopilot, RATE, around(0.05))
    assert autopilot.decide(seen(300.0, BEST, RATE, epoch=1, observed=around(0.5))) is not None
    assert autopilot.state.failures[0].until == 900.0
    early = autopilot.decide(seen(880.0, start, RATE, epoch=2, observed=around(0.05)))
    assert early is None or early.after != BEST or not early.acts
    again = autopilot.decide(seen(950.0, start, RATE, epoch=2, observed=around(0.05)))
    assert again is not None
    assert (again.kind, again.after) == ("change", BEST)
    assert autopilot.decide(seen(1250.0, BEST, RATE, epoch=3, observed=around(0.5))) is not None
    assert (autopilot.state.failures[0].times, autopilot.state.failures[0].until) == (
        2,
        1250.0 + 1200.0,
    )


def test_a_failure_is_forgiven_when_the_load_has_changed_much() -> None:
    autopilot, start = pilot(), Setting(policy="elastic")
    changed(autopilot, RATE, around(0.05))
    autopilot.decide(seen(300.0, BEST, RATE, epoch=1, observed=around(0.5)))
    found = autopilot.decide(seen(600.0, start, 0.5 * RATE, epoch=2, observed=around(0.05)))
    assert found is not None
    assert (found.kind, found.after) == ("change", BEST)


@pytest.mark.parametrize(
    ("case", "others"),
    [
        ("within the noise of both", {"observed": around(0.06, 0.9)}),
        ("the load has changed", {"rate": 1.8}),
        ("worse than predicted, no worse than before", {"before": around(1.0)}),
    ],
)
def test_a_change_is_kept_where_nothing_is_proved_against_it(
    case: str, others: dict[str, object]
) -> None:
    autopilot = pilot()
    base = 0.5 * RATE
    changed(autopilot, base, others.get("before", around(0.05)))  # type: ignore[arg-type]
    rate = base * float(others.get("rate", 1.0))  # type: ignore[arg-type]
    found = autopilot.decide(
        seen(300.0, BEST, rate, epoch=1, observed=others.get("observed", around(0.5)))
    )  # type: ignore[arg-type]
    assert found is not None, case
    assert found.kind == "kept", case


def test_a_queue_that_has_not_settled_is_waited_for_and_then_kept() -> None:
    autopilot = pilot()
    changed(autopilot, RATE, around(0.05))
    draining = Assumption(
        "settled", False, 0.5, "the queue needs 300 s to forget how this epoch began"
    )
    assert (
        autopilot.decide(
            seen(100.0, BEST, RATE, epoch=1, observed=around(0.5), failing=(draining,))
        )
        is None
    )
    found = autopilot.decide(
        seen(300.0, BEST, RATE, epoch=1, observed=around(0.5), failing=(draining,))
    )
    assert found is not None
    assert found.kind == "kept"
    assert "could not be measured" in found.reason


def test_a_queue_that_grows_after_a_change_is_not_waited_for() -> None:
    autopilot = pilot()
    changed(autopilot, RATE, around(0.05))
    found = autopilot.decide(seen(20.0, BEST, RATE, epoch=1, judged=20, count=100, waiting=1000))
    assert found is not None
    assert found.kind == "rollback"
    assert "1000 requests wait" in found.reason


def test_a_queue_that_grows_because_more_arrives_is_not_the_changes_fault() -> None:
    autopilot = pilot()
    changed(autopilot, 0.5 * RATE, around(0.05))
    found = autopilot.decide(seen(20.0, BEST, RATE, epoch=1, judged=20, count=100, waiting=1000))
    assert found is None or found.kind != "rollback"
    assert not autopilot.state.failures


def test_there_is_no_way_back_into_an_unstable_queue() -> None:
    """Worse than predicted, but at today's load the setting of before has no steady state."""
    autopilot = pilot()
    base = 0.9 * capacity(Setting(policy="elastic"))
    changed(autopilot, base, around(0.05))
    found = autopilot.decide(seen(300.0, BEST, 1.12 * base, epoch=1, observed=around(3.0)))
    assert found is not None
    assert (found.kind, found.after) == ("kept", BEST)
    assert found.load_before == pytest.approx(0.9, rel=0.01)
    assert found.load_after < 0.85
    assert "no way back" in found.reason


def test_a_worse_change_is_left_in_force_and_said_where_the_autopilot_only_advises_by_now() -> None:
    autopilot = pilot()
    changed(autopilot, RATE, around(0.05))
    autopilot.mode = "advise"
    found = autopilot.decide(seen(300.0, BEST, RATE, epoch=1, observed=around(3.0)))
    assert found is not None
    assert (found.kind, found.acts, found.before) == ("held back", False, BEST)
    assert found.reason.startswith("the autopilot only advises (it does clearly worse")
    assert autopilot.state.trial is None
    assert [failure.knobs for failure in autopilot.state.failures] == [BEST]


def test_a_knob_that_somebody_else_turned_ends_the_trial() -> None:
    autopilot = pilot()
    changed(autopilot, RATE, around(0.05))
    assert (
        autopilot.decide(seen(10.0, Setting(policy="capped:max_batch_size=8"), 0.3 * RATE, epoch=1))
        is None
    )
    assert autopilot.state.trial is None


def test_the_gain_of_two_measured_means_covers_the_truth() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(500):
        before, after = (
            symmetric(value + half / 1.96 * rng.normal(), half, 50.0)
            for value, half in ((1.0, 0.1), (0.6, 0.08))
        )
        covered += measured_gain(before, after).covers(0.4)
    assert 0.92 <= covered / 500 <= 0.98


# what a setting gains


FREE, CLIPPED = Setting(policy="elastic"), Setting(policy="elastic", max_output_tokens=64)


def gained(rate: float, before: Setting, after: Setting, relative: float = 0.02) -> Estimate:
    found = seen(0.0, before, rate, relative=relative)
    operating_point = OperatingPoint(estimates=found.estimates, shape=LAW, limits=found.limits)
    return operating_point.gain(before, after, Criterion(Objective(name="delay")))


def test_between_two_settings_without_a_steady_state_the_loads_are_compared() -> None:
    rate = 2 * capacity(CLIPPED)
    loads = {each: rate / capacity(each) for each in (FREE, CLIPPED)}
    for before, after in ((FREE, CLIPPED), (CLIPPED, FREE)):
        shown = seen(0.0, before, rate)
        operating_point = OperatingPoint(estimates=shown.estimates, shape=LAW, limits=shown.limits)
        chosen = RankedSetting(after, math.nan, math.inf)
        gain = gain_or_load(operating_point, before, chosen)
        assert gain.value == gain.low == gain.high
        assert gain.value == pytest.approx(1 - loads[after] / loads[before], abs=0.02)
        assert operating_point.gain(before, after, Criterion()) == UNKNOWN


def test_where_either_setting_can_be_forecast_the_gain_is_that_of_the_forecasts() -> None:
    """With patience far above saturation, and where only the lower limit has a steady state."""
    impatient = QueueLimits(patience=0.05, engine=EngineBounds(max_num_seqs=SEQS))
    for rate, limits in (
        (2 * capacity(CLIPPED), impatient),
        (1.01 * capacity(FREE), QueueLimits(engine=EngineBounds(max_num_seqs=SEQS))),
    ):
        shown = seen(0.0, FREE, rate, relative=0.1, limits=limits)
        operating_point = OperatingPoint(estimates=shown.estimates, shape=LAW, limits=limits)
        gain = gain_or_load(operating_point, FREE, RankedSetting(CLIPPED, math.nan, math.inf))
        measure = Criterion(Objective(name="delay"))
        assert gain == operating_point.gain(FREE, CLIPPED, measure)
        assert gain.low < gain.value


def test_a_steady_state_gains_all_over_none_and_none_gains_nothing_that_could_be_told() -> None:
    """At the lower end of the rate both have one: there the gain is a part only."""
    rate = 1.01 * capacity(FREE)
    gain = gained(rate, FREE, CLIPPED, 0.1)
    assert (gain.value, gain.high) == (1.0, 1.0)
    assert 0 < gain.low < 1.0
    assert gained(rate, CLIPPED, FREE, 0.1) == UNKNOWN


def test_a_gain_is_that_of_the_steady_means_and_its_interval_grows_with_doubt_of_the_rate() -> None:
    rate = 0.8 * capacity(FREE)
    found = seen(0.0, FREE, rate)
    operating_point = OperatingPoint(estimates=found.estimates, shape=LAW, limits=found.limits)
    before, after = (
        operating_point.predicted(each).queueing_delay.mean for each in (FREE, CLIPPED)
    )
    assert before is not None
    assert after is not None
    sharp, vague = (gained(rate, FREE, CLIPPED, relative) for relative in (0.01, 0.15))
    assert sharp.value == vague.value == pytest.approx(1 - after / before, rel=1e-6)
    assert vague.low < sharp.low < sharp.value < sharp.high <= vague.high < 1
    loss = gained(rate, CLIPPED, FREE, 0.01)
    assert loss.value == pytest.approx(1 - before / after, rel=1e-6)
    assert loss.low < loss.value < loss.high < 0


# what is said of a decision


SAID = Decision(
    at=0.0,
    kind="change",
    knob="token limit",
    before=Setting(policy="elastic"),
    after=BEST,
    reason="it pays",
)
PREDICTED = {
    "predicted_before": symmetric(2.0, 0.5, 100.0),
    "predicted_after": symmetric(0.12, 0.02, 100.0),
    "predicted_gain": Estimate(0.94, 0.9, 0.96, 100.0),
}
OBSERVED = {
    "observed_before": symmetric(0.2, 0.02, 100.0),
    "observed_after": symmetric(0.3, 0.03, 100.0),
    "measured_gain": Estimate(-0.5, -0.7, -0.3, 100.0),
}


@pytest.mark.parametrize(
    ("about", "line"),
    [
        ({}, "change: token limit, elastic, no token limit -> elastic, token limit 96; it pays"),
        (
            PREDICTED,
            "change: token limit, elastic, no token limit -> elastic, token limit 96; it pays; "
            "predicted queueing delay 2 s (1.5 s to 2.5 s) -> 120 ms (100 ms to 140 ms), 94 % "
            "less (90 to 96)",
        ),
        (
            OBSERVED | {"kind": "rollback", "compared": "sojourn_time"},
            "rollback: token limit, elastic, no token limit -> elastic, token limit 96; it pays; "
            "observed sojourn time 200 ms (180 ms to 220 ms) -> 300 ms (270 ms to 330 ms), -50 % "
            "less (-70 to -30)",
        ),
        (
            PREDICTED | {"predicted_before": UNKNOWN},
            "change: token limit, elastic, no token limit -> elastic, token limit 96; it pays; "
            "predicted queueing delay without bound -> 120 ms (100 ms to 140 ms)",
        ),
        (
            PREDICTED
            | {
                "predicted_before": Estimate(2.0, 1.5, math.inf, 9.0),
                "predicted_gain": Estimate(0.94, 0.9, math.inf, 9.0),
            },
            "change: token limit, elastic, no token limit -> elastic, token limit 96; it pays; "
            "predicted queueing delay 2 s (1.5 s to unbounded) -> 120 ms (100 ms to 140 ms), 94 % "
            "less (90 to unbounded)",
        ),
        (
            OBSERVED | {"observed_after": UNKNOWN, "measured_gain": UNKNOWN},
            "change: token limit, elastic, no token limit -> elastic, token limit 96; it pays; "
            "observed queueing delay 200 ms (180 ms to 220 ms) -> not measured",
        ),
        (
            {"kind": "held back", "after": Setting(policy="elastic")},
            "held back: elastic, no token limit; it pays",
        ),
    ],
)
def test_a_decision_says_what_is_known_and_nothing_of_what_is_not(
    about: dict[str, object], line: str
) -> None:
    decision = dataclasses.replace(SAID, **about)  # type: ignore[arg-type]
    assert decision.says == json_object(decision)["says"] == line
    assert decision.acts == (decision.kind in ("change", "rollback"))


# epochs


def test_an_earlier_epochs_rate_stands_in_until_this_one_has_its_own() -> None:
    """Five seconds after a switch: 20 arrivals say nothing; with the rate of before the queue is
    seen to be unstable still.
    """
    autopilot, start = pilot(), Setting(policy="dynamic")
    rate = 1.3 * capacity(Setting(policy="elastic"))
    first = autopilot.decide(seen(60.0, start, rate))
    assert first is not None
    young = seen(66.0, first.after, rate, relative=0.9, epoch=1, judged=0, count=5, speed=UNKNOWN)
    found = autopilot.decide(young)
    assert found is not None
    assert found.kind == "change"
    fresh = pilot().decide(young)
    assert fresh is None or "grows without bound" not in fresh.reason


def test_a_rate_that_contradicts_the_earlier_one_is_believed() -> None:
    autopilot, start = pilot(), Setting(policy="dynamic")
    first = autopilot.decide(seen(60.0, start, 1.3 * capacity(Setting(policy="elastic"))))
    assert first is not None
    found = autopilot.decide(
        seen(
            66.0, first.after, 0.2 * capacity(first.after), relative=0.3, epoch=1, judged=0, count=5
        )
    )
    assert found is None or "grows without bound" not in found.reason


# state


def test_state_and_decisions_survive_json() -> None:
    autopilot = pilot()
    first = changed(autopilot, RATE, around(0.05))
    back = autopilot.decide(seen(300.0, BEST, RATE, epoch=1, observed=around(0.5)))
    assert back is not None
    again = Autopilot(bounds=BOUNDS, mode="act")
    again.restore(State.from_json(json.loads(json.dumps(json_object(autopilot.state)))))
    assert State.from_json(json_object(autopilot.state)) == autopilot.state
    assert again.state.failures
    for decision in (first, back):
        copy = from_json(json.loads(json.dumps(json_object(decision), allow_nan=False)), Decision)
        assert copy.says == decision.says
    on_trial = pilot()
    changed(on_trial, RATE, around(0.05))
    restored = pilot()
    restored.restore(State.from_json(json_object(on_trial.state)), shift=1000.0)
    found = restored.decide(seen(1300.0, BEST, RATE, epoch=1, observed=around(0.5)))
    assert found is not None
    assert found.kind == "rollback"


def test_a_state_of_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="schema version 7"):
        State.from_json({"schema_version": 7})


def test_it_travels_between_processes() -> None:
    import pickle

    autopilot = pilot()
    changed(autopilot, RATE, around(0.05))
    copy = pickle.loads(pickle.dumps(autopilot))
    assert json_object(copy.state) == json_object(autopilot.state)
    assert copy.bounds == autopilot.bounds
