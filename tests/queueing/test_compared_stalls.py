"""Ranking and reporting on a machine that stalls, continuous batching among the candidates: in the
order of the machine itself.

The truth is not the law's: one machine that stands still at Poisson instants of the wall clock
under every policy, simulated to some 3 %. Estimates are those of a window of that machine, under
whole batches or under continuous batching.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import cache

import pytest

from kendall.policies import parse_policy
from kendall.queueing.choosing.autopilot.bounds import AutopilotBounds
from kendall.queueing.choosing.autopilot.controller import Autopilot
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.choosing.objective import Objective, parse_slo
from kendall.queueing.estimation.estimates import Estimates, estimate
from kendall.queueing.estimation.summaries import Stalls
from tests.queueing.advised import advise, what_ifs
from tests.queueing.estimation_windows import snapshot_of_run
from tests.queueing.families import DELAY, LAWS, LIMITS, POLICY, USUAL, assessed, model_of
from tests.server.stalled_runs import stalled_run

LAW, LOAD = "tiny", 0.5
SHARE, STALL = 0.05, 0.5  # of the time; seconds each
CONTINUOUS = USUAL[-1]
NOISE, APART = (
    0.1,
    0.1,
    # of 30,000 and 100,000 simulated requests with stalls; of two means: nearer ones may change
    # places
)
IN_FORCE = (POLICY, CONTINUOUS)


def rate() -> float:
    return LOAD * (1 - SHARE) * model_of(LAW).largest_stable_rate


@cache
def window(policy: str, count: int = 60_000) -> Estimates:
    """What is known of the machine under that policy."""
    model = model_of(LAW, policy)
    seen = snapshot_of_run(stalled_run(model, rate(), count, 3, share=SHARE, stall=STALL), model)
    return estimate(seen, parse_policy(policy), LAWS[LAW][0])


@cache
def truth(policy: str) -> float:
    """Mean sojourn, seconds; infinite without a steady state."""
    model = model_of(LAW, policy)
    if model.load(rate()) / (1 - SHARE) >= 1:
        return math.inf
    return float(
        stalled_run(model, rate(), 600_000, 11, share=SHARE, stall=STALL)
        .after(10_000)
        .sojourn_time.mean()
    )


def operating_point(in_force: str) -> OperatingPoint:
    return OperatingPoint(estimates=window(in_force), shape=LAWS[LAW][0], limits=LIMITS)


def calm(in_force: str) -> OperatingPoint:
    """The same machine if it was as fast without ever stalling."""
    still = dataclasses.replace(window(in_force), stalls=Stalls(0, 0.0, 0.0, None))
    return OperatingPoint(estimates=still, shape=LAWS[LAW][0], limits=LIMITS)


def in_order(means: dict[str, float]) -> None:
    """Of those that are apart; without a steady state infinite."""
    assert set(means) == set(USUAL)
    for one, other in itertools.permutations(USUAL, 2):
        if truth(other) > (1 + APART) * truth(one):
            assert means[one] < means[other], (one, other)


def reported(in_force: str) -> dict[str, float]:
    """Mean sojourns as what-ifs and advice print them."""
    found = what_ifs(
        window(in_force),
        LAWS[LAW][0],
        Setting(policy=in_force),
        LIMITS,
        policies=USUAL,
        token_limits=[],
        sizes=[],
        beside=True,
    )
    return {
        each.setting.policy: math.inf
        if each.prediction is None
        else each.prediction.sojourn_time.mean or 0.0
        for each in found
    }


@pytest.mark.parametrize("in_force", [pytest.param(POLICY, marks=pytest.mark.slow), CONTINUOUS])
def test_advice_ranks_policies_as_the_stalling_machine_does(in_force: str) -> None:
    (found,) = advise(
        window(in_force), LAWS[LAW][0], Setting(policy=in_force), LIMITS, DELAY, targets=["policy"]
    )
    scores = {
        str(point["policy"]): math.inf if point["score"] is None else point["score"]
        for point in found.curve
    }
    in_order(scores)
    assert scores == pytest.approx(reported(in_force), rel=NOISE)
    assert found.best is not None
    assert truth(found.best.setting.policy) == min(map(truth, USUAL))


@pytest.mark.parametrize("in_force", IN_FORCE)
def test_what_ifs_rank_policies_as_the_stalling_machine_does(in_force: str) -> None:
    in_order(reported(in_force))


@pytest.mark.slow
@pytest.mark.parametrize("in_force", IN_FORCE)
def test_the_autopilot_weighs_settings_as_the_stalling_machine_does(in_force: str) -> None:
    of = operating_point(in_force)
    found = {policy: of.ranking_mean(Setting(policy=policy), "sojourn_time") for policy in USUAL}
    in_order(found)
    assert found == pytest.approx(reported(in_force), rel=NOISE)


@pytest.mark.parametrize(
    "policy", [policy for policy in USUAL if policy not in ("single", "fixed:batch_size=8")]
)
def test_stalls_are_a_good_part_of_a_mean_here(policy: str) -> None:
    """Or the tests above would not see them left out; and means with them are nearer to the
    machine's.
    """
    with_them, without = (
        each(POLICY).predicted(Setting(policy=policy)).sojourn_time.mean
        for each in (operating_point, calm)
    )
    assert with_them is not None
    assert without is not None
    assert without < (1 - NOISE) * with_them
    assert abs(with_them - truth(policy)) < abs(without - truth(policy))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", ["continuous:max_batch_size=4", "continuous:max_batch_size=16"])
@pytest.mark.parametrize(
    ("load", "share", "stall"), [(0.3, 0.1, 1.0), (0.5, 0.05, 0.2), (0.7, 0.1, 1.0)]
)
def test_slots_seen_from_batches_have_the_whole_queue_behind_a_stall(
    load: float, share: float, stall: float, policy: str
) -> None:
    """At most 5 % off; without those who come into a stall 11 to 53 % short."""
    batches, slots = model_of(LAW, POLICY), model_of(LAW, policy)
    asked = load * (1 - share) * batches.largest_stable_rate
    seen = snapshot_of_run(
        stalled_run(batches, asked, 60_000, 3, share=share, stall=stall), batches
    )
    known = OperatingPoint(
        estimates=estimate(seen, parse_policy(POLICY), LAWS[LAW][0]),
        shape=LAWS[LAW][0],
        limits=LIMITS,
    )
    there = float(
        stalled_run(slots, asked, 300_000, 11, share=share, stall=stall)
        .after(10_000)
        .sojourn_time.mean()
    )
    assert known.predicted(Setting(policy=policy)).sojourn_time.mean == pytest.approx(
        there, rel=0.06
    )


def test_the_autopilot_gains_what_the_stalling_machine_does() -> None:
    """The machine's own means."""
    shown = dataclasses.replace(assessed(POLICY), estimates=window(POLICY), shape=LAWS[LAW][0])
    autopilot = Autopilot(
        bounds=AutopilotBounds(policies=("capped", "continuous"), max_clipped_fraction=0.0),
        mode="act",
    )
    found = autopilot.decide(shown)
    assert found is not None
    assert parse_policy(found.after.policy).name == "continuous"
    before, after = truth(POLICY), truth(found.after.policy)
    assert found.predicted_before.value == pytest.approx(before, rel=NOISE)
    assert found.predicted_after.value == pytest.approx(after, rel=NOISE)
    assert found.predicted_gain.value == pytest.approx(1 - after / before, abs=0.05)
    still = calm(POLICY).predicted(found.before).sojourn_time.mean
    assert still is not None
    assert still < (1 - NOISE) * before, (
        "and the same machine without its stalls would be told from it"
    )


