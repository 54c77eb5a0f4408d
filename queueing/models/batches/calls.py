"""Calls: requests that arrive together, as the sequences of one HTTP call with `n` > 1 or several
prompts do. M^X: Poisson calls of X each.

The number that arrives in a service time t is compound Poisson; where the service time has a gamma
residual of squared variation v, compound negative binomial. Panjer's (1981) recursion has both,
with lam calls per second and P(X = k) = g_k:

    P(A = j | t) = sum_k (a + b k / j) g_k P(A = j - k | t)
    a = lam t v / (1 + lam t v),   b = lam t (1 - v) / (1 + lam t v)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kendall.queueing.distributions.lattice import Vector, blocks
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.errors import OutOfReachError
from kendall.queueing.latency.service_table import ServiceTable

_BLOCK = 256  # numbers of arrivals at a time
_AT_ONCE = 2_000_000  # numbers of a block: 16 MB
_LARGE = 1e100
_MOST_NUMBERS = 2**25  # of the recursion's last columns, 270 MB
_MOST_TERMS = 2_000_000_000  # of the recursion: some seconds


@dataclass(frozen=True, eq=False)
class Calls:
    """`rate` calls per second, `sizes[n]` = P(X = n), n = 0 .. K."""

    rate: float
    sizes: Vector

    @classmethod
    def of(cls, rate: float, sequences: TokenDistribution) -> Calls:
        """Of a law of sequences per call."""
        return cls(rate, np.asarray(sequences.pmf))

    @property
    def largest(self) -> int:
        """K."""
        return len(self.sizes) - 1

    @property
    def usual(self) -> int:
        """A size that few calls exceed: four standard deviations above the mean, at most K."""
        mean = self.moment(1)
        return min(
            self.largest, math.ceil(mean + 4 * math.sqrt(max(0.0, self.moment(2) - mean**2)))
        )

    def moment(self, k: int) -> float:
        """E[X^k]."""
        return float(self.sizes @ np.arange(float(len(self.sizes))) ** k)

    def generating(self, z: float) -> float:
        """E z^X."""
        return float(np.polynomial.polynomial.polyval(z, self.sizes))

    def arrivals(self, table: ServiceTable, count: int, first: int = 0) -> Vector:
        """`rows[b - 1, j]` = P(A = j | b), j = 0 .. count - 1, for b = first + 1 .. B. Raises
        OutOfReachError.
        """
        instants = len(table.instants)
        if self.largest * instants > _MOST_NUMBERS or self.largest * instants * count > _MOST_TERMS:
            what = (
                f"the arrivals during a batch ({count} of them, in calls of up to "
                f"{self.largest} sequences)"
            )
            raise OutOfReachError(what, "ask for smaller calls, or use the method simulation")
        laws = table.laws[first:]
        rows = np.empty((len(laws), count))
        recursion = _Panjer(self, self.rate * table.instants, table.law.cv**2)
        for part in blocks(count, max(1, min(_BLOCK, _AT_ONCE // len(table.instants)))):
            rows[:, part] = laws @ recursion.following(part.stop - part.start).T
        return rows


class _Panjer:
    """P(A = j | t) for one j after the other, every t at once; columns that grow large are
    scaled down, so that none underflows.
    """

    def __init__(self, calls: Calls, means: Vector, variance: float) -> None:
        self._a, self._b = (
            means * variance / (1 + means * variance),
            means * (1 - variance) / (1 + means * variance),
        )
        # logarithm of P(A = 0 | t)
        self._scale = -means if variance == 0 else -np.log1p(means * variance) / variance
        self._sizes, self._weighted = (
            calls.sizes[:0:-1],
            (calls.sizes * np.arange(len(calls.sizes)))[:0:-1],
        )  # the last first
        self._last = np.zeros((calls.largest, len(means)))
        self._j = 0

    def following(self, count: int) -> Vector:
        """The next `count` rows."""
        known = len(self._last)
        held = np.vstack([self._last, np.empty((count, self._last.shape[1]))])
        rows = np.empty((count, held.shape[1]))
        for row in range(count):
            before = held[row : row + known]
            new = held[row + known]
            if self._j:
                new[:] = self._a * (self._sizes @ before) + self._b * (
                    (self._weighted / self._j) @ before
                )
            else:
                new[:] = 1.0
            rows[row] = new * np.exp(self._scale)
            self._j += 1
            if self._j % 8 == 0 and (large := new > _LARGE).any():
                held[row + 1 : row + known + 1, large] /= _LARGE
                self._scale[large] += math.log(_LARGE)
        self._last = held[count:]
        return rows


def draw_calls(
    sequences: TokenDistribution | None, num_requests: int, stream: np.random.SeedSequence
) -> npt.NDArray[np.int64] | None:
    """How many sequences each call has, `num_requests` in all; None: one each. From the child of
    the seed behind all others.
    """
    if sequences is None:
        return None
    sizes = sequences.sample(np.random.default_rng(stream.spawn(1)[0]), num_requests)
    ends = np.cumsum(sizes)
    sizes = sizes[: int(np.searchsorted(ends, num_requests)) + 1]
    sizes[-1] -= int(sizes.sum()) - num_requests
    return sizes
