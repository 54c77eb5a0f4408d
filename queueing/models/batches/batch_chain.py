"""Dynamic batching, M/G^[1,B]/1: the server takes min(waiting, B) as soon as it is empty and
something waits.

Embedded chain at batch starts, Q = requests waiting (those about to start included), b = min(Q, B),
A = arrivals during H(b), R = (Q - B)^+ left behind, p0 = P(Q - b + A = 0):

    Q' = max(Q - b + A, 1)        (an idle server starts the next arrival alone)
    drift of Q      E[b] = lam E[H] + p0
    drift of Q^2    2 (B - lam E[H(B)]) E[R] = E[A^2] + p0 - E[b^2]
                    E[A^2 | b] = lam E[H | b] + lam^2 E[H^2 | b]

Area under the number waiting, over one cycle: those left behind wait H, those who arrive during H
its residual, so

    E[Wq] = (E[R] E[H(B)] + lam E[H^2] / 2) / E[b]

Utilisation is lam E[H] / E[b] (a cycle lasts E[b] / lam). Conditions: Poisson arrivals, one server,
lam < B / E[H(B)]; without a bound lam (k1 + k3 sup N) < 1 (padded) or lam (k1 + k3 E[N]) < 1
(unpadded).

Method: above B - 1 the chain is a random walk with steps A - B; it comes back below B by its
descending ladder heights (queueing.models.batches.ladder), so the chain censored on 1 .. B - 1 is
finite and exact: no truncation of the queue, any load. p0 and P(Q >= B) follow from the drift, the
means from both drifts. Residual: what its rows miss in mass and mean. Without a bound the chain is
cut at a size that doubles until fewer than 1e-11 of the batches are larger; residual: what the
drift of Q leaves. Inoue (2021) treats deterministic H and B = infinity; THEORY c.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from kendall.queueing.distributions.lattice import Vector
from kendall.queueing.errors import (
    SMALLER,
    LargeBatchesError,
    NotConvergedError,
    OutOfReachError,
    UnstableQueueError,
)
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.latency.service_table import ServiceTable
from kendall.queueing.models.batches.ladder import Ladder, solve_ladder

_FIRST, _LARGEST_BATCH = 32, 2048  # sizes tried where there is no bound
LARGEST_BOUND = 512  # of a chain with full batches: its time grows with the cube
_LONGEST_ROW = 2**17
# log of the largest power of the circle's radius, with room for a row twice as long
_LONG_ROW = 300.0
_FIRST_CIRCLE, _LAST_CIRCLE = 1024, 2**16
_NEGLIGIBLE = 1e-9
_MOST_LANDINGS = 3_000_000_000  # sums over the states below a bound: a few seconds
_MOST_TERMS = 150_000_000  # numbers of arrivals times instants: a few seconds
LOST = 1e-11  # share of batches beyond the cut of an unbounded chain

Moments = tuple[Vector, ...]  # E[H | b], E[H^2 | b], mean own release | b, for b = 1, 2, ...
State = tuple[Vector, float, float]  # P(Q = b) for b < B, P(Q >= B), p0


@dataclass(frozen=True, eq=False)
class BatchQueue:
    """Means of a batch-service queue, and the state at batch starts from which its laws follow."""

    queueing_delay: float
    sojourn_time: float
    batch_size: float
    utilisation: float
    residual: float
    starts: Vector  # starts[b - 1] = P(Q = b), b < B
    full: float  # P(Q >= B)
    empty: float  # p0, P(nobody waits when a batch ends)
    behind: Vector  # behind[R] = P(Q = B + R); empty where it is too long to follow

    @property
    def largest(self) -> int:
        """B."""
        return len(self.starts) + 1

    def by_request(self, values: Vector) -> float:
        """The mean over requests of what depends on their batch's size, `values[b - 1]`, b = 1
        .. B.
        """
        weights = np.append(self.starts, self.full) * np.arange(1.0, self.largest + 1)
        return float(weights @ values) / self.batch_size

    @property
    def largest_used(self) -> int:
        """The largest size that occurs."""
        if self.full > _NEGLIGIBLE:
            return self.largest
        return int(np.flatnonzero(self.starts > 1e-13)[-1]) + 1


def solve_batch_chain(time: BatchTime, arrival_rate: float, bound: int | None) -> BatchQueue:
    """The stationary means. Raises UnstableQueueError, NotConvergedError."""
    load = arrival_rate / time.largest_stable_rate(bound)
    if load >= 1:
        raise UnstableQueueError(load)
    if bound is not None and bound <= LARGEST_BOUND:
        return _solve(time, arrival_rate, bound)
    return solve_cut(
        bound,
        lambda size: arrival_rate * time.mean(size) > 0.95 * size,
        partial(_unbounded, time, arrival_rate),
    )


def solve_cut(
    bound: int | None,
    grow: Callable[[int], bool],
    cut_at: Callable[[int], tuple[BatchQueue, float]],
) -> BatchQueue:
    """A chain cut at a size that batches do not reach; `grow`: batches of that size become larger
    ones, `cut_at`: also the share lost.

    A bound above `LARGEST_BOUND` is none where batches stay below that. Raises NotConvergedError.
    """
    largest, size = _LARGEST_BATCH if bound is None else LARGEST_BOUND, _FIRST
    while size < largest and grow(size):
        size *= 2
    before = math.inf
    while True:
        queue, lost = cut_at(size)
        if lost < LOST:
            return queue
        if size >= largest or not _may_reach(before, lost, round(math.log2(largest / size))):
            raise LargeBatchesError(size, lost, bound, LARGEST_BOUND)
        before, size = lost, 2 * size


def _may_reach(before: float, lost: float, doublings: int) -> bool:
    """Whether the share lost may yet become negligible: its logarithm falls at most fourfold from
    one doubling to the next.

    A tail exp(-c b^2) falls so; geometric ones fall twofold, powers of b not at all faster.
    """
    if before == math.inf:
        return True
    fall = max(0.0, math.log(max(before, LOST) / max(lost, LOST)))
    least = math.log(max(lost, LOST)) - fall * sum(4.0**each for each in range(1, doublings + 1))
    return least <= math.log(LOST)


def _unbounded(time: BatchTime, arrival_rate: float, size: int) -> tuple[BatchQueue, float]:
    """Batches of `size` and more put into the last state, and how many they are."""
    landing = time.table(size).arrivals(arrival_rate, size)[:-1]
    beyond = 1 - landing.sum(axis=1)
    landing[:, -1] += beyond
    visits, to_empty = _stationary(landing)
    lost = abs(float(visits @ beyond))
    state = visits, 0.0, to_empty
    moments = tuple(moment[:-1] for moment in time.moments(size))
    residual = _drift(arrival_rate, moments[0], state)
    if lost < LOST and residual > 1e-8:
        raise NotConvergedError("the chain of batch sizes (drift)", residual)
    return _means(arrival_rate, moments, state, residual, np.zeros(0)), lost


def _drift(arrival_rate: float, first: Vector, state: State) -> float:
    """What the drift of Q leaves, relative."""
    sizes = np.arange(1.0, len(first) + 1)
    return abs(float(state[0] @ (arrival_rate * first - sizes)) + state[2]) / float(
        state[0] @ sizes
    )


def full_arrivals(
    table: ServiceTable, arrival_rate: float, batch_size: int, row: Vector | None = None
) -> tuple[Vector, float]:
    """P(A = j | b = B) until what follows is negligible even times r^j, and the radius r of the
    walk's circle; `row`: its beginning.
    """
    count = 4 * batch_size + 64 if row is None else len(row)
    radius = _radius(table, arrival_rate, batch_size, count)
    while count <= _LONGEST_ROW:
        row = (
            table.arrivals(arrival_rate, count, first=batch_size - 1)[0]
            if row is None or len(row) < count
            else row
        )
        weight = np.abs(row[-8:]) @ radius ** np.arange(count - 8.0, count)
        if weight < 1e-14 * radius**batch_size:
            return row, radius
        count *= 2
    raise NotConvergedError(
        "the arrivals during a batch (steps of their law)", count / _LONGEST_ROW
    )


def _radius(table: ServiceTable, arrival_rate: float, batch_size: int, count: int) -> float:
    """The circle on which |w^{-b} E w^A| is smallest, found in u = log r > 0, inside the pole of
    the gamma residual.
    """

    def height(u: float) -> float:
        value = table.log_generating(arrival_rate, np.exp(u), batch_size)
        return value - batch_size * u if value < np.inf else 1e9 * u

    # r^b stays below 1e3: what it costs the falling coefficients in digits
    widest = 7.0 / batch_size
    if table.most_stalls:
        widest = min(
            widest, _LONG_ROW / count
        )  # rows that hold a stall are long: r^j stays a number
    if table.law.cv:
        # of the way to the pole: masses of stalls are not so tiny there
        inside = 0.5 if table.most_stalls else 0.9
        widest = min(
            widest, float(np.log1p(inside / (arrival_rate * table.longest * table.law.cv**2)))
        )
    return smallest_circle(height, widest)


def smallest_circle(height: Callable[[float], float], widest: float) -> float:
    """The radius at which a convex `height` of its logarithm, 0 .. `widest`, is least: golden
    section.
    """
    low, high = 0.0, widest
    for _ in range(24):
        third = 0.381966 * (high - low)
        if height(low + third) < height(high - third):
            high -= third
        else:
            low += third
    return float(np.exp((low + high) / 2))


def _solve(time: BatchTime, arrival_rate: float, bound: int) -> BatchQueue:
    moments = time.moments(bound)
    table = time.table(bound)
    rows = _arrivals(time, arrival_rate, bound)
    row, radius = full_arrivals(table, arrival_rate, bound, rows[-1])
    if bound == 1:
        state = _normalised(
            arrival_rate, moments, np.zeros(0), 1 - arrival_rate * float(moments[0][0])
        )
        return _means(
            arrival_rate, moments, state, 0.0, _left_behind(row, np.zeros(1), state, radius)
        )
    ladder = solve_ladder(row, bound, radius)
    rows = rows[:-1]
    landing = landing_below(rows, ladder)
    means = rows @ np.arange(rows.shape[1])
    residual = float(
        max(
            np.abs(landing.sum(axis=1) - 1).max(),
            np.abs(means / (arrival_rate * moments[0][:-1]) - 1).max(),
        )
    )
    if residual > 1e-8:
        raise NotConvergedError("the chain of batch sizes (its rows)", residual)
    state = _normalised(arrival_rate, moments, *_stationary(landing))
    behind = _left_behind(row, state[0] @ rows, state, radius)
    return _means(arrival_rate, moments, state, max(residual, ladder.residual), behind)


def _arrivals(time: BatchTime, arrival_rate: float, bound: int) -> Vector:
    """P(A = j | b), b = 1 .. B, as far as a full batch's arrivals reach."""
    table, count = time.table(bound), _needed(time, arrival_rate, bound)
    while count * bound**2 <= _MOST_LANDINGS and count * len(table.instants) <= _MOST_TERMS:
        rows = table.arrivals(arrival_rate, count)
        if abs(1 - float(rows[-1].sum())) < LOST or 2 * count > _LONGEST_ROW:
            return rows
        count *= 2
    raise OutOfReachError(
        f"the arrivals during a batch of up to {table.longest:.4g} s ({count} of them)", SMALLER
    )