@pytest.mark.parametrize("in_force", IN_FORCE)
def test_an_slo_that_only_a_calm_machine_keeps_is_not_kept(in_force: str) -> None:
    """Between what continuous batching takes without stalls and with them: neither the curve nor
    the advice says it is kept.
    """
    without = calm(in_force).predicted(Setting(policy=CONTINUOUS)).sojourn_time.mean
    assert without is not None
    value = operating_point(in_force).predicted(Setting(policy=CONTINUOUS)).sojourn_time.mean
    assert value is not None
    limit = (without + value) / 2
    assert truth(CONTINUOUS) > limit, "nor does the machine"
    assert choice(in_force, limit)[0] is None
    best, score = choice(in_force, 1.02 * value)
    assert best == CONTINUOUS
    assert score == pytest.approx(value, rel=1e-9)


def choice(in_force: str, limit: float) -> tuple[str | None, float | None]:
    """Under an SLO on the mean sojourn: the policy that is advised, and what the curve compares
    continuous by.
    """
    objective = Objective(name="slo", slo=parse_slo(f"mean_sojourn_time={limit:.6f}s"))
    (found,) = advise(
        window(in_force),
        LAWS[LAW][0],
        Setting(policy=in_force),
        LIMITS,
        objective,
        targets=["policy"],
    )
    scores = [point["score"] for point in found.curve if point["policy"] == CONTINUOUS]
    return None if found.best is None else found.best.setting.policy, scores[0] if scores else None
