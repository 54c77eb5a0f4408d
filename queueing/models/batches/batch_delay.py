"""Dynamic batching: the laws of queueing delay and sojourn, from the state at batch starts
(queueing.models.batches.batch_chain).

Arrivals after a request do not change its delay, so the number waiting is what arrives during a
delay (distributional Little's law), and

    E e^{-s Wq} = p0/E[b] + lam/E[b] (sum_{b<B} x_b (1 - h_b(s)) + X(z) (1 - h_B(s))) / s
    X(z) = sum_{q>=B} x_q z^{q-B} = (sum_{b<B} x_b (h_b(s) - z^b) - p0 (1 - z)) / (z^B - h_B(s))
    z = 1 - s/lam

x_q = P(Q = q), h_b(s) = E exp(-s H | b). P(Wq = 0) = p0/E[b], the server is idle.

The sojourn depends on the own batch's size, which later arrivals change. With p requests ahead, a
request waits for the rest of the batch in service and floor(p / B) more; its rank in its own batch
is p mod B, and those who arrive while it waits, Poisson(lam Wq), join the same batch. The transform
F_p of that rest, jointly with p, over the arrivals of a cycle:

    z F_p = F_{p-1} + (1[p = 0] sum_{b<B} x_b h_b(s) + x_{B+p} h_B(s) - P(R + A = p)) / lam
            (by parts; upwards where |z| >= 1, downwards where |z| < 1: each stable)
    f_r = lam/E[b] sum_n F_{nB+r} h_B^n
    own batch of size b:  sum_r f_r(w) P(Poisson(lam w) = b - 1 - r)
    sojourn = Wq + time to the own release | b

Accuracy: the lattice's width squared, about 1e-4 of the horizon. A law whose mean misses the exact
one by more than 0.3 % and one width is not given.
"""

from __future__ import annotations

import math

import numpy as np

from kendall.queueing.distributions.lattice import Complex, Grid, Vector, fitted_width, mean_of
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.models.batches.batch_chain import BatchQueue
from kendall.queueing.result import LEVELS, Levels, Quantiles

_POINTS, _SOJOURN_POINTS = 2048, 1024
_LONGEST_QUEUE = 8192  # requests ahead that the sojourn's law follows
_NEGLIGIBLE = 1e-9
_LONG_POINTS = (
    2**14
    # where heavy-tailed lengths leave too much beyond the first lattice; each is four times as long
    # as the one before
)
_EIGHTH = 7.0  # P(T > t) / P(7 t / 8 < T <= t) where P falls as 1 / t
_MISSED, _LOST = 1e-3, 5e-3  # of the mean and the mass of a law on such a lattice
_MOST_NUMBERS = 2**24  # of the transforms of all batch sizes on the finer lattice: 270 MB


def batch_quantiles(
    time: BatchTime, arrival_rate: float, queue: BatchQueue, levels: Levels = LEVELS
) -> tuple[Quantiles, Quantiles]:
    """Queueing delay and sojourn; quantiles are None where their law could not be made accurate."""
    atom = queue.empty / queue.batch_size
    horizon = _horizon(time, queue, atom)
    waits = _delay_quantiles(time, arrival_rate, queue, horizon, atom=atom, levels=levels)
    if queue.full > _NEGLIGIBLE and not 0 < len(queue.behind) < _LONGEST_QUEUE:
        return waits, Quantiles(queue.sojourn_time)
    coarse = Grid(fitted_width(horizon, _SOJOURN_POINTS), _SOJOURN_POINTS)
    law = _sojourn_law(time, arrival_rate, queue, coarse)
    return waits, checked(queue.sojourn_time, law, coarse, levels=levels)


def delay_law(
    time: BatchTime, arrival_rate: float, queue: BatchQueue
) -> tuple[Vector, Vector] | None:
    """Lattice points of the delay, seconds, and their probabilities; the first is P(no wait). None
    where one lattice is not accurate.
    """
    atom = queue.empty / queue.batch_size
    grid, delay = _first_law(time, arrival_rate, queue, _horizon(time, queue, atom))
    if checked(queue.queueing_delay, delay, grid, atom).p50 is None:
        return None
    delay[0] += atom
    return grid.instants, delay


def _horizon(time: BatchTime, queue: BatchQueue, atom: float) -> float:
    """Seconds that the lattice of a law covers."""
    return 16 * queue.queueing_delay / (1 - atom) + 4 * max(
        time.mean(queue.largest_used), queue.sojourn_time - queue.queueing_delay
    )


