"""What holds for every policy in every state."""

from __future__ import annotations

import copy
import dataclasses
import math

from hypothesis import assume, given
from hypothesis import strategies as st

from policies import (
    POLICIES,
    Dispatch,
    Policy,
    QueueState,
    Request,
    Running,
    Server,
    Waiting,
    WaitUntil,
    policy_batch_size,
)
from tests.policies.states import by_name, policies, seconds, states, work_conserving


def dispatched(policy: Policy, state: QueueState, now: float) -> tuple[Dispatch, Server]:
    """The dispatch and its server; other decisions are not looked at."""
    decision = policy.decide(state, now)
    assume(isinstance(decision, Dispatch))
    assert isinstance(decision, Dispatch)
    return decision, next(server for server in state.servers if server.id == decision.server_id)


def context_tokens(request: Request) -> int:
    return request.prompt_tokens + request.max_output_tokens


def test_every_policy_takes_part() -> None:
    """A policy that is added to the table is added to the contracts."""
    assert set(by_name) == set(POLICIES)


@given(policies, states(), seconds)
def test_a_batch_is_the_head_of_the_queue(policy: Policy, state: QueueState, now: float) -> None:
    """Distinct, waiting, never empty, first come first served."""
    decision, _ = dispatched(policy, state, now)
    size = len(decision.request_ids)
    assert size > 0
    assert list(decision.request_ids) == [item.request.id for item in state.waiting[:size]]
    assert len(set(decision.request_ids)) == size


@given(policies, states(), seconds)
def test_a_batch_keeps_within_the_policy_and_the_engine(
    policy: Policy, state: QueueState, now: float
) -> None:
    decision, server = dispatched(policy, state, now)
    together = len(decision.request_ids) + len(server.in_service)
    assert together <= server.max_batch_size
    assert together <= (policy_batch_size(policy) or math.inf)


@given(policies, states(), seconds)
def test_a_batch_keeps_within_the_tokens_of_its_server(
    policy: Policy, state: QueueState, now: float
) -> None:
    """Only a request that is alone on its server may be above a bound."""
    decision, server = dispatched(policy, state, now)
    batch = state.waiting[: len(decision.request_ids)]
    if len(batch) > 1:
        assert (
            sum(item.request.prompt_tokens + item.output_tokens_so_far for item in batch)
            <= server.max_prompt_tokens
        )
    if len(batch) + len(server.in_service) > 1:
        held = sum(context_tokens(item.request) for item in server.in_service)
        assert (
            held + sum(context_tokens(item.request) for item in batch) <= server.max_context_tokens
        )


@given(policies, states(), seconds)
def test_a_batch_starts_on_an_empty_server(policy: Policy, state: QueueState, now: float) -> None:
    """Unless the policy lets requests join others in service."""
    _, server = dispatched(policy, state, now)
    assert policy.joins_running or not server.in_service


@given(policies, states(), seconds)
def test_the_same_state_gives_the_same_decision_and_stays_as_it_was(
    policy: Policy, state: QueueState, now: float
) -> None:
    before = copy.deepcopy(state)
    first = policy.decide(state, now)
    assert state == before
    assert policy.decide(state, now) == first
    assert policy.decide(before, now) == first


@given(policies, states(), seconds)
def test_a_wait_ends_in_the_future(policy: Policy, state: QueueState, now: float) -> None:
    """A deadline that has come is acted upon, not answered: else the driver would turn in a
    circle.
    """
    decision = policy.decide(state, now)
    if isinstance(decision, WaitUntil):
        assert decision.deadline > now


@given(policies, states(), seconds)
def test_what_was_dispatched_brings_the_driver_to_rest(
    policy: Policy, state: QueueState, now: float
) -> None:
    """Asked again after each dispatch, a policy comes to a wait after at most one dispatch per
    waiting request.
    """
    queue, servers = list(state.waiting), list(state.servers)
    for _ in range(len(queue) + 1):
        decision = policy.decide(QueueState(queue, servers, closing=state.closing), now)
        if isinstance(decision, WaitUntil):
            return
        assert isinstance(decision, Dispatch)
        size = len(decision.request_ids)
        started = [Running(item.request, now) for item in queue[:size]]
        servers = [
            dataclasses.replace(server, in_service=[*server.in_service, *started])
            if server.id == decision.server_id
            else server
            for server in servers
        ]
        queue = queue[size:]
    raise AssertionError("the policy never waits")


@given(st.one_of(*work_conserving.values()), states(), seconds)
def test_a_work_conserving_policy_leaves_no_server_empty(
    policy: Policy, state: QueueState, now: float
) -> None:
    """While something waits. Only fixed makes requests wait for company."""
    assume(state.waiting and state.empty_server() is not None)
    assert isinstance(policy.decide(state, now), Dispatch)


@given(policies, states(), seconds)
def test_at_the_end_nobody_waits_for_company(policy: Policy, state: QueueState, now: float) -> None:
    assume(state.waiting and state.empty_server() is not None)
    assert isinstance(policy.decide(dataclasses.replace(state, closing=True), now), Dispatch)


@given(policies, states(), seconds, st.data())
def test_fcfs_looks_at_no_prediction_priority_or_patience(
    policy: Policy, state: QueueState, now: float, data: st.DataObject
) -> None:
    """A driver that fills these fields changes nothing under the orders there are."""
    changed = [
        Waiting(
            dataclasses.replace(
                item.request,
                predicted_output_tokens=data.draw(st.none() | st.floats(1.0, 1e4)),
                priority=data.draw(st.integers(-5, 5)),
                deadline=data.draw(seconds),
            ),
            item.output_tokens_so_far,
        )
        for item in state.waiting
    ]
    other = QueueState(changed, state.servers, {"arrival_rate": data.draw(seconds)}, state.closing)
    assert policy.decide(other, now) == policy.decide(state, now)


def test_no_policy_can_tell_two_lengths_apart() -> None:
    """What a policy sees has no field for the true output length; who adds a field here must say
    why it is not one.
    """
    fields = {
        cls: {field.name for field in dataclasses.fields(cls)}
        for cls in (Request, Waiting, Running, Server, QueueState)
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
        },
        Waiting: {"request", "output_tokens_so_far"},
        Running: {"request", "started_at", "output_tokens_so_far", "preemptible"},
        Server: {"id", "in_service", "max_batch_size", "max_prompt_tokens", "max_context_tokens"},
        QueueState: {"waiting", "servers", "estimates", "closing"},
    }
    assert all("__slots__" in vars(cls) for cls in fields), (
        "without slots anything can be hung onto them"
    )
