"""How long the sequences of a call are: the one description that formulas, simulators and the live
model share.

Each of the X sequences of a call has a length N of one law. With probability r all of a call are
one draw, else they are independent draws: r is the intraclass correlation, not of the lengths
alone,

    E f(N_1) f(N_2) = r E f(N)^2 + (1 - r) (E f(N))^2          for every f

Calls are independent of each other, lengths of the number of sequences. What a batch of s
sequences, taken from a line of calls, holds is D different draws, and with F the distribution
function of N:

    longest       max of D draws, P(longest <= n) = E F(n)^D
    total         Var = (s + r E[pairs]) Var N          ordered pairs of one call
    covariance    Cov(total, longest) = s E Cov(N_1, max of D draws)      as s is fixed
    whole calls   of n sequences each, s = c n:  E x^D = (r x + (1 - r) x^n)^c

Where batches split calls, the line is that of a queue that never empties: of the call in which a
batch begins k sequences are left with a probability in proportion to P(X >= k), k a multiple of the
greatest common divisor of s and of the sizes. Beyond `_MOST` sequences D is taken at its mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kendall.queueing.distributions.lattice import Complex, Vector
from kendall.queueing.distributions.token_distribution import TokenDistribution

_MOST = 512  # sequences of a batch that splits calls, up to which the law of D is computed
_NEGLIGIBLE = 1e-15  # probability of a number of draws

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CallLengths:
    """`sequences` of a call, None: one each; `correlation`: r."""

    lengths: TokenDistribution
    sequences: TokenDistribution | None = None
    correlation: float = 0.0

    @property
    def independent(self) -> bool:
        """Whether all lengths are."""
        return self.sequences is None or self.correlation == 0

    @property
    def size(self) -> int | None:
        """Of every call, where all have as many sequences."""
        if self.sequences is None:
            return 1
        return self.sequences.longest if self.sequences.pmf[-1] == 1 else None

    def longest(self, count: int) -> TokenDistribution:
        """The law of the longest of a batch of `count` sequences."""
        if self.independent:
            return self.lengths.maximum(count)
        if (calls := self._whole(count)) is not None:
            return self._longest_of_a_call.maximum(calls)
        parts = self._draws(count).items()
        kept = {draws: chance for draws, chance in parts if chance > _NEGLIGIBLE}
        total = sum(kept.values())
        return TokenDistribution.mixture(
            [chance / total for chance in kept.values()],
            [self.lengths.maximum(draws) for draws in kept],
        )

    def total_variance(self, count: int) -> float:
        """Of the tokens of a batch."""
        return (count + self.equal_pairs(count)) * self.lengths.variance

    def total_with_longest(self, count: int) -> float:
        """Covariance of the two."""
        lengths, longest = self.lengths, self.longest(count)
        partial = (
            count
            * np.cumsum((lengths.counts - lengths.mean) * lengths.pmf)
            * self._beside_one(count)
        )
        return float(np.diff(partial, prepend=0.0) @ (longest.counts - longest.mean))

    def equal_pairs(self, count: int) -> float:
        """Mean number of ordered pairs in a batch that are of one draw."""
        if self.independent:
            return 0.0
        assert self.sequences is not None
        if (calls := self._whole(count)) is not None:
            return self.correlation * (count * (count // calls - 1))
        if count > _MOST:
            each = self.sequences.moment(2) / self.sequences.mean - 1
            return self.correlation * count * each
        return self.correlation * sum(
            chance * (left * (left - 1) + self._pairs_from_a_call(count - left))
            for left, chance in self._left_of_the_first(count)
        )

    def mixed(self, equal: Complex, independent: Complex) -> Complex:
        """What is expected of a call, from what it is where all are equal, and where none are."""
        return self.correlation * equal + (1 - self.correlation) * independent

    def _whole(self, count: int) -> int | None:
        """How many calls a batch of so many sequences holds, where it splits none."""
        size = self.size
        return count // size if size is not None and count % size == 0 else None

    @cached_property
    def _longest_of_a_call(self) -> TokenDistribution:
        independent = self.lengths.maximum(self.size or 1)
        if self.correlation == 1:
            return self.lengths
        return TokenDistribution.mixture(
            [self.correlation, 1 - self.correlation], [self.lengths, independent]
        )

    def _beside_one(self, count: int) -> Vector:
        """The probability, for each length x, that no other member of a batch of `count` is longer:
        E[F(x)^(D - 1)], D the number of independent draws in it.
        """
        below = self.lengths.cdf
        if self.independent:
            return np.asarray(below ** (count - 1))
        if (calls := self._whole(count)) is not None:
            equal, size = self.correlation, count // calls
            own = equal + (1 - equal) * below ** (size - 1)
            return np.asarray(own * (own * below) ** (calls - 1))
        parts = self._draws(count).items()
        return np.asarray(sum(chance * below ** (draws - 1) for draws, chance in parts))

    def _draws(self, count: int) -> dict[int, float]:
        """The law of D in a batch that may split calls."""
        assert self.sequences is not None
        equal = self.correlation
        if count > _MOST:
            each = equal / self.sequences.mean + 1 - equal
            return {max(1, round(count * each)): 1.0}
        law = np.zeros(count + 1)
        for left, chance in self._left_of_the_first(count):
            rest = self._draws_from_a_call(count - left)
            law[1 : len(rest) + 1] += chance * equal * rest
            law[left : left + len(rest)] += chance * (1 - equal) * rest
        return {int(draws): float(law[draws]) for draws in np.flatnonzero(law)}

    def _left_of_the_first(self, count: int) -> list[tuple[int, float]]:
        """Members of the batch that are of the call in which it begins, with their chances."""
        assert self.sequences is not None
        sizes = np.flatnonzero(self.sequences.pmf)
        apart = math.gcd(count, *sizes.tolist())
        left = np.arange(apart, self.sequences.longest + 1, apart)
        chances = self.sequences.survival[left - 1]
        chances = chances / chances.sum()
        found: dict[int, float] = {}
        for k, chance in zip(np.minimum(left, count).tolist(), chances.tolist(), strict=True):
            found[k] = found.get(k, 0.0) + chance
        return list(found.items())

    def _parts(self, count: int) -> list[tuple[int, float]]:
        """Of the next call at most `count` sequences: how many, with their chances."""
        assert self.sequences is not None
        pmf, last = self.sequences.pmf, self.sequences.survival
        parts = [(int(size), float(pmf[size])) for size in np.flatnonzero(pmf[:count])]
        rest = float(last[count - 1]) if count - 1 < len(last) else 0.0
        return [*parts, (count, rest)] if rest > 0 else parts

    @cached_property
    def _known_draws(self) -> list[Vector]:
        return [np.ones(1)]

    def _draws_from_a_call(self, count: int) -> Vector:
        """The law of D in so many sequences of which the first begins a call."""
        known, equal = self._known_draws, self.correlation
        for j in range(len(known), count + 1):
            law = np.zeros(j + 1)
            for size, chance in self._parts(j):
                rest = known[j - size]
                law[1 : len(rest) + 1] += chance * equal * rest
                law[size : size + len(rest)] += chance * (1 - equal) * rest
            known.append(law)
        return known[count]

    @cached_property
    def _known_pairs(self) -> list[float]:
        return [0.0]

    def _pairs_from_a_call(self, count: int) -> float:
        known = self._known_pairs
        for j in range(len(known), count + 1):
            known.append(
                sum(
                    chance * (size * (size - 1) + known[j - size])
                    for size, chance in self._parts(j)
                )
            )
        return known[count]


def equal_calls(
    sizes: Ints | None, correlation: float, stream: np.random.SeedSequence
) -> npt.NDArray[np.bool_] | None:
    """Which calls have sequences of equal length; None: no call needs to. From the child of the
    seed behind all others.
    """
    if sizes is None or correlation == 0:
        return None
    rng = np.random.default_rng(stream.spawn(1)[0])
    return np.asarray(rng.random(len(sizes)) < correlation)


def within_calls(
    lengths: npt.NDArray[np.signedinteger], sizes: Ints | None, equal: npt.NDArray[np.bool_] | None
) -> npt.NDArray[np.signedinteger]:
    """Independent lengths, in order of arrival, as calls of these sizes have them: where they are
    equal, the first of the call is that of all.
    """
    if sizes is None or equal is None:
        return lengths
    firsts = np.cumsum(sizes) - sizes
    return np.where(np.repeat(equal, sizes), np.repeat(lengths[firsts], sizes), lengths)
