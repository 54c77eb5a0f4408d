"""The recursion on a run's own arrivals, batches and service times: when each request MUST have
started.

A batch starts when its server is free and its policy's condition holds, so

    start = max(observed end of that server's previous batch, trigger)

where the trigger is the arrival that lets the policy dispatch: the oldest member's (single,
dynamic, capped, elastic), the last member's or the oldest's plus `max_wait` (fixed). A continuous
engine is c slots: a request starts at max(its arrival, the instant a slot was free), c the largest
number seen in service, each slot held as long as measured. Of a policy from outside no condition is
known: its starts are those observed. No law and no observed start enters:
where this delay and the observed one part, the gateway lost time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from policies import Policy, is_first_come, parse_policy
from policies.fixed import Fixed
from queueing.measurement.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One dispatched request with everything about its service known: the non-null part of a
    record. One that was preempted counts as dispatched after all its waits: its service is the sum
    of its stints.
    """

    id: str
    policy: str
    epoch: int
    server_id: int
    batch_id: int
    batch_size: int
    arrived_at: float
    dispatched_at: float
    server_free_at: float
    released_at: float | None
    prompt_tokens: int  # that the engine computed
    output_tokens: int
    completed: bool
    # what a policy may have decided by
    max_output_tokens: int | None = None
    predicted_output_tokens: float | None = None
    client_request_id: str | None = None
    flow: str | None = None
    preemptions: int = 0


def served(records: Iterable[Record]) -> list[Served]:
    """The dispatched ones, in order of arrival."""
    found = [one for record in records if (one := _served(record)) is not None]
    return sorted(found, key=attrgetter("arrived_at"))


def _served(record: Record) -> Served | None:
    free_at = record.released_at if record.server_free_at is None else record.server_free_at
    known = (record.policy, record.batch_id, record.arrived_at, record.dispatched_at, free_at)
    if None in known:
        return None
    policy, batch_id, arrived_at, dispatched_at, server_free_at = known
    if record.preemptions and record.queueing_delay is not None:
        dispatched_at = float(arrived_at or 0.0) + record.queueing_delay
    return Served(
        id=record.request_id,
        policy=str(policy),
        epoch=record.epoch or 0,
        server_id=record.server_id or 0,
        batch_id=int(batch_id or 0),
        batch_size=record.batch_size or 1,
        arrived_at=float(arrived_at or 0.0),
        dispatched_at=float(dispatched_at or 0.0),
        server_free_at=float(server_free_at or 0.0),
        released_at=record.released_at,
        prompt_tokens=record.computed_tokens,
        output_tokens=record.output_tokens or 0,
        completed=record.outcome == "completed",
        preemptions=record.preemptions or 0,
        max_output_tokens=record.max_output_tokens,
        predicted_output_tokens=record.predicted_output_tokens,
        client_request_id=record.client_request_id,
        flow=record.flow,
    )


def batches(requests: Iterable[Served]) -> list[list[Served]]:
    """The requests by batch, members in order of arrival, batches in order of dispatch."""
    by_id: dict[int, list[Served]] = defaultdict(list)
    for request in requests:
        by_id[request.batch_id].append(request)
    return sorted(
        by_id.values(), key=lambda members: (members[0].dispatched_at, members[0].batch_id)
    )


def measured_starts(requests: Sequence[Served]) -> dict[str, float]:
    """Start of every request, by id; `requests` are ALL that were dispatched, in order of
    arrival, of one or more policies.
    """
    starts: dict[str, float] = {}
    free: dict[int, float] = {}  # observed end of each server's previous work
    runs = itertools.groupby(batches(requests), key=lambda members: members[0].policy)
    for text, run in runs:
        policy, members = parse_policy(text), list(run)
        starts |= _starts(policy, members, free)
        for batch in members:
            end = max(member.server_free_at for member in batch)
            free[batch[0].server_id] = max(end, free.get(batch[0].server_id, -math.inf))
    return starts


def _starts(
    policy: Policy, run: Sequence[list[Served]], free: dict[int, float]
) -> dict[str, float]:
    if not is_first_come(policy):
        return {member.id: member.dispatched_at for members in run for member in members}
    if policy.joins_running:
        return _slot_starts(run, free)
    return _batch_starts(policy, run, free)


def _batch_starts(
    policy: Policy, run: Sequence[list[Served]], free: dict[int, float]
) -> dict[str, float]:
    ends = dict(free)
    starts: dict[str, float] = {}
    full = _full_size(policy, run)
    for members in run:
        server = members[0].server_id
        start = max(ends.get(server, -math.inf), _trigger(policy, members, full))
        starts |= {member.id: start for member in members}
        ends[server] = max(member.server_free_at for member in members)
    return starts


def _full_size(policy: Policy, run: Sequence[list[Served]]) -> int:
    """Members that fixed waits for: without max_wait the largest batch seen, as the engine's
    bound may be below its own.
    """
    if not isinstance(policy, Fixed):
        return 1
    return (
        policy.batch_size
        if math.isfinite(policy.max_wait)
        else min(policy.batch_size, max(map(len, run)))
    )


def _trigger(policy: Policy, members: Sequence[Served], full: int) -> float:
    first = members[0]
    if not isinstance(policy, Fixed):
        return first.arrived_at
    if len(members) >= full:
        return members[-1].arrived_at
    # fewer: the oldest had waited max_wait, or (before that) the queue was closing
    return min(first.arrived_at + policy.max_wait, first.dispatched_at)


def _slot_starts(run: Iterable[list[Served]], free: dict[int, float]) -> dict[str, float]:
    requests = sorted(
        itertools.chain.from_iterable(run), key=lambda r: (r.dispatched_at, r.arrived_at)
    )
    slots: list[float] = []
    for server in {request.server_id for request in requests}:
        most = max(request.batch_size for request in requests if request.server_id == server)
        slots += [free.get(server, -math.inf)] * most
    heapq.heapify(slots)
    starts: dict[str, float] = {}
    for request in requests:
        start = max(request.arrived_at, slots[0])
        heapq.heapreplace(slots, start + request.server_free_at - request.dispatched_at)
        starts[request.id] = start
    return starts
