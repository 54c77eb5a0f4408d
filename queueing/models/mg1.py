"""M/G/1: one request at a time, S = X (c + d N), gamma residual X (mean 1, SCV cv^2), N tokens.

    E[Wq] = lam E[S^2] / (2 (1 - rho)),  rho = lam E[S] < 1                   (Pollaczek-Khinchine)
    P(Wq <= x) = (1 - rho) U(x),  U = sum_n rho^n Fe^{*n},  Fe' = P(S > y) / E[S]  (renewal series)

A token limit is part of the lengths: N' = min(N, n_max) (Yang et al., Eq. 1-5, right as printed).
Distribution: Fe is put on a lattice by matching local first moments (mean-preserving, error
O(width^2)); the geometric sum is one FFT (queueing.distributions.lattice). Accuracy about 1e-4 of
the mean delay; the means are exact. A quantile is 0 exactly where P(Wq = 0) = 1 - rho reaches it.
Conditions: Poisson arrivals, first come first served. Source: Takacs (1962); THEORY a.

Heavy tails: P(Wq <= x) needs Fe only as far as x. Where the longest service is more than `_FAR`
mean ones, each quantile is read from the finest of several lattices that reaches it, each eight
times as long as the one before; longer services end behind it. The mean delay is infinite where
E[S^2] is (None), its quantiles are not; those beyond `_LATEST` seconds are not given.

>>> from kendall.queueing.distributions.token_distribution import parse_distribution
>>> from kendall.queueing.latency.law import LatencyModel
>>> law, length = LatencyModel(k4=1.0), parse_distribution("deterministic:value=1")
>>> solve_mg1(law, length, 0.5).delay.mean  # M/D/1: rho / (2 mu (1 - rho))
0.5
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kendall.queueing.distributions.lattice import Grid
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.result import LEVELS, Levels, Quantiles

_POINTS = 2**15
_FAR = _POINTS / 32  # mean service times
_LATEST = 1e12


@dataclass(frozen=True)
class SingleQueue:
    """An M/G/1 queue in steady state."""

    delay: Quantiles
    sojourn: Quantiles
    load: float


def solve_mg1(
    law: LatencyModel,
    output_tokens: TokenDistribution,
    arrival_rate: float,
    prompt_tokens: TokenDistribution | None = None,
    *,
    levels: Levels = LEVELS,
) -> SingleQueue:
    """Delay and sojourn. Raises UnstableQueueError."""
    service = ServiceTime.of(law, output_tokens, prompt_tokens)
    return solve_service(service, arrival_rate, levels=levels)


def solve_service(
    service: ServiceTime, arrival_rate: float, *, levels: Levels = LEVELS
) -> SingleQueue:
    """The same for any service time. Raises UnstableQueueError."""
    load, delay = mean_delay(service, arrival_rate)
    if service.longest > _FAR * service.mean:
        return _far_reaching(service, load, delay, levels)
    grid, waits, sojourns = _laws(service, load, _grid(service, load, delay))
    waits[0] -= 1 - load
    return SingleQueue(
        Quantiles.of(levels, delay, grid.quantiles(waits, 1 - load, levels)),
        Quantiles.of(levels, delay + service.mean, grid.quantiles(sojourns, levels=levels)),
        load,
    )


def mean_delay(service: ServiceTime, arrival_rate: float) -> tuple[float, float]:
    """Load and mean queueing delay (Pollaczek-Khinchine), seconds; infinite where E[S^2] is.
    Raises UnstableQueueError.
    """
    load = arrival_rate * service.mean
    if load >= 1:
        raise UnstableQueueError(load)
    return load, arrival_rate * service.second_moment / (2 * (1 - load))


def laws(service: ServiceTime, arrival_rate: float) -> tuple[Grid, Vector, Vector] | None:
    """Lattice laws of delay and sojourn, the first mass of the delay that of no wait; None where
    services differ too much for one lattice. Raises UnstableQueueError.
    """
    load, delay = mean_delay(service, arrival_rate)
    if service.longest > _FAR * service.mean:
        return None
    return _laws(service, load, _grid(service, load, delay))


def delay_tail(service: ServiceTime, arrival_rate: float, x: Vector) -> Vector:
    """P(Wq > x), x in seconds, up to 16 mean delays of those who wait. Raises
    UnstableQueueError.
    """
    load, delay = mean_delay(service, arrival_rate)
    grid, waits, _ = _laws(service, load, _grid(service, load, delay))
    middle = np.cumsum(waits) - waits / 2
    middle[0] = 1 - load
    return np.asarray(np.where(x < 0, 1.0, 1 - np.interp(x, grid.instants, middle)))


def _far_reaching(service: ServiceTime, load: float, delay: float, levels: Levels) -> SingleQueue:
    """Each quantile on the first lattice that holds clearly more than its level."""
    found: dict[str, dict[str, float | None]] = {"delay": {}, "sojourn": {}}
    horizon = 64 * service.mean
    while horizon < _LATEST and any(len(known) < len(levels) for known in found.values()):
        grid, waits, sojourns = _laws(service, load, Grid(horizon / _POINTS, _POINTS))
        waits[0] -= 1 - load
        for known, masses, atom in (
            (found["delay"], waits, 1 - load),
            (found["sojourn"], sojourns, 0.0),
        ):
            held, values = atom + float(masses.sum()), grid.quantiles(masses, atom, levels)
            for name, value in zip(levels, values, strict=True):
                if name not in known and held > (1 + levels[name]) / 2:
                    known[name] = value
        horizon *= 8
    mean = delay if math.isfinite(delay) else None
    sojourn = None if mean is None else mean + service.mean
    return SingleQueue(
        Quantiles.of(levels, mean, map(found["delay"].get, levels)),
        Quantiles.of(levels, sojourn, map(found["sojourn"].get, levels)),
        load,
    )


def _grid(service: ServiceTime, load: float, delay: float) -> Grid:
    return Grid((16 * delay / load + 4 * service.longest) / _POINTS, _POINTS)


def _laws(service: ServiceTime, load: float, grid: Grid) -> tuple[Grid, Vector, Vector]:
    """Lattice laws of delay and sojourn; the first mass of the delay holds the atom at 0."""
    end = (_POINTS + 1) * grid.width
    near = service if service.longest <= end else service.up_to(end)
    excess = np.array(near.excess(np.append(0.0, grid.width * np.arange(_POINTS + 1))))
    excess[0, 0] += grid.width  # left of 0 the excess and its integral go on with P(S > x) = 1
    # the residual life's tail there is a straight line
    excess[1, 0] = excess[1, 1] + grid.width * near.mean
    life, own = (
        grid.transform(np.diff(excess[1] / service.mean, 2) / grid.width),
        grid.transform(np.diff(excess[0], 2) / grid.width),
    )
    wait = (1 - load) / (1 - load * life)
    waits, sojourns = grid.masses(np.array([wait, wait * own]))
    return grid, waits, sojourns
