"""Compiled replays of batch policies and of continuous batching in an order that interrupts nobody:
the sample paths of `queueing.simulation.reference`, as `queueing.simulation.kernels` and
`slot_kernels` have them first come, first served.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from queueing.simulation.kernels import (
    Bounds,
    Drawn,
    Floats,
    Ints,
    RequestPath,
    Requests,
    Servers,
    at_pace,
    earliest,
    first_step,
    idle,
    inner,
    last_step,
    new_path,
    serve_batch,
)
from queueing.simulation.orders.kernels import pop, push
from queueing.simulation.orders.waiting_kernels import (
    OrderedQueue,
    enter,
    leave,
    oldest,
    ready,
    take,
)
from queueing.simulation.slot_kernels import Slots, advance, plan


class Members(NamedTuple):
    """Room for a batch side by side: lengths, prompts, first tokens, releases."""

    lengths: Ints
    prompts: Ints
    first_token_at: Floats
    released_at: Floats


def run_ordered_batches(
    requests: Requests,
    law: tuple[float, ...],
    drawn: Drawn,
    bounds: Bounds,
    queue: OrderedQueue,
    servers: Servers,
) -> RequestPath:
    """Single, dynamic, capped, elastic (`wait_for` = 1) and fixed (`wait_for` = its size)."""
    path, largest = new_path(len(requests.arrived_at)), len(queue.chosen)
    room = Members(
        np.empty(largest, np.int64), np.empty(largest, np.int64), *np.empty((2, largest))
    )
    _run_batches(requests, (law, drawn, servers, room), bounds, queue, path)
    return path


def run_ordered_single(
    requests: Requests, law: tuple[float, ...], drawn: Drawn, rank: Floats
) -> RequestPath:
    """One server, one request at a time, endless patience, arrivals one by one."""
    count = len(requests.arrived_at)
    path = new_path(count)
    path.batch_size[:], path.server_id[:] = 1, 0
    _run_single(requests, law, drawn, (rank, np.empty((count, 4))), path)
    path.server_free_at[:] = path.released_at
    return path


def run_ordered_slots(
    requests: Requests,
    law: tuple[float, ...],
    turnaround: float,
    bounds: Bounds,
    queue: OrderedQueue,
    state: Slots,
) -> RequestPath:
    """Continuous batching, `bounds.batch_size` in service per server; `state`: of empty ones."""
    path = new_path(len(requests.arrived_at))
    _run_slots(requests, law, (bounds.batch_size, turnaround), (state, queue), path)
    path.server_free_at[:] = path.released_at
    return path


@inner
def _run_single(requests, law, drawn, queue, path):  # type: ignore[no-untyped-def]
    arrived_at, lengths, prompts, _, _ = requests
    (residuals, gaps, clocks), (rank, heap) = drawn, queue
    dispatched_at, released_at, first_token_at, _, batch, _, _ = path
    has_residual, count = residuals.shape[1] > 0, len(arrived_at)
    free, waiting, coming = -np.inf, 0, 0
    for number in range(count):
        start = free
        if waiting == 0:
            start = max(free, arrived_at[coming])
        while coming < count and (arrived_at[coming] < start or waiting == 0):
            push(heap, waiting, (0.0, rank[coming], float(coming)), coming)
            waiting += 1
            coming += 1
        job = pop(heap, waiting)
        waiting -= 1
        chance = (residuals[0, number] if has_residual else 1.0), gaps[0], clocks[0]
        first, rest, step = first_step(start, 1, prompts[job], law, chance)
        free = last_step(first, lengths[job], rest, step, law, chance)
        dispatched_at[job] = start
        first_token_at[job] = first
        released_at[job] = free
        batch[job] = number


@inner
def _arrive(tail, requests, queue):  # type: ignore[no-untyped-def]
    """The next request, or all of its call, joins the queue; who comes after that."""
    call_ends = requests[3]
    last = call_ends[tail] if len(call_ends) > 0 else tail + 1
    for job in range(tail, last):
        enter(job, queue)
    return last


@inner
def _lost_at(deadlines, queue):  # type: ignore[no-untyped-def]
    """When the patience of the oldest ends."""
    if len(deadlines) == 0:
        return np.inf
    first = oldest(queue)
    return deadlines[first] if first >= 0 else np.inf


@inner
def _run_batches(requests, engine, bounds, queue, path):  # type: ignore[no-untyped-def]
    arrived_at, deadlines, (ends, busy, _, _, _, _, _) = requests[0], requests[4], engine[2]
    count, timer, tail, batches = len(arrived_at), np.inf, 0, 0
    while True:
        first = earliest(ends)
        arrival = arrived_at[tail] if tail < count else np.inf
        lost = _lost_at(deadlines, queue)
        now = min(ends[first], arrival, lost, timer)
        if now == np.inf:
            return
        if ends[first] == now:
            ends[first] = np.inf
            busy[first] = False
        elif arrival == now:
            tail = _arrive(tail, requests, queue)
        elif lost == now:
            leave(oldest(queue), queue)
        timer = np.inf
        while True:
            free = idle(busy)
            if free < 0:
                break
            size, group, timer = ready(bounds, now, tail == count, requests, queue)
            if size == 0:
                break
            size = take(size, group, now, requests, queue)
            place = free, batches, bounds[4]
            _start_batch(now, queue[9][:size], place, requests, engine, path)
            batches += 1


@inner
def _start_batch(now, members, place, requests, engine, path):  # type: ignore[no-untyped-def]
    (free, number, padded), (law, drawn, servers, room) = place, engine
    (residuals, stalls, clocks), (ends, busy, used, paces, ordered, ordered_ends, gaps) = (
        drawn,
        servers,
    )
    dispatched_at, released_at, first_token_at, free_at, batch, sizes, server_of = path
    lengths, prompts, firsts, releases = room
    size, residual = len(members), 1.0
    for k in range(size):
        lengths[k], prompts[k] = requests[1][members[k]], requests[2][members[k]]
    if residuals.shape[1] > 0:
        residual = residuals[free, used[free]]
        used[free] += 1
    chance = residual, stalls[free], clocks[free]
    out = padded, firsts, releases, ordered, ordered_ends, gaps, members[0] >= gaps[2]
    side_by_side = requests[0], lengths, prompts, requests[3], requests[4]
    own = at_pace(law, paces[free])
    end = serve_batch(now, (0, size), side_by_side, own, chance, out)
    for k in range(size):
        i = members[k]
        dispatched_at[i], first_token_at[i], released_at[i] = now, firsts[k], releases[k]
        batch[i], sizes[i], server_of[i], free_at[i] = number, size, free, end
    ends[free] = end
    busy[free] = True


@inner
def _run_slots(requests, law, bounds, system, path):  # type: ignore[no-untyped-def]
    (arrived_at, _, _, _, deadlines), (state, queue) = requests, system
    changes_at, whole, count = state[0], state[2], len(arrived_at)
    tail = batches = 0
    while True:
        engine = earliest(changes_at)
        arrival = arrived_at[tail] if tail < count else np.inf
        lost = _lost_at(deadlines, queue)
        now = min(changes_at[engine], arrival, lost)
        if now == np.inf:
            return
        leaving = 0
        completed = changes_at[engine] == now
        if completed:
            leaving = advance(engine, state, requests, law, path)
        elif arrival == now:
            tail = _arrive(tail, requests, queue)
        else:
            leave(oldest(queue), queue)
        while True:  # the policy is asked after each departure, and once more after the event
            if leaving > 0:
                whole[engine, 6] -= 1
                leaving -= 1
            elif completed:
                completed = False
                plan(engine, state, requests, law)
            batches = _fill((now, batches), bounds, system, (requests, law), path)
            if leaving == 0 and not completed:
                break


@inner
def _fill(at, bounds, system, served, path):  # type: ignore[no-untyped-def]
    """Fill the free slots; how many dispatches there were."""
    (now, batches), (slots, turnaround), (state, queue), (requests, law) = (
        at,
        bounds,
        system,
        served,
    )
    _, real, whole, _, pending, entry, _, _, _, _, _ = state
    dispatched_at, _, _, _, batch, sizes, server_of = path
    while queue[8][1] > 0:
        best = 0
        for s in range(1, len(whole)):
            if whole[s, 6] < whole[best, 6]:
                best = s
        size = min(slots - whole[best, 6], queue[8][1])
        if size <= 0:
            break
        size = take(size, -1, now, requests, queue)
        delay = turnaround * (law[5] * real[best, 4])
        for k in range(size):
            i = queue[9][k]
            dispatched_at[i] = now
            batch[i] = batches
            sizes[i] = size + whole[best, 6]
            server_of[i] = best
            pending[best, whole[best, 1]] = i
            entry[best, whole[best, 1]] = now + delay
            whole[best, 1] += 1
        whole[best, 6] += size
        batches += 1
        plan(best, state, requests, law)
    return batches
