"""What-ifs of a window with stalls: they include the queue behind a stall, or say that they leave it out."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from policies import parse_policy
from queueing.advice.forecast import Knobs
from queueing.advice.situation import Situation
from queueing.advice.what_if import what_ifs
from queueing.estimation.assess import Limits
from queueing.estimation.estimates import Estimates, estimate
from queueing.estimation.speed_process import Stalls
from queueing.estimation.stall_backlog import stall_backlog
from tests.queueing.estimation_runs import LAW, Engine, poisson, seen, serve
from tests.queueing.test_advice import POLICY, capacity

LIMITS = Limits(max_num_seqs=16)
NOTE = "leaves out the queue behind a stall (stalls hold "


@cache
def window(every: int) -> Estimates:
    """Each `every`-th batch takes half a second longer; none for 0."""
    engine = Engine(most=8, stall=lambda batch: 0.5 if every and batch % every == every - 1 else 0.0)
    records = serve(poisson(0.4 * capacity(), 4000, 1), engine, 1)
    return estimate(seen(records, POLICY), parse_policy(POLICY), LAW)


@pytest.mark.parametrize("policy", ["elastic:max_batch_size=8", "capped:max_batch_size=4"])
def test_a_what_if_of_whole_batches_beside_a_continuous_engine_says_what_it_leaves_out(policy: str) -> None:
    """Its stalls are known as slots saw them, and the law that what-ifs read has none."""
    by_batches = window(80)
    estimates = replace(by_batches, policy="continuous:max_batch_size=8")
    assert (by_batches.law(LAW).stall_share > 0, estimates.law(LAW).stall_share) == (True, False)
    for seen_by, expected in ((by_batches, []), (estimates, [f"{NOTE}{estimates.stalls.time_share:.1%} of the busy time)"])):
        (found,) = what_ifs(seen_by, LAW, Knobs(policy=seen_by.policy), LIMITS, policies=[policy], token_limits=[], sizes=[])
        assert json.loads(json.dumps(found.to_dict()))["notes"] == expected


def test_a_what_if_of_a_continuous_engine_holds_the_queue_behind_a_stall() -> None:
    estimates, knobs = window(80), Knobs(policy="continuous:max_batch_size=8")
    assert estimates.stalls.count > 5
    stalling = Situation(estimates=estimates, shape=LAW, limits=LIMITS)
    calm = Situation(estimates=replace(estimates, stalls=Stalls(0, 0.0, 0.0, None)), shape=stalling.law, limits=LIMITS)
    backlog = stall_backlog(estimates.stalls, stalling.model(knobs).load(stalling.rate))
    means = [each.predicted(knobs).sojourn_time.mean or 0.0 for each in (stalling, calm)]
    assert backlog > 0.01
    assert means[0] - means[1] == pytest.approx(backlog, rel=0.05)


def test_without_stalls_nothing_is_said() -> None:
    (found,) = what_ifs(window(0), LAW, Knobs(policy=POLICY), LIMITS, policies=["continuous:max_batch_size=8"], token_limits=[], sizes=[])
    assert found.notes == ()
