"""Fixed batching, M/G^b/1: the server waits until exactly b are present (no max_wait).

R = requests left behind when a batch starts is a Lindley recursion R' = (R + A - b)^+, A the
arrivals during H: the supremum of the walk with steps A - b (queueing.models.batches.ladder). With
V the wait of a formed batch:

    lam E[Wq] = E[R] + (b - 1) / 2        (the wait of the formed batch, plus the forming delay)
    E[W] = E[Wq] + E[H(b)]
    E e^{-s V} = E w^R,  w = 1 - s/lam    (R = those who arrive during V)

The member that arrives p-th into its batch waits F_p for the other b - p, and for the server. The
previous batch formed E_p before the member arrived and left it with U = V + H of work, so

    Wq_p = max(F_p, U - E_p),   p = 1 .. b equally likely
    E_p ~ Erlang(p), F_p ~ Erlang(b - p), U independent

Conditions: Poisson arrivals, one server, lam E[H] < b. Equals Bailey's (1954) sum over the roots of
z^b = E z^A inside the unit circle (THEORY d), needs none of them. Bailey's mean is the queue at
departures: the queueing delay is that minus lam E[H], plus the forming delay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import gammainc, gammaincc

from kendall.queueing.distributions.lattice import Grid, Vector, fitted_width
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.models.batches.batch_chain import full_arrivals
from kendall.queueing.models.batches.batch_delay import checked
from kendall.queueing.models.batches.ladder import Ladder, solve_ladder
from kendall.queueing.result import LEVELS, Levels, Quantiles

_POINTS = 4096


@dataclass(frozen=True, eq=False)
class FixedQueue:
    """Delay and sojourn of fixed batches; `residual` is what the ladder heights lack to 1."""

    delay: Quantiles
    sojourn: Quantiles
    batch_size: float
    utilisation: float
    residual: float


def solve_fixed_batches(
    time: BatchTime,
    arrival_rate: float,
    batch_size: int,
    *,
    quantiles: bool = True,
    levels: Levels = LEVELS,
) -> FixedQueue:
    """The stationary delays. Raises UnstableQueueError, NotConvergedError."""
    service = time.mean(batch_size)
    load = arrival_rate * service / batch_size
    if load >= 1:
        raise UnstableQueueError(load)
    row, radius = full_arrivals(time.table(batch_size), arrival_rate, batch_size)
    ladder = solve_ladder(row, batch_size, radius)
    mean = (ladder.mean_supremum + (batch_size - 1) / 2) / arrival_rate
    delay, sojourn = Quantiles(mean), Quantiles(mean + service)
    if quantiles:
        delay, sojourn = _laws(time, arrival_rate, ladder, (mean, service), levels)
    return FixedQueue(delay, sojourn, float(batch_size), load, ladder.residual)


def _laws(
    time: BatchTime,
    arrival_rate: float,
    ladder: Ladder,
    means: tuple[float, float],
    levels: Levels,
) -> tuple[Quantiles, Quantiles]:
    b, (mean, service) = ladder.size, means
    forming = (b + 6 * np.sqrt(b)) / arrival_rate
    grid = Grid(
        fitted_width(16 * ladder.mean_supremum / arrival_rate + 4 * service + forming, _POINTS),
        _POINTS,
    )
    batch = time.table(b).transforms(grid, b)[-1]
    w = 1 - grid.s / arrival_rate
    wait = ladder.supremum_transform(w, batch * w ** -float(b))
    backlog = grid.masses(wait * batch * grid.hat)  # U: the hat spreads what is an atom at V = 0
    cumulative = _delay_cdf(backlog, arrival_rate, b, grid)
    atom = float(cumulative[0])
    masses = np.diff(cumulative, prepend=atom)
    masses = (masses + np.append(masses[1:], 0.0)) / 2  # between two instants: half to either
    sojourn = grid.masses((grid.transform(masses) + atom) * batch)
    return (
        checked(mean, masses, grid, atom, levels),
        checked(mean + service, sojourn, grid, levels=levels),
    )


def _delay_cdf(backlog: Vector, arrival_rate: float, b: int, grid: Grid) -> Vector:
    """P(Wq <= x) at the grid's instants: the mean over p of P(F_p <= x) P(E_p >= U - x)."""
    size = 2 * grid.points
    spectrum = np.fft.rfft(backlog, n=size)
    below = np.cumsum(backlog)
    total = np.zeros(grid.points)
    for p in range(1, b + 1):
        tail = gammaincc(p, arrival_rate * grid.instants)  # P(E_p >= t)
        tail[0] = 0.0  # U <= x is counted by `below`
        ahead = np.fft.irfft(spectrum * np.conj(np.fft.rfft(tail, n=size)), n=size)[: grid.points]
        formed = gammainc(b - p, arrival_rate * grid.instants) if p < b else 1.0
        total += formed * (below + ahead)
    return np.asarray(np.clip(total / b, 0.0, 1.0))
