"""What each policy decides, worked out by hand: driver and simulator share a policy, so no
comparison of theirs sees a wrong one.
"""

from __future__ import annotations

import pytest

from kendall.policies import (
    Capped,
    Continuous,
    Decision,
    Dispatch,
    Dynamic,
    Elastic,
    Fixed,
    Policy,
    QueueState,
    Request,
    Running,
    Server,
    Single,
    Waiting,
    WaitUntil,
)
from kendall.policies.decision import DecisionError, check_decision
from tests.policies.decisions import FIVE, ROWS, state
from tests.policies.states import calls, running


@pytest.mark.parametrize(("policy", "seen", "now", "expected"), ROWS)
def test_decision(policy: Policy, seen: QueueState, now: float, expected: Decision) -> None:
    assert policy.decide(seen, now) == expected


def test_the_deadline_of_fixed_is_that_of_the_oldest_not_of_the_newest() -> None:
    """The wait runs from the oldest arrival; a later one does not start it anew."""
    policy = Fixed(batch_size=3, max_wait=5.0)
    late = Request(id="late", arrived_at=104.9, prompt_tokens=10, max_output_tokens=20)
    queue = [*FIVE[:1], Waiting(late)]
    assert policy.decide(state(queue=queue), 104.9) == WaitUntil(105.0)
    assert policy.decide(state(queue=queue), 105.0) == Dispatch(("a", "late"), 0)


@pytest.mark.parametrize(
    ("policy", "padded", "release", "joins_running"),
    [
        (Single(), False, "request", False),
        (Dynamic(), True, "batch", False),
        (Fixed(batch_size=2), True, "batch", False),
        (Capped(max_batch_size=2), True, "batch", False),
        (Elastic(), False, "request", False),
        (Continuous(), False, "request", True),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_how_a_batch_runs_and_ends(
    policy: Policy, padded: bool, release: str, joins_running: bool
) -> None:
    assert (policy.padded, policy.release, policy.joins_running) == (padded, release, joins_running)
    assert not policy.wants_steps


@pytest.mark.parametrize(("taken", "fault"), [("ab", None), ("bc", "got 6 together")])
def test_a_batch_from_outside_is_checked_by_its_sequences(taken: str, fault: str | None) -> None:
    """As is what is in service: 1 + 2 + 2 of 5 fit, 1 + 2 + 3 do not."""
    in_service = [Running(each.request, 0.0) for each in calls(x=1)]
    seen = QueueState(calls(a=2, b=2, c=3), [Server(0, in_service, max_batch_size=5)])
    decision = Dispatch(tuple(taken), 0)
    if fault is None:
        check_decision(Continuous(), decision, seen, 5.0)
    else:
        with pytest.raises(DecisionError, match=f"{fault} on server 0; expected at most 5"):
            check_decision(Continuous(), decision, seen, 5.0)


def test_a_call_larger_than_the_bound_may_be_served_alone_only() -> None:
    seen = QueueState(calls(a=6, b=1), [Server(0, max_batch_size=5)])
    check_decision(Elastic(), Dispatch(("a",), 0), seen, 5.0)
    with pytest.raises(DecisionError, match="got 7 together"):
        check_decision(Elastic(), Dispatch(("a", "b"), 0), seen, 5.0)
    busy = QueueState(calls(a=6), [Server(0, running("x"), max_batch_size=5)])
    with pytest.raises(DecisionError, match="got 7 together"):
        check_decision(Continuous(), Dispatch(("a",), 0), busy, 5.0)
