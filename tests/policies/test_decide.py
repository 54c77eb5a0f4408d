"""What each policy decides, worked out by hand: driver and simulator share a policy, so no
comparison of theirs sees a wrong one.
"""

from __future__ import annotations

import pytest

from policies import (
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
    Single,
    Waiting,
    WaitUntil,
)
from tests.policies.decisions import FIVE, ROWS, state


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