def _needed(time: BatchTime, arrival_rate: float, bound: int) -> int:
    """First guess at it: mean and 14 standard deviations, and the tail of the residual."""
    mean, second, _ = time.moments(bound)
    spread = arrival_rate * mean[-1] + arrival_rate**2 * max(second[-1] - mean[-1] ** 2, 0.0)
    return int(bound + arrival_rate * mean[-1] + (14 + 60 * time.law.cv) * np.sqrt(spread)) + 64


def landing_below(rows: Vector, ladder: Ladder) -> Vector:
    """`landing[b - 1, q]`: P(the next state below B is q), q = 0 .. B - 1, from a batch of b <
    B.
    """
    bound = ladder.size
    heights = ladder.heights
    above = rows[:, bound:]
    undershoot = np.zeros(
        (above.shape[1] + 1, bound)
    )  # undershoot[d, o]: from d above B - 1, P(first at or below it by o)
    for d in range(1, above.shape[1] + 1):
        reach = min(d - 1, bound)
        undershoot[d] = (
            heights[1 : reach + 1] @ undershoot[d - 1 : d - 1 - reach : -1]
            if reach < d - 1
            else _short(heights, undershoot, d)
        )
        if d <= bound:
            undershoot[d, : bound - d + 1] += heights[d:]
    answer = rows[:, :bound].copy()
    answer += (above @ undershoot[1:])[:, ::-1]
    return answer


