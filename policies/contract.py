"""What every policy must obey in every state, as functions that name the fault.

`kendall check-policy` and the tests look for a state in which a policy breaks one of CONTRACTS.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kendall.policies.core import (
    Decision,
    Dispatch,
    Policy,
    Preempt,
    QueueState,
    Running,
    Waiting,
    WaitUntil,
)
from kendall.policies.decision import RULES, SHOWN, DecisionError, Rule, check_decision, members
from kendall.policies.errors import SpecError
from kendall.policies.ordered import in_order
from kendall.policies.text import counted, format_policy, one_line, parse_policy

MOST_WAKE_UPS = 1000  # of a policy that nothing more arrives for, before it dispatches
Check = Callable[[Policy, QueueState, float], str | None]


@dataclass(frozen=True, slots=True)
class Contract:
    """`fault` tells how the policy breaks it in this state, or None."""

    name: str
    fault: Check


def checked(policy: Policy, state: QueueState, now: float) -> dict[str, str | None]:
    """The contracts that could be checked in this state, with the fault or None; the queue is put
    into the policy's order. Of a policy that raises only the first rule is; where it breaks a rule,
    what follows from its decision is not.
    """
    state = dataclasses.replace(state, waiting=in_order(policy, state.waiting))
    try:
        policy.decide(copy.deepcopy(state), now)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a policy may raise anything
        return {RULES[0][0]: f"raised {type(error).__name__}: {one_line(error)}"}
    found: dict[str, str | None] = {}
    for contract in CONTRACTS:
        with suppress(DecisionError):  # a rule of its own tells it
            found[contract.name] = _fault(contract, policy, state, now)
    return found


def _fault(contract: Contract, policy: Policy, state: QueueState, now: float) -> str | None:
    try:
        return contract.fault(policy, state, now)
    except (KeyboardInterrupt, DecisionError):
        raise
    except BaseException as error:  # noqa: BLE001 - in a later state, or asked again
        return f"raised {type(error).__name__}: {one_line(error)}"


def _obeys(rule: Rule) -> Check:
    return lambda policy, state, now: rule(policy, policy.decide(state, now), state, now)


def _same_again(policy: Policy, state: QueueState, now: float) -> str | None:
    first, second = policy.decide(state, now), policy.decide(state, now)
    copied = policy.decide(copy.deepcopy(state), now)
    if first == second == copied:
        return None
    other = second if second != first else copied
    return f"got {first!r:.{SHOWN}}, then {other!r:.{SHOWN}}; expected the same decision"


def _modifies_nothing(policy: Policy, state: QueueState, now: float) -> str | None:
    seen = copy.deepcopy(state)
    policy.decide(seen, now)
    return None if seen == state else "got another state after decide; expected it unchanged"


def _comes_to_rest(policy: Policy, state: QueueState, now: float) -> str | None:
    """At most one dispatch for each request that waits, and one preemption for each in service."""
    most = len(state.waiting) + 2 * sum(len(server.in_service) for server in state.servers)
    for _ in range(most + 1):
        decision = policy.decide(state, now)
        check_decision(policy, decision, state, now)
        if isinstance(decision, WaitUntil):
            return None
        state = _after(policy, decision, state, now)
    return f"got {counted(most + 1, 'decision')} at one instant without a WaitUntil"


def _waits_for_nothing(policy: Policy, state: QueueState, now: float) -> str | None:
    """With all servers empty and nothing more to arrive, what waits is dispatched in the end."""
    servers = [dataclasses.replace(server, in_service=[]) for server in state.servers]
    last = dataclasses.replace(state, servers=servers, closing=True)
    if not servers or not state.waiting:
        return None
    for _ in range(MOST_WAKE_UPS):
        decision = policy.decide(last, now)
        check_decision(policy, decision, last, now)
        if isinstance(decision, Dispatch):
            return None
        if not isinstance(decision, WaitUntil) or math.isinf(decision.deadline):
            break
        now = decision.deadline
    return (
        f"got {decision!r:.{SHOWN}} with every server empty, {len(state.waiting)} waiting and "
        "closing=True; expected a dispatch: nothing else will happen"
    )


def _text_reads_back(policy: Policy, state: QueueState, now: float) -> str | None:
    del state, now
    text = format_policy(policy)
    try:
        same = parse_policy(text)
    except SpecError as error:
        return f"got {text!r}, which cannot be read ({error})"
    return None if same == policy else f"got {same!r:.{SHOWN}} from {text!r}; expected {policy!r}"


def _after(policy: Policy, decision: Decision, state: QueueState, now: float) -> QueueState:
    if isinstance(decision, Dispatch):
        started = [
            Running(each.request, now, each.output_tokens_so_far)
            for each in members(decision, state)
        ]
        chosen = set(decision.request_ids)
        waiting = [each for each in state.waiting if each.request.id not in chosen]
        servers = [
            dataclasses.replace(server, in_service=[*server.in_service, *started])
            if server.id == decision.server_id
            else server
            for server in state.servers
        ]
        return dataclasses.replace(state, waiting=waiting, servers=servers)
    assert isinstance(decision, Preempt)
    out = set(decision.request_ids)
    back = [
        Waiting(each.request, each.output_tokens_so_far)
        for server in state.servers
        for each in server.in_service
        if each.request.id in out
    ]
    servers = [
        dataclasses.replace(
            server, in_service=[each for each in server.in_service if each.request.id not in out]
        )
        for server in state.servers
    ]
    queue = in_order(policy, [*back, *state.waiting])
    return dataclasses.replace(state, waiting=queue, servers=servers)


CONTRACTS = (
    Contract("deciding changes nothing in the state", _modifies_nothing),  # first: others decide
    *(Contract(name, _obeys(rule)) for name, rule in RULES),
    Contract("the same state gives the same decision", _same_again),
    Contract("after its dispatches a policy waits", _comes_to_rest),
    Contract("nothing waits for ever", _waits_for_nothing),
    Contract("the text of the policy reads back", _text_reads_back),
)
