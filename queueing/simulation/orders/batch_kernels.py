"""Compiled replays of batch policies in an order that interrupts nobody, and of continuous batching
in any, from one queue or from a queue for each server: the sample paths of
`queueing.simulation.reference` and `queueing.simulation.scenarios.routed`, as
`queueing.simulation.kernels` and `slot_kernels` have them first come, first served from one queue.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kendall.queueing.simulation.kernels import (
    REJECTED,
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
from kendall.queueing.simulation.orders.interrupting_kernels import (
    NO_INTERRUPTION,
    Interrupting,
    form_rank,
)
from kendall.queueing.simulation.orders.kernels import pop, push
from kendall.queueing.simulation.orders.lanes import (
    dispatched,
    ended,
    has_room,
    lane_of,
    new_lanes,
    route,
)
from kendall.queueing.simulation.orders.waiting_kernels import (
    RankedQueue,
    enter,
    leave,
    next_of,
    oldest,
    ready,
    serve,
    take,
)
from kendall.queueing.simulation.slot_kernels import (
    Memory,
    Slots,
    advance,
    catch_up,
    free,
    plan,
    remove,
    with_room,
)


class Members(NamedTuple):
    """Room for a batch side by side: lengths, prompts, first tokens, releases."""

    lengths: Ints
    prompts: Ints
    first_token_at: Floats
    released_at: Floats


class Stints(NamedTuple):
    """Who may interrupt whom; of each request the seconds served before its last dispatch, and how
    often it was interrupted.
    """

    order: Interrupting
    served: Floats
    interrupted: Ints


def run_ordered_batches(
    requests: Requests,
    law: tuple[float, ...],
    drawn: Drawn,
    bounds: Bounds,
    queue: RankedQueue,
    servers: Servers,
    choices: Ints,
    most: int,
) -> RequestPath:
    """Single, dynamic, capped, elastic (`wait_for` = 1) and fixed (`wait_for` = its size);
    `choices`, `most`: see `Lanes`.
    """
    path, largest = new_path(len(requests.arrived_at)), len(queue.chosen)
    room = Members(
        np.empty(largest, np.int64), np.empty(largest, np.int64), *np.empty((2, largest))
    )
    lanes = new_lanes(len(queue.waiting), bounds.servers, choices, most)
    _run_batches(requests, (law, drawn, servers, room), bounds, (queue, lanes), path)
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
    queue: RankedQueue,
    state: Slots,
    memory: Memory,
    choices: Ints,
    most: int,
    order: Interrupting = NO_INTERRUPTION,
) -> RequestPath:
    """Continuous batching, `bounds.batch_size` in service per server, fewer where the next one does
    not fit into the memory; `state`: of empty ones. Where the order interrupts, from one queue and
    without a bound on memory: the column of dispatches has the arrival and the time outside of
    service then.
    """
    count = len(requests.arrived_at)
    path = new_path(count)
    lanes = new_lanes(len(queue.waiting), bounds.servers, choices, most)
    limits = bounds.batch_size, turnaround, memory
    stints = Stints(order, np.zeros(count), np.zeros(count, np.int64))
    _run_slots(requests, law, limits, (state, queue, lanes, stints), path)
    if order is not NO_INTERRUPTION:
        waited = path.dispatched_at - requests.arrived_at - stints.served
        path.dispatched_at[:] = requests.arrived_at + waited
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
def _arrive(tail, at, requests, system, path):  # type: ignore[no-untyped-def]
    """The next request, or all of its call, joins its queue or is rejected; who comes after that.
    `at`: see `has_room`.
    """
    queue, lanes = system
    last = requests.call_ends[tail] if len(requests.call_ends) > 0 else tail + 1
    admitted = has_room((tail, last), at, queue, lanes, path)
    for job in range(tail, last):
        if admitted:
            enter(job, queue)
        else:
            path.batch_id[job] = REJECTED
    return last


@inner
def _lost_at(deadlines, queue):  # type: ignore[no-untyped-def]
    """When the patience of the oldest ends."""
    if len(deadlines) == 0:
        return np.inf
    first = oldest(queue)
    return deadlines[first] if first >= 0 else np.inf


@inner
def _lose(queue, lanes):  # type: ignore[no-untyped-def]
    """The oldest leaves; whose lane it was."""
    job = oldest(queue)
    leave(job, queue)
    lane = queue.lane[job]
    lanes.held[lane] -= 1
    return lane


@inner
def _run_batches(requests, engine, bounds, system, path):  # type: ignore[no-untyped-def]
    arrived_at, deadlines = requests.arrived_at, requests.deadlines
    (queue, lanes), (ends, busy) = system, (engine[2].ends, engine[2].busy)
    count, tail, routed, batches = len(arrived_at), 0, 0, 0
    while True:
        first, waking = earliest(ends), earliest(lanes.timers)
        arrival = arrived_at[tail] if tail < count else np.inf
        lost = _lost_at(deadlines, queue)
        now = min(ends[first], arrival, lost, lanes.timers[waking])
        if now == np.inf:
            return
        if arrival == now:
            routed = route(routed, now, requests, (queue, lanes), path)
        lane = waking
        if ends[first] == now:
            ends[first] = np.inf
            busy[first] = False
            lane = ended(first, lanes)
        elif arrival == now:
            lane = queue.lane[tail]
            tail = _arrive(tail, (now, routed), requests, (queue, lanes), path)
        elif lost == now:
            lane = _lose(queue, lanes)
        closing = tail == count
        for asked in range(0 if closing else lane, len(lanes.held) if closing else lane + 1):
            at = asked, now, closing, batches
            batches = _ask(at, requests, engine, bounds, system, path)


@inner
def _ask(at, requests, engine, bounds, system, path):  # type: ignore[no-untyped-def]
    """Start the batches of a lane that are ready; how many there were."""
    (lane, now, closing, batches), (queue, lanes), busy = at, system, engine[2].busy
    lanes.timers[lane] = np.inf
    while True:
        server = idle(busy)
        if len(lanes.held) > 1:
            server = -1 if busy[lane] else lane
        if server < 0:
            return batches
        size, group, lanes.timers[lane] = ready(bounds, lane, now, closing, requests, queue)
        if size == 0:
            return batches
        size = take(size, lane, group, now, (requests, bounds), queue)
        place = server, batches, bounds.padded
        _start_batch(now, queue.chosen[:size], place, requests, engine, path)
        dispatched(server, queue.chosen[:size], bounds.padded, queue, lanes)
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
    (arrived_at, _, _, _, deadlines), (state, queue, lanes, _) = requests, system
    changes_at, count, each_step = state.changes_at, len(arrived_at), state.whole[0, 11] > 0
    tail = routed = batches = 0
    while True:
        engine = earliest(changes_at)
        arrival = arrived_at[tail] if tail < count else np.inf
        lost = _lost_at(deadlines, queue)
        now = min(changes_at[engine], arrival, lost)
        if now == np.inf:
            return
        if arrival == now:
            routed = route(routed, now, requests, (queue, lanes), path)
        leaving = 0
        completed = changes_at[engine] == now
        if completed:
            lane = lane_of(engine, lanes)
            leaving = advance(engine, state, requests, law, path)
        elif arrival == now:
            lane = queue.lane[tail]
            tail = _arrive(tail, (now, routed), requests, (queue, lanes), path)
        else:
            lane = _lose(queue, lanes)
        # the policy is asked after each departure, and once more after the event; only then where
        # it is asked after each step
        while True:
            if leaving > 0:
                free(engine, leaving, bounds, state, requests)
                lanes.held[lane] -= 1
                leaving -= 1
                if each_step:
                    continue
            elif completed:
                completed = False
                plan(engine, state, requests, law)
            batches = _fill((now, lane, batches), bounds, system, (requests, law), path)
            if leaving == 0 and not completed:
                break


@inner
def _fill(at, bounds, system, served, path):  # type: ignore[no-untyped-def]
    """Fill the free slots of a lane's servers, and those that others are interrupted for; how many
    dispatches there were.
    """
    (now, lane, batches), turnaround = at, bounds[1]
    (state, queue, lanes, _), (requests, law) = system, served
    whole, entry, pending = state.whole, state.entry, state.pending
    while True:
        first = next_of(lane, 0, now, requests, queue)
        if first < 0:
            return batches
        best = with_room(first, bounds, state, requests, lane if len(lanes.held) > 1 else -1)
        if best < 0:
            if not _interrupt(first, now, system, requests, law, path):
                return batches
            continue
        size = _take_slots(best, (now, lane, first), bounds, system, requests)
        delay = turnaround * (law[5] * state.real[best, 4])
        for k in range(size):
            i = queue.chosen[k]
            path.dispatched_at[i] = now
            path.batch_id[i] = batches
            path.batch_size[i] = size + whole[best, 6]
            path.server_id[i] = best
            pending[best, whole[best, 1]] = i
            entry[best, whole[best, 1]] = now + delay
            whole[best, 1] += 1
        whole[best, 6] += size
        batches += 1
        plan(best, state, requests, law)


@inner
def _take_slots(server, at, bounds, system, requests):  # type: ignore[no-untyped-def]
    """Put those who fit into the free slots of a server, and its memory, into `chosen`; how
    many.
    """
    (now, lane, job), (slots, _, (memory, limit)), (state, queue, _, _) = at, bounds, system
    taken, held = 0, state.held
    while True:
        serve(job, queue)
        held[server] += requests.prompt_tokens[job] + limit
        queue.chosen[taken] = job
        taken += 1
        if state.whole[server, 6] + taken == slots:
            return taken
        job = next_of(lane, 0, now, requests, queue)
        if job < 0 or held[server] + requests.prompt_tokens[job] + limit > memory:
            return taken


@inner
def _interrupt(first, now, system, requests, law, path):  # type: ignore[no-untyped-def]
    """Put the worst of those in service behind the first that waits back into the queue; whether
    there was one.
    """
    state, queue, _, (order, served, interrupted) = system
    if order.settled == 0.0:
        return False
    for s in range(len(state.whole)):
        catch_up(s, now, state, requests, law, path)
    server, worst = _outranked(first, system, requests)
    if server < 0:
        return False
    served[worst] += now - path.dispatched_at[worst]
    interrupted[worst] += 1
    remove(server, worst, now, state, requests, law)
    plan(server, state, requests, law)
    made = requests.output_tokens[worst] - state.left[worst]
    queue.rank[worst] = form_rank(worst, made, requests.arrived_at, order)
    enter(worst, queue)
    return True


@inner
def _outranked(first, system, requests):  # type: ignore[no-untyped-def]
    """The server and the request in service that has the worst rank behind the first that waits;
    -1: none.
    """
    state, queue, _, (order, _, interrupted) = system
    arrived_at, server, worst, last = requests.arrived_at, -1, -1, queue.rank[first]
    came = arrived_at[first]
    for s in range(len(state.whole)):
        active = state.whole[s, 0]
        for i in range(active + state.whole[s, 1]):
            job = state.active[s, i] if i < active else state.pending[s, i - active]
            made = requests.output_tokens[job] - state.left[job]
            if interrupted[job] >= order.most or made >= order.settled * order.predicted[job]:
                continue
            rank = form_rank(job, made, arrived_at, order)
            if rank > last or (rank == last and arrived_at[job] > came):
                server, worst, last, came = s, job, rank, arrived_at[job]
    return server, worst
