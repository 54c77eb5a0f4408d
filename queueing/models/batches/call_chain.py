"""Calls of several requests at a batch server, M^X/G^[1,B]/1: `queueing.models.batches.batch_chain`
where requests arrive in groups.

Calls arrive Poisson at rate lam, each with X requests, m = E[X], m2 = E[X^2]; A, the requests that
arrive during H(b), is compound Poisson. An idle server begins with a whole call, as far as it fits:
with R = Q - b left behind,

    Q' = R + A, or X where that is 0                     p0 = P(R + A = 0)
    drift of Q      E[b] = lam m E[H] + p0 m
    drift of Q^2    2 (B - lam m E[H(B)]) E[R] = E[A^2] + p0 m2 - E[b^2]
                    E[A^2 | b] = lam m2 E[H | b] + (lam m)^2 E[H^2 | b]
    E[Wq] = (E[R] E[H(B)] + lam m E[H^2] / 2) / E[b]     by the area under the number waiting,
                                                         as there

Means are over requests, not calls. With one request per call these are the equations there. B = 1
is M^X/G/1 (Chaudhry and Templeton 1983).

Lengths in a call must be independent: what is left of a call that a batch splits would tell of the
batch before. Of single requests, whose line is that of the calls' total work T, only

    E[Wq] = lam E[T^2] / (2 (1 - rho)) + (m2 / m - 1) E[S] / 2
    E[T^2] = m E[S^2] + (m2 - m) (E[S]^2 + Cov(S_1, S_2))

knows of it, with Cov(S_1, S_2) = r (k3 + k4)^2 Var N (queueing.distributions.call_lengths). Calls
that no batch splits are requests of their own (`BatchTime.of_calls`).
"""

from __future__ import annotations

from functools import partial

import numpy as np

from kendall.queueing.distributions.lattice import Vector
from kendall.queueing.errors import NotConvergedError, UnstableQueueError
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.latency.service_table import ServiceTable
from kendall.queueing.models.batches.batch_chain import (
    LARGEST_BOUND,
    LOST,
    BatchQueue,
    Moments,
    State,
    landing_below,
    smallest_circle,
    solve_cut,
)
from kendall.queueing.models.batches.calls import Calls
from kendall.queueing.models.batches.ladder import solve_ladder

_LONG_ROW = 2**12
_SMALLEST, _NEGLIGIBLE = 1e-6, -14 * np.log(10)  # logarithms: of a circle's radius, of a term
_TOLERANCE = 1e-8


def solve_call_chain(time: BatchTime, calls: Calls, bound: int | None) -> BatchQueue:
    """The stationary means. Raises UnstableQueueError, NotConvergedError."""
    load = calls.rate * calls.moment(1) / time.largest_stable_rate(bound)
    if load >= 1:
        raise UnstableQueueError(load)
    if bound == 1:
        return _one_by_one(time, calls)
    if bound is not None and bound <= LARGEST_BOUND:
        return _bounded(time, calls, bound)
    rate = calls.rate * calls.moment(1)
    return solve_cut(
        bound,
        lambda size: rate * time.mean(size) > 0.95 * size or size < 2 * calls.largest,
        partial(_unbounded, time, calls),
    )


def _one_by_one(time: BatchTime, calls: Calls) -> BatchQueue:
    first, second, mean = time.mean(1), time.second_moment(1), calls.moment(1)
    pairs = calls.moment(2) - mean
    load = calls.rate * mean * first
    outputs = time.outputs
    together = time.step(1) ** 2 * outputs.correlation * outputs.lengths.variance
    work = mean * second + pairs * (first**2 + together)
    delay = calls.rate * work / (2 * (1 - load)) + pairs / mean * first / 2
    return BatchQueue(
        queueing_delay=delay,
        sojourn_time=delay + first,
        batch_size=1.0,
        utilisation=load,
        residual=0.0,
        starts=np.zeros(0),
        full=1.0,
        empty=(1 - load) / mean,
        behind=np.zeros(0),
    )


def _unbounded(time: BatchTime, calls: Calls, size: int) -> tuple[BatchQueue, float]:
    """Batches of `size` and more put into the last state, and how many they are."""
    rows = np.vstack([_entry(calls, size), calls.arrivals(time.table(size), size)[:-1]])
    beyond = 1 - rows.sum(axis=1)
    rows[:, -1] += beyond
    flows = _stationary(rows)
    batches = float(flows[1:].sum())
    lost = abs(float(flows @ beyond)) / batches
    state = flows[1:] / batches, 0.0, float(flows[0]) / batches
    moments = tuple(moment[:-1] for moment in time.moments(size))
    residual = _drift(calls, moments[0], state)
    if lost < LOST and residual > _TOLERANCE:
        raise NotConvergedError("the chain of batch sizes (drift)", residual)
    return _means(calls, moments, state, residual), lost


