"""Compiled replays of one request at a time under an order that interrupts: the sample paths of
`queueing.simulation.reference`, from end to end instead of from step to step.

A rank changes with the tokens made, so between an arrival, an end and the next token at which the
rank in service changes no decision does. A request that is interrupted loses the token in the
making; it goes on behind its tokens, which are a part of its prompt then, in a batch of its own: it
pays k1, k2 and kp for them, kr once it has made one, and draws another residual.

Predictions on the server are stints of their own, before the service that is ranked by them: one of
every request, a second one of those predicted long, or behind the tokens that rank first. They go
before all but what ranks first, the first ones before the second ones, each in order of arrival;
one that is interrupted goes on where it stopped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kendall.queueing.latency.slots.token_gaps import GapCounts
from kendall.queueing.simulation.kernels import (
    Floats,
    Ints,
    RequestPath,
    Requests,
    count_gaps,
    earliest,
    inner,
    new_path,
)
from kendall.queueing.simulation.orders.waiting_kernels import (
    RankedQueue,
    enter,
    leave,
    next_of,
    serve,
)
from kendall.queueing.simulation.slot_kernels import step_at_or_after, step_instant

NEVER = 2**62
SECOND_PREDICTION, SERVED = 1, 2  # what a request waits for or is in; 0: its first prediction
_RANKS = -1e308, -1e307  # of the predictions: behind -inf, before any length


class Interrupting(NamedTuple):
    """An order (`policies.orders.order.Form`): of each request its `value` before its first token
    and its predicted tokens; the share of these from which on it is not interrupted, and seconds
    for each unit where the value ages, else not-a-number; what a token made adds, and whether the
    value `bounces`; how many tokens of each request rank first; where levels begin, their ranks
    where these are not their numbers, of each request where those of its class begin (empty: there
    is one class), and how many tokens each from the last of these on has (0: it has no end); how
    often one request is interrupted at most; seconds of the server that its first and second
    prediction take.
    """

    value: Floats
    predicted: Floats
    settled: float
    aging: float
    per_token: float
    bounces: bool
    first_tokens: int
    starts: Ints
    ranks: Floats
    rows: Ints
    every: int
    most: int
    first_prediction: float
    second_prediction: float


# of an order that interrupts nobody
NO_INTERRUPTION = Interrupting(
    *(np.empty(0), np.empty(0), 0.0, np.nan, 0.0, False, 0),
    *(np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64), 0, 0, 0.0, 0.0),
)


class StintColumns(NamedTuple):
    """Of each request: tokens made, seconds served, its last token before an interruption, how
    often it was interrupted, whether it was ever in service, seconds of predictions that are `due`
    (two rows, none where no prediction takes time).
    """

    made: Ints
    served: Floats
    left_off: Floats
    interrupted: Ints
    started: Ints
    due: Floats


class InService(NamedTuple):
    """Of each server: its request (-1: none), the factor on its times, residuals used; of this
    stint its start, the end of its first step, what each other one takes, the step of the next
    change of rank or end, when that is.
    """

    job: Ints
    paces: Floats
    used: Ints
    begun: Floats
    first_end: Floats
    rest: Floats
    target: Ints
    changes_at: Floats


def run_interrupting(
    requests: Requests,
    law: tuple[float, ...],
    paces: Floats,
    residuals: Floats,
    order: Interrupting,
    queue: RankedQueue,
    gaps: GapCounts,
) -> RequestPath | None:
    """One request at a time on each server; `law`: k1 .. kp, kr, speed. `residuals`: a row for each
    server, empty where the law has none. None where there were too few.

    The column of dispatches has the arrival and the time outside of service.
    """
    count, servers = len(requests.arrived_at), len(paces)
    path = new_path(count)
    path.batch_size[:] = 1
    made, interrupted, started = np.zeros((3, count), dtype=np.int64)
    due = _due(order)
    stints = StintColumns(made, np.zeros(count), np.full(count, np.nan), interrupted, started, due)
    job, used, target = np.zeros((3, servers), dtype=np.int64)
    job[:] = -1
    begun, first_end, rest = np.zeros((3, servers))
    never = np.full(servers, np.inf)
    state = InService(job, paces, used, begun, first_end, rest, target, never)
    queue.rank[:] = first_ranks(order, requests.arrived_at)
    for stage in reversed(range(len(due))):
        queue.rank[due[stage] > 0] = _RANKS[stage]
    if not _run(requests, (law, residuals), order, (state, stints, queue, gaps), path):
        return None
    path.server_free_at[:] = path.released_at
    return path


def first_ranks(order: Interrupting, arrived_at: Floats) -> Floats:
    """Of each request as it arrives."""
    rows = order.rows if len(order.rows) else 0
    begins = order.value + (order.ranks[rows] if len(order.ranks) else 0.0)
    if not np.isnan(order.aging):
        return np.asarray(arrived_at + order.aging * begins)
    return np.full(len(begins), -np.inf) if order.first_tokens > 0 else begins


def _due(order: Interrupting) -> Floats:
    """Seconds of predictions before the first token."""
    if order.first_prediction == order.second_prediction == 0:
        return np.empty((0, len(order.value)))
    first = np.full(len(order.value), order.first_prediction)
    long = (order.value > -np.inf) & (order.first_tokens == 0)
    return np.stack([first, np.where(long, order.second_prediction, 0.0)])


@inner
def _stage(job, stints):  # type: ignore[no-untyped-def]
    """The prediction that it waits for or is in, or SERVED."""
    for stage in range(len(stints.due)):
        if stints.due[stage, job] > 0.0:
            return stage
    return SERVED


@inner
def _run(requests, engine, order, system, path):  # type: ignore[no-untyped-def]
    """Whether there were enough residuals."""
    arrived_at, deadlines = requests.arrived_at, requests.deadlines
    state, stints, queue, gaps = system
    count, tail, patient, batches = len(arrived_at), 0, 0, 0
    while True:
        s = earliest(state.changes_at)
        arrival = arrived_at[tail] if tail < count else np.inf
        while patient < tail and (stints.started[patient] > 0 or not queue.waits[patient]):
            patient += 1
        lost = deadlines[patient] if patient < tail and len(deadlines) > 0 else np.inf
        now = min(state.changes_at[s], arrival, lost)
        if now == np.inf:
            return True
        if state.changes_at[s] == now:
            _reach(s, now, requests, order, (state, stints, queue, gaps), path)
        elif arrival == now:
            enter(tail, queue)
            tail += 1
        else:
            path.batch_size[patient] = 0
            leave(patient, queue)
        batches = _ask(now, batches, requests, engine, order, system, path)
        if batches < 0:
            return False


@inner
def _reach(s, now, requests, order, system, path):  # type: ignore[no-untyped-def]
    """The request of a server has another rank, its prediction or its last token."""
    state, stints, _, gaps = system
    job, done = state.job[s], state.target[s]
    length, stage = requests.output_tokens[job], _stage(job, stints)
    if stage < SERVED:
        stints.due[stage, job] = 0.0
        _leave_server(s, 0, now, requests, order, system, path)
        return
    if stints.made[job] + done < length:
        if order.second_prediction > 0.0 and stints.made[job] + done == order.first_tokens:
            stints.due[SECOND_PREDICTION, job] = order.second_prediction
            _leave_server(s, done, now, requests, order, system, path)
            return
        state.target[s] = _next_target(job, done, length, order, stints)
        state.changes_at[s] = step_instant(state.first_end[s], state.rest[s], state.target[s])
        return
    _count(s, done, state, stints, gaps, path)
    stints.made[job] = length
    path.released_at[job] = now
    path.dispatched_at[job] = requests.arrived_at[job] + (
        state.begun[s] - requests.arrived_at[job] - stints.served[job]
    )
    state.job[s] = -1
    state.changes_at[s] = np.inf


@inner
def _count(s, done, state, stints, gaps, path):  # type: ignore[no-untyped-def]
    """The tokens of a stint that is over: the first one ever, and the gaps between them."""
    job = state.job[s]
    if done == 0:
        return
    if np.isnan(path.first_token_at[job]):
        path.first_token_at[job] = state.first_end[s]
    if job >= gaps[2]:
        if not np.isnan(stints.left_off[job]):
            count_gaps(gaps, state.first_end[s] - stints.left_off[job], 1)
        count_gaps(gaps, state.rest[s], done - 1)
    stints.left_off[job] = step_instant(state.first_end[s], state.rest[s], done)


@inner
def _made_by(s, now, requests, state, stints):  # type: ignore[no-untyped-def]
    """Steps of the stint that are over, but for the one that ends the answer."""
    job, first_end, rest = state.job[s], state.first_end[s], state.rest[s]
    if first_end > now or _stage(job, stints) < SERVED:
        return 0
    steps = step_at_or_after(now, first_end, rest)
    if step_instant(first_end, rest, steps) > now:
        steps -= 1
    return min(steps, requests.output_tokens[job] - stints.made[job] - 1)


@inner
def _level(made, order):  # type: ignore[no-untyped-def]
    """From 0."""
    level, last = 0, len(order.starts) - 1
    if last == 0 and order.every > 0:
        return made // order.every
    while level < last and order.starts[level + 1] <= made:
        level += 1
    if level == last and order.every > 0:
        level += (made - order.starts[last]) // order.every
    return level


@inner
def _next_level_at(made, order):  # type: ignore[no-untyped-def]
    """The tokens with which the next level begins."""
    level, last = _level(made, order), len(order.starts) - 1
    if level < last:
        return order.starts[level + 1]
    return order.starts[last] + (level - last + 1) * order.every if order.every > 0 else NEVER


@inner
def _rank(job, made, requests, order, stints):  # type: ignore[no-untyped-def]
    """With so many tokens made."""
    stage = _stage(job, stints)
    if stage < SERVED:
        return _RANKS[stage]
    return form_rank(job, made, requests.arrived_at, order)


@inner
def form_rank(job, made, arrived_at, order):  # type: ignore[no-untyped-def]
    """Of a request in no prediction, with so many tokens made."""
    if made < order.first_tokens:
        return -np.inf
    value = order.value[job]
    if order.per_token != 0.0:
        value += order.per_token * made
    if order.bounces:
        value = min(abs(value), order.value[job])
    if len(order.starts) > 0:
        level = _level(made, order)
        if len(order.rows) > 0:
            level += order.rows[job]
        value += order.ranks[level] if len(order.ranks) > 0 else float(level)
    return value if np.isnan(order.aging) else arrived_at[job] + order.aging * value


@inner
def _next_target(job, done, length, order, stints):  # type: ignore[no-untyped-def]
    """The step of this stint, behind `done` ones, with which its rank changes, or it ends."""
    made = stints.made[job]
    end, following = length - made, NEVER
    if made + done < order.first_tokens:
        following = order.first_tokens - made
    elif order.per_token > 0.0:
        following = done + 1
    elif order.bounces:  # it rises from the token behind the last predicted one on
        following = max(done, int(-order.value[job] / order.per_token) - made) + 1
    elif len(order.starts) > 0:
        following = _next_level_at(made + done, order) - made
    return min(end, following)


@inner
def _ask(now, batches, requests, engine, order, system, path):  # type: ignore[no-untyped-def]
    """Start and interrupt as the policy decides; how many batches there were, -1 where residuals
    ran out.
    """
    state, stints, queue, _ = system
    while True:
        first = next_of(0, 0, now, requests, queue)
        if first < 0:
            return batches
        free = earliest(state.job)  # -1 is the least
        if state.job[free] >= 0:
            free = _outranked(first, now, requests, order, (state, stints, queue))
            if free < 0:
                return batches
            _interrupt(free, now, requests, order, system, path)
            continue
        serve(first, queue)
        if not _start(free, first, now, batches, requests, engine, order, (state, stints), path):
            return -1
        batches += 1


@inner
def _outranked(first, now, requests, order, system):  # type: ignore[no-untyped-def]
    """The server whose request has the worst rank behind the first that waits; -1: none."""
    state, stints, queue = system
    arrived_at, worst, last, came = requests.arrived_at, -1, 0.0, 0.0
    own, own_came = queue.rank[first], arrived_at[first]
    for s in range(len(state.job)):
        job = state.job[s]
        if stints.interrupted[job] >= order.most:
            continue
        made = stints.made[job] + _made_by(s, now, requests, state, stints)
        if made >= order.settled * order.predicted[job]:
            continue
        rank, at = _rank(job, made, requests, order, stints), arrived_at[job]
        if rank < own or (rank == own and at <= own_came):
            continue
        if worst < 0 or rank > last or (rank == last and at > came):
            worst, last, came = s, rank, at
    return worst


@inner
def _interrupt(s, now, requests, order, system, path):  # type: ignore[no-untyped-def]
    """Back into the queue with its tokens."""
    state, stints, _, _ = system
    job, stage = state.job[s], _stage(state.job[s], stints)
    if stage < SERVED:
        left = stints.due[stage, job] - (now - state.begun[s])
        stints.due[stage, job] = max(0.0, left)
    else:
        stints.interrupted[job] += 1
    done = _made_by(s, now, requests, state, stints) if stage == SERVED else 0
    _leave_server(s, done, now, requests, order, system, path)


@inner
def _leave_server(s, done, now, requests, order, system, path):  # type: ignore[no-untyped-def]
    """Back into the queue with `done` tokens more."""
    state, stints, queue, gaps = system
    job = state.job[s]
    _count(s, done, state, stints, gaps, path)
    stints.made[job] += done
    stints.served[job] = stints.served[job] + (now - state.begun[s])
    queue.rank[job] = _rank(job, stints.made[job], requests, order, stints)
    state.job[s] = -1
    state.changes_at[s] = np.inf
    enter(job, queue)


@inner
def _start(s, job, now, number, requests, engine, order, system, path):  # type: ignore[no-untyped-def]
    """Whether there was a residual for it."""
    (state, stints), (law, residuals) = system, engine
    k1, k2, k3, k4, kp, kr, speed = law
    path.batch_id[job] = number
    path.server_id[job] = s
    stints.started[job] = 1
    stage = _stage(job, stints)
    if stage < SERVED:
        state.job[s], state.begun[s], state.target[s] = job, now, 1
        state.first_end[s] = state.changes_at[s] = now + stints.due[stage, job]
        return True
    residual = 1.0
    if residuals.shape[1] > 0:
        if state.used[s] == residuals.shape[1]:
            return False
        residual = residuals[s, state.used[s]]
        state.used[s] += 1
    made, pace = stints.made[job], speed * state.paces[s]
    inputs, resumed = requests.prompt_tokens[job] + made, 1.0 if made > 0 else 0.0
    setup = pace * (k1 * 1 + k2 + kp * inputs + kr * resumed)
    state.job[s], state.begun[s] = job, now
    state.rest[s] = residual * (pace * (k3 * 1 + k4))
    state.first_end[s] = now + (residual * setup + state.rest[s])
    state.target[s] = _next_target(job, 0, requests.output_tokens[job], order, stints)
    state.changes_at[s] = step_instant(state.first_end[s], state.rest[s], state.target[s])
    return True
