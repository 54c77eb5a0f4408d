"""From what the simulator knows of a request to its record."""

from __future__ import annotations

from dataclasses import dataclass

from policies.core import Policy, Request, Running, Waiting
from policies.fixed import Fixed
from queueing.latency.service import Member
from queueing.measurement.record import Outcome, Record


@dataclass(slots=True, eq=False, kw_only=True)
class Batch:
    """One dispatch: its members share it."""

    id: int
    size: int
    server_id: int
    at: float
    policy: Policy
    policy_text: str
    epoch: int
    formed_at: float | None


@dataclass(slots=True, eq=False, kw_only=True)
class Started(Running):
    """A request in service, with what only the driver may know. A policy sees it as `Running`."""

    member: Member
    batch: Batch
    ended_at: float | None = None  # its own last token


def formed_at(policy: Policy, taken: list[Waiting], bound: int, now: float) -> float | None:
    """The instant at which a fixed batch stopped waiting for batch mates; None where nobody ever
    waits for it.
    """
    if not isinstance(policy, Fixed):
        return None
    if len(taken) >= min(policy.batch_size, bound):
        return max(waiting.request.arrived_at for waiting in taken)
    return min(now, taken[0].request.arrived_at + policy.max_wait)


def ended(
    started: Started, outcome: Outcome, released_at: float | None, free_at: float | None
) -> Record:
    """The record of a request that was dispatched."""
    request, batch, member = started.request, started.batch, started.member
    forming = (
        0.0
        if batch.formed_at is None or batch.formed_at < request.arrived_at
        else batch.formed_at - request.arrived_at
    )
    produced = min(member.produced, member.output_tokens)
    return Record(
        request_id=request.id,
        outcome=outcome,
        policy=batch.policy_text,
        epoch=batch.epoch,
        server_id=batch.server_id,
        batch_id=batch.id,
        batch_size=batch.size,
        arrived_at=request.arrived_at,
        first_dispatched_at=batch.at,
        dispatched_at=batch.at,
        first_token_at=member.first_token_at,
        last_token_at=member.last_token_at,
        released_at=released_at,
        server_free_at=free_at,
        queueing_delay=batch.at - request.arrived_at,
        batch_forming_delay=forming,
        service_time=None if free_at is None else free_at - batch.at,
        sojourn_time=None if released_at is None else released_at - request.arrived_at,
        prompt_tokens=request.prompt_tokens,
        output_tokens=produced,
        max_output_tokens=request.max_output_tokens,
    )


def lost(request: Request, outcome: Outcome, at: float, policy_text: str, epoch: int) -> Record:
    """The record of a request that never started: it has waited until `at`, and has no queueing
    delay.
    """
    return Record(
        request_id=request.id,
        outcome=outcome,
        policy=policy_text,
        epoch=epoch,
        arrived_at=request.arrived_at,
        released_at=at,
        prompt_tokens=request.prompt_tokens,
        output_tokens=0,
        max_output_tokens=request.max_output_tokens,
    )