def _bounded(time: BatchTime, calls: Calls, bound: int) -> BatchQueue:
    moments, table = time.moments(bound), time.table(bound)
    first = calls.rate * calls.moment(1) * moments[0]
    stalled = int(calls.rate * calls.moment(1) * time.law.stall * table.most_stalls)
    rows = calls.arrivals(table, _needed(time, calls, bound) + stalled)
    while abs(1 - float(rows[-1].sum())) > LOST and 2 * rows.shape[1] <= _LONG_ROW:
        rows = calls.arrivals(table, 2 * rows.shape[1])
    row, radius = _full_arrivals(table, calls, bound, rows[-1])
    ladder = solve_ladder(row, bound, radius)
    rows = np.vstack([_entry(calls, rows.shape[1]), rows[:-1]])
    landing = landing_below(rows, ladder)
    means = rows[1:] @ np.arange(rows.shape[1])
    residual = float(
        max(np.abs(landing.sum(axis=1) - 1).max(), np.abs(means / first[:-1] - 1).max())
    )
    if residual > _TOLERANCE:
        raise NotConvergedError("the chain of batch sizes (its rows)", residual)
    flows = _stationary(landing)
    full = (
        float(flows[1:] @ (first[:-1] - np.arange(1.0, bound))) + float(flows[0]) * calls.moment(1)
    ) / (bound - float(first[-1]))
    total = float(flows[1:].sum()) + full
    state = flows[1:] / total, full / total, float(flows[0]) / total
    return _means(calls, moments, state, max(residual, ladder.residual))


def _entry(calls: Calls, count: int) -> Vector:
    """Where an idle server's next state is: a call; what is beyond `count` is missing."""
    entry = np.zeros(count)
    kept = min(count, len(calls.sizes))
    entry[:kept] = calls.sizes[:kept]
    return entry


def _stationary(landing: Vector) -> Vector:
    """Relative visits of 0 (an idle server), 1, 2, ... of a chain of that transition matrix."""
    equations = landing.T - np.eye(len(landing))
    equations[0] = 1.0
    right = np.zeros(len(landing))
    right[0] = 1.0
    return np.asarray(np.linalg.solve(equations, right))


def _drift(calls: Calls, first: Vector, state: State) -> float:
    """What the drift of Q leaves, relative."""
    sizes, mean = np.arange(1.0, len(first) + 1), calls.moment(1)
    return abs(float(state[0] @ (calls.rate * mean * first - sizes)) + state[2] * mean) / float(
        state[0] @ sizes
    )


def _needed(time: BatchTime, calls: Calls, bound: int) -> int:
    """States that the arrivals of a batch below the bound reach: mean and 14 standard
    deviations, and the tail of the residual.
    """
    first, second, _ = time.moments(bound)
    mean = calls.rate * calls.moment(1)
    spread = calls.rate * calls.moment(2) * first[-1] + mean**2 * max(
        second[-1] - first[-1] ** 2, 0.0
    )
    return (
        int(bound + mean * first[-1] + (14 + 60 * time.law.cv) * np.sqrt(spread))
        + 64
        + 16 * calls.usual
    )


def _full_arrivals(
    table: ServiceTable, calls: Calls, bound: int, row: Vector
) -> tuple[Vector, float]:
    """P(A = j | b = B) until what follows is negligible even times r^j, and the radius r of the
    walk's circle; `row`: its beginning.

    A long row is made no longer: the circle is made smaller instead.
    """
    u = _log_radius(table, calls, bound)
    last = max(8, calls.largest)
    while u > _SMALLEST:
        count = len(row)
        terms = np.log(np.maximum(np.abs(row[-last:]), 1e-300)) + u * (
            np.arange(count - float(last), count) - bound
        )
        if np.logaddexp.reduce(terms) < _NEGLIGIBLE:
            return row, float(np.exp(u))
        if 2 * count <= _LONG_ROW:
            row = calls.arrivals(table, 2 * count, first=bound - 1)[0]
        else:
            u *= 0.7
    raise NotConvergedError(
        "the arrivals during a batch (steps of their law)", float(np.abs(row[-last:]).sum())
    )


def _log_radius(table: ServiceTable, calls: Calls, bound: int) -> float:
    """Logarithm of the radius of the circle on which |w^{-B} E w^A| is smallest, inside the pole
    of the gamma residual.
    """

    def height(u: float) -> float:
        z = float(np.exp(u))
        value = table.log_generating(calls.rate * (calls.generating(z) - 1) / (z - 1), z, bound)
        return value - bound * u if value < np.inf else 1e9 * u

    mean, variance = calls.rate * table.longest, table.law.cv**2
    widest = _inverse(
        calls, 7.0 / bound, min(500.0, 0.9 / variance if variance else np.inf) / mean
    )  # exp(500) is still a number
    return float(np.log(smallest_circle(height, widest)))


def _inverse(calls: Calls, widest: float, excess: float) -> float:
    """The largest u up to `widest` with E e^{u X} <= 1 + `excess`."""
    low, high = 0.0, widest
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if calls.generating(float(np.exp(middle))) <= 1 + excess
            else (low, middle)
        )
    return low


def _means(calls: Calls, moments: Moments, state: State, residual: float) -> BatchQueue:
    first, second, own = moments
    rate, mean, square = calls.rate, calls.moment(1), calls.moment(2)
    sizes = np.arange(1.0, len(first) + 1)
    starts, full, empty = state
    weights = np.append(starts, full)[: len(first)]
    batch_size, service = float(weights @ sizes), float(weights @ first)
    squares = (
        float(weights @ (rate * square * first + (rate * mean) ** 2 * second - sizes**2))
        + empty * square
    )
    behind = squares / (2 * (len(first) - rate * mean * float(first[-1]))) if full else 0.0
    delay = float(behind * first[-1] + rate * mean * float(weights @ second) / 2) / batch_size
    return BatchQueue(
        queueing_delay=delay,
        sojourn_time=delay + float(weights @ (sizes * own)) / batch_size,
        batch_size=batch_size,
        utilisation=rate * mean * service / batch_size,
        residual=residual,
        starts=starts,
        full=full,
        empty=empty,
        behind=np.zeros(0),
    )
