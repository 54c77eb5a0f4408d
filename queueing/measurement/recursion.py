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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from kendall.policies import Policy, is_first_come, parse_policy
from kendall.policies.fixed import Fixed
from kendall.queueing.measurement.batch_means import FloatArray
from kendall.queueing.measurement.record import Record

IntArray = npt.NDArray[np.int64]
NOTHING: Mapping[int, float] = {}


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

    @classmethod
    def of(cls, record: Record) -> Served | None:
        """None where it was never dispatched, or its service is not known."""
        free_at = record.released_at if record.server_free_at is None else record.server_free_at
        known = (record.policy, record.batch_id, record.arrived_at, record.dispatched_at, free_at)
        if None in known:
            return None
        policy, batch_id, arrived_at, dispatched_at, server_free_at = known
        if record.preemptions and record.queueing_delay is not None:
            dispatched_at = float(arrived_at or 0.0) + record.queueing_delay
        return cls(
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


def served(records: Iterable[Record]) -> list[Served]:
    """The dispatched ones, in order of arrival."""
    found = [one for record in records if (one := Served.of(record)) is not None]
    return sorted(found, key=attrgetter("arrived_at"))


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
        of_run = list(itertools.chain.from_iterable(members))
        if not is_first_come(policy):
            starts |= {request.id: request.dispatched_at for request in of_run}
        elif policy.joins_running:
            starts |= _slot_starts(of_run, free)
        else:
            table = np.array(
                [
                    (r.arrived_at, r.dispatched_at, r.server_free_at, r.batch_id, r.server_id)
                    for r in of_run
                ]
            )
            began = batch_starts(policy, table.T, free).tolist()
            starts |= {request.id: at for request, at in zip(of_run, began, strict=True)}
        for batch in members:
            end = max(member.server_free_at for member in batch)
            free[batch[0].server_id] = max(end, free.get(batch[0].server_id, -math.inf))
    return starts


def batch_starts(
    policy: Policy, requests: FloatArray, free: Mapping[int, float] = NOTHING
) -> FloatArray:
    """Start of every request of batches in the order of arrival. Five rows: arrival, dispatch, the
    server's end, batch and server of each; instants in seconds. `free`: until when the servers had
    served others.
    """
    arrived, dispatched, freed, batch, server = requests
    order, first = by_batch(batch)
    sizes = np.diff(np.append(first, order.size))
    at, oldest = (np.minimum.reduceat(each[order], first) for each in (dispatched, arrived))
    ends, youngest = (np.maximum.reduceat(each[order], first) for each in (freed, arrived))
    starts = _ready(policy, sizes, oldest, youngest, at)
    for one in np.unique(server):
        own = np.flatnonzero(server[order][first] == one)
        own = own[np.lexsort((batch[order][first][own], at[own]))]
        before = np.append(free.get(int(one), -math.inf), ends[own][:-1])
        starts[own] = np.maximum(np.maximum.accumulate(before), starts[own])
    found = np.empty(order.size)
    found[order] = np.repeat(starts, sizes)
    return found


def by_batch(batch: npt.NDArray[Any]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Places of the members in the order of their batches, and where each batch begins there."""
    order = np.argsort(batch, kind="stable")
    return order, np.flatnonzero(np.diff(batch[order], prepend=-math.inf) != 0)


def prompts_cut(batch: npt.NDArray[Any], prompts: npt.NDArray[Any], tokens: int) -> float:
    """The share of batches whose prompts leave less room in one step than a mean one takes: these
    may have been cut; `batch` and `prompts` of each request.
    """
    if not len(batch):
        return 0.0
    order, first = by_batch(batch)
    sums = np.add.reduceat(prompts[order], first)
    return float(np.mean(sums + prompts.mean() > tokens))


def _ready(
    policy: Policy, sizes: IntArray, oldest: FloatArray, youngest: FloatArray, at: FloatArray
) -> FloatArray:
    """When the policy may dispatch each batch. Without max_wait fixed waits for as many as the
    largest has, as the engine's bound may be below its own; fewer left when the oldest had waited
    max_wait, or (before that) the queue was closing.
    """
    if not isinstance(policy, Fixed):
        return oldest
    bounded = math.isfinite(policy.max_wait)
    full = policy.batch_size if bounded else min(policy.batch_size, int(sizes.max()))
    return np.where(sizes >= full, youngest, np.minimum(oldest + policy.max_wait, at))


def _slot_starts(run: Iterable[Served], free: dict[int, float]) -> dict[str, float]:
    requests = sorted(run, key=lambda r: (r.dispatched_at, r.arrived_at))
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
