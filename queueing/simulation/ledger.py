"""The state of a request in the simulator, and the record that is made of it."""

from __future__ import annotations

from dataclasses import dataclass

from kendall.policies.core import Policy, Request, Running, Waiting
from kendall.policies.fixed import Fixed
from kendall.policies.flow_counters import FlowCounters
from kendall.queueing.latency.service import Member
from kendall.queueing.measurement.record import Outcome, Record


@dataclass(slots=True, eq=False, kw_only=True)
class ServedBatch:
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
    """The service that a request had before it was preempted, or before its engine died."""

    first_dispatched_at: float | None = None
    dispatched_at: float | None = None  # the last time
    first_token_at: float | None = None
    last_token_at: float | None = None
    served: float = 0.0  # seconds
    output_tokens: int = 0
    preemptions: int = 0
    interruptions: int = 0  # engines that died meanwhile


NO_STINTS = Stints()


@dataclass(slots=True, eq=False, kw_only=True)
class Started(Running):
    """A request in service, with what only the driver may know. A policy sees it as `Running`."""

    member: Member
    batch: ServedBatch
    before: Stints = NO_STINTS
    ended_at: float | None = None  # its own last token

    @property
    def has_left(self) -> bool:
        """Whether its answer has left, though its batch may run on."""
        return self.ended_at is not None and self.batch.policy.release == "request"

    @property
    def first_dispatched_at(self) -> float:
        """Instant of its first dispatch."""
        first = self.before.first_dispatched_at
        return self.batch.at if first is None else first

    @property
    def first_token_at(self) -> float | None:
        """Instant of its first token, None before that."""
        first = self.before.first_token_at
        return self.member.first_token_at if first is None else first

    def count_tokens(self, counters: FlowCounters | None) -> None:
        """Show how far it is, and tell the counters what is new. What pads a batch behind the own
        end does not count.
        """
        before, member = self.output_tokens_so_far, self.member
        self.output_tokens_so_far = self.before.output_tokens + min(
            member.produced, member.output_tokens
        )
        if counters is not None:
            counters.made(self.request.flow, self.output_tokens_so_far - before)


def stopped(started: Started, now: float) -> Stints:
    """A preempted request as it goes back into the queue."""
    before, member = started.before, started.member
    return Stints(
        first_dispatched_at=started.first_dispatched_at,
        dispatched_at=started.batch.at,
        first_token_at=started.first_token_at,
        last_token_at=member.left_off_at,
        served=before.served + (now - started.batch.at),
        output_tokens=before.output_tokens + member.produced,
        preemptions=before.preemptions + 1,
        interruptions=before.interruptions,
    )


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
    before = started.before
    formed = request.arrived_at if batch.formed_at is None else batch.formed_at
    produced = before.output_tokens + min(member.produced, member.output_tokens)
    return Record(
        request_id=request.id,
        outcome=outcome,
        policy=batch.policy_text,
        epoch=batch.epoch,
        server_id=batch.server_id,
        batch_id=batch.id,
        batch_size=batch.size,
        arrived_at=request.arrived_at,
        first_dispatched_at=started.first_dispatched_at,
        dispatched_at=batch.at,
        first_token_at=started.first_token_at,
        last_token_at=member.last_token_at,
        released_at=released_at,
        server_free_at=free_at,
        queueing_delay=batch.at - request.arrived_at - before.served,
        batch_forming_delay=max(0.0, formed - request.arrived_at),
        service_time=None if free_at is None else before.served + (free_at - batch.at),
        sojourn_time=None if released_at is None else released_at - request.arrived_at,
        prompt_tokens=request.prompt_tokens,
        output_tokens=produced,
        max_output_tokens=request.max_output_tokens,
        predicted_output_tokens=request.predicted_output_tokens,
        flow=request.flow or None,
        preemptions=before.preemptions,
        interruptions=before.interruptions,
    )


def lost(
    request: Request,
    outcome: Outcome,
    at: float,
    policy_text: str,
    epoch: int,
    *,
    stints: Stints = NO_STINTS,
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
        output_tokens=stints.output_tokens,
        preemptions=stints.preemptions,
        interruptions=stints.interruptions,
        first_dispatched_at=stints.first_dispatched_at,
        dispatched_at=stints.dispatched_at,
        first_token_at=stints.first_token_at,
        service_time=stints.served if stints.preemptions else None,
        predicted_output_tokens=request.predicted_output_tokens,
        max_output_tokens=request.max_output_tokens,
        flow=request.flow or None,
    )
