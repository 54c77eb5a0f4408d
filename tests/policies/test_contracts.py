"""What holds for every policy in every state."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kendall.policies import (
    POLICIES,
    Dispatch,
    Policy,
    QueueState,
    Request,
    Running,
    Server,
    Waiting,
)
from kendall.policies.contract import CONTRACTS, Contract
from tests.policies.states import by_name, policies, seconds, states, work_conserving


def dispatched(policy: Policy, state: QueueState, now: float) -> tuple[Dispatch, Server]:
    """The dispatch and its server; other decisions are not looked at."""
    decision = policy.decide(state, now)
    assume(isinstance(decision, Dispatch))
    assert isinstance(decision, Dispatch)
    return decision, next(server for server in state.servers if server.id == decision.server_id)


def test_every_policy_takes_part() -> None:
    """A policy that is added to the table is added to the contracts."""
    assert set(by_name) == set(POLICIES)


@pytest.mark.thinned(12)
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
@given(policies, states(), seconds)
def test_every_policy_keeps_its_contracts(
    contract: Contract, policy: Policy, state: QueueState, now: float
) -> None:
    """Those that `kendall check-policy` checks too."""
    assert contract.fault(policy, state, now) is None


@given(policies, states(), seconds)
def test_a_batch_is_the_head_of_the_queue(policy: Policy, state: QueueState, now: float) -> None:
    """Distinct, waiting, never empty, first come first served."""
    decision, _ = dispatched(policy, state, now)
    size = len(decision.request_ids)
    assert size > 0
    assert list(decision.request_ids) == [item.request.id for item in state.waiting[:size]]
    assert len(set(decision.request_ids)) == size


@pytest.mark.slow
@given(st.one_of(*work_conserving.values()), states(), seconds)
def test_a_work_conserving_policy_leaves_no_server_empty(
    policy: Policy, state: QueueState, now: float
) -> None:
    """While something waits. Only fixed makes requests wait for company."""
    assume(state.waiting and state.empty_server() is not None)
    assert isinstance(policy.decide(state, now), Dispatch)


@pytest.mark.slow
@given(policies, states(), seconds)
def test_at_the_end_nobody_waits_for_company(policy: Policy, state: QueueState, now: float) -> None:
    assume(state.waiting and state.empty_server() is not None)
    assert isinstance(policy.decide(dataclasses.replace(state, closing=True), now), Dispatch)


@pytest.mark.slow
@given(policies, states(), seconds, st.data())
def test_fcfs_looks_at_no_prediction_priority_patience_or_flow(
    policy: Policy, state: QueueState, now: float, data: st.DataObject
) -> None:
    """A driver that fills these fields changes nothing under the orders there are."""
    changed = [
        Waiting(
            item.request._replace(
                predicted_output_tokens=data.draw(st.none() | st.floats(1.0, 1e4)),
                priority=data.draw(st.integers(-5, 5)),
                deadline=data.draw(seconds),
                flow=data.draw(st.sampled_from(["", "a"])),
            ),
            item.output_tokens_so_far,
        )
        for item in state.waiting
    ]
    other = QueueState(
        changed,
        state.servers,
        {"arrival_rate": data.draw(seconds)},
        state.closing,
        {"": data.draw(seconds), "a": data.draw(seconds)},
        state.prefix_matches,
    )
    assert policy.decide(other, now) == policy.decide(state, now)


def test_no_policy_can_tell_two_lengths_apart() -> None:
    """What a policy sees has no field for the true output length; who adds a field here must say
    why it is not one.
    """
    fields = {cls: set(cls._fields) for cls in (Request, Waiting)} | {
        cls: {field.name for field in dataclasses.fields(cls)}
        for cls in (Running, Server, QueueState)
    }
    assert fields == {
        Request: {
            "id",
            "arrived_at",
            "prompt_tokens",
            "max_output_tokens",
            "predicted_output_tokens",
            "priority",
            "deadline",
            "flow",  # who asks
            "sequences",
            "reserved_tokens",  # by the operator, or a share of the memory: one for all
        },
        Waiting: {"request", "output_tokens_so_far"},
        Running: {"request", "started_at", "output_tokens_so_far", "preemptible", "preemptions"},
        Server: {
            "id",
            "in_service",
            "max_batch_size",
            "max_prompt_tokens",
            "max_context_tokens",
            "counted",  # sums over those in service
        },
        QueueState: {
            "waiting",
            "servers",
            "estimates",
            "closing",
            "virtual_tokens",  # of what was made
            "prefix_matches",  # of prompts
        },
    }
    assert all("__slots__" in vars(cls) for cls in fields), (
        "without slots anything can be hung onto them"
    )
