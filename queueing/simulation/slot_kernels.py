"""The compiled replay of continuous batching (see queueing.simulation.kernels): c slots per server,
step by step as `ServiceProcess` goes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kendall.policies.core import UNBOUNDED
from kendall.queueing.latency.slots.token_gaps import GapCounts, no_gaps
from kendall.queueing.simulation.kernels import (
    Bounds,
    Floats,
    Ints,
    RequestPath,
    Requests,
    count_gaps,
    earliest,
    inner,
    new_path,
)


class Slots(NamedTuple):
    """A row for each server; of each request the tokens that are `left`, of its answer and of its
    prompt.

    changes_at  the next change of its composition
    real        the end of the last step, the start of the stretch, the end of its first step, what
                each other step takes, the factor on the server's times
    whole       counts: active, pending, entered with the stretch, tokens of prompts in its first
                step; whether the composition changed; steps done in the stretch, all in service,
                ended; tokens that a step may have, those active whose prompt takes another step;
                entered behind tokens made before, whether the policy is asked after each step,
                tokens of the prompts that entered with the stretch and were interrupted
    entry       when each pending request may enter
    ended       those that ended with the last change, of one server at a time
    held        tokens of memory that the requests of each server hold
    gaps        between the tokens of all
    part        of each prompt, tokens in the first step of the stretch
    left_off    the last token of an interrupted request that has made none since; not a number
    entered     the start of the stretch with which each entered
    """

    changes_at: Floats
    real: Floats
    whole: Ints
    active: Ints
    pending: Ints
    entry: Floats
    left: Ints
    prompt_left: Ints
    ended: Ints
    held: Ints
    gaps: GapCounts
    part: Ints
    left_off: Floats
    entered: Floats


class Memory(NamedTuple):
    """Tokens that the requests of a server may hold: each its prompt and the token limit."""

    tokens: int = UNBOUNDED
    token_limit: int = 0


UNLIMITED = Memory()


def run_slots(
    requests: Requests,
    law: tuple[float, ...],
    turnaround: float,
    bounds: Bounds,
    state: Slots,
    memory: Memory = UNLIMITED,
) -> RequestPath:
    """Continuous batching, `bounds.batch_size` in service per server, fewer where the first that
    waits does not fit into the memory. `state`: of empty ones.
    """
    path = new_path(len(requests.arrived_at))
    limits = bounds.batch_size, turnaround, memory
    _run_slots(requests, law, limits, state, path)
    path.server_free_at[:] = path.released_at
    return path


def new_slots(
    requests: Requests,
    bounds: Bounds,
    paces: Floats,
    step_tokens: int = UNBOUNDED,
    since: int = 0,
    *,
    asked_each_step: bool = False,
) -> Slots:
    """Nobody in service. `paces`: of each server, how many times as long as the law's its steps
    take; `step_tokens`: that a step computes, at most; gaps count from request `since` on;
    `asked_each_step`: the policy is.
    """
    real = np.full((bounds.servers, 5), -np.inf)
    real[:, 2:4] = np.inf
    real[:, 4] = paces
    whole = np.zeros((bounds.servers, 13), dtype=np.int64)
    whole[:, 4], whole[:, 8], whole[:, 11] = 1, step_tokens, asked_each_step
    active, pending = np.zeros((2, bounds.servers, bounds.batch_size), dtype=np.int64)
    entry = np.zeros((bounds.servers, bounds.batch_size))
    idle, left = np.full(bounds.servers, np.inf), requests.output_tokens.copy()
    prompt_left = np.zeros(0, dtype=np.int64)
    if step_tokens < UNBOUNDED:
        prompt_left = requests.prompt_tokens.copy()
    ended, held = np.zeros_like(active[0]), np.zeros_like(whole[:, 0])
    gaps = no_gaps(since)
    part, (left_off, entered) = np.zeros_like(prompt_left), np.full((2, len(left)), np.nan)
    return Slots(
        idle, real, whole, active, pending, entry, left, prompt_left, ended, held, gaps, part,
        left_off, entered,
    )  # fmt: skip


@inner
def _run_slots(requests, law, bounds, state, path):  # type: ignore[no-untyped-def]
    arrived_at, _, _, call_ends, deadlines = requests
    changes_at, n = state[0], len(arrived_at)
    head = tail = batches = 0
    while True:
        engine = earliest(changes_at)
        arrival = arrived_at[tail] if tail < n else np.inf
        lost = deadlines[head] if head < tail and len(deadlines) > 0 else np.inf
        now = min(changes_at[engine], arrival, lost)
        if now == np.inf:
            return
        leaving = 0
        completed = changes_at[engine] == now
        if completed:
            leaving = advance(engine, state, requests, law, path)
        elif arrival == now:
            tail = call_ends[tail] if len(call_ends) > 0 else tail + 1
        else:
            head += 1
        while True:  # the policy is asked after each departure, and once more after the event
            if leaving > 0:
                free(engine, leaving, bounds, state, requests)
                leaving -= 1
            elif completed:
                completed = False
                plan(engine, state, requests, law)
            queue = now, head, tail, batches
            head, batches = _dispatch(queue, bounds, state, requests, law, path)
            if leaving == 0 and not completed:
                break


@inner
def free(s, leaving, bounds, state, requests):  # type: ignore[no-untyped-def]
    """The first of those who are leaving gives back its slot and its memory."""
    whole, ended, held = state[2], state[8], state[9]
    whole[s, 6] -= 1
    first = ended[whole[s, 7] - leaving]
    held[s] -= requests[2][first] + bounds[2][1]


@inner
def with_room(first, bounds, state, requests, only):  # type: ignore[no-untyped-def]
    """The server with the most free slots, among those with memory for the first that waits; -1:
    none. `only`: the one server that it may go to, -1 for any.
    """
    (slots, _, (memory, limit)), whole, held = bounds, state[2], state[9]
    best, needed = -1, requests[2][first] + limit
    for s in range(0 if only < 0 else only, len(whole) if only < 0 else only + 1):
        taken = whole[s, 6]
        if (
            taken < slots
            and (best < 0 or taken < whole[best, 6])
            and (taken == 0 or held[s] + needed <= memory)
        ):
            best = s
    return best


@inner
def _dispatch(queue, bounds, state, requests, law, path):  # type: ignore[no-untyped-def]
    """Fill the free slots; where the queue begins then, and how many batches there were."""
    (now, head, tail, batches), (slots, turnaround, (memory, limit)) = queue, bounds
    _, real, whole, _, pending, entry, _, _, _, held, _, _, _, _ = state
    dispatched_at, _, _, _, batch, sizes, server_of = path
    while head < tail:
        best = with_room(head, bounds, state, requests, -1)
        if best < 0:
            break
        most = min(slots - whole[best, 6], tail - head)
        held[best] += requests[2][head] + limit
        size = 1
        while size < most and held[best] + requests[2][head + size] + limit <= memory:
            held[best] += requests[2][head + size] + limit
            size += 1
        delay = turnaround * (law[5] * real[best, 4])
        for i in range(head, head + size):
            dispatched_at[i] = now
            batch[i] = batches
            sizes[i] = size + whole[best, 6]
            server_of[i] = best
            pending[best, whole[best, 1]] = i
            entry[best, whole[best, 1]] = now + delay
            whole[best, 1] += 1
        whole[best, 6] += size
        batches += 1
        head += size
        plan(best, state, requests, law)
    return head, batches


@inner
def plan(s, state, requests, law):  # type: ignore[no-untyped-def]
    """When the composition changes next."""
    changes_at, real, whole = state[0], state[1], state[2]
    if whole[s, 0] + whole[s, 1] == 0:
        changes_at[s] = np.inf
    else:
        _open(s, state, requests, law)
        changes_at[s] = step_instant(real[s, 2], real[s, 3], _target(s, state))


@inner
def step_instant(first_end, rest, step):  # type: ignore[no-untyped-def]
    """End of a step of a stretch, counted from 1."""
    return first_end if step == 1 or first_end == np.inf else first_end + (step - 1) * rest


@inner
def step_at_or_after(at, first_end, rest):  # type: ignore[no-untyped-def]
    """The first step that does not end before `at`."""
    step = max(1, math.ceil((at - first_end) / rest) + 1)
    while step > 1 and step_instant(first_end, rest, step - 1) >= at:
        step -= 1
    while step_instant(first_end, rest, step) < at:
        step += 1
    return step


@inner
def _open(s, state, requests, law):  # type: ignore[no-untyped-def]
    """Begin a new stretch where the composition changed or someone may enter now
    (ServiceProcess._open).
    """
    real, whole, entry = state[1], state[2], state[5]
    now = real[s, 0]
    if whole[s, 0] == 0:
        real[s, 2] = real[s, 3] = np.inf
        if whole[s, 1] == 0:
            return
        first = np.inf
        for i in range(whole[s, 1]):
            first = min(first, entry[s, i])
        at = max(now, first)
    else:
        due = whole[s, 4] == 1
        for i in range(whole[s, 1]):
            due = due or entry[s, i] <= now
        if not due:
            return
        at = now
    if at > real[s, 1]:
        real[s, 1] = at
        whole[s, 2] = whole[s, 3] = whole[s, 10] = whole[s, 12] = 0
    _enter(s, at, state, requests)
    if len(state[7]) > 0:
        whole[s, 3], whole[s, 9] = _parts(s, state)
    k1, _, _, _, kp, speed, kr = law
    speed *= real[s, 4]
    real[s, 3] = _step(s, max(1, whole[s, 0] - whole[s, 9]), state, law)
    entering = k1 * whole[s, 2] + kp * whole[s, 3] + kr * whole[s, 10]
    real[s, 2] = at + (1.0 * (speed * entering) + real[s, 3])
    whole[s, 4] = whole[s, 5] = 0


@inner
def _step(s, members, state, law):  # type: ignore[no-untyped-def]
    """Seconds of one with so many members."""
    return 1.0 * (law[5] * state[1][s, 4] * (law[2] * members + law[3]))


@inner
def _parts(s, state):  # type: ignore[no-untyped-def]
    """Tokens of prompts in the next step, and how many active ones' prompts it does not end
    (ServiceProcess._divide_prompts).
    """
    whole, active, prompt_left, parts = state[2], state[3], state[7], state[11]
    room, unready = whole[s, 8], 0
    for i in range(whole[s, 0]):
        room -= prompt_left[active[s, i]] == 0
    tokens = min(max(room, 0), whole[s, 12])
    room -= tokens
    for i in range(whole[s, 0]):
        left = prompt_left[active[s, i]]
        part = min(left, max(room, 0))
        room -= part
        tokens += part
        unready += part < left
        parts[active[s, i]] = part
    return tokens, unready


@inner
def _enter(s, at, state, requests):  # type: ignore[no-untyped-def]
    """Who is pending and may enter by `at` becomes active."""
    (_, _, whole, active, pending, entry, left, _, _, _, _, _, _, _), kept = state, 0
    for i in range(whole[s, 1]):
        if entry[s, i] <= at:
            job = pending[s, i]
            made = requests[1][job] - left[job]
            active[s, whole[s, 0]] = job
            whole[s, 0] += 1
            whole[s, 2] += 1
            whole[s, 3] += requests[2][job] + made
            whole[s, 10] += made > 0
            state[13][job] = state[1][s, 1]
        else:
            pending[s, kept] = pending[s, i]
            entry[s, kept] = entry[s, i]
            kept += 1
    whole[s, 1] = kept


@inner
def _target(s, state):  # type: ignore[no-untyped-def]
    """The step of the next end or entry."""
    _, real, whole, active, _, entry, left, _, _, _, _, _, _, _ = state
    if whole[s, 9] > 0 or whole[s, 11] > 0:
        return whole[s, 5] + 1
    least = left[active[s, 0]]
    for i in range(1, whole[s, 0]):
        least = min(least, left[active[s, i]])
    steps = whole[s, 5] + least
    for i in range(whole[s, 1]):
        steps = min(steps, step_at_or_after(entry[s, i], real[s, 2], real[s, 3]))
    return max(steps, whole[s, 5] + 1)


@inner
def _complete(s, target, state):  # type: ignore[no-untyped-def]
    """The steps of the stretch up to `target`: how many were done before, how many these are, the
    end of the step before them and of the last.
    """
    real, whole = state[1], state[2]
    done, before = whole[s, 5], real[s, 0]
    whole[s, 5] = target
    real[s, 0] = step_instant(real[s, 2], real[s, 3], target)
    return done, target - done, before, real[s, 0]


@inner
def advance(s, state, requests, law, path):  # type: ignore[no-untyped-def]
    """Complete the steps up to the next change; how many ended."""
    _open(s, state, requests, law)
    return _make(s, _target(s, state), state, requests, path)


@inner
def _make(s, target, state, requests, path):  # type: ignore[no-untyped-def]
    """The tokens of the steps of the stretch up to `target`; how many ended."""
    _, real, whole, active, _, _, left, prompt_left, gone, _, gaps, part, left_off, _ = state
    (_, released_at, first_token_at, _, _, _, _), lengths = path, requests[1]
    done, steps, before, now = _complete(s, target, state)
    kept = ended = making = going_on = 0
    unready = whole[s, 9] > 0
    if len(prompt_left) > 0 and done == 0:
        for i in range(whole[s, 0]):
            prompt_left[active[s, i]] -= part[active[s, i]]
            part[active[s, i]] = 0
    for i in range(whole[s, 0]):
        member = active[s, i]
        if unready and prompt_left[member] > 0:
            active[s, kept] = member
            kept += 1
            continue
        making += member >= gaps[2]
        if left[member] == lengths[member]:
            first_token_at[member] = step_instant(real[s, 2], real[s, 3], done + 1)
        elif not math.isnan(left_off[member]):
            gap = step_instant(real[s, 2], real[s, 3], done + 1) - left_off[member]
            count_gaps(gaps, gap, member >= gaps[2])
            left_off[member] = np.nan
        else:
            going_on += member >= gaps[2]
        left[member] -= steps
        if left[member] <= 0:
            released_at[member] = now
            gone[ended] = member
            ended += 1
        else:
            active[s, kept] = member
            kept += 1
    if done == 0:
        count_gaps(gaps, real[s, 2] - before, going_on)
    count_gaps(gaps, real[s, 3], making * (steps - (done == 0)))
    whole[s, 0] = kept
    whole[s, 7], whole[s, 9] = ended, 0
    if ended or unready:
        whole[s, 4] = 1
    return ended


@inner
def catch_up(s, now, state, requests, law, path):  # type: ignore[no-untyped-def]
    """Complete the steps that end by `now`, up to the next change (ServiceProcess.catch_up)."""
    _open(s, state, requests, law)
    first_end, rest, done = state[1][s, 2], state[1][s, 3], state[2][s, 5]
    if step_instant(first_end, rest, done + 1) > now:
        return
    steps = step_at_or_after(now, first_end, rest)
    if step_instant(first_end, rest, steps) > now:
        steps -= 1
    steps = min(steps, _target(s, state) - 1)
    if steps > done:
        _make(s, steps, state, requests, path)


@inner
def remove(s, job, now, state, requests, law):  # type: ignore[no-untyped-def]
    """Take one out of service, once the steps until now are complete (ServiceProcess.remove)."""
    real, whole, active = state.real, state.whole, state.active
    pending, entry = state.pending, state.entry
    prompt_left, part, left_off = state.prompt_left, state.part, state.left_off
    whole[s, 6] -= 1
    for i in range(whole[s, 1]):
        if pending[s, i] == job:
            whole[s, 1] -= 1
            for k in range(i, whole[s, 1]):
                pending[s, k], entry[s, k] = pending[s, k + 1], entry[s, k + 1]
            return
    place = 0
    while active[s, place] != job:
        place += 1
    whole[s, 0] -= 1
    for k in range(place, whole[s, 0]):
        active[s, k] = active[s, k + 1]
    made = requests[1][job] - state.left[job]
    if made > 0 and math.isnan(left_off[job]):
        left_off[job] = real[s, 0]
    if len(prompt_left) > 0:
        whole[s, 12] += prompt_left[job] if state.entered[job] == real[s, 1] else 0
        whole[s, 9] -= whole[s, 9] > 0 and part[job] < prompt_left[job]
        prompt_left[job], part[job] = requests[2][job] + made, 0
    if whole[s, 0] == 0:
        whole[s, 4] = 1
        real[s, 0] = max(real[s, 0], now)
        return
    real[s, 2] = step_instant(real[s, 2], real[s, 3], whole[s, 5] + 1)
    real[s, 3] = _step(s, whole[s, 0], state, law)
    whole[s, 5] = 0
