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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stints:
    """What a preempted request had of service before."""

    first_dispatched_at: float
    dispatched_at: float  # the last time
    first_token_at: float | None
    served: float  # seconds
    output_tokens: int
    preemptions: int


@dataclass(slots=True, eq=False, kw_only=True)
class Started(Running):
    """A request in service, with what only the driver may know. A policy sees it as `Running`."""

    member: Member
    batch: Batch
    before: Stints | None = None
    ended_at: float | None = None  # its own last token

    @property
    def made_before(self) -> int:
        """Tokens of earlier stints."""
        return 0 if self.before is None else self.before.output_tokens

    def count_tokens(self) -> None:
        """Show how far it is."""
        self.output_tokens_so_far = self.made_before + self.member.produced


def stopped(started: Started, now: float) -> Stints:
    """A preempted request as it goes back into the queue."""
    before, member = started.before, started.member
    return Stints(
        first_dispatched_at=started.batch.at if before is None else before.first_dispatched_at,
        dispatched_at=started.batch.at,
        first_token_at=_first_token_at(started),
        served=_served_before(started) + (now - started.batch.at),
        output_tokens=started.made_before + member.produced,
        preemptions=_preemptions(started) + 1,
    )


def _first_token_at(started: Started) -> float | None:
    before = started.before
    if before is not None and before.first_token_at is not None:
        return before.first_token_at
    return started.member.first_token_at


def _served_before(started: Started) -> float:
    return 0.0 if started.before is None else started.before.served


def _preemptions(started: Started) -> int:
    return 0 if started.before is None else started.before.preemptions


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
    produced = started.made_before + min(member.produced, member.output_tokens)
    before, served = started.before, _served_before(started)
    return Record(
        request_id=request.id,
        outcome=outcome,
        policy=batch.policy_text,
        epoch=batch.epoch,
        server_id=batch.server_id,
        batch_id=batch.id,
        batch_size=batch.size,
        arrived_at=request.arrived_at,
        first_dispatched_at=batch.at if before is None else before.first_dispatched_at,
        dispatched_at=batch.at,
        first_token_at=_first_token_at(started),
        last_token_at=member.last_token_at,
        released_at=released_at,
        server_free_at=free_at,
        queueing_delay=batch.at - request.arrived_at - served,
        batch_forming_delay=forming,
        service_time=None if free_at is None else served + (free_at - batch.at),
        sojourn_time=None if released_at is None else released_at - request.arrived_at,
        prompt_tokens=request.prompt_tokens,
        output_tokens=produced,
        max_output_tokens=request.max_output_tokens,
        predicted_output_tokens=request.predicted_output_tokens,
        preemptions=_preemptions(started),
    )


def lost(
    request: Request,
    outcome: Outcome,
    at: float,
    policy_text: str,
    epoch: int,
    *,
    stints: Stints | None = None,
) -> Record:
    """The record of a request that was waiting when it left, at `at`: it has no queueing delay;
    `stints` where it had been preempted.
    """
    return Record(
        request_id=request.id,
        outcome=outcome,
        policy=policy_text,
        epoch=epoch,
        arrived_at=request.arrived_at,
        released_at=at,
        prompt_tokens=request.prompt_tokens,
        output_tokens=0 if stints is None else stints.output_tokens,
        preemptions=0 if stints is None else stints.preemptions,
        first_dispatched_at=None if stints is None else stints.first_dispatched_at,
        dispatched_at=None if stints is None else stints.dispatched_at,
        first_token_at=None if stints is None else stints.first_token_at,
        service_time=None if stints is None else stints.served,
        predicted_output_tokens=request.predicted_output_tokens,
        max_output_tokens=request.max_output_tokens,
    )
