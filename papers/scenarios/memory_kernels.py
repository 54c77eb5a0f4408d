"""The compiled sample path of a continuously batching engine whose KV memory is bounded, in tokens
(see papers.scenarios.memory).

Before each step, in this order: who arrived or came back from a call joins the queue; while the
step would overfill the memory, the requests of the worst rank lose theirs; requests enter in the
order of their ranks, the first that does not fit blocks the others. The step

    seconds = k3 n + k4 + k1 m + kp (tokens computed) + (swaps)

makes one token for each of the n in service, m of whom entered; then requests end, or leave for
their call. `used` counts the tokens in memory: of those in service, of those that call and keep
them (`preserve`), and of those that wait and still hold theirs.
"""

from __future__ import annotations

import numpy as np

from kendall.queueing.simulation.kernels import Floats, inner
from kendall.queueing.simulation.orders.kernels import before, pop, push
from papers.scenarios.memory_state import (
    AGAIN,
    CALLING,
    COMING,
    COMPUTED,
    DISCARD,
    ENTERED,
    IDLE_WASTE,
    KEPT,
    LEAST_WASTE,
    NOW,
    OWED,
    PRESERVE,
    RUNNING,
    STALL_WASTE,
    SWAP,
    USED,
    WAITING,
    Engine,
    Path,
    Ranking,
    Work,
    new_state,
)


def run_memory(work: Work, ranking: Ranking, engine: Engine) -> tuple[Path, Floats]:
    """What happens to each request, and what was wasted: token-seconds held by nobody in service,
    and held while all wait for a recomputation or a swap.
    """
    count = len(work.arrived_at)
    path = Path(np.full(count, np.nan), np.full(count, np.nan), np.zeros(count, np.int64))
    state = new_state(count, engine.slots)
    _run(work, ranking, engine, state, path)
    return path, state.clock[IDLE_WASTE:]


@inner
def rank_of(job, ranking, state):  # type: ignore[no-untyped-def]
    """Lower first."""
    return ranking[0][job] + ranking[1] * state[0][job]


@inner
def goes_before(job, other, ranking, state):  # type: ignore[no-untyped-def]
    """Whether the first job does, by rank and then by arrival."""
    rank, other_rank = rank_of(job, ranking, state), rank_of(other, ranking, state)
    return before(0.0, rank, job, 0.0, other_rank, other)


@inner
def enqueue(job, ranking, state):  # type: ignore[no-untyped-def]
    """Let it wait."""
    counts = state[7]
    push(state[4], counts[WAITING], (0.0, rank_of(job, ranking, state), float(job)), job)
    counts[WAITING] += 1
    if state[1][job] > 0:
        state[6][counts[KEPT]] = job
        counts[KEPT] += 1


@inner
def take_in(work, ranking, state):  # type: ignore[no-untyped-def]
    """Arrivals and returns from calls up to now."""
    calls, counts, now = state[5], state[7], state[8][NOW]
    while counts[COMING] < len(work[0]) and work[0][counts[COMING]] <= now:
        enqueue(counts[COMING], ranking, state)
        counts[COMING] += 1
    while counts[CALLING] > 0 and calls[0, 1] <= now:
        job = pop(calls, counts[CALLING])
        counts[CALLING] -= 1
        enqueue(job, ranking, state)


@inner
def release(job, state):  # type: ignore[no-untyped-def]
    """Free its memory."""
    state[7][USED] -= state[1][job]
    state[1][job] = 0


@inner
def worst(members, ranking, state):  # type: ignore[no-untyped-def]
    """The place of the one that goes last."""
    place = 0
    for k in range(1, len(members)):
        if goes_before(members[place], members[k], ranking, state):
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
def drop_kept(ranking, state, path):  # type: ignore[no-untyped-def]
    """Free the memory of the worst one that waits and holds some; whether there was one."""
    kept, counts = state[6], state[7]
    if counts[KEPT] == 0:
        return False
    place = worst(kept[: counts[KEPT]], ranking, state)
    job = remove(kept, place, counts, KEPT)
    path[2][job] += 1
    release(job, state)
    return True


@inner
def interrupt(place, keeps, ranking, state, path):  # type: ignore[no-untyped-def]
    """Put one in service back into the queue, with its memory or without."""
    job = remove(state[3], place, state[7], RUNNING)
    if not keeps:
        release(job, state)
        path[2][job] += 1
    enqueue(job, ranking, state)


@inner
def shrink(engine, ranking, state, path):  # type: ignore[no-untyped-def]
    """Until the next token of all in service fits."""
    running, counts = state[3], state[7]
    while counts[USED] + counts[RUNNING] > engine[1]:
        if not drop_kept(ranking, state, path):
            place = worst(running[: counts[RUNNING]], ranking, state)
            interrupt(place, False, ranking, state, path)


@inner
def worst_behind(first, ranking, state):  # type: ignore[no-untyped-def]
    """The place of the last of those in service that may be interrupted for the first that waits;
    -1: none. And the tokens that all of these hold and would hold after the step.
    """
    made, running, place, tokens = state[0], state[3], -1, 0
    for k in range(state[7][RUNNING]):
        job = running[k]
        if made[job] < ranking[2][job] and goes_before(first, job, ranking, state):
            tokens += state[1][job] + 1
            if place < 0 or goes_before(running[place], job, ranking, state):
                place = k
    return place, tokens


