"""What-ifs of a window with stalls: a prediction that leaves out the queue behind a stall says so beside those that include it."""

from __future__ import annotations

import json
from functools import cache

import pytest

from policies import parse_policy
from queueing.advice.forecast import Knobs
from queueing.advice.what_if import what_ifs
from queueing.estimation.assess import Limits
from queueing.estimation.estimates import Estimates, estimate
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


@pytest.mark.parametrize("policy", ["continuous:max_batch_size=8", "elastic:max_batch_size=8", "capped:max_batch_size=4"])
def test_a_what_if_says_where_it_leaves_out_the_queue_behind_a_stall(policy: str) -> None:
    estimates = window(80)
    assert estimates.stalls.count > 5
    assert estimates.law(LAW).stall_share > 0
    (found,) = what_ifs(estimates, LAW, Knobs(policy=POLICY), LIMITS, policies=[policy], token_limits=[], sizes=[])
    notes = json.loads(json.dumps(found.to_dict()))["notes"]
    expected = [f"{NOTE}{estimates.stalls.time_share:.1%} of the busy time); predictions of whole batches include it"]
    assert notes == (expected if policy.startswith("continuous") else [])


def test_without_stalls_nothing_is_said() -> None:
    (found,) = what_ifs(window(0), LAW, Knobs(policy=POLICY), LIMITS, policies=["continuous:max_batch_size=8"], token_limits=[], sizes=[])
    assert found.notes == ()
