"""M/G/1: one request at a time, S = X (c + d N), gamma residual X (mean 1, SCV cv^2), N tokens.

    E[Wq] = lam E[S^2] / (2 (1 - rho)),  rho = lam E[S] < 1                          (Pollaczek-Khinchine)
    P(Wq <= x) = (1 - rho) U(x),  U = sum_n rho^n Fe^{*n},  Fe' = P(S > y) / E[S]     (renewal series)

A token limit is part of the lengths: N' = min(N, n_max) (Yang et al., Eq. 1-5, right as printed).
Distribution: Fe is put on a lattice by matching local first moments (mean-preserving, error O(width^2)); the geometric sum is one
FFT (queueing.lattice). Accuracy about 1e-4 of the mean delay; the means are exact. A quantile is 0 exactly where
P(Wq = 0) = 1 - rho reaches it. Conditions: Poisson arrivals, first come first served. Source: Takacs (1962); THEORY a.

>>> from queueing.distributions import parse_distribution
>>> from queueing.latency import LatencyModel
>>> solve_mg1(LatencyModel(k4=1.0), parse_distribution("deterministic:value=1"), 0.5).delay.mean  # M/D/1: rho / (2 mu (1 - rho))
0.5
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from queueing.distributions import TokenDistribution, Vector
from queueing.errors import UnstableQueueError
from queueing.latency import LatencyModel
from queueing.lattice import Grid
from queueing.result import Quantiles
from queueing.service_time import ServiceTime

_POINTS = 2**15


@dataclass(frozen=True)
class SingleQueue:
    """An M/G/1 queue in steady state."""

    delay: Quantiles
    sojourn: Quantiles
    load: float


def solve_mg1(
    law: LatencyModel, output_tokens: TokenDistribution, arrival_rate: float, prompt_tokens: TokenDistribution | None = None
) -> SingleQueue:
    """Delay and sojourn. Raises UnstableQueueError."""
    return solve_service(ServiceTime.of(law, output_tokens, prompt_tokens), arrival_rate)


def solve_service(service: ServiceTime, arrival_rate: float) -> SingleQueue:
    """The same for any service time. Raises UnstableQueueError."""
    load, delay = mean_delay(service, arrival_rate)
    grid, waits, sojourns = _laws(service, load, delay)
    return SingleQueue(
        Quantiles(delay, *grid.quantiles(np.append(waits[0] - (1 - load), waits[1:]), 1 - load)),
        Quantiles(delay + service.mean, *grid.quantiles(sojourns)),
        load,
    )


def mean_delay(service: ServiceTime, arrival_rate: float) -> tuple[float, float]:
    """Load and mean queueing delay (Pollaczek-Khinchine), seconds. Raises UnstableQueueError."""
    load = arrival_rate * service.mean
    if load >= 1:
        raise UnstableQueueError(load)
    return load, arrival_rate * service.second_moment / (2 * (1 - load))


def delay_tail(service: ServiceTime, arrival_rate: float, x: Vector) -> Vector:
    """P(Wq > x), x in seconds, up to 16 mean delays of those who wait. Raises UnstableQueueError."""
    load, delay = mean_delay(service, arrival_rate)
    grid, waits, _ = _laws(service, load, delay)
    middle = np.cumsum(waits) - waits / 2
    middle[0] = 1 - load
    return np.asarray(np.where(x < 0, 1.0, 1 - np.interp(x, grid.instants, middle)))


def _laws(service: ServiceTime, load: float, delay: float) -> tuple[Grid, Vector, Vector]:
    """Lattice laws of delay and sojourn; the first mass of the delay holds the atom at 0."""
    grid = Grid((16 * delay / load + 4 * service.longest) / _POINTS, _POINTS)
    excess = np.array(service.excess(np.append(0.0, grid.width * np.arange(_POINTS + 1))))
    excess[0, 0] += grid.width  # left of 0 the excess and its integral go on with P(S > x) = 1
    excess[1, 0] = excess[1, 1] + grid.width * service.mean  # the residual life's tail there is a straight line
    life, own = grid.transform(np.diff(excess[1] / service.mean, 2) / grid.width), grid.transform(np.diff(excess[0], 2) / grid.width)
    wait = (1 - load) / (1 - load * life)
    waits, sojourns = grid.masses(np.array([wait, wait * own]))
    return grid, waits, sojourns
