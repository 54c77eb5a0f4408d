"""A policy that breaks a contract is found out, and the fault is named."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from kendall.policies import (
    Decision,
    Dispatch,
    Policy,
    QueueState,
    Running,
    Server,
    WaitUntil,
    is_built_in,
)
from kendall.policies.contract import CONTRACTS
from kendall.policies.decision import RULES, DecisionError, decide
from kendall.queueing.simulation.policy_check import (
    FLOWS,
    RUN,
    check_policy,
    not_checked,
    random_states,
)
from tests.policies.broken import (
    BREAKS,
    Broken,
    Evicts,
    Exits,
    Garbage,
    Raises,
    Shortest,
    Stranger,
    Swap,
    Unreadable,
)
from tests.policies.states import waiting

EMPTY = Server(0)
NAMES = [contract.name for contract in CONTRACTS]
STATES = 300


def test_the_states_are_of_every_kind_and_two_in_five_of_what_may_bind_do() -> None:
    drawn = list(random_states(2000, seed=1))
    queued = [(each, now) for state, now in drawn for each in state.waiting]
    servers = [server for state, _ in drawn for server in state.servers]
    served = [each for server in servers for each in server.in_service]
    requests = [each.request for each, _ in queued]
    assert {len(state.waiting) for state, _ in drawn} == set(range(11))
    assert {len(state.servers) for state, _ in drawn} == set(range(4))
    assert {len(server.in_service) for server in servers} == set(range(5))
    assert {request.priority for request in requests} == set(range(-5, 6))
    assert {request.flow for request in requests} == set(FLOWS)
    assert all(set(state.virtual_tokens) == set(FLOWS) for state, _ in drawn)
    for state, now in drawn:
        instants = [each.request.arrived_at for each in state.waiting]
        assert instants == sorted(instants)
        assert all(0 <= at <= now <= 100 for at in instants)
        assert len({server.id for server in state.servers}) == len(state.servers)
    assert all(now <= each.request.deadline for each, now in queued)
    assert all(each.started_at == each.request.arrived_at for each in served)
    sizes = [server.max_batch_size for server in servers if server.max_batch_size < 2**31]
    assert set(sizes) == set(range(1, 13))
    shares = {
        "closes": [state.closing for state, _ in drawn],
        "has tokens": [each.output_tokens_so_far > 0 for each, _ in queued],
        "is predicted": [request.predicted_output_tokens is not None for request in requests],
        "is urgent or not": [request.priority != 0 for request in requests],
        "is impatient": [request.deadline < math.inf for request in requests],
        "is at work": [len(server.in_service) > 0 for server in servers],
        "bounds batches": [server.max_batch_size < 2**31 for server in servers],
        "bounds prompts": [server.max_prompt_tokens < 2**31 for server in servers],
        "bounds memory": [server.max_context_tokens < 2**62 for server in servers],
    }
    for name, true in shares.items():
        assert np.mean(true) == pytest.approx(0.4, abs=0.05), name
    assert np.mean([each.preemptible for each in served]) == pytest.approx(0.5, abs=0.05)
    predicted = np.array([request.predicted_output_tokens or math.nan for request in requests])
    assert (np.nanmin(predicted), np.nanmax(predicted)) == pytest.approx((1, 500), abs=1)
    assert np.nanmean(predicted) == pytest.approx(250.5, rel=0.05)


def first_broken(policy: Policy) -> str | None:
    checked = check_policy(policy, states=STATES, seed=0)
    return next((each.contract for each in checked if each.fault is not None), None)


@pytest.mark.thinned(10)
@pytest.mark.parametrize(("cls", "contract"), BREAKS.items(), ids=str)
def test_a_broken_contract_is_named(cls: type[Policy], contract: str) -> None:
    assert first_broken(cls()) == contract


@pytest.mark.parametrize("answers", ["aba", "abb", "aab"])
def test_a_decision_that_changes_is_told_beside_the_first_one(answers: str) -> None:
    """Asked twice in one state, and once in a copy."""
    given = iter(answers)

    class Scripted(Broken):
        def start(self, state: QueueState, server: Server) -> Decision:
            return Dispatch((next(given),), server.id)

    (same,) = [each for each in CONTRACTS if each.name == "the same state gives the same decision"]
    fault = same.fault(Scripted(), QueueState(waiting("a", "b"), [EMPTY]), 5.0)
    first, other = Dispatch(("a",), 0), Dispatch(("b",), 0)
    assert fault == f"got {first!r}, then {other!r}; expected the same decision"


def test_every_contract_can_be_broken() -> None:
    """That of the text by the next test."""
    assert set(BREAKS.values()) == set(NAMES) - {"the text of the policy reads back"}


def test_a_text_that_does_not_read_back(known: None) -> None:
    assert first_broken(Unreadable(words="a,b")) == "the text of the policy reads back"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of the policies here can be read."""
    classes = {cls.name: cls for cls in (Shortest, Unreadable)}
    monkeypatch.setattr("kendall.policies.text.policy_class", classes.get)
    monkeypatch.setattr("kendall.policies.text.usable_policies", lambda: tuple(classes))