def _first_law(
    time: BatchTime, arrival_rate: float, queue: BatchQueue, horizon: float
) -> tuple[Grid, Vector]:
    """The delay's, without its atom at 0."""
    grid = Grid(fitted_width(horizon, _POINTS), _POINTS)
    return grid, grid.masses(_delay_transform(time, arrival_rate, queue, grid) * grid.hat)


def _delay_quantiles(
    time: BatchTime,
    arrival_rate: float,
    queue: BatchQueue,
    horizon: float,
    *,
    atom: float,
    levels: Levels,
) -> Quantiles:
    """On one lattice, or, where heavy-tailed lengths leave too much beyond it, each level on the
    finest lattice that reaches it.
    """
    grid, delay = _first_law(time, arrival_rate, queue, horizon)
    waits = checked(queue.queueing_delay, delay, grid, atom, levels)
    tried: list[tuple[Grid, Vector, float]] = []
    while waits.p50 is None:
        grid, table = (
            Grid(fitted_width(horizon, _LONG_POINTS), _LONG_POINTS),
            time.table(queue.largest),
        )
        finer = 2 ** max(0, math.ceil(math.log2(grid.width / table.width)))
        if finer * _LONG_POINTS * max(queue.largest, table.rows_of_a_transform) > _MOST_NUMBERS:
            return waits
        delay = grid.masses(_delay_transform(time, arrival_rate, queue, grid, finer) * grid.hat)
        lost = float(delay.sum()) + atom - 1
        whole = abs(mean_of(delay, grid) / queue.queueing_delay - 1) < _MISSED
        if whole and abs(lost) > _LOST:
            return waits
        tried.append(
            (grid, delay, atom - lost if whole else atom)
        )  # what a whole law lacks lies next to 0, where it is steepest
        if whole:
            found = (_finest(level, tried) for level in levels.values())
            return Quantiles.of(levels, queue.queueing_delay, found)
        horizon *= 4
    return waits


def _finest(level: float, tried: list[tuple[Grid, Vector, float]]) -> float | None:
    """The quantile on the first lattice that holds clearly more than the level."""
    reached = (level + 1) / 2
    grid, delay, atom = next(
        (each for each in tried if each[2] + float(each[1].sum()) > reached), tried[-1]
    )
    return grid.quantiles(delay, atom, {"": level})[0]


