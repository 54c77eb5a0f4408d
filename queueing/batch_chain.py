"""Dynamic batching, M/G^[1,B]/1: the server takes min(waiting, B) as soon as it is empty and something waits.

Embedded chain at batch starts, Q = requests waiting (those about to start included), b = min(Q, B), A = arrivals during
H(b), p0 = P(Q - b + A = 0):

    Q' = max(Q - b + A, 1)                                    (an idle server starts the next arrival alone)
    drift of Q      E[b] = lam E[H] + p0
    drift of Q^2    2 (B - lam E[H(B)]) E[R] = E[A^2] + p0 - E[b^2],   R = (Q - B)^+ left behind,  E[A^2|b] = lam E[H|b] + lam^2 E[H^2|b]

Area under the number waiting, over one cycle: those left behind wait H, those who arrive during H its residual, so
    E[Wq] = (E[R] E[H(B)] + lam E[H^2] / 2) / E[b]
Utilisation is lam E[H] / E[b] (a cycle lasts E[b] / lam). Conditions: Poisson arrivals, one server, lam < B / E[H(B)]; without a
bound lam (k1 + k3 sup N) < 1 (padded) or lam (k1 + k3 E[N]) < 1 (unpadded).

Method: rows P(A = j | b) from queueing.batch_time; the chain is truncated at N states, N doubled until the tail
mass is below 1e-12; stationary vector by a dense solve. Means come from the drifts, not from the truncated tail; the drift of
Q is the residual that is checked. Inoue (2021) treats deterministic H and B = infinity; THEORY c.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import solve

from queueing.batch_time import BatchTime
from queueing.distributions import Vector
from queueing.errors import NotConvergedError, UnstableQueueError

_FIRST, _LAST = 64, 4096
_LARGEST_BATCH = 512  # rows; beyond, simulation is quicker


@dataclass(frozen=True)
class BatchQueue:
    """Means of a batch-service queue; `residual` is what its drift equation leaves, relative."""

    queueing_delay: float
    sojourn_time: float
    batch_size: float
    utilisation: float
    residual: float
    states: int


def solve_batch_chain(time: BatchTime, arrival_rate: float, bound: int | None) -> BatchQueue:
    """The stationary means. Raises UnstableQueueError, NotConvergedError."""
    load = arrival_rate / time.largest_stable_rate(bound)
    if load >= 1:
        raise UnstableQueueError(load)
    states = _FIRST
    while True:
        rows = time.arrivals_table(arrival_rate, states if bound is None else min(bound, states), states)
        start = _stationary(rows, states)
        tail = float(start[-(states // 16) :].sum())
        if tail < 1e-12:
            return _means(time, arrival_rate, start, rows, bound)
        states *= 2
        if states > _LAST or min(states, bound or states) > _LARGEST_BATCH:
            raise NotConvergedError(f"the chain of batch sizes (tail mass at {states // 2} states)", tail)


def _stationary(rows: Vector, states: int) -> Vector:
    """P(Q = 1 .. states) at batch starts; what lies beyond is folded into the last state."""
    matrix = np.zeros((states, states))
    largest = len(rows)
    for q in range(1, states + 1):
        b = min(q, largest)
        reached = np.append(np.zeros(q - b), rows[b - 1])[: states + 1]
        matrix[q - 1] = np.append(reached[0] + reached[1], reached[2 : states + 1])
        matrix[q - 1, -1] += 1 - matrix[q - 1].sum()
    equations = matrix.T - np.eye(states)
    equations[0] = 1.0
    right = np.zeros(states)
    right[0] = 1.0
    return np.asarray(solve(equations, right, overwrite_a=True, check_finite=False))


def _means(time: BatchTime, arrival_rate: float, start: Vector, rows: Vector, bound: int | None) -> BatchQueue:
    largest = len(rows)
    weights = np.append(start[: largest - 1], start[largest - 1 :].sum())
    sizes = np.arange(1, largest + 1)
    each = range(1, largest + 1)
    first = np.array([time.mean(b) for b in each])
    second = np.array([time.second_moment(b) for b in each])
    own = np.array([time.own_mean(b) for b in each])
    idle = float(weights @ rows[:, 0]) - float(start[largest:] @ np.full(len(start) - largest, rows[-1, 0]))
    batch_size, service = float(weights @ sizes), float(weights @ first)
    squares = float(weights @ (arrival_rate * first + arrival_rate**2 * second - sizes**2))
    behind = (squares + idle) / (2 * (largest - arrival_rate * first[-1])) if largest == bound else 0.0
    delay = float(behind * first[-1] + arrival_rate * float(weights @ second) / 2) / batch_size
    residual = abs(arrival_rate * service + idle - batch_size) / batch_size
    if residual > 1e-8:
        raise NotConvergedError("the chain of batch sizes (drift)", residual)
    sojourn = delay + float(weights @ (sizes * own)) / batch_size
    return BatchQueue(delay, sojourn, batch_size, arrival_rate * service / batch_size, residual, len(start))