def test_a_policy_that_keeps_them_all_is_said_to(known: None) -> None:
    checked = list(check_policy(Shortest(), states=STATES, seed=0))
    assert [each.contract for each in checked] == [*NAMES, RUN]
    assert all(each.fault is None and each.note is None for each in checked)


def test_who_was_preempted_waits_again_and_is_not_preempted_twice() -> None:
    (rests,) = [each for each in CONTRACTS if each.name == "after its dispatches a policy waits"]
    in_service = [Running(each.request, 1.0, 3) for each in waiting("a", "b", "c")]
    servers = [Server(0, in_service[:2]), Server(1, in_service[2:])]
    assert rests.fault(Evicts(), QueueState(waiting("d"), servers), 5.0) is None
    assert rests.fault(Swap(), QueueState(waiting("d"), servers), 5.0) is not None


def test_where_a_policy_raises_its_other_contracts_are_not_said_to_hold() -> None:
    """In the states in which nothing can be dispatched it waits, and is checked."""
    first, rule, *others, run = check_policy(Raises(), states=STATES, seed=0)
    assert rule.fault is not None
    broken = [each for each in others if each.fault is not None]
    assert [each.contract for each in broken] == [
        "nothing waits for ever",  # it raises in a later state
        "the text of the policy reads back",  # its name is no policy's
    ]
    for each in (first, *others):
        if each in broken:
            continue
        assert each.note is not None
        assert re.fullmatch(
            r"not checked in \d+ of the 300 states, as another contract is broken there", each.note
        )
    assert run.note is not None


def test_what_follows_from_a_decision_is_not_checked_where_a_rule_is_broken() -> None:
    checked = {each.contract: each for each in check_policy(Garbage(), states=STATES, seed=0)}
    assert checked["the same state gives the same decision"].note is None
    rests = checked["after its dispatches a policy waits"]
    assert (rests.fault, rests.note is None) == (None, False)


@pytest.mark.parametrize(
    ("count", "note"),
    [
        (5, None),
        (4, "not checked in 1 of the 5 states, as another contract is broken there"),
        (1, "not checked in 4 of the 5 states, as another contract is broken there"),
        (0, "not checked in any state, as another contract is broken there"),
    ],
)
def test_a_contract_says_in_how_many_states_it_was_not_checked(
    count: int, note: str | None
) -> None:
    assert not_checked(count, 5) == note


def test_a_run_is_not_simulated_where_a_contract_is_broken() -> None:
    *_, run = check_policy(Raises(), states=STATES, seed=0)
    assert run.contract == RUN
    assert run.fault is None
    assert run.note is not None


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Raises(), "policy broken raised KeyError: 'oops'"),
        (Exits(), "policy broken raised SystemExit: good bye"),
        (Garbage(), "policy broken: got 'dispatch everything'; expected a Dispatch, a Preempt or"),
        (Stranger(), "policy broken: got a dispatch of 'nobody'; expected waiting requests"),
    ],
)
def test_a_driver_gets_no_decision_that_cannot_be_carried_out(policy: Policy, says: str) -> None:
    with pytest.raises(DecisionError, match="policy broken") as raised:
        decide(policy, QueueState(waiting("a", "b"), [EMPTY]), 5.0)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "server", [Server(0, max_context_tokens=29), Server(0, max_prompt_tokens=9)]
)
@pytest.mark.parametrize(("count", "allowed"), [(1, True), (2, False), (3, False)])
def test_only_a_request_that_is_alone_may_be_above_a_bound(
    count: int, allowed: bool, server: Server
) -> None:
    """Each has a prompt of 10 tokens and holds 30."""
    names = [str(place) for place in range(count)]
    state = QueueState(waiting(*names), [server])
    (rule,) = [rule for name, rule in RULES if "token bounds" in name]
    fault = rule(Broken(), Dispatch(tuple(names), 0), state, 5.0)
    assert (fault is None) is allowed


@pytest.mark.parametrize(
    "server", [Server(0, max_context_tokens=60), Server(0, max_prompt_tokens=20)]
)
def test_a_batch_may_fill_a_bound(server: Server) -> None:
    """Two with a prompt of 10 tokens that hold 30 each."""
    state = QueueState(waiting("0", "1"), [server])
    (rule,) = [rule for name, rule in RULES if "token bounds" in name]
    assert rule(Broken(), Dispatch(("0", "1"), 0), state, 5.0) is None


def test_a_driver_gets_what_can_be_carried_out() -> None:
    state = QueueState(waiting("a", "b"), [EMPTY])
    assert decide(Broken(), state, 5.0) == Dispatch(("a",), 0)
    assert decide(Broken(), QueueState([], [EMPTY]), 5.0) == WaitUntil(float("inf"))
    assert not is_built_in(Broken())
