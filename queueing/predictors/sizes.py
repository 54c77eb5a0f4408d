"""Laws of service times for the analysis of orders: atoms, or a continuous law cut into cells.

The analysis (`analysis`) is exact for atoms. A continuous law is cut into cells, and each cell
becomes the two atoms that have its moments up to the third (Gauss), so that load and E[X^2] are
exact. Cells hold equal shares of the mean of F(x), E[X; X <= x], E[X^2; X <= x] and ln(1 - rho_x),
each of its total, with rho_x = load E[X; X <= x] / E[X]. What remains is of order n^-2, and
`queue.solve_order` removes its leading term (Richardson). Tokens: the service times of a batch of
one, S(N) = k1 + k2 + (k3 + k4) N, which is a law of atoms; residual and stalls change the second
moment of each part of a service, and nothing else that the analysis reads (`Residual`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import gamma, gammainc, gammaincinv, ndtr, ndtri

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.latency.law import LatencyModel

_FINE = 20_000  # points at which the shares of a continuous law are tabled
_KEPT = 1000  # atoms that are never merged
_NARROW = 1e-8  # squared coefficient of variation inside a cell
_BEYOND = 1e-15  # probability left out at either end of the table


@dataclass(frozen=True)
class Residual:
    """What makes a service of known length h random: E[S | h] = h and E[S^2 | h] = factor (h^2 +
    stalls h), and the same of every part of it (`queueing.latency.stalls`). Ages and predictions
    are then those of the known length.
    """

    factor: float = 1.0  # 1 + cv^2
    stalls: float = 0.0  # q s, seconds

    def second_moment(self, first: Vector, second: Vector) -> Vector:
        """E[S^2] from E[h] and E[h^2]."""
        return self.factor * (second + self.stalls * first)


NO_RESIDUAL = Residual()


@dataclass(frozen=True, eq=False)
class Atoms:
    """Sizes [n] in seconds, increasing, with probabilities [n]; `exact`: not cells of a continuous
    law.
    """

    sizes: Vector
    weights: Vector
    exact: bool = True
    residual: Residual = NO_RESIDUAL

    def __post_init__(self) -> None:
        if self.sizes.shape != self.weights.shape or not self.sizes.size:
            raise SpecError(
                f"got {self.sizes.shape} sizes and {self.weights.shape} weights; expected as many"
            )
        if np.any(np.diff(self.sizes) <= 0) or self.sizes[0] < 0 or self.sizes[-1] <= 0:
            raise SpecError("got sizes that do not increase; expected increasing seconds >= 0")
        if np.any(self.weights < 0) or abs(float(self.weights.sum()) - 1) > 1e-9:
            raise SpecError(f"got weights with sum {self.weights.sum():.12g}; expected 1")

    @property
    def mean(self) -> float:
        """E[X], seconds."""
        return float(self.weights @ self.sizes)

    @property
    def second_moment(self) -> float:
        """E[X^2], residual included."""
        moments = self.weights @ self.sizes, self.weights @ self.sizes**2
        return float(self.residual.second_moment(*moments))

    def cells(self, grid: SizeGrid) -> Atoms:
        """These, or of more than `_KEPT`, and twice `grid.count`, neighbours merged to their
        mean.
        """
        if len(self.sizes) <= max(2 * grid.count, _KEPT):
            return self
        moments = np.stack([self.weights * self.sizes**k for k in range(3)])
        share = shares(np.cumsum(moments, axis=1) - moments / 2, grid.load)
        cell = np.minimum((share * 2 * grid.count).astype(np.int64), 2 * grid.count - 1)
        cell = 100 * cell + np.searchsorted(grid.boundaries, self.sizes)
        _, cell = np.unique(cell, return_inverse=True)
        weights = np.bincount(cell, self.weights)
        work = np.bincount(cell, self.weights * self.sizes)
        return Atoms(work / weights, np.asarray(weights, float), residual=self.residual)

    def sample(self, rng: np.random.Generator, count: int) -> Vector:
        """Independent sizes without residual, seconds."""
        cumulative = np.cumsum(self.weights)
        found = np.searchsorted(cumulative, rng.random(count) * cumulative[-1], side="right")
        return np.asarray(self.sizes[found])


@dataclass(frozen=True)
class SizeGrid:
    """How finely a law is cut: about `count` cells, none with one of `boundaries` (seconds) in its
    inside, for this load.
    """

    count: int
    boundaries: tuple[float, ...] = ()
    load: float = 0.0


def shares(moments: Vector, load: float) -> Vector:
    """What lies below each place, as shares of the whole [places], from E[X^k; below], k = 0, 1, 2
    [3, places], whose last column is (nearly) the whole.
    """
    parts = moments / moments[:, -1:]
    if load > 0:
        parts = np.append(parts, [np.log1p(-load * parts[1]) / np.log1p(-load)], axis=0)
    return np.asarray(parts.mean(axis=0))


class SizeLaw(Protocol):
    """A law of service times, seconds."""

    @property
    def mean(self) -> float:
        """E[X]."""

    @property
    def second_moment(self) -> float:
        """E[X^2]."""

    def cells(self, grid: SizeGrid) -> Atoms:
        """About twice `grid.count` atoms."""

    def sample(self, rng: np.random.Generator, count: int) -> Vector:
        """Independent sizes."""


@dataclass(frozen=True)
class WeibullSizes:
    """P(X > x) = exp(-(x / scale)^shape); shape 1 is exponential. The slides' Weibull law of mean 1
    is P(X > x) = exp(-sqrt(2 x)): shape 1/2, scale 1/2.
    """

    shape: float
    scale: float

    @property
    def mean(self) -> float:
        """E[X]."""
        return self._moment(1)

    @property
    def second_moment(self) -> float:
        """E[X^2]."""
        return self._moment(2)

    def _moment(self, k: int) -> float:
        return float(self.scale**k * gamma(1 + k / self.shape))

    def partial(self, k: int, x: Vector) -> Vector:
        """E[X^k; X <= x]."""
        return np.asarray(
            self._moment(k) * gammainc(1 + k / self.shape, (x / self.scale) ** self.shape)
        )

    def cells(self, grid: SizeGrid) -> Atoms:
        """See `SizeLaw`."""
        last = (gammaincinv(1 + 2 / self.shape, 1 - 1e-13)) ** (1 / self.shape) * self.scale
        first = self.scale * _BEYOND ** (1 / self.shape)
        return _cut(self, (max(first, 1e-12 * last), float(last)), grid)

    def sample(self, rng: np.random.Generator, count: int) -> Vector:
        """See `SizeLaw`."""
        return np.asarray(self.scale * rng.exponential(size=count) ** (1 / self.shape))


@dataclass(frozen=True)
class LognormalSizes:
    """ln X is normal with mean mu and standard deviation sigma."""

    mu: float
    sigma: float

    @property
    def mean(self) -> float:
        """E[X]."""
        return math.exp(self.mu + self.sigma**2 / 2)

    @property
    def second_moment(self) -> float:
        """E[X^2]."""
        return math.exp(2 * self.mu + 2 * self.sigma**2)

    def partial(self, k: int, x: Vector) -> Vector:
        """E[X^k; X <= x]."""
        total = math.exp(k * self.mu + (k * self.sigma) ** 2 / 2)
        return np.asarray(total * ndtr((np.log(x) - self.mu) / self.sigma - k * self.sigma))

    def cells(self, grid: SizeGrid) -> Atoms:
        """See `SizeLaw`."""
        reach = float(ndtri(1 - 1e-13))
        ends = self.mu - self.sigma * reach, self.mu + self.sigma * (2 * self.sigma + reach)
        return _cut(self, (math.exp(ends[0]), math.exp(ends[1])), grid)

    def sample(self, rng: np.random.Generator, count: int) -> Vector:
        """See `SizeLaw`."""
        return np.asarray(rng.lognormal(self.mu, self.sigma, count))


def exponential_sizes(mean: float = 1.0) -> WeibullSizes:
    """Exponential service times."""
    return WeibullSizes(1.0, mean)


def token_sizes(tokens: TokenDistribution, law: LatencyModel) -> Atoms:
    """Service times of batches of one. Raises SpecError: a tail, which atoms do not carry."""
    if tokens.tail is not None:
        raise SpecError("got lengths with a tail; expected lengths with a limit")
    counts = np.flatnonzero(tokens.pmf)
    residual = Residual(1 + law.cv**2, law.stall_share * law.stall)
    sizes = law.setup(1) + law.step(1) * counts.astype(float)
    return Atoms(sizes, tokens.pmf[counts], residual=residual)


def _cut(law: WeibullSizes | LognormalSizes, ends: tuple[float, float], grid: SizeGrid) -> Atoms:
    x = np.geomspace(*ends, _FINE)
    share = shares(np.stack([law.partial(k, x) for k in range(3)]), grid.load)
    edges = np.interp(np.arange(1, grid.count) / grid.count, share, x)
    for boundary in grid.boundaries:
        if 0.9 * edges[0] < boundary < 1.1 * edges[-1]:
            edges[np.argmin(np.abs(edges - boundary))] = boundary  # a new edge may leave a sliver
        elif ends[0] < boundary < ends[1]:
            edges = np.unique(np.append(edges, boundary))
    beyond = np.array([1e3 * ends[1]])
    moments = [
        np.diff(np.concatenate([[0.0], law.partial(k, edges), law.partial(k, beyond)]))
        for k in range(4)
    ]
    return Atoms(*_gauss(moments), exact=False)


def _gauss(moments: list[Vector]) -> tuple[Vector, Vector]:
    """Two sizes and their probabilities for each cell, from its moments 0..3."""
    mass = moments[0]
    mean, second, third = (moment / mass for moment in moments[1:])
    variance = second - mean**2
    variance = np.maximum(variance, _NARROW * mean**2 / 100)
    skewness = (third - mean**3 - 3 * mean * variance) / variance**1.5
    skewness[variance < _NARROW * mean**2] = 0.0  # nothing but rounding
    root = np.sqrt(1 + skewness**2 / 4)
    offsets = np.sqrt(variance) * np.stack([skewness / 2 - root, skewness / 2 + root])
    parts = mass / 2 * np.stack([1 + skewness / 2 / root, 1 - skewness / 2 / root])
    return (mean + offsets).T.ravel(), (parts / mass.sum()).T.ravel()
