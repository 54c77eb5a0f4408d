"""M/G/1+D: a request is lost once it has waited `patience` tau; any service law, any load (also above 1).

    U(x) = 1 + lam int_0^x U(x - y) P(S > y) dy                         (the renewal series of queueing.mg1)
    P0 = 1 / (1 + rho U(tau)),   loss pi = (1 + (rho - 1) U(tau)) / (1 + rho U(tau)),   busy rho (1 - pi)
    P(Wq <= x) = P0 U(x) for x < tau, the lost wait tau:   E[Wq] = tau - P0 int_0^tau U
    served: P(Wq <= x) = U(x) / U(tau)

by level crossing of the unfinished work, which a lost request does not join. Method: product trapezoid on n steps (U linear between them,
P(S > y) integrated exactly), Richardson from n/2 and n; loss and means to about 1e-6 (exponential service 1e-9). U grows without end
above load 1: it is rescaled as it grows, only its ratios count. Residual: the change of U(tau) by the last refinement, relative.
M/M/1+D and M/D/1+D have closed forms.

De Kok and Tijms (1985), Yang et al. Eq. 6-9: pi = (1 - C^2) pi_D + C^2 pi_M, C^2 = SCV of S, the same for E[Wq]. Exact for C^2 = 0
and 1. Against the exact values: pi -2 to -3 % for load .77-1.18 and C^2 .07-.35; -6 to 0 % for load .7-2; +13 % at .4, 4.8
times too high at .1 (tau = 2.5 E[S]); E[Wq | served] -11 to +12 %. Outside 0 <= C^2 <= 1 it is refused: there pi is 7 to 69 % too
high, and the served delay may be negative.
Sources: level crossing: Brill; THEORY b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from policies.text import SpecError
from queueing.distributions import TokenDistribution, Vector
from queueing.errors import NotConvergedError
from queueing.latency import LatencyModel
from queueing.lattice import Grid, fitted_width
from queueing.result import LEVELS, Quantiles
from queueing.service_time import ServiceTime

_FEWEST, _MOST = 2048, 32768  # steps
_PER_SERVICE = 48  # steps per mean service time
_POINTS = 4096


@dataclass(frozen=True)
class ImpatientQueue:
    """M/G/1+D: `delay` counts the lost at their patience; `served` and `sojourn` are those of the served."""

    loss_fraction: float
    delay: Quantiles
    served: Quantiles
    sojourn: Quantiles
    utilisation: float
    load: float
    residual: float


@dataclass(frozen=True)
class ImpatientMeans:
    """Loss fraction and mean delays (seconds) of all and of the served."""

    loss_fraction: float
    delay: float
    served: float


def solve_mg1d(
    law: LatencyModel,
    output_tokens: TokenDistribution,
    arrival_rate: float,
    patience: float,
    prompt_tokens: TokenDistribution | None = None,
) -> ImpatientQueue:
    """The stationary queue. Raises SpecError, NotConvergedError."""
    return solve_impatient(ServiceTime.of(law, output_tokens, prompt_tokens), arrival_rate, patience)


def solve_impatient(service: ServiceTime, arrival_rate: float, patience: float) -> ImpatientQueue:
    """The same for any service time."""
    series, residual = _renewal(service, arrival_rate, patience)
    load, top = arrival_rate * service.mean, float(series[-1])
    one = float(series[0])  # what U(0) = 1 has become
    steps = len(series) - 1
    if service.is_constant and 0.87 * arrival_rate * patience < 6:
        means = constant_impatience(arrival_rate, service.mean, patience)
    else:
        means = _from_series(load, patience, one, top, _integral(series, patience / steps))
    atom = one / top
    served = [_level(series / top, level, patience / steps, atom) for level in LEVELS.values()]
    everyone = (1 - means.loss_fraction) / top * series
    delays = [_level(everyone, level, patience / steps, float(everyone[0])) for level in LEVELS.values()]
    return ImpatientQueue(
        loss_fraction=means.loss_fraction,
        delay=Quantiles(means.delay, *(patience if delay is None else delay for delay in delays)),
        served=Quantiles(means.served, *served),
        sojourn=_sojourn(service, series / top, patience, means.served),
        utilisation=load * (1 - means.loss_fraction),
        load=load,
        residual=residual,
    )


def exponential_impatience(arrival_rate: float, service_rate: float, patience: float) -> ImpatientMeans:
    """M/M/1+D: U = 1 + lam (1 - e^{-d x}) / d, d = mu - lam."""
    d = service_rate - arrival_rate
    if abs(d * patience) < 1e-6:  # d = 0: U = 1 + lam x, to second order in d
        top = 1 + arrival_rate * patience * (1 - d * patience / 2)
        integral = patience + arrival_rate * patience**2 / 2 * (1 - d * patience / 3)
    else:
        top = 1 - arrival_rate * math.expm1(-d * patience) / d
        integral = patience + arrival_rate / d * (patience + math.expm1(-d * patience) / d)
    return _from_series(arrival_rate / service_rate, patience, 1.0, top, integral)


def constant_impatience(arrival_rate: float, service_time: float, patience: float) -> ImpatientMeans:
    """M/D/1+D by Erlang's alternating series, which loses 0.87 lam tau digits. Raises NotConvergedError where fewer than 9 are left."""
    if 0.87 * arrival_rate * patience > 6.5:
        raise NotConvergedError("Erlang's series for M/D/1+D (digits lost)", 10 ** (0.87 * arrival_rate * patience - 16))
    top = integral = 0.0
    for k in range(math.floor(patience / service_time) + 1):
        y = arrival_rate * (patience - k * service_time)
        terms = [(-y) ** j / math.factorial(j) for j in range(k + 1)]
        top += terms[-1] * math.exp(y)
        integral += (math.exp(y) * math.fsum(terms) - 1) / arrival_rate
    return _from_series(arrival_rate * service_time, patience, 1.0, top, integral)


