"""Laws of a predicted size Y given the actual size X, in seconds.

    exact                Y = X
    exponential          Y exponential with mean X (the slides' examples)
    lognormal, sigma     Y = X e^{sigma Z}, Z standard normal
    uniform, below and   Y uniform on [below X, above X]: the bounded noise of Scully, Grosof and
      above              Mitzenmacher (beta, alpha), whose Y lies in [beta X, alpha X]
    one bit, threshold   whether the prediction of another predictor is above T; or whether X is,
      T                  wrong with probability p where X <= T (a false "long"), q where X > T
    constant             the same for every job: no prediction
    pairs                as seen: actual sizes with what was predicted for them

A joint law is a matrix: predictions [m] increasing, probabilities [m, n] of each prediction with
each size. Continuous predictions are cut into m cells that hold equal shares of P(Y <= y), E[X; Y
<= y], E[X^2; Y <= y] and ln(1 - rho_y) (`sizes.shares`), a prediction at the middle of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import ndtr

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.predictors.sizes import Atoms, SizeGrid, shares

_FINE = 3000  # predictions at which the shares are tabled
_COARSE = 300  # sizes with which they are
_LEAST = 1e-12


@dataclass(frozen=True, eq=False)
class PredictedSizes:
    """Sizes [n] and predictions [m], increasing, seconds; `joint` [m, n] probabilities; `exact`:
    predictions are no cells.
    """

    sizes: Vector
    predictions: Vector
    joint: Vector
    exact: bool = True

    @property
    def weights(self) -> Vector:
        """Probability of each size [n]."""
        return np.asarray(self.joint.sum(axis=0))


class Predictor(Protocol):
    """A law of predictions."""

    @property
    def few_values(self) -> bool:
        """Whether jobs of different sizes have the same prediction, and not only in cells of sizes
        or predictions.
        """

    def at_most(self, y: Vector, x: Vector) -> Vector:
        """P(Y <= y | X = x), broadcast."""

    def joint(self, sizes: Atoms, grid: SizeGrid) -> PredictedSizes:
        """The joint law, with about `grid.count` predictions where they are continuous."""

    def sample(self, rng: np.random.Generator, sizes: Vector) -> Vector:
        """A prediction for each size, seconds; does not modify."""


@dataclass(frozen=True)
class ExactPrediction:
    """Y = X."""

    few_values = False

    def at_most(self, y: Vector, x: Vector) -> Vector:
        """See `Predictor`."""
        return np.where(x <= y, 1.0, 0.0)

    def joint(self, sizes: Atoms, grid: SizeGrid) -> PredictedSizes:  # noqa: ARG002 - the protocol's
        """See `Predictor`."""
        return PredictedSizes(sizes.sizes, sizes.sizes, np.diag(sizes.weights))

    def sample(self, rng: np.random.Generator, sizes: Vector) -> Vector:  # noqa: ARG002 - the protocol's
        """See `Predictor`."""
        return sizes


@dataclass(frozen=True)
class ExponentialPrediction:
    """Y exponential with mean X."""

    few_values = False

    def at_most(self, y: Vector, x: Vector) -> Vector:
        """See `Predictor`."""
        return np.asarray(-np.expm1(-y / x))

    def joint(self, sizes: Atoms, grid: SizeGrid) -> PredictedSizes:
        """See `Predictor`."""
        return _dense(self, sizes, grid)

    def sample(self, rng: np.random.Generator, sizes: Vector) -> Vector:
        """See `Predictor`."""
        return np.asarray(sizes * rng.exponential(size=sizes.size))


@dataclass(frozen=True)
class LognormalPrediction:
    """Y = X e^{sigma Z}, sigma > 0."""

    few_values = False
    sigma: float

    def __post_init__(self) -> None:
        if not 0 < self.sigma < math.inf:
            raise SpecError(f"got sigma={self.sigma}; expected a number > 0 (0: ExactPrediction)")

    def at_most(self, y: Vector, x: Vector) -> Vector:
        """See `Predictor`."""
        return np.asarray(ndtr(np.log(y / x) / self.sigma))

    def joint(self, sizes: Atoms, grid: SizeGrid) -> PredictedSizes:
        """See `Predictor`."""
        return _dense(self, sizes, grid)

    def sample(self, rng: np.random.Generator, sizes: Vector) -> Vector:
        """See `Predictor`."""
        with np.errstate(over="ignore"):  # infinite: longer than any; clients may say anything
            return np.asarray(sizes * np.exp(self.sigma * rng.standard_normal(sizes.size)))


@dataclass(frozen=True)
class UniformPrediction:
    """Y uniform on [below X, above X], 0 <= below < above."""

    few_values = False
    below: float
    above: float

    def __post_init__(self) -> None:
        if not 0 <= self.below < self.above < math.inf:
            raise SpecError(f"got {self.below} and {self.above}; expected 0 <= below < above")

    def at_most(self, y: Vector, x: Vector) -> Vector:
        """See `Predictor`."""
        return np.clip((y / x - self.below) / (self.above - self.below), 0.0, 1.0)

    def joint(self, sizes: Atoms, grid: SizeGrid) -> PredictedSizes:
        """See `Predictor`."""
        return _dense(self, sizes, grid)

    def sample(self, rng: np.random.Generator, sizes: Vector) -> Vector:
        """See `Predictor`."""
        return np.asarray(sizes * rng.uniform(self.below, self.above, sizes.size))


@dataclass(frozen=True)
class OneBit:
    """Whether the size is above `threshold`: what `source` predicts, or the truth, told wrong with
    probability `short_wrong` where X <= T and `long_wrong` where X > T. Y is one of `values`, T/2
    and 2 T where these are None.
    """

    few_values = True
    threshold: float
    source: Predictor | None = None
    short_wrong: float = 0.0
    long_wrong: float = 0.0
    values: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.threshold < math.inf or not (
            0 <= self.short_wrong <= 1 and 0 <= self.long_wrong <= 1
        ):
            raise SpecError(
                f"got threshold={self.threshold}, short_wrong={self.short_wrong}, "
                f"long_wrong={self.long_wrong}; expected seconds > 0 and two probabilities"
            )

    def at_most(self, y: Vector, x: Vector) -> Vector:
        """See `Predictor`."""
        low, high = self._values
        return np.where(y < low, 0.0, np.where(y < high, self.short(x), 1.0))

    @property
    def _values(self) -> tuple[float, float]:
        return self.values or (self.threshold / 2, 2 * self.threshold)

    def short(self, sizes: Vector) -> Vector:
        """P(predicted short | X)."""
        if self.source is not None:
            return self.source.at_most(np.array(self.threshold), sizes)
        return np.where(sizes <= self.threshold, 1 - self.short_wrong, self.long_wrong)

    def joint(self, sizes: Atoms, grid: SizeGrid) -> PredictedSizes:  # noqa: ARG002 - the protocol's
        """See `Predictor`; cells of sizes must not straddle the threshold (`boundary`)."""
        short = self.short(sizes.sizes)
        joint = np.stack([sizes.weights * short, sizes.weights * (1 - short)])
        return PredictedSizes(sizes.sizes, np.array(self._values), joint)

    def sample(self, rng: np.random.Generator, sizes: Vector) -> Vector:
        """See `Predictor`."""
        short = rng.random(sizes.size) < self.short(sizes)
        return np.where(short, *self._values)


@dataclass(frozen=True)
class ConstantPrediction:
    """Every job is predicted to take `value` seconds."""

    few_values = True
    value: float

    def at_most(self, y: Vector, x: Vector) -> Vector:
        """See `Predictor`."""
        return np.where(np.broadcast_arrays(y, x)[0] >= self.value, 1.0, 0.0)

    def joint(self, sizes: Atoms, grid: SizeGrid) -> PredictedSizes:  # noqa: ARG002 - the protocol's
        """See `Predictor`."""
        return PredictedSizes(sizes.sizes, np.array([self.value]), sizes.weights[None, :])

    def sample(self, rng: np.random.Generator, sizes: Vector) -> Vector:  # noqa: ARG002 - the protocol's
        """See `Predictor`."""
        return np.full(sizes.size, self.value)


@dataclass(frozen=True, eq=False)
class PairedPrediction:
    """Of pairs (actual, predicted), those whose actual size is the nearest to X: Y = X predicted /
    actual of one of them. `actual` [n] and `ratio` [n] = predicted / actual, sorted by both.
    """

    few_values = False
    actual: Vector
    ratio: Vector

    @classmethod
    def of(cls, actual: Vector, predicted: Vector) -> PairedPrediction:
        """Pairs in any order, all > 0."""
        ratio = predicted / actual
        by_both = np.lexsort((ratio, actual))
        return cls(actual[by_both], ratio[by_both])

    def _nearest(self, x: Vector) -> tuple[np.ndarray, np.ndarray]:
        """Where the pairs of each size begin and end."""
        at = np.clip(np.searchsorted(self.actual, x), 1, len(self.actual) - 1)
        below, above = self.actual[at - 1], self.actual[at]
        nearest = np.where(x - below <= above - x, below, above)
        ends = np.searchsorted(self.actual, nearest, side="right")
        return np.searchsorted(self.actual, nearest), ends

    def at_most(self, y: Vector, x: Vector) -> Vector:
        """See `Predictor`."""
        ratios, sizes = np.broadcast_arrays(y / x, x)
        found = np.empty(ratios.shape)
        for size in np.unique(sizes):
            begin, end = self._nearest(np.array(size))
            told = np.searchsorted(self.ratio[begin:end], ratios[sizes == size], side="right")
            found[sizes == size] = told / (end - begin)
        return found

    def joint(self, sizes: Atoms, grid: SizeGrid) -> PredictedSizes:
        """See `Predictor`."""
        return _dense(self, sizes, grid)

    def sample(self, rng: np.random.Generator, sizes: Vector) -> Vector:
        """See `Predictor`."""
        begin, end = self._nearest(sizes)
        chosen = begin + (rng.random(sizes.size) * (end - begin)).astype(np.int64)
        return np.asarray(sizes * self.ratio[chosen])


@dataclass(frozen=True)
class WholeTokens:
    """`source` predicts tokens, rounded to a whole number from 1 to `longest`: sizes and
    predictions are `setup` + `step` tokens seconds.
    """

    few_values = False
    source: Predictor
    setup: float
    step: float
    longest: float = math.inf
    most: int = 1000  # predictions that are kept apart

    def at_most(self, y: Vector, x: Vector) -> Vector:
        """See `Predictor`."""
        count = np.floor((y - self.setup) / self.step + 1e-9)
        tokens = (x - self.setup) / self.step
        below = self.source.at_most(np.maximum(count, 1) + 0.5, tokens)
        return np.where(count < 1, 0.0, np.where(count >= self.longest, 1.0, below))

    def joint(self, sizes: Atoms, grid: SizeGrid) -> PredictedSizes:
        """See `Predictor`."""
        tokens = (sizes.sizes - self.setup) / self.step
        last = max(round(float(tokens[-1])), 1)
        while (
            last < min(2**24, self.longest)
            and _left(self.source, last, tokens, sizes.weights) > _LEAST
        ):
            last *= 2
        last = int(min(last, self.longest))
        counts = np.arange(1, last + 1)
        if last > self.most:
            fine = np.geomspace(1, last, 8 * self.most)
            counts = np.unique(np.round(fine))
        edges = np.append((counts[1:] + counts[:-1]) / 2, np.inf)
        below = self.source.at_most(edges[:-1, None], tokens) * sizes.weights
        joint = np.diff(below, axis=0, prepend=0.0, append=sizes.weights[None, :])
        kept = joint.sum(axis=1) > 0
        predictions = self.setup + self.step * counts
        law = PredictedSizes(sizes.sizes, predictions[kept], joint[kept])
        return law if len(law.predictions) <= self.most else _merged(law, grid)

    def sample(self, rng: np.random.Generator, sizes: Vector) -> Vector:
        """See `Predictor`."""
        tokens = self.source.sample(rng, (sizes - self.setup) / self.step)
        return np.asarray(self.setup + self.step * np.clip(np.rint(tokens), 1.0, self.longest))


def _left(source: Predictor, last: int, tokens: Vector, weights: Vector) -> float:
    return float(weights @ (1 - source.at_most(np.array(last + 0.5), tokens)))


def _merged(law: PredictedSizes, grid: SizeGrid) -> PredictedSizes:
    """Neighbouring predictions merged into about `grid.count`, by equal shares."""
    moments = np.stack([law.joint @ law.sizes**k for k in range(3)])
    share = shares(np.cumsum(moments, axis=1) - moments / 2, grid.load)
    _, cell = np.unique((share * grid.count).astype(np.int64), return_index=True)
    joint = np.add.reduceat(law.joint, cell, axis=0)
    middle = (cell + np.append(cell[1:], len(share)) - 1) // 2
    return PredictedSizes(law.sizes, law.predictions[middle], joint, exact=False)


def _dense(predictor: Predictor, sizes: Atoms, grid: SizeGrid) -> PredictedSizes:
    """Cells of continuous predictions."""
    edges, middles = _cells(predictor, sizes, grid)
    below = predictor.at_most(edges[:, None], sizes.sizes) * sizes.weights
    joint = np.diff(below, axis=0, prepend=0.0, append=sizes.weights[None, :])
    return PredictedSizes(sizes.sizes, middles, joint, exact=False)


def _cells(predictor: Predictor, sizes: Atoms, grid: SizeGrid) -> tuple[Vector, Vector]:
    """Inner edges [count - 1] and middles [count] of the cells."""
    few = sizes.cells(SizeGrid(_COARSE))
    high = float(few.sizes[-1])
    weights = np.stack([few.weights * few.sizes**k for k in range(3)])
    totals = weights.sum(axis=1)
    while float(np.max(1 - predictor.at_most(np.array(high), few.sizes) @ weights.T / totals)) > (
        _LEAST
    ):
        high *= 2
    low = max(float(few.sizes[few.sizes > 0][0]) * 1e-6, 1e-12 * high)
    y = np.geomspace(low, high, _FINE)
    share = shares((predictor.at_most(y[:, None], few.sizes) @ weights.T).T, grid.load)
    places = np.interp(np.arange(1, 2 * grid.count) / (2 * grid.count), share, y)
    return places[1::2], places[::2]
