"""M/G/1+D: one request at a time; a request that would wait longer than tau seconds for its service
is lost.

    P(V <= x) = P0 U(x) on 0 .. tau,  P0 = 1 / (1 + rho U(tau))        (level crossing)
    loss = P(V > tau) = (1 + (rho - 1) U(tau)) / (1 + rho U(tau))
    delay of the served: P(W_qs <= x) = U(x) / U(tau)
    delay of all: P(Wq <= x) = P0 U(x) below tau, the lost counted at tau
    sojourn of the served: W_qs + S, independent;   utilisation = rho (1 - loss)

V is the unfinished work that an arrival sees. Whether the lost leave at once or wait tau and leave
is the same for everyone else. Any service law, any load, also above 1.

Method: U by queueing.models.erlang_series for constant service, else by queueing.models.renewal.
Measured error of loss and means (load 0.05 to 3, patience 0.01 to 100 E[S], against closed forms
and a lattice 16 times finer): constant or exponential S 1e-10, else 2e-6, with a gamma residual on
more than 64 lengths (its law is condensed piece by piece, moments 0 to 3 kept) 1e-5; losses below
1e-15 a digit or two less. Two lattice widths that differ by more raise NotConvergedError. Quantiles
of the delays: to 1e-5 of the patience; of the sojourn: about 1e-4. 10 to 50 ms, with such a
residual 0.2 s. Source: Takacs (1962); de Kok and Tijms (1985); THEORY b.

With patience below the service time, U = e^{lam x}:

>>> queue = solve_impatient(np.array([1.0]), np.array([1.0]), 0.8, 0.5)
>>> round(queue.loss_fraction, 9) == round((1 - 0.2 * math.exp(0.4)) / (1 + 0.8 * math.exp(0.4)), 9)
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import gammainc, gammaincinv

from kendall.policies.text import SpecError
from kendall.queueing.distributions.lattice import Grid
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.models.erlang_series import renewal_of
from kendall.queueing.models.mm1d import (
    ImpatientMeans,
    check_impatient,
    de_kok_tijms,
    md1d,
    means_from,
    mm1d,
)
from kendall.queueing.models.renewal import RenewalFunction
from kendall.queueing.result import LEVELS, Levels, Quantiles

__all__ = [
    "ImpatientMeans",
    "ImpatientQueue",
    "de_kok_tijms",
    "md1d",
    "mm1d",
    "solve_impatient",
    "solve_lossy_service",
    "solve_mg1d",
]

_POINTS = 2**15
_CELLS = 64  # at least, of the residual's law
_ATOMS = 20_000  # cells times values, where that is more
_FEW = 64  # values for which the gamma residual is exact
_MANY = 4_000  # values that are kept as they are


@dataclass(frozen=True)
class ImpatientQueue:
    """An M/G/1+D queue in steady state. `delay` is of all, the lost counted at the patience;
    `served` and `sojourn` of the served.
    """

    loss_fraction: float
    delay: Quantiles
    served: Quantiles
    sojourn: Quantiles
    utilisation: float
    load: float


def solve_mg1d(
    law: LatencyModel,
    output_tokens: TokenDistribution,
    arrival_rate: float,
    patience: float,
    prompt_tokens: TokenDistribution | None = None,
    *,
    levels: Levels = LEVELS,
) -> ImpatientQueue:
    """The exact queue; requests/s and seconds. Raises SpecError, NotConvergedError."""
    service = ServiceTime.of(law, output_tokens, prompt_tokens)
    return solve_lossy_service(service, arrival_rate, patience, levels=levels)


def solve_impatient(
    services: Vector, weights: Vector, arrival_rate: float, patience: float
) -> ImpatientQueue:
    """The same for service times `services` (seconds) with probabilities `weights`: a fine
    lattice stands for a continuous law.
    """
    values, mass = np.asarray(services, dtype=float), np.asarray(weights, dtype=float)
    if (
        values.shape != mass.shape
        or values.ndim != 1
        or not np.all(values > 0)
        or not np.all(mass >= 0)
        or abs(mass.sum() - 1) > 1e-9
    ):
        raise SpecError(
            "got services and weights that are no law; expected seconds > 0 and as many "
            "probabilities >= 0 with sum 1"
        )
    return solve_lossy_service(
        ServiceTime(values[mass > 0], mass[mass > 0]), arrival_rate, patience
    )


def solve_lossy_service(
    service: ServiceTime, arrival_rate: float, patience: float, *, levels: Levels = LEVELS
) -> ImpatientQueue:
    """The same for any service time."""
    check_impatient(arrival_rate, service.mean, patience)
    plain = plain_service(service)
    renewal = renewal_of(plain, arrival_rate, patience)
    load = arrival_rate * service.mean
    means = means_from(renewal, load, patience)
    kept = 1 - means.loss_fraction
    return ImpatientQueue(
        means.loss_fraction,
        _delays(means.delay, renewal, kept, levels),
        _delays(means.served, renewal, 1.0, levels),
        Quantiles.of(levels, means.served + service.mean, _sojourn(renewal, plain, levels)),
        load * kept,
        load,
    )


def plain_service(service: ServiceTime) -> ServiceTime:
    """The same law without a residual, where there is one and many values: 2 points for every
    piece of the residual's law.
    """
    values, weights = service.values, service.weights
    if service.cv == 0 or len(values) <= _FEW:
        return service
    if len(values) > _MANY:
        values, weights = _condensed(values, weights, _MANY // 2)
    points, mass = _residual_points(service.cv, max(_CELLS, _ATOMS // len(values)))
    return ServiceTime(
        np.multiply.outer(points, values).ravel(), np.multiply.outer(mass, weights).ravel()
    )


def _residual_points(cv: float, cells: int) -> tuple[Vector, Vector]:
    """A gamma law of mean 1 as two points in each cell, with its moments 0 to 3; cells of equal
    shares of 1 and of X^3.
    """
    shape = cv**-2
    edges = np.union1d(
        gammaincinv(shape, np.arange(cells + 1) / cells),
        gammaincinv(shape + 3, np.arange(1, cells) / cells),
    )
    moments = [
        np.diff(gammainc(shape + k, edges)) * math.prod((shape + i) / shape for i in range(k))
        for k in range(4)
    ]
    return _two_points(*moments)


def _condensed(values: Vector, weights: Vector, cells: int) -> tuple[Vector, Vector]:
    """Many values as two in each cell of equal share of the second moment."""
    order = np.argsort(values)
    values, weights = values[order], weights[order]
    share = np.cumsum(weights * (1 + (values / values.max()) ** 2))
    starts = np.unique(np.searchsorted(share, share[-1] * np.arange(cells) / cells, side="right"))
    return _two_points(*(np.add.reduceat(weights * values**k, starts) for k in range(4)))


def _two_points(m0: Vector, m1: Vector, m2: Vector, m3: Vector) -> tuple[Vector, Vector]:
    """Points and masses of Gauss's rule for each cell of these moments about 0; one point where
    a cell is one.
    """
    mean = m1 / m0
    variance = m2 / m0 - mean**2
    wide = variance > 1e-12 * mean**2
    skew = np.where(
        wide, (m3 / m0 - 3 * mean * m2 / m0 + 2 * mean**3) / np.where(wide, variance, 1.0), 0.0
    )
    spread = np.sqrt(skew**2 + 4 * np.where(wide, variance, 0.0))
    high, low = (skew + spread) / 2, (skew - spread) / 2  # offsets; high - low = spread
    upper = np.where(wide, m0 * -low / np.where(wide, spread, 1.0), m0)
    points, mass = (
        np.concatenate([mean + high, (mean + low)[wide]]),
        np.concatenate([upper, (m0 - upper)[wide]]),
    )
    return points, mass


def _delays(mean: float, renewal: RenewalFunction, kept: float, levels: Levels) -> Quantiles:
    found = (_quantile(renewal, kept, level) for level in levels.values())
    return Quantiles.of(levels, mean, found)


def _quantile(renewal: RenewalFunction, kept: float, level: float) -> float:
    """Of kept * U(x) / U(tau), the rest at the patience; 0 where the atom there reaches the
    level.
    """
    if kept * renewal.share[0] >= level:
        return 0.0
    return float(
        np.interp(level, kept * renewal.share, renewal.instants)
    )  # above `kept` the last instant: the patience


def _sojourn(
    renewal: RenewalFunction, service: ServiceTime, levels: Levels
) -> tuple[float | None, ...]:
    """Delay and service time put on one lattice, mean-preserving, and convolved."""
    values, mass = service.spread
    order, beyond = np.argsort(values), (1 - max(levels.values())) / 100
    reached = min(int(np.searchsorted(np.cumsum(mass[order]), 1 - beyond)), len(order) - 1)
    long = values[order][reached]
    end = renewal.instants[np.searchsorted(renewal.share, 1 - beyond)]
    grid = Grid(float(end + long) / _POINTS, _POINTS)  # beyond both only what no level asks for
    area = np.append(
        0.0, np.cumsum((renewal.share[1:] + renewal.share[:-1]) / 2 * np.diff(renewal.instants))
    )
    ends = np.append(-grid.width, np.append(grid.instants, grid.points * grid.width))
    above = np.maximum(ends - renewal.instants[-1], 0.0)
    delays = np.diff(np.interp(ends, renewal.instants, area) + above, 2) / grid.width
    first = service.excess(np.maximum(ends, 0.0))[0]
    first[0] += grid.width
    both = grid.transform(delays) * grid.transform(np.diff(first, 2) / grid.width)
    return grid.quantiles(grid.masses(both), levels=levels)
