"""The part of a law of lengths that lies beyond a table: P(N > x) at points a constant factor
apart, between two of them a power of x.

A Pareto law is one power everywhere, so that all of this is exact for it; other laws are within
some per cent of what lies beyond the
table, which is at most `MOST_BEYOND` of them. Beyond the last point the power `index` goes on:

    E[N^k; N > e] = sum_i s_i P(N > e_i) e_i^k (r^(k - s_i) - 1) / (k - s_i) + P(N > e_last)
    e_last^k index / (index - k)

with s_i the power between e_i and r e_i. Infinite for k >= index: no mean at index <= 1, no second
moment at index <= 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.floating[Any]]
MOST_BEYOND = 0.01  # probability
LARGEST_COUNT = 2.0**53  # that a sample holds
_OCTAVES, _PARTS = 64, 8  # points: that many times twice as far, each in so many steps
_NOTHING = 1e-290


@dataclass(frozen=True, eq=False)
class Tail:
    """`above[i]` = P(N > edges[i]) > 0, falling; `index` where the moments end, infinite where
    they do not.
    """

    edges: Vector
    above: Vector
    index: float

    @classmethod
    def of(cls, above: Callable[[Vector], Vector], start: float, index: float = math.inf) -> Tail:
        """Of a law from `start` on."""
        edges = start * 2.0 ** (np.arange(_OCTAVES * _PARTS + 1) / _PARTS)
        values = above(edges)
        kept = max(2, int(np.count_nonzero(values > _NOTHING)))
        return cls(edges[:kept], np.maximum(values[:kept], _NOTHING), index)

    @classmethod
    def mixture(cls, weights: Sequence[float], parts: Sequence[Tail]) -> Tail:
        """Of tails that begin at the same point."""
        longest = max(parts, key=lambda part: len(part.edges))
        above = np.zeros(len(longest.edges))
        for weight, part in zip(weights, parts, strict=True):
            above[: len(part.above)] += weight * part.above
        return cls(longest.edges, above, min(part.index for part in parts))

    def largest_of(self, count: int) -> Tail:
        """Of the largest of `count` independent ones."""
        return Tail(self.edges, -np.expm1(count * np.log1p(-self.above)), self.index)

    def moment(self, k: int) -> float:
        """E[N^k; N > the first edge]."""
        if k >= self.index:
            return math.inf
        last = (
            self.above[-1]
            * self.edges[-1] ** k
            * (1.0 if self.index == math.inf else self.index / (self.index - k))
        )
        return float(self._shares(k).sum() + last)

    def atoms(self) -> tuple[Vector, Vector]:
        """Values and probabilities that have the mass, mean and variance of each part; the last:
        what is left at the last edge.
        """
        mass = self._shares(0)
        held = mass > 0
        mean, second = (self._shares(k)[held] / mass[held] for k in (1, 2))
        deviation = np.sqrt(np.maximum(second - mean**2, 0.0))
        values = np.concatenate([mean - deviation, mean + deviation, self.edges[-1:]])
        return values, np.concatenate([mass[held] / 2, mass[held] / 2, self.above[-1:]])

    def left(self) -> tuple[float, float]:
        """What the last of the atoms lacks in E[N] and E[N^2]."""
        if self.index == math.inf:
            return 0.0, 0.0
        edge, above = float(self.edges[-1]), float(self.above[-1])
        return above * edge / (self.index - 1), 2 * above * edge**2 / (
            self.index - 2
        ) if self.index > 2 else math.inf

    def quantile(self, above: Vector) -> Vector:
        """x with P(N > x) = `above`, which is at most that of the first edge."""
        logs = np.log(np.clip(above, _NOTHING, self.above[0]))
        found = np.exp(np.interp(logs, np.log(self.above[::-1]), np.log(self.edges[::-1])))
        if self.index < math.inf:
            found = np.where(
                logs < math.log(self.above[-1]),
                self.edges[-1] * (self.above[-1] * np.exp(-logs)) ** (1 / self.index),
                found,
            )
        return np.asarray(found)

    def counts(self, above: Vector) -> npt.NDArray[np.int64]:
        """The rounded lengths that are exceeded with these probabilities."""
        return np.floor(np.minimum(self.quantile(above), LARGEST_COUNT) + 0.5).astype(np.int64)

    def _shares(self, k: int) -> Vector:
        """E[N^k] of what lies between each two edges."""
        edge, above = self.edges[:-1], self.above[:-1]
        ratio = np.log(self.edges[1:] / edge)
        power = np.log(above / self.above[1:]) / ratio
        rest = (k - power) * ratio
        near = np.abs(rest) < 1e-9
        return np.asarray(
            power
            * above
            * edge**k
            * ratio
            * np.where(near, 1.0, np.expm1(rest) / np.where(near, 1.0, rest))
        )