def _short(heights: Vector, undershoot: Vector, d: int) -> Vector:
    """The walk's first step stays above: d - 1 at most."""
    return (
        np.asarray(heights[1:d] @ undershoot[d - 1 : 0 : -1])
        if d > 1
        else np.zeros(undershoot.shape[1])
    )


def _stationary(landing: Vector) -> tuple[Vector, float]:
    """Relative visits of 1 .. B - 1 and the flow into 0 (an idle server, which starts its next
    batch from 1).
    """
    size = len(landing)
    matrix = landing[:, 1:].copy()
    matrix[:, 0] += landing[:, 0]
    equations = matrix.T - np.eye(size)
    equations[0] = 1.0
    right = np.zeros(size)
    right[0] = 1.0
    visits = np.linalg.solve(equations, right)
    return visits, float(visits @ landing[:, 0])


def _normalised(arrival_rate: float, moments: Moments, visits: Vector, to_empty: float) -> State:
    """By the drift of Q: what the batches below B lose and gain, the full ones make good."""
    first = moments[0]
    sizes = np.arange(1.0, len(first))
    full = (float(visits @ (arrival_rate * first[:-1] - sizes)) + to_empty) / (
        len(first) - arrival_rate * float(first[-1])
    )
    total = float(visits.sum()) + full
    return visits / total, full / total, to_empty / total