@inner
def make_room(job, new, bounds, ranking, state, path):  # type: ignore[no-untyped-def]
    """Whether the first that waits has a slot and memory for `new` tokens and its next one; those
    behind it lose theirs for it, where that helps.
    """
    slots, memory, keep = bounds
    held, kept, counts = state[1], state[6], state[7]
    behind, tokens = worst_behind(job, ranking, state)
    if counts[RUNNING] >= slots and behind < 0:
        return False
    for k in range(counts[KEPT]):
        tokens += held[kept[k]] if kept[k] != job else 0
    if counts[USED] + new + counts[RUNNING] + 1 - tokens > memory:
        return False
    if counts[RUNNING] >= slots:
        interrupt(behind, keep, ranking, state, path)
    if held[job] > 0:  # it is not one of those who wait any more
        place = 0
        while kept[place] != job:
            place += 1
        remove(kept, place, counts, KEPT)
    while counts[USED] + new + counts[RUNNING] + 1 > memory:
        if not drop_kept(ranking, state, path):
            behind, _ = worst_behind(job, ranking, state)
            interrupt(behind, False, ranking, state, path)
    return True


@inner
def admit(work, ranking, engine, state, path):  # type: ignore[no-untyped-def]
    """Let requests enter, the first in the order of ranks first."""
    made, held, hosted, running, queue, _, _, counts, clock = state
    counts[COMPUTED] = counts[AGAIN] = counts[ENTERED] = 0
    while counts[WAITING] > 0:
        job = int(queue[0, 3])
        new = work[1][job] + made[job] - held[job]
        if not make_room(job, new, engine[:3], ranking, state, path):
            return
        pop(queue, counts[WAITING])  # it still goes first: those put back go behind it
        counts[WAITING] -= 1
        if hosted[job]:
            clock[OWED] += engine[7] + engine[8] * new
            hosted[job] = 0
        else:
            counts[COMPUTED] += new
            counts[AGAIN] += new if made[job] > 0 else 0
        counts[USED] += new
        held[job] += new
        running[counts[RUNNING]] = job
        counts[RUNNING] += 1
        counts[ENTERED] += 1


@inner
def least_waste(call, tokens, used, engine):  # type: ignore[no-untyped-def]
    """The handling that wastes fewest token-seconds by the predicted length of the call."""
    preserve = call * tokens
    discard = (engine[3] + engine[6] * tokens) * used
    swap = 2 * (engine[7] + engine[8] * tokens) * used
    if preserve <= discard and preserve <= swap:
        return PRESERVE
    return DISCARD if discard <= swap else SWAP


@inner
def begin_call(job, used, work, engine, state):  # type: ignore[no-untyped-def]
    """It leaves the engine until its call returns."""
    _, held, hosted, _, _, calls, _, counts, clock = state
    handling = work[6][job]
    if handling == LEAST_WASTE:
        handling = least_waste(work[5][job], held[job], used, engine)
    if handling == SWAP:
        clock[OWED] += engine[7] + engine[8] * held[job]
        hosted[job] = 1
    if handling != PRESERVE:
        release(job, state)
    push(calls, counts[CALLING], (0.0, clock[NOW] + work[4][job], float(job)), job)
    counts[CALLING] += 1


@inner
def step(work, engine, state, path):  # type: ignore[no-untyped-def]
    """One token for each in service."""
    made, held, _, running, _, _, _, counts, clock = state
    busy, stall = counts[RUNNING], engine[6] * counts[AGAIN] + clock[OWED]
    computing = engine[6] * counts[COMPUTED] + clock[OWED]
    seconds = engine[4] * busy + engine[5] + engine[3] * counts[ENTERED] + computing
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
            path[0][job] = clock[NOW]
    counts[USED] += busy
    leave(work, engine, state, path)


@inner
def leave(work, engine, state, path):  # type: ignore[no-untyped-def]
    """Requests that have ended, then those whose call begins; these see the memory in use before
    any of them has left.
    """
    made, running, counts, k = state[0], state[3], state[7], 0
    while k < counts[RUNNING]:
        job = running[k]
        if made[job] >= work[2][job]:
            path[1][job] = state[8][NOW]
            release(job, state)
            remove(running, k, counts, RUNNING)
        else:
            k += 1
    used, k = counts[USED], 0
    while k < counts[RUNNING]:
        job = running[k]
        if made[job] == work[3][job]:
            remove(running, k, counts, RUNNING)
            begin_call(job, used, work, engine, state)
        else:
            k += 1


@inner
def _run(work, ranking, engine, state, path):  # type: ignore[no-untyped-def]
    calls, counts, clock = state[5], state[7], state[8]
    while True:
        take_in(work, ranking, state)
        shrink(engine, ranking, state, path)
        admit(work, ranking, engine, state, path)
        if counts[RUNNING] > 0:
            step(work, engine, state, path)
            continue
        arrival = work[0][counts[COMING]] if counts[COMING] < len(work[0]) else np.inf
        back = calls[0, 1] if counts[CALLING] > 0 else np.inf
        following = min(arrival, back)
        if following == np.inf:
            return
        gap = following - clock[NOW]
        clock[IDLE_WASTE] += gap * counts[USED]
        clock[OWED] = max(clock[OWED] - gap, 0.0)  # swapped out meanwhile
        clock[NOW] = following
