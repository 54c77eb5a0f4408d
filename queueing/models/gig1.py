"""GI/G/1 exactly, one request at a time, independent gaps: the supremum of a random walk by its
Wiener-Hopf factor.

    Wq = sup of the walk with steps U = S - A                                         (Lindley)
    E e^{-s Wq} = exp(-int_{x>0} (1 - e^{-s x}) nu(dx)),  nu = sum_n P(U_1 + .. + U_n in dx) / n
    E[Wq] = int_{x>0} x nu(dx),  P(Wq = 0) = e^{-nu(0, inf)}                          (Spitzer)

nu is read from -log(1 - E e^{tilt U}) on one line, U on a lattice, with the tilt half of Lundberg's
exponent. There the transform is below 1, so that the logarithm has one value, and nu dies out
exponentially on either side of 0; an error of 1e-16 is one of 1e-16 e^{-tilt x}, so that the tail
keeps its digits. Gaps: gamma, of any squared coefficient of variation (0 constant, 1 exponential,
1/c the sum of c exponential ones), as the simulator draws them.

Every value goes onto the lattice by a stencil of four points that keeps three moments: only what
lies within a step of 0 is wrong, an error O(width^2) that a load near 1 does not multiply. The
number of points doubles until the mean stands still, and Richardson takes the rest: means to 1e-6
or better (with a gamma residual and more than eight lengths to 3e-5, as in `ServiceTime`),
quantiles to 1e-4 of the mean sojourn. Where the longest service is some 100,000 mean ones no such
lattice is fine enough (NotConvergedError). Conditions: gaps and services independent, first come,
first served, load below 1, no lengths beyond the table. Source: Spitzer (1956).

>>> service = ServiceTime(np.ones(1), np.ones(1), cv=1.0)
>>> round(solve_gig1(service, 0.5, 1.0).delay.mean, 6)  # M/M/1
1.0
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammainc, gammaln

from kendall.queueing.distributions.lattice import Complex, Grid, cyclic
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.errors import NotConvergedError, UnstableQueueError
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.models.mg1 import SingleQueue
from kendall.queueing.models.roots import bisected
from kendall.queueing.result import LEVELS, Levels, Quantiles

_FIRST, _LAST = 2**14, 2**20  # lattice points, of both signs
_STILL, _TOLERANCE = 1e-5, 1e-4  # of the mean, from one number of points to the next
_DIGITS = 37.0  # e^-37 of what is tilted is nothing
_ORDER = 4  # of a stencil
_FEW = 8  # services whose gamma residual is followed point by point
_PER_DEVIATION, _DEVIATIONS = 64, 14.0  # points of a gamma law
_CONSTANT = 1e-8  # SCV below which the density has no digits left
_NEAR = 64  # of its first cells, where the density may have a pole


def solve_gig1(
    service: ServiceTime, arrival_rate: float, arrival_scv: float, *, levels: Levels = LEVELS
) -> SingleQueue:
    """Delay and sojourn. Raises UnstableQueueError, NotConvergedError."""
    load, gap = arrival_rate * service.mean, 1 / arrival_rate
    if load >= 1:
        raise UnstableQueueError(load)
    if arrival_scv < _CONSTANT and service.longest <= gap:
        nothing = Quantiles.of(levels, 0.0, [0.0] * len(levels))
        return SingleQueue(nothing, service.quantiles(levels), load)
    tilt = _tilt(service, gap, arrival_scv)
    points, walk, moved = _FIRST, _Walk(service, gap, arrival_scv, tilt, _FIRST), math.inf
    while moved > _STILL and points < _LAST:
        points, before = 2 * points, walk.mean
        walk = _Walk(service, gap, arrival_scv, tilt, points)
        moved = abs(walk.mean / before - 1) if before > 0 else 1.0
    if moved > _TOLERANCE:
        raise NotConvergedError("the delay of GI/G/1 on a lattice", moved)
    mean = walk.mean + (walk.mean - before) / 3  # the error falls with the width's square
    delay, sojourn = walk.quantiles(levels)
    return SingleQueue(
        Quantiles.of(levels, mean, delay),
        Quantiles.of(levels, mean + service.mean, sojourn),
        load,
    )


def _tilt(service: ServiceTime, gap: float, scv: float) -> float:
    """Half of the exponent > 0 at which E e^{tilt U} is 1, or less where that is too steep."""
    values, weights = service.spread
    logs = np.log(np.maximum(weights, 1e-300))

    def height(tilt: float) -> float:
        terms = logs + tilt * values
        top = float(terms.max())
        of_gap = -tilt * gap if scv < _CONSTANT else -math.log1p(scv * tilt * gap) / scv
        return top + math.log(float(np.exp(terms - top).sum())) + of_gap

    high = _DIGITS / service.longest  # the lattice holds two of the longest
    if service.cv:
        high = min(high, 1 / (service.cv**2 * float(service.values.max())))  # the residual's pole
    if height(high) <= 0:
        return high / 2
    low = high
    while height(low) >= 0:
        low /= 2
    return bisected(height, low, 2 * low) / 2


class _Walk:
    """The walk on `points` lattice points around 0; masses are tilted by e^{tilt x}."""

    def __init__(
        self, service: ServiceTime, gap: float, scv: float, tilt: float, points: int
    ) -> None:
        self._half = points // 2
        self._width = width = 2 * _DIGITS / tilt / points
        self._log_tilt = tilt * width  # of a step to the right
        self._has_density = scv >= _CONSTANT
        served = _points_of_service(service, width, self._half * width)
        self._service = self._spectrum(*served, 1.0)
        gaps = gamma_points(scv, gap, width, self._half * width)
        walk = self._service * np.conj(self._spectrum(*gaps, -1.0))
        highest = float(np.abs(walk).max())
        if highest >= 1:
            raise NotConvergedError("the delay of GI/G/1 (its walk on a lattice)", highest)
        nu = np.fft.irfft(-np.log(1 - walk), n=points)
        self._at_zero = float(nu[0])
        self._tilted = nu[: self._half]
        self._tilted[0] = 0.0
        self._decay = np.exp(-self._log_tilt * np.arange(self._half))
        self._nu = self._tilted * self._decay

    @property
    def mean(self) -> float:
        """E[Wq], seconds."""
        return max(0.0, float(self._nu @ np.arange(self._half)) * self._width)

    def quantiles(
        self, levels: Levels
    ) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
        """Of the delay and of the sojourn."""
        grid, total = Grid(self._width, self._half), math.exp(-float(self._nu.sum()))
        law = np.exp(np.fft.rfft(self._tilted, n=2 * self._half))
        delay: Complex = np.asarray(total * law, dtype=np.complex128)
        delays, sojourns = (self._masses(of) for of in (delay, delay * self._service))
        # half of what lies within a step of 0 lies above it, where the gaps have a density
        atom = total * math.exp(-max(self._at_zero, 0.0) / 2) if self._has_density else total
        delays[0] = max(0.0, delays[0] - atom)
        return grid.quantiles(delays, atom, levels), grid.quantiles(sojourns, levels=levels)

    def _masses(self, transform: Complex) -> Vector:
        tilted = np.fft.irfft(transform, n=2 * self._half)
        masses = np.asarray(tilted[: self._half] * self._decay)
        masses[0] += float(tilted[-_ORDER:].sum())  # stencils of values near 0 reach below it
        return masses

    def _spectrum(self, values: Vector, weights: Vector, sign: float) -> Complex:
        """Of a law on 0, 1, ...; sign -1: of its mirror image, read from left to right."""
        points = 2 * self._half
        kept = values < (self._half - _ORDER) * self._width
        masses = cyclic(values[kept], weights[kept], self._width, points, _ORDER)
        place = np.arange(points)
        place[self._half :] -= points
        return np.asarray(np.fft.rfft(masses * np.exp(sign * self._log_tilt * place)))


def _points_of_service(service: ServiceTime, spacing: float, end: float) -> tuple[Vector, Vector]:
    if service.cv == 0 or len(service.values) > _FEW:
        return service.spread
    parts = [gamma_points(service.cv**2, value, spacing, end) for value in service.values]
    return (
        np.concatenate([values for values, _ in parts]),
        np.concatenate(
            [mass * chance for (_, mass), chance in zip(parts, service.weights, strict=True)]
        ),
    )


def gamma_points(scv: float, mean: float, spacing: float, end: float) -> tuple[Vector, Vector]:
    """A gamma law below `end` as points with probabilities, two in each cell no wider than
    `spacing`.

    Two points of Gauss and Legendre; in the first cells, where the density may have a pole, those
    at their mean -+ their standard deviation. Below an SCV of 1e-8 a constant.
    """
    if scv < _CONSTANT:
        return np.array([mean]), np.ones(1)
    shape, scale = 1 / scv, mean * scv
    deviation = mean * math.sqrt(scv)
    low = max(0.0, mean - _DEVIATIONS * deviation)
    high = min(end, mean + _DEVIATIONS * (deviation + 3 * scale))
    width = min(spacing, deviation / _PER_DEVIATION)
    edges = low + width * np.arange(math.ceil((high - low) / width) + 1)
    middles = edges[:-1] + width / 2
    values = np.concatenate([middles - width / math.sqrt(12), middles + width / math.sqrt(12)])
    scaled = values / scale
    weights = np.exp((shape - 1) * np.log(scaled) - scaled - gammaln(shape)) * width / scale / 2
    if low == 0:
        near = min(_NEAR, len(middles))
        x = edges[: near + 1] / scale
        moments = [np.diff(gammainc(shape + k, x)) for k in range(3)]
        mass = np.maximum(moments[0], 1e-300)
        centre = moments[1] * shape / mass
        spread = np.sqrt(np.maximum(moments[2] * shape * (shape + 1) / mass - centre**2, 0.0))
        for of, side in ((slice(0, near), -1), (slice(len(middles), len(middles) + near), 1)):
            values[of] = scale * (centre + side * spread)
            weights[of] = moments[0] / 2
    return values, weights / weights.sum() if high < end else weights