def _left_behind(full_row: Vector, below_row: Vector, state: State, radius: float) -> Vector:
    """P(Q = B + R), R = 0, 1, ..., from its generating function on the circle (docstring of
    queueing.models.batches.batch_delay).
    """
    starts, full, empty = state
    bound = len(starts) + 1
    polynomial = np.append([empty], starts)
    if bound == 1:
        polynomial = np.array([empty, -empty])
    else:
        polynomial[1] -= empty
    points = max(_FIRST_CIRCLE, 2 ** int(np.ceil(np.log2(2 * max(len(full_row), len(below_row))))))
    while full > _NEGLIGIBLE and points <= _LAST_CIRCLE:
        z = radius * np.exp(-2j * np.pi * np.arange(points // 2 + 1) / points)
        below, all_of = (
            np.fft.rfft(row * radius ** np.arange(len(row)), n=points)
            for row in (below_row, full_row)
        )
        values = (below - np.polynomial.polynomial.polyval(z, polynomial)) / (z**bound - all_of)
        masses = np.fft.irfft(values, n=points) * radius ** -np.arange(float(points))
        kept = masses[: points // 2]
        if abs(float(kept.sum()) - full) < 1e-9:
            return np.asarray(kept[: int(np.searchsorted(np.cumsum(kept), full - 1e-8)) + 1])
        points *= 2
    return np.zeros(0)


def _means(
    arrival_rate: float, moments: Moments, state: State, residual: float, left_behind: Vector
) -> BatchQueue:
    first, second, own = moments
    sizes = np.arange(1.0, len(first) + 1)
    starts, full, empty = state
    weights = np.append(starts, full)[: len(first)]
    batch_size, service = float(weights @ sizes), float(weights @ first)
    squares = float(weights @ (arrival_rate * first + arrival_rate**2 * second - sizes**2))
    behind = (
        (squares + empty) / (2 * (len(first) - arrival_rate * float(first[-1]))) if full else 0.0
    )
    delay = float(behind * first[-1] + arrival_rate * float(weights @ second) / 2) / batch_size
    return BatchQueue(
        queueing_delay=delay,
        sojourn_time=delay + float(weights @ (sizes * own)) / batch_size,
        batch_size=batch_size,
        utilisation=arrival_rate * service / batch_size,
        residual=residual,
        starts=starts,
        full=full,
        empty=empty,
        behind=left_behind,
    )
