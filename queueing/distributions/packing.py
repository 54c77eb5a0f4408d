"""How many requests a KV memory holds that reserves for each, from its dispatch on, its prompt and
the token limit.

    R = prompt + limit, independent;   N = max {k : R_1 + ... + R_k <= M}, at most the slots
    P(N >= k) = P(R_1 + ... + R_k <= M)

While requests wait for ever, first come, first served, those in service and the first that does not
fit are a stretch of the arrivals. With exponential work and departures at the rate phi(n) of n in
service this queue has a product form: the stationary probability of the stretch is proportional to
P(R_1, R_2, ...) / phi(N). So departures see N as drawn above, and

    throughput = 1 / E[1 / phi(N)]

With M / E[R] in place of N it would be too high: memory too small for the first that waits stays
free. Proof: in the balance of a state s, the states from which the departure of a request of size r
leads to s are s with r put at the places 1 ... k, k = the number that fits in any of these; each
has the rate phi(k), of which a share 1 / k falls on r. Rumyantsev (2020, CEUR 2792) has it for
servers in place of tokens.

Method: P(R_1 + ... + R_k <= M) by convolutions that are cut at M, in tokens below M = 2^13, else on
a lattice of 2^13 points with two-point weights that keep the mean; from k = 2^i by squaring.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kendall.queueing.distributions.lattice import spread
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector

POINTS = 2**13  # of the lattice
DRAWN = 2**15  # prompts of a saturated queue of batches
NEGLIGIBLE = 1e-10  # probability


@dataclass(frozen=True)
class Reservations:
    """`memory` tokens, of which each request holds its prompt and `token_limit`."""

    memory: int
    token_limit: int
    prompt_tokens: TokenDistribution | None = None

    @property
    def largest(self) -> int:
        """Tokens that a request holds at most."""
        return self.token_limit + (0 if self.prompt_tokens is None else self.prompt_tokens.longest)

    @property
    def smallest(self) -> int:
        """Tokens that a request holds at least."""
        return self.token_limit + (0 if self.prompt_tokens is None else self.prompt_tokens.shortest)

    @property
    def most(self) -> int:
        """Requests that fit at most."""
        return self.memory // self.smallest

    def chances(self, slots: int | None) -> dict[int, float]:
        """P(N = n), where there are so many slots; what is not negligible.

        >>> Reservations(memory=1000, token_limit=300).chances(8)
        {3: 1.0}
        """
        most = self.most if slots is None else min(slots, self.most)
        if most * self.largest <= self.memory:
            return {most: 1.0}
        surely, sums = self._surely(most)
        at_least = [1.0]
        while surely + len(at_least) <= most and at_least[-1] > NEGLIGIBLE:
            sums = self._added(sums, self._one)
            at_least.append(self._within(sums))
        found = -np.diff([*at_least, 0.0])
        return {surely + n: float(chance) for n, chance in enumerate(found) if chance > NEGLIGIBLE}

    def _surely(self, most: int) -> tuple[int, Vector]:
        """How many fit, but for a negligible chance, and the law of what they hold."""
        powers = [self._one]  # of 1, 2, 4, ... requests
        while 2 ** len(powers) <= most:
            powers.append(self._added(powers[-1], powers[-1]))
        count, sums = 0, np.eye(1, len(self._one))[0]
        for i, power in reversed(list(enumerate(powers))):
            more = self._added(sums, power)
            if count + 2**i <= most and self._within(more) >= 1 - NEGLIGIBLE:
                count, sums = count + 2**i, more
        return count, sums

    @property
    def _exact(self) -> bool:
        return self.memory < POINTS

    @cached_property
    def _one(self) -> Vector:
        """What one request holds, on the lattice from 0 to the memory."""
        prompts = np.array([1.0]) if self.prompt_tokens is None else self.prompt_tokens.pmf
        tokens = self.token_limit + np.arange(len(prompts), dtype=float)
        points = (self.memory if self._exact else POINTS) + 1
        return spread(tokens, prompts, self.memory / (points - 1), points)

    def _added(self, first: Vector, second: Vector) -> Vector:
        """The law of the sum of two, cut at the memory."""
        size = 2 * len(first)
        spectrum = np.fft.rfft(first, size) * np.fft.rfft(second, size)
        return np.asarray(np.maximum(np.fft.irfft(spectrum, size)[: len(first)], 0.0))

    def _within(self, sums: Vector) -> float:
        """P(at most the memory); half of what a coarse lattice has at its last point."""
        return float(sums.sum() - (0.0 if self._exact else sums[-1] / 2))


def batch_sizes(prompts: TokenDistribution, tokens: int, most: int | None) -> dict[int, float]:
    """How many of a queue that never ends a batch takes, by chance: until the prompts of the next
    one are too many together, one at least; of prompts at even levels, in an order drawn once.
    """
    drawn = np.searchsorted(prompts.cdf, (np.arange(DRAWN) + 0.5) / DRAWN, "right")
    drawn = np.random.default_rng(0).permutation(drawn)
    total, first, sizes = np.concatenate([[0], np.cumsum(drawn)]), 0, list[int]()
    ends = np.searchsorted(total, total + tokens, "right") - 1
    while first < DRAWN:
        fits = min(max(1, int(ends[first]) - first), DRAWN - first)
        sizes.append(fits if most is None else min(fits, most))
        first += sizes[-1]
    size, count = np.unique(sizes, return_counts=True)
    return dict(zip(size.tolist(), (count / len(sizes)).tolist(), strict=True))