def de_kok_tijms(arrival_rate: float, mean: float, scv: float, patience: float) -> ImpatientMeans:
    """Yang et al. Eq. 6-9, an approximation. Raises SpecError outside 0 <= C^2 <= 1."""
    if not -1e-12 <= scv <= 1 + 1e-12:
        raise SpecError(f"got a service time of SCV {scv:.3g}; expected between 0 and 1 for the interpolation: use --method exact")
    constant = solve_impatient(ServiceTime(np.array([mean]), np.ones(1)), arrival_rate, patience)
    random = exponential_impatience(arrival_rate, 1 / mean, patience)
    loss = (1 - scv) * constant.loss_fraction + scv * random.loss_fraction
    delay = (1 - scv) * float(constant.delay.mean or 0.0) + scv * random.delay
    return ImpatientMeans(loss, delay, (delay - patience * loss) / (1 - loss))


def _from_series(load: float, patience: float, one: float, top: float, integral: float) -> ImpatientMeans:
    """`one`, `top`, `integral` = U(0), U(tau) and its integral, in one common unit."""
    empty = 1 / (one + load * top)
    loss = (one + (load - 1) * top) * empty
    return ImpatientMeans(max(loss, 0.0), patience - empty * integral, patience - integral / top)


def _renewal(service: ServiceTime, arrival_rate: float, patience: float) -> tuple[Vector, float]:
    """U at equidistant instants of [0, tau], up to a factor, by Richardson's extrapolation."""
    if not (0 < arrival_rate < math.inf and 0 < patience < math.inf):
        raise SpecError(f"got arrival_rate={arrival_rate}, patience={patience}; expected both > 0 and finite")
    steps = _FEWEST
    if service.is_constant:  # a step that divides the service time keeps the kinks of U on the grid
        each = 2 * math.ceil(_FEWEST * service.mean / patience / 2)
        steps = 2 * math.ceil(each * patience / service.mean / 2)
    while steps < _PER_SERVICE * patience / service.mean:
        steps *= 2
    if steps > _MOST:
        raise NotConvergedError(f"the renewal series over {patience / service.mean:.0f} service times (steps)", steps / _MOST)
    rough, fine = (_march(service, arrival_rate, patience, n) for n in (steps // 2, steps))
    scale = fine[0] / rough[0]
    better = (4 * fine[::2] - rough * scale) / 3
    return better, abs(float(better[-1] / fine[-1]) - 1)


def _march(service: ServiceTime, arrival_rate: float, patience: float, steps: int) -> Vector:
    width = patience / steps
    first, second = service.excess(width * np.arange(steps + 1))
    slope = -np.diff(second) / width
    weights = np.append(first[0] - slope[0], -np.diff(slope))  # of U(x - y_j): a hat times P(S > y); `first` integrates it
    ends = slope - first[1:]  # the last, half hat
    series = np.empty(steps + 1)
    series[0] = source = 1.0
    ahead = 1 - arrival_rate * float(weights[0])
    for n in range(1, steps + 1):
        inner = float(weights[1:n] @ series[n - 1 : 0 : -1]) + float(ends[n - 1]) * series[0]
        series[n] = (source + arrival_rate * inner) / ahead
        if series[n] > 1e200:
            series[: n + 1] *= 1e-200
            source *= 1e-200
    return series


def _integral(series: Vector, width: float) -> float:
    """Trapezoid with Richardson (Simpson where the number of steps is even)."""
    fine = width * (float(series.sum()) - float(series[0] + series[-1]) / 2)
    if len(series) % 2 == 0:
        return fine
    coarse = 2 * width * (float(series[::2].sum()) - float(series[0] + series[-1]) / 2)
    return (4 * fine - coarse) / 3


def _level(cumulative: Vector, level: float, width: float, atom: float) -> float | None:
    if atom >= level:
        return 0.0
    if cumulative[-1] < level:
        return None
    return float(width * np.interp(level, cumulative, np.arange(len(cumulative))))


def _sojourn(service: ServiceTime, cumulative: Vector, patience: float, served: float) -> Quantiles:
    """The served wait and the own service are independent."""
    grid = Grid(fitted_width(patience + service.longest, _POINTS), _POINTS)
    edges = grid.instants + grid.width / 2
    waits = np.interp(edges, np.linspace(0, patience, len(cumulative)), cumulative)
    excess = service.excess(np.append(0.0, grid.width * np.arange(_POINTS + 1)))[0]
    excess[0] += grid.width
    own = np.diff(excess, 2) / grid.width
    law = grid.masses(grid.transform(np.diff(waits, prepend=0.0)) * grid.transform(own))
    return Quantiles(served + service.mean, *grid.quantiles(law))
