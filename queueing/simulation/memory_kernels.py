"""The compiled sample path of a continuously batching engine whose requests take KV memory token by
token (queueing.latency.kv_memory).

Before each step, in this order: what arrived or came back from a call joins the queue; while the
step would overfill the memory, the requests of the worst rank lose theirs; requests enter in the
order of their ranks, and the first that does not fit blocks the others. The step

    seconds = k3 n + k4 + k1 m + kp (tokens computed) + kr (computed again) + (swaps)

makes one token for each of the n in service, m of whom entered; then requests end, or leave for
their call. `used` counts the tokens in memory: of those in service, of those that call and keep
them (`preserve`), and of those that wait and still hold theirs.

Ranks are those of an order that interrupts (interrupting_kernels); under another order, `settled`
0, requests leave the engine only for memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kendall.queueing.latency.kv_memory import DISCARD, LEAST_WASTE, PRESERVE, SWAP
from kendall.queueing.latency.slots.token_gaps import GapCounts, no_gaps
from kendall.queueing.simulation.kernels import Floats, Ints, count_gaps, inner
from kendall.queueing.simulation.orders.interrupting_kernels import Interrupting, form_rank
from kendall.queueing.simulation.orders.kernels import before, pop, push

# places in `counts`
RUNNING, WAITING, CALLING, KEPT, COMING, USED, COMPUTED, AGAIN, RESUMED, ENTERED, ROUND = range(11)
NOW, OWED, IDLE_WASTE, STALL_WASTE = range(4)  # places in `clock`


class Work(NamedTuple):
    """Requests in order of arrival; a call begins once `call_after` tokens are made (0: none), and
    `handling` is what becomes of its memory meanwhile.
    """

    arrived_at: Floats
    prompt: Ints
    output: Ints
    call_after: Ints
    call_seconds: Floats
    predicted_call: Floats
    handling: Ints


class Engine(NamedTuple):
    """`preempt`: what becomes of the memory of an interrupted request: DISCARD, SWAP, or PRESERVE
    until others need it. Seconds.
    """

    slots: int
    memory: int
    preempt: int
    k1: float
    k3: float
    k4: float
    kp: float
    kr: float
    swap_setup: float
    swap_token: float


class Path(NamedTuple):
    """Of each request: the end of its first token and of its last, how often it lost its memory
    before its end, calls aside, and the seconds that it waited, calls aside; of its last dispatch
    the number, and how many were in service behind it.
    """

    first_token_at: Floats
    ended_at: Floats
    lost_memory: Ints
    waited: Floats
    dispatch: Ints
    size: Ints


class State(NamedTuple):
    """Of each request the tokens made, those in memory, whether they are swapped out, how often it
    was interrupted for another, since when it waits, its last token; who is in service, waits (a
    heap), calls (a heap), waits and holds memory; counts and instants as above.
    """

    made: Ints
    held: Ints
    hosted: Ints
    interrupted: Ints
    since: Floats
    last_token: Floats
    running: Ints
    queue: Floats
    calls: Floats
    kept: Ints
    counts: Ints
    clock: Floats


class Order(NamedTuple):
    """Ranks, and what is added to each before the first token (no values: nothing)."""

    form: Interrupting
    added: Floats


def run_memory(
    work: Work, order: Order, engine: Engine, gaps: GapCounts | None = None
) -> tuple[Path, Floats]:
    """What happens to each request, and what was wasted: token-seconds held by nobody in service,
    and held while all wait for a recomputation or a swap.
    """
    count = len(work.arrived_at)
    first, ended = np.full((2, count), np.nan)
    lost, dispatch, size = np.zeros((3, count), np.int64)
    path = Path(first, ended, lost, np.zeros(count), dispatch, size)
    state = _new_state(count, engine.slots)
    _run(work, order, engine, state, path, no_gaps() if gaps is None else gaps)
    return path, state.clock[IDLE_WASTE:]


def _new_state(count: int, slots: int) -> State:
    made, held, hosted, interrupted, kept = np.zeros((5, count), dtype=np.int64)
    since, last_token = np.zeros((2, count))
    queue, calls = np.empty((2, count, 4))
    running = np.zeros(min(slots, count), dtype=np.int64)
    counts, clock = np.zeros(11, np.int64), np.zeros(4)
    return State(
        made, held, hosted, interrupted, since, last_token, running, queue, calls, kept, counts,
        clock,
    )  # fmt: skip


@inner
def rank_of(job, work, order, state):  # type: ignore[no-untyped-def]
    """Lower first."""
    made = state.made[job]
    rank = form_rank(job, made, work.arrived_at, order.form)
    return rank + order.added[job] if made == 0 and len(order.added) > 0 else rank


@inner
def goes_before(job, other, work, order, state):  # type: ignore[no-untyped-def]
    """Whether the first job does, by rank and then by arrival."""
    rank, other_rank = rank_of(job, work, order, state), rank_of(other, work, order, state)
    return before(0.0, rank, job, 0.0, other_rank, other)


@inner
def enqueue(job, at, work, order, state):  # type: ignore[no-untyped-def]
    """Let it wait."""
    counts = state.counts
    rank = rank_of(job, work, order, state)
    push(state.queue, counts[WAITING], (0.0, rank, float(job)), job)
    counts[WAITING] += 1
    state.since[job] = at
    if state.held[job] > 0:
        state.kept[counts[KEPT]] = job
        counts[KEPT] += 1


@inner
def take_in(work, order, state):  # type: ignore[no-untyped-def]
    """Arrivals and returns from calls up to now."""
    calls, counts, now = state.calls, state.counts, state.clock[NOW]
    while counts[COMING] < len(work.arrived_at) and work.arrived_at[counts[COMING]] <= now:
        enqueue(counts[COMING], work.arrived_at[counts[COMING]], work, order, state)
        counts[COMING] += 1
    while counts[CALLING] > 0 and calls[0, 1] <= now:
        at = calls[0, 1]
        job = pop(calls, counts[CALLING])
        counts[CALLING] -= 1
        enqueue(job, at, work, order, state)


@inner
def release(job, state):  # type: ignore[no-untyped-def]
    """Free its memory."""
    state.counts[USED] -= state.held[job]
    state.held[job] = 0


@inner
def swap_out(job, engine, state):  # type: ignore[no-untyped-def]
    """The next step waits until its memory is moved out."""
    state.clock[OWED] += engine.swap_setup + engine.swap_token * state.held[job]
    state.hosted[job] = 1


@inner
def evict(job, engine, state, path):  # type: ignore[no-untyped-def]
    """Others need its memory."""
    if engine.preempt == SWAP:
        swap_out(job, engine, state)
    else:
        path.lost_memory[job] += 1
    release(job, state)


@inner
def worst(members, work, order, state):  # type: ignore[no-untyped-def]
    """The place of the one that goes last."""
    place = 0
    for k in range(1, len(members)):
        if goes_before(members[place], members[k], work, order, state):
            place = k
    return place


@inner
def remove(members, place, counts, kind):  # type: ignore[no-untyped-def]
    """Take the one at this place out of a list."""
    job = members[place]
    counts[kind] -= 1
    members[place] = members[counts[kind]]
    return job


@inner
def drop_kept(work, order, engine, state, path):  # type: ignore[no-untyped-def]
    """Free the memory of the worst one that waits and holds some; whether there was one."""
    kept, counts = state.kept, state.counts
    if counts[KEPT] == 0:
        return False
    place = worst(kept[: counts[KEPT]], work, order, state)
    evict(remove(kept, place, counts, KEPT), engine, state, path)
    return True


@inner
def interrupt(place, keeps, work, order, engine, state, path):  # type: ignore[no-untyped-def]
    """Put one in service back into the queue, with its memory or without."""
    job = remove(state.running, place, state.counts, RUNNING)
    if not keeps:
        evict(job, engine, state, path)
    enqueue(job, state.clock[NOW], work, order, state)


@inner
def shrink(work, order, engine, state, path):  # type: ignore[no-untyped-def]
    """Until the next token of all in service fits."""
    running, counts = state.running, state.counts
    while counts[USED] + counts[RUNNING] > engine.memory:
        if not drop_kept(work, order, engine, state, path):
            place = worst(running[: counts[RUNNING]], work, order, state)
            interrupt(place, False, work, order, engine, state, path)


@inner
def worst_behind(first, work, order, state):  # type: ignore[no-untyped-def]
    """The place of the last of those in service that may be interrupted for the first that waits;
    -1: none. And the tokens that all of these hold and would hold after the step.
    """
    form, running, place, tokens = order.form, state.running, -1, 0
    if form.settled == 0.0:
        return place, tokens
    for k in range(state.counts[RUNNING]):
        job = running[k]
        if state.made[job] >= form.settled * form.predicted[job]:
            continue
        if state.interrupted[job] >= form.most:
            continue
        if goes_before(first, job, work, order, state):
            tokens += state.held[job] + 1
            if place < 0 or goes_before(running[place], job, work, order, state):
                place = k
    return place, tokens


@inner
def interrupt_for(job, keeps, work, order, engine, state, path):  # type: ignore[no-untyped-def]
    """Put the last of those in service that may be interrupted for this one back."""
    place, _ = worst_behind(job, work, order, state)
    state.interrupted[state.running[place]] += 1
    interrupt(place, keeps, work, order, engine, state, path)


@inner
def make_room(job, new, work, order, engine, state, path):  # type: ignore[no-untyped-def]
    """Whether the first that waits has a slot and memory for `new` tokens and its next one; those
    behind it lose theirs for it, where that helps.
    """
    memory, held, kept, counts = engine.memory, state.held, state.kept, state.counts
    behind, tokens = worst_behind(job, work, order, state)
    if counts[RUNNING] >= engine.slots and behind < 0:
        return False
    for k in range(counts[KEPT]):
        tokens += held[kept[k]] if kept[k] != job else 0
    if counts[USED] + new + counts[RUNNING] + 1 - tokens > memory:
        return False
    if counts[RUNNING] >= engine.slots:
        interrupt_for(job, engine.preempt == PRESERVE, work, order, engine, state, path)
    if held[job] > 0:  # it is not one of those that wait any more
        place = 0
        while kept[place] != job:
            place += 1
        remove(kept, place, counts, KEPT)
    while counts[USED] + new + counts[RUNNING] + 1 > memory:
        if not drop_kept(work, order, engine, state, path):
            interrupt_for(job, False, work, order, engine, state, path)
    return True


@inner
def admit(work, order, engine, state, path):  # type: ignore[no-untyped-def]
    """Let requests enter, the first in the order of ranks first."""
    made, held, running, queue = state.made, state.held, state.running, state.queue
    counts, clock = state.counts, state.clock
    counts[COMPUTED] = counts[AGAIN] = counts[RESUMED] = counts[ENTERED] = 0
    while counts[WAITING] > 0:
        job = int(queue[0, 3])
        new = work.prompt[job] + made[job] - held[job]
        if not make_room(job, new, work, order, engine, state, path):
            break
        pop(queue, counts[WAITING])  # it still goes first: those put back go behind it
        counts[WAITING] -= 1
        if state.hosted[job]:
            clock[OWED] += engine.swap_setup + engine.swap_token * new
            state.hosted[job] = 0
        else:
            counts[COMPUTED] += new
            if made[job] > 0 and new > 0:
                counts[AGAIN] += new
                counts[RESUMED] += 1
        counts[USED] += new
        held[job] += new
        running[counts[RUNNING]] = job
        counts[RUNNING] += 1
        counts[ENTERED] += 1
        path.waited[job] += clock[NOW] - state.since[job]
        path.dispatch[job] = counts[ROUND]
        path.size[job] = -1
    if counts[ENTERED] > 0:
        counts[ROUND] += 1
        for k in range(counts[RUNNING]):
            if path.size[running[k]] < 0:
                path.size[running[k]] = counts[RUNNING]


@inner
def least_waste(call, tokens, used, engine):  # type: ignore[no-untyped-def]
    """The handling that wastes fewest token-seconds by the predicted length of the call."""
    preserve = call * tokens
    discard = (engine.k1 + engine.kr + engine.kp * tokens) * used
    swap = 2 * (engine.swap_setup + engine.swap_token * tokens) * used
    if preserve <= discard and preserve <= swap:
        return PRESERVE
    return DISCARD if discard <= swap else SWAP


@inner
def begin_call(job, used, work, engine, state):  # type: ignore[no-untyped-def]
    """It leaves the engine until its call returns."""
    counts, handling = state.counts, work.handling[job]
    if handling == LEAST_WASTE:
        handling = least_waste(work.predicted_call[job], state.held[job], used, engine)
    if handling == SWAP:
        swap_out(job, engine, state)
    if handling != PRESERVE:
        release(job, state)
    back = state.clock[NOW] + work.call_seconds[job]
    push(state.calls, counts[CALLING], (0.0, back, float(job)), job)
    counts[CALLING] += 1


@inner
def step(work, engine, state, path, gaps):  # type: ignore[no-untyped-def]
    """One token for each in service."""
    made, held, running, counts, clock = (
        state.made, state.held, state.running, state.counts, state.clock,
    )  # fmt: skip
    busy, resumes = counts[RUNNING], engine.kr * counts[RESUMED]
    stall = engine.kp * counts[AGAIN] + resumes + clock[OWED]
    computing = engine.kp * counts[COMPUTED] + resumes + clock[OWED]
    seconds = engine.k3 * busy + engine.k4 + engine.k1 * counts[ENTERED] + computing
    active = 0
    for k in range(busy):
        active += held[running[k]]
    clock[IDLE_WASTE] += seconds * (counts[USED] - active)
    clock[STALL_WASTE] += stall * active
    clock[NOW] += seconds
    clock[OWED] = 0.0
    for k in range(busy):
        job = running[k]
        made[job] += 1
        held[job] += 1
        if made[job] == 1:
            path.first_token_at[job] = clock[NOW]
        elif job >= gaps.since:
            count_gaps(gaps, clock[NOW] - state.last_token[job], 1)
        state.last_token[job] = clock[NOW]
    counts[USED] += busy
    leave(work, engine, state, path)


@inner
def leave(work, engine, state, path):  # type: ignore[no-untyped-def]
    """Requests that have ended, then those whose call begins; these see the memory in use before
    any of them has left.
    """
    made, running, counts, k = state.made, state.running, state.counts, 0
    while k < counts[RUNNING]:
        job = running[k]
        if made[job] >= work.output[job]:
            path.ended_at[job] = state.clock[NOW]
            release(job, state)
            remove(running, k, counts, RUNNING)
        else:
            k += 1
    used, k = counts[USED], 0
    while k < counts[RUNNING]:
        job = running[k]
        if made[job] == work.call_after[job]:
            remove(running, k, counts, RUNNING)
            begin_call(job, used, work, engine, state)
        else:
            k += 1


@inner
def _run(work, order, engine, state, path, gaps):  # type: ignore[no-untyped-def]
    calls, counts, clock, arrived_at = state.calls, state.counts, state.clock, work.arrived_at
    while True:
        take_in(work, order, state)
        shrink(work, order, engine, state, path)
        admit(work, order, engine, state, path)
        if counts[RUNNING] > 0:
            step(work, engine, state, path, gaps)
            continue
        arrival = arrived_at[counts[COMING]] if counts[COMING] < len(arrived_at) else np.inf
        back = calls[0, 1] if counts[CALLING] > 0 else np.inf
        following = min(arrival, back)
        if following == np.inf:
            return
        gap = following - clock[NOW]
        clock[IDLE_WASTE] += gap * counts[USED]
        clock[OWED] = max(clock[OWED] - gap, 0.0)  # swapped out meanwhile
        clock[NOW] = following