def checked(
    mean: float, masses: Vector, grid: Grid, atom: float = 0.0, levels: Levels = LEVELS
) -> Quantiles:
    """The exact mean with the quantiles of the law, if that law has this mean and all its mass.
    What it has too much or too little lies next to 0, where the law is steepest, but for what is
    beyond the horizon: that is a horizon each in the mean, and of a tail that has a mean, `_EIGHTH`
    times what is in the last eighth before it at most. A high quantile is counted from the end, and
    is there where a tenth of what lies behind it is beyond the horizon at most.
    """
    missed = abs(mean_of(masses, grid) - mean)
    lost = abs(float(masses.sum()) + atom - 1)
    if missed > 3e-3 * mean + grid.width or lost > 1e-3:
        return Quantiles(mean)
    found = dict(zip(levels, grid.quantiles(masses, atom, levels), strict=True))
    far = {
        name: level
        for name, level in levels.items()
        if level > LEVELS["p99"] and lost > (1 - level) / 100
    }
    if far:
        last = abs(float(masses[-(grid.points // 8) :].sum()))
        beyond = min(_EIGHTH * last, missed / (grid.points * grid.width))
        counted = grid.quantiles(masses, atom, far, end=True)
        for (name, level), value in zip(far.items(), counted, strict=True):
            found[name] = value if beyond <= (1 - level) / 10 else None
    return Quantiles.of(levels, mean, found.values())


def _delay_transform(
    time: BatchTime, arrival_rate: float, queue: BatchQueue, grid: Grid, finer: int = 1
) -> Complex:
    """Of the part of the delay that is not 0; the service times are put on a lattice `finer`
    times as fine.
    """
    below, last = _mixture(time, queue, grid, finer)
    total = queue.starts.sum() - below
    if queue.full > _NEGLIGIBLE:
        total = total + _behind_transform(1 - grid.s / arrival_rate, queue, below, last) * (
            1 - last
        )
    return np.asarray(arrival_rate / queue.batch_size * total / grid.s)


def _mixture(
    time: BatchTime, queue: BatchQueue, grid: Grid, finer: int = 1
) -> tuple[Complex, Complex]:
    """sum_{b<B} x_b h_b(s) and h_B(s), or 1 where no batch is full."""
    size = queue.largest if queue.full > _NEGLIGIBLE else queue.largest_used
    table = time.table(queue.largest).transforms(
        Grid(grid.width / finer, grid.points * finer), size
    )[:, : grid.points + 1]
    used = min(size, len(queue.starts))
    return np.asarray(queue.starts[:used] @ table[:used]), table[
        -1
    ] if size == queue.largest else np.ones(len(grid.s), dtype=complex)


def _behind_transform(z: Complex, queue: BatchQueue, below: Complex, last: Complex) -> Complex:
    """X(z); outside the unit circle in powers of 1/z, which do not overflow."""
    answer = np.empty(len(z), dtype=complex)
    bound = queue.largest
    inside = np.abs(z) < 1
    z_in, z_out = z[inside], 1 / z[~inside]
    small, large = below - queue.empty * (1 - z), last
    numerator = small[inside] - np.polynomial.polynomial.polyval(z_in, np.append(0.0, queue.starts))
    answer[inside] = numerator / (z_in**bound - large[inside])
    highest_first = np.append(0.0, queue.starts[::-1])  # z^{b - B}
    numerator = small[~inside] * z_out**bound - np.polynomial.polynomial.polyval(
        z_out, highest_first
    )
    answer[~inside] = numerator / (1 - large[~inside] * z_out**bound)
    return answer


def _sojourn_law(time: BatchTime, arrival_rate: float, queue: BatchQueue, grid: Grid) -> Vector:
    ranks = grid.masses(_ranks(time, arrival_rate, queue, grid) * grid.hat)
    own = time.table(queue.largest).transforms(grid, len(ranks), own=True)
    joined = _poisson(arrival_rate, grid.instants, len(ranks))
    sizes = np.zeros_like(ranks)  # sizes[b - 1]: law of the delay, own batch of size b
    for b in range(1, len(ranks)):
        sizes[b - 1] = np.einsum("rw,rw->w", ranks[:b], joined[b - 1 :: -1][:b])
    sizes[-1] = ranks.sum(axis=0) - sizes[:-1].sum(axis=0)
    idle = queue.empty / queue.batch_size
    return grid.masses(np.einsum("bs,bs->s", grid.transform(sizes), own) + idle * own[0])


def _ranks(time: BatchTime, arrival_rate: float, queue: BatchQueue, grid: Grid) -> Complex:
    """`ranks[r]`: transform of the delay of those who had to wait with r before them in their
    own batch.
    """
    below, last = _mixture(time, queue, grid)
    ahead = _ahead(arrival_rate, queue, grid, below, last)
    if queue.full <= _NEGLIGIBLE:
        return ahead / queue.batch_size
    parts = ahead.reshape(-1, queue.largest, len(grid.s))
    total = parts[-1]
    for part in parts[-2::-1]:
        total = total * last + part
    return np.asarray(total / queue.batch_size)


def _ahead(
    arrival_rate: float, queue: BatchQueue, grid: Grid, below: Complex, last: Complex
) -> Complex:
    """`f[p]`: lam times the transform of the rest of the batch in service, with p requests
    ahead; whole batches of p.
    """
    starts = queue.starts if len(queue.behind) else queue.starts[: queue.largest_used]
    found = np.append(queue.empty, np.append(starts, queue.behind))  # P(R + A = p)
    found[1] -= queue.empty
    behind = np.append(queue.behind, np.zeros(len(starts) + 1))
    z = 1 - grid.s / arrival_rate
    inside = int(np.count_nonzero(np.abs(z) < 1))  # |z| grows with the frequency
    rows = len(found) - 1
    answer = np.zeros(
        (-(-rows // queue.largest) * queue.largest if queue.full > _NEGLIGIBLE else rows, len(z)),
        dtype=complex,
    )
    up, inverse = (
        below[inside:].copy(),
        1 / z[inside:],
    )  # what is known below p, and the source at p = 0
    for p in range(rows):
        up += behind[p] * last[inside:] - found[p]
        up *= inverse
        answer[p, inside:] = up
    down = np.zeros(inside, dtype=complex)
    for p in range(rows, 0, -1):
        down = z[:inside] * down - behind[p] * last[:inside] + found[p]
        answer[p - 1, :inside] = down
    return answer


def _poisson(arrival_rate: float, instants: Vector, count: int) -> Vector:
    """`p[j, t]` = P(j arrivals in t), j = 0 .. count - 1."""
    means = np.maximum(arrival_rate * instants, 1e-300)
    steps = np.log(means) - np.log(np.arange(1.0, count))[:, None]
    return np.asarray(np.exp(np.cumsum(np.vstack([-means, steps]), axis=0)))
