"""What every decision must obey before a driver carries it out."""

from __future__ import annotations

from collections.abc import Callable

from kendall.policies.core import (
    Decision,
    Dispatch,
    Policy,
    Preempt,
    QueueState,
    Server,
    Waiting,
    WaitUntil,
    sequences_of,
)
from kendall.policies.registry import is_built_in
from kendall.policies.text import format_policy, one_line, policy_batch_size

LONGEST_DECISION = 1.0  # seconds; the gateway does nothing else meanwhile
SHOWN = 100  # characters of what a policy answered
Rule = Callable[[Policy, Decision, QueueState, float], str | None]


class DecisionError(ValueError):
    """A policy decided what cannot be carried out; the message says what was got and expected.
    `seconds`: what a decision took that is refused for it.
    """

    seconds = 0.0


def decide(policy: Policy, state: QueueState, now: float) -> Decision:
    """What the policy decides, checked where it is from outside. Raises DecisionError."""
    if is_built_in(policy):
        return policy.decide(state, now)
    try:
        decision = policy.decide(state, now)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: it would end the gateway
        raise DecisionError(
            f"policy {format_policy(policy)} raised {type(error).__name__}: {one_line(error)}"
        ) from error
    check_decision(policy, decision, state, now)
    return decision


def check_decision(policy: Policy, decision: Decision, state: QueueState, now: float) -> None:
    """Raises DecisionError."""
    for _, rule in RULES:
        if fault := rule(policy, decision, state, now):
            raise DecisionError(f"policy {format_policy(policy)}: {fault}")


def check_once(policy: str, decision: Dispatch, dispatched: set[str]) -> None:
    """Raises DecisionError for a request that the policy has dispatched, and then preempted, since
    it was asked: it would do so without end. Puts the others into `dispatched`.
    """
    for request_id in decision.request_ids:
        if request_id in dispatched:
            raise DecisionError(
                f"policy {policy}: got a second dispatch of {request_id!r:.{SHOWN}} at one "
                "instant; expected a WaitUntil"
            )
    dispatched.update(decision.request_ids)


def members(decision: Dispatch, state: QueueState) -> list[Waiting]:
    """The waiting requests that it dispatches."""
    ids = decision.request_ids
    head = list(state.waiting[: len(ids)])
    if [waiting.request.id for waiting in head] == list(ids):
        return head
    chosen = set(ids)
    return [waiting for waiting in state.waiting if waiting.request.id in chosen]


def _is_decision(_: Policy, decision: Decision, state: QueueState, now: float) -> str | None:
    del state, now
    if isinstance(decision, Dispatch | Preempt | WaitUntil):
        return None
    return f"got {decision!r:.{SHOWN}}; expected a Dispatch, a Preempt or a WaitUntil"


def _requests_wait(_: Policy, decision: Decision, state: QueueState, now: float) -> str | None:
    del now
    if not isinstance(decision, Dispatch):
        return None
    ids = decision.request_ids
    if not isinstance(ids, tuple) or not ids:
        return f"got Dispatch({ids!r:.{SHOWN}}, ...); expected a tuple with one id at least"
    if list(ids) == [waiting.request.id for waiting in state.waiting[: len(ids)]]:
        return None  # the head of the queue, as nearly always
    waits = {waiting.request.id for waiting in state.waiting}
    for request_id in ids:
        if request_id not in waits:
            return (
                f"got a dispatch of {request_id!r:.{SHOWN}}; expected waiting requests, each once"
            )
        waits.discard(request_id)
    return None


def _server_takes(policy: Policy, decision: Decision, state: QueueState, now: float) -> str | None:
    del now
    if not isinstance(decision, Dispatch):
        return None
    server = _server(decision, state)
    if server is None:
        return f"got a dispatch to server {decision.server_id!r}; expected one of state.servers"
    if server.in_service and not policy.joins_running:
        return (
            f"got a dispatch to server {server.id}, which has {len(server.in_service)} in service; "
            "expected an empty server, as joins_running is False"
        )
    return None


def _size_fits(policy: Policy, decision: Decision, state: QueueState, now: float) -> str | None:
    del now
    server = _server(decision, state)
    if server is None or not isinstance(decision, Dispatch):
        return None
    together = sequences_of(members(decision, state)) + server.sequences
    own = policy_batch_size(policy)
    bound = server.max_batch_size if own is None else min(own, server.max_batch_size)
    alone = len(decision.request_ids) == 1 and not server.in_service  # a call is never split
    if together > bound and not alone:
        return f"got {together} together on server {server.id}; expected at most {bound}"
    return None


def _tokens_fit(_: Policy, decision: Decision, state: QueueState, now: float) -> str | None:
    """Only a request that is alone on its server may be above a bound."""
    del now
    server = _server(decision, state)
    if server is None or not isinstance(decision, Dispatch):
        return None
    batch = members(decision, state)
    prompts = sum(each.request.prompt_tokens + each.output_tokens_so_far for each in batch)
    if len(batch) > 1 and prompts > server.max_prompt_tokens:
        return f"got prompts of {prompts} tokens; expected at most {server.max_prompt_tokens}"
    if len(batch) + len(server.in_service) == 1:
        return None
    requests = [each.request for each in batch] + [each.request for each in server.in_service]
    context = sum(request.context_tokens for request in requests)
    if context > server.max_context_tokens:
        return (
            f"got prompts and limits of {context} tokens; expected at most "
            f"{server.max_context_tokens}"
        )
    return None


def _can_preempt(_: Policy, decision: Decision, state: QueueState, now: float) -> str | None:
    del now
    if not isinstance(decision, Preempt):
        return None
    ids = decision.request_ids
    if not isinstance(ids, tuple) or not ids:
        return f"got Preempt({ids!r:.{SHOWN}}); expected a tuple with one id at least"
    running = {
        each.request.id
        for server in state.servers
        for each in server.in_service
        if each.preemptible
    }
    for request_id in ids:
        if request_id not in running:
            return (
                f"got a decision to preempt {request_id!s:.{SHOWN}}; expected a request in service "
                "that can be continued exactly (Running.preemptible), once"
            )
        running.discard(request_id)
    return None


def _wait_ends_later(_: Policy, decision: Decision, state: QueueState, now: float) -> str | None:
    """A deadline that has come is acted upon: else the driver would ask without end."""
    del state
    if not isinstance(decision, WaitUntil):
        return None
    deadline = decision.deadline
    if isinstance(deadline, int | float) and deadline > now:
        return None
    return f"got WaitUntil({deadline!r:.{SHOWN}}) at {now}; expected a later instant"


def _server(decision: Decision, state: QueueState) -> Server | None:
    if not isinstance(decision, Dispatch):
        return None
    return next((server for server in state.servers if server.id == decision.server_id), None)


RULES: tuple[tuple[str, Rule], ...] = (
    ("the decision is a Dispatch, a Preempt or a WaitUntil", _is_decision),
    ("a batch has waiting requests, each once", _requests_wait),
    ("a batch starts on a server that can take it", _server_takes),
    ("a batch is no larger than the policy and the engine allow", _size_fits),
    ("a batch keeps within the token bounds of its server", _tokens_fit),
    ("only preemptible requests in service are preempted", _can_preempt),
    ("a wait ends later than now", _wait_ends_later),
)
