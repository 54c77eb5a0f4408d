"""S = X (c + d N + kp P): one request's service time, as values for X = 1 with their probabilities,
and its excess over a level.

    excess(x) = E (S - x)^+   and   E ((S - x)^+)^2 / 2

from which follow the residual life P(Se > x) = excess_1(x) / E[S] and every hat-weighted integral
of P(S > y) (no cancellation in the tail). X is gamma with mean 1 and SCV cv^2: with few values by
its incomplete gamma functions, exactly; with many, X is represented by its conditional means in
about 400 cells (error of the second moment below 1e-5). More than `_MOST` values, as lengths
combined with prompts are, are merged to classes of one width, each of which keeps its mean and its
variance; where the longest is more than `_FAR` mean ones, as under a heavy tail, to classes of one
ratio. Stalls are further values (queueing.latency.stalls), and so are the parts of a tail
(queueing.distributions.heavy_tail); what its last one lacks is added to the moments, of which the
second may be infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.special import gammainc, gammaincc, gammaincinv

from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.stalls import most_stalls, stalled_values
from kendall.queueing.result import Levels, Quantiles

_FEW = 8
_PARTS = 200
_MOST = 1024  # values
_MOST_ALONE = 8192  # where no residual multiplies their number
_FAR = 512  # mean values
_MOST_PAIRS = 4_000_000  # of a prompt and an output


@dataclass(frozen=True, eq=False)
class ServiceTime:
    """`values` (seconds, X = 1) with probabilities `weights`; `cv` of the residual."""

    values: Vector
    weights: Vector
    cv: float = 0.0
    beyond: tuple[float, float] = (
        0.0,
        0.0,
    )  # what the values lack in the first two moments where X = 1: a tail's end

    @classmethod
    def of(
        cls,
        law: LatencyModel,
        output_tokens: TokenDistribution,
        prompt_tokens: TokenDistribution | None = None,
    ) -> ServiceTime:
        """Of a single request under the latency law; random prompts are combined with every
        length.
        """
        pace = law.without_stalls()
        counts, pmf, (first, second) = _counts(output_tokens)
        seconds = pace.setup(1) + pace.step(1) * counts
        before = pace.setup(
            1, prompt_tokens.mean if prompt_tokens is not None and law.kp != 0 else 0.0
        )
        beyond = (
            pace.step(1) * first,
            pace.step(1) ** 2 * second + 2 * pace.step(1) * before * first,
        )
        if prompt_tokens is not None and law.kp != 0:
            lengths = np.flatnonzero(prompt_tokens.pmf)
            prompts, chances = pace.speed * pace.kp * lengths, prompt_tokens.pmf[lengths]
            if len(prompts) * len(seconds) > _MOST_PAIRS:
                (prompts, chances), (seconds, pmf) = (
                    _merged(prompts, chances),
                    _merged(seconds, pmf),
                )
            seconds = np.add.outer(prompts, seconds).ravel()
            pmf = np.multiply.outer(chances, pmf).ravel()
        found = cls.of_values(seconds, pmf, law)
        return replace(found, beyond=beyond) if output_tokens.tail is not None else found

    @classmethod
    def of_values(cls, seconds: Vector, pmf: Vector, law: LatencyModel) -> ServiceTime:
        """Of durations without residual and stalls, at the pace that the law has without stalls;
        both are the law's.
        """
        most = most_stalls(law.stall_rate / (1 - law.stall_share) * float(seconds.max(initial=0.0)))
        room = _MOST if law.cv else _MOST_ALONE
        values, weights = _merged(seconds, pmf, room)
        if most:
            values, weights = _merged(*stalled_values(values, weights, law, most), room)
        return cls(values, weights, law.cv)

    @property
    def mean(self) -> float:
        """E[S], seconds."""
        return float(self.weights @ self.values) + self.beyond[0]

    @property
    def second_moment(self) -> float:
        """E[S^2]."""
        return (1 + self.cv**2) * (float(self.weights @ self.values**2) + self.beyond[1])

    @property
    def scv(self) -> float:
        """Var S / E[S]^2."""
        mean = self.mean
        centred = (
            float(self.weights @ (self.values - mean) ** 2)
            + self.beyond[1]
            - 2 * mean * self.beyond[0]
        )
        return centred / mean**2 * (1 + self.cv**2) + self.cv**2

    def transform(self, theta: float) -> float:
        """E[e^{-theta S}], theta >= 0."""
        scaled = theta * self.values
        if self.cv == 0:
            return float(self.weights @ np.exp(-scaled))
        return float(self.weights @ (1 + self.cv**2 * scaled) ** (-(self.cv**-2)))

    @property
    def is_constant(self) -> bool:
        """Whether S takes one value only."""
        return self.cv == 0 and len(self.values) == 1

    @property
    def longest(self) -> float:
        """A service time that is practically never exceeded, seconds."""
        return float(self.spread[0].max())

    @cached_property
    def spread(self) -> tuple[Vector, Vector]:
        """Values and probabilities of S, X included."""
        if self.cv == 0:
            return self.values, self.weights
        shape = self.cv**-2
        levels = np.arange(_PARTS + 1) / _PARTS
        edges = np.union1d(
            gammaincinv(shape, levels), gammaincinv(shape + 2, levels[1:-1])
        )  # equal shares of 1 and of X^2
        mass = np.diff(gammainc(shape, edges))
        means = np.diff(gammainc(shape + 1, edges)) / mass
        return np.multiply.outer(means, self.values).ravel(), np.multiply.outer(
            mass, self.weights
        ).ravel()

    def up_to(self, longest: float) -> ServiceTime:
        """The law of min(S, longest)."""
        values, weights = self.spread
        return ServiceTime(np.minimum(values, longest), weights)

    def quantiles(self, levels: Levels) -> Quantiles:
        """With the mean."""
        values, mass = self._sorted
        least = [level * (1 - 1e-12) for level in levels.values()]  # the sum of the masses rounds
        places = np.minimum(np.searchsorted(np.cumsum(mass), least), len(values) - 1)
        return Quantiles.of(levels, self.mean, values[places].tolist())

    def excess(self, x: Vector) -> tuple[Vector, Vector]:
        """E (S - x)^+ and E ((S - x)^+)^2 / 2 at each level x >= 0."""
        if self.cv and len(self.values) <= _FEW:
            return self._gamma_excess(x)
        values = self._sorted[0]
        above = self._above[:, np.searchsorted(values, x, side="right")]
        return above[1] - x * above[0], (above[2] - 2 * x * above[1] + x**2 * above[0]) / 2

    def _gamma_excess(self, x: Vector) -> tuple[Vector, Vector]:
        shape = self.cv**-2
        first, second = np.zeros(len(x)), np.zeros(len(x))
        for value, weight in zip(self.values, self.weights, strict=True):
            z = np.maximum(x, 0.0) * shape / value
            tails = [gammaincc(shape + k, z) for k in range(3)]
            first += weight * (value * tails[1] - x * tails[0])
            second += (
                weight
                * (
                    value**2 * (1 + self.cv**2) * tails[2]
                    - 2 * x * value * tails[1]
                    + x**2 * tails[0]
                )
                / 2
            )
        return first, second

    @cached_property
    def _sorted(self) -> tuple[Vector, Vector]:
        values, weights = self.spread
        order = np.argsort(values)
        return values[order], weights[order]

    @cached_property
    def _above(self) -> Vector:
        """Sums of mass, mass * value and mass * value^2 from each value upwards."""
        values, mass = self._sorted
        return np.array(
            [np.append(np.cumsum((mass * values**k)[::-1])[::-1], 0.0) for k in range(3)]
        )


def _counts(lengths: TokenDistribution) -> tuple[Vector, Vector, tuple[float, float]]:
    """Numbers of tokens, their probabilities, and what these lack in the first two moments."""
    support = np.flatnonzero(lengths.pmf)
    counts, chances = support.astype(float), lengths.pmf[support]
    if lengths.tail is None:
        return counts, chances, (0.0, 0.0)
    far, rare = lengths.tail.atoms()
    return (
        np.concatenate([counts[:-1], far]),
        np.concatenate([chances[:-1], rare]),
        lengths.tail.left(),
    )


def _reaches_far(values: Vector, weights: Vector) -> bool:
    return float(values.min(initial=math.inf)) > 0 and float(
        values.max(initial=0.0)
    ) > _FAR * float(weights @ values)


def _merged(values: Vector, weights: Vector, most: int = _MOST) -> tuple[Vector, Vector]:
    """At most `most` values: two in each class of equal width or ratio, at its mean -+ its
    standard deviation.
    """
    if len(values) <= most:
        return values, weights
    low, high = float(values.min()), float(values.max())
    classes = most // 2
    if _reaches_far(values, weights):
        place = np.log(values / low) * (classes / math.log(high / low))
    else:
        place = (values - low) * (classes / (high - low))
    label = np.minimum(place.astype(np.int64), classes - 1)
    mass = np.bincount(label, weights, classes)
    kept = mass > 0
    mean = np.bincount(label, weights * values, classes)[kept] / mass[kept]
    variance = (
        np.bincount(label, weights * (values - mean[np.cumsum(kept)[label] - 1]) ** 2, classes)[
            kept
        ]
        / mass[kept]
    )
    deviation = np.sqrt(variance)
    return np.concatenate([mean - deviation, mean + deviation]), np.tile(mass[kept] / 2, 2)
