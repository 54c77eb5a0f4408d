"""A padded policy on an engine that cannot pad: the same decisions, and nobody waits for the end of
a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given

from kendall.policies import (
    Capped,
    Decision,
    Dispatch,
    Dynamic,
    Elastic,
    Fixed,
    Policy,
    QueueState,
    WaitUntil,
    format_policy,
    is_built_in,
    parse_policy,
    policy_batch_size,
    served_as,
)
from kendall.policies.core import Release
from tests.policies.states import policies, seconds, states


@dataclass(frozen=True, kw_only=True)
class Pairs(Policy):
    """From outside, padded."""

    wait: float = 2.0
    max_batch_size: int = 2
    name: ClassVar[str] = "pairs"
    padded: ClassVar[bool] = True
    release: ClassVar[Release] = "batch"

    def decide(self, state: QueueState, now: float) -> Decision:
        if len(state.waiting) < self.max_batch_size:
            return WaitUntil(now + self.wait)
        return Dispatch(tuple(each.request.id for each in state.waiting[:2]), state.servers[0].id)


@pytest.mark.parametrize(
    ("asked", "served"),
    [
        (Dynamic(), Elastic()),
        (Dynamic(order="spjf", aging=0.5), Elastic(order="spjf", aging=0.5)),
        (Capped(max_batch_size=8), Elastic(max_batch_size=8)),
        (
            Capped(max_batch_size=8, order="threshold", threshold=5.0),
            Elastic(max_batch_size=8, order="threshold", threshold=5.0),
        ),
    ],
)
def test_dynamic_and_capped_batches_are_elastic_ones(asked: Policy, served: Policy) -> None:
    assert served_as(asked, pads=False) == served


@given(policies)
def test_an_engine_that_pads_serves_every_policy_as_it_is(policy: Policy) -> None:
    assert served_as(policy, pads=True) is policy
    if not policy.padded:
        assert served_as(policy, pads=False) is policy


@pytest.mark.slow
@given(policies, states(), seconds)
def test_the_decisions_are_the_same(policy: Policy, state: QueueState, now: float) -> None:
    served = served_as(policy, pads=False)
    assert served.decide(state, now) == policy.decide(state, now)
    assert not served.padded
    assert served.release == "request"
    assert served.joins_running == policy.joins_running
    assert policy_batch_size(served) == policy_batch_size(policy)
    assert is_built_in(served)


@pytest.mark.parametrize("text", ["fixed:batch_size=4", "fixed:batch_size=4,max_wait=0.5"])
def test_a_fixed_batch_keeps_its_text_and_its_kind(text: str) -> None:
    served = served_as(parse_policy(text), pads=False)
    assert isinstance(served, Fixed)
    assert format_policy(served) == text
    assert served_as(served, pads=False) is served


def test_a_policy_from_outside_keeps_its_parameters() -> None:
    asked = Pairs(wait=7.0)
    served = served_as(asked, pads=False)
    assert (served.padded, served.release, served.name) == (False, "request", "pairs")
    assert isinstance(served, Pairs)
    assert (served.wait, served.max_batch_size) == (7.0, 2)
    assert type(served) is type(served_as(Pairs(), pads=False))
    assert not is_built_in(served)
    assert (asked.padded, Pairs.release) == (True, "batch")
