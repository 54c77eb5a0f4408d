"""Batches of like lengths without a bound: the server takes all that wait of one of K bins, that of
the oldest request (`order=binned`), as soon as it is empty and something waits.

Embedded chain at batch starts: bin i of the batch, its size m, and l others that wait; A arrivals
during H_i(m), each of bin j with probability p_j. None of the l is of bin i, and all are older than
the A:

    l = 0, A = 0    idle: next batch of bin j with probability p_j, m' = 1
    l = 0, A > 0    bin j with probability p_j, m' = 1 + Bin(A - 1, p_j)
    l > 0           bin j != i with probability w_ij = p_j g_j / sum_{k != i} p_k g_k,
                    m' = 1 + Bin(l - 1, s_ij (1 + c (1 - s_ij) / (1 + s_ij))) + Bin(A, p_j),
                    s_ij = p_j / (1 - p_i)
    l' = l + A - m'

    E[Wq] = (E[l H_i(m)] + lam E[H_i(m)^2] / 2) / E[m]      area under the number waiting

Approximation: the l are drawn afresh, whatever batches have left them. With g = 1 and c = 0 they
would have come since one instant. In truth those of rarer bins have waited longer, so that they are
the oldest more often than by their share, and the bin of the oldest has gathered requests for
longest; c = 1 is its share where all bins are served in turn. Two laws that hold exactly fix g and
c: each bin's batches take away what arrives, and those behind a request in its bin came while it
waited (Little's law within the bins),

    P(bin j) E[m | bin j] = p_j E[m]
    lam E[Wq] E[m] = sum_j P(bin j) E[m (m - 1) | bin j] / (2 p_j)

Exact for one bin (queueing.models.batches.batch_chain) and for two: all of the l are of the other
one. Conditions: Poisson arrivals, one server, a stable queue (queueing.models.batches.binned).
Measured against simulation: table in docs/why/theory.md.

Method: powers of the chain, g and c corrected on the way, cut at a size that grows until what is
lost is negligible. Its time grows with K (size)^4 + 4 K^2 (size)^3, so larger batches are left to
the simulation (OutOfReachError).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb

import numpy as np

from kendall.queueing.distributions.lattice import Vector
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.errors import NotConvergedError, OutOfReachError
from kendall.queueing.latency.batch_time import BatchTime

_FIRST, _GROWTH = 12, 1.5  # largest batch tried first; how the next one grows
_MOST_TERMS = 40_000_000  # of one step: some hundredths of a second
_MOST_STEPS = 400
_SETTLED = 1e-6  # change of the state in one step
_BALANCED = 5e-4  # of the flows of the bins, and of Little's law within them, relative
_LOST, _SURELY_LOST = 1e-6, 1e-5  # probability beyond the cut: negligible; needs a larger one
_FREE_STEPS = 3  # before g and c are corrected
_CORRECTION, _CROWDING = 0.7, 0.5  # how far g and c follow what the laws miss
_WIDEST, _MOST_CROWDED = 2.0, 3.0  # factor of g in one step; c


@dataclass(frozen=True, eq=False)
class BinnedQueue:
    """Means; `sizes[m - 1]` = P(a batch has m requests)."""

    queueing_delay: float
    sojourn_time: float
    batch_size: float
    utilisation: float
    sizes: Vector
    residual: float  # what the two laws miss, relative

    @property
    def largest(self) -> int:
        """Requests in the largest batch that is counted."""
        return len(self.sizes)

    def by_request(self, values: Vector) -> float:
        """The mean over requests of what depends on their batch's size, `values[m - 1]`."""
        members = self.sizes * np.arange(1.0, len(self.sizes) + 1)
        return float(members @ values) / self.batch_size


@dataclass(eq=False)
class _Draw:
    """How the l are drawn afresh."""

    weights: Vector  # g
    crowding: float = 0.0  # c


def solve_bin_chain(
    time: BatchTime, arrival_rate: float, bins: Sequence[tuple[float, TokenDistribution]]
) -> BinnedQueue:
    """`bins`: share and lengths of each. Raises NotConvergedError, OutOfReachError where batches
    are too large to follow.
    """
    shares = np.array([share for share, _ in bins])
    times = [replace(time, output_tokens=lengths) for _, lengths in bins]
    draw, size = _Draw(np.ones(len(bins))), _FIRST
    while len(bins) * size**4 + 4 * len(bins) ** 2 * size**3 <= _MOST_TERMS:
        chain = _Chain(times, arrival_rate, shares / shares.sum(), size)
        state = chain.settled(draw)
        if state is not None:
            return chain.means(state)
        size = round(_GROWTH * size)
    raise OutOfReachError(f"the chain of batches of {size} and more from {len(bins)} bins")


class _Chain:
    """The chain cut at `size`. States are [bin, m, l]."""

    def __init__(
        self, times: Sequence[BatchTime], arrival_rate: float, shares: Vector, size: int
    ) -> None:
        self.rate, self.shares, self.size = arrival_rate, shares, size
        moments = np.array([time.moments(size) for time in times])
        self.first, self.second, self.own = np.swapaxes(moments, 0, 1)  # [bin, m - 1]
        self._arrived = np.zeros((len(times), size + 1, size + 1))  # [bin, m, A]
        for rows, time in zip(self._arrived, times, strict=True):
            rows[1:] = time.table(size).arrivals(arrival_rate, size + 1)
        self._joining = _binomials(size + 1, shares)  # [bin, A, d]: d of A arrivals are of the bin
        self._added = np.stack([_shifted(law) for law in self._joining])  # [bin, A, c, c + d]

    def settled(self, draw: _Draw) -> Vector | None:
        """The stationary state; `draw` is corrected on the way. None where too much is lost
        beyond the cut. Raises NotConvergedError.
        """
        state: Vector = np.zeros((len(self.shares), self.size + 1, self.size + 1))
        state[:, 1, 0] = self.shares
        own, exact = self._of_the_oldest(draw), len(self.shares) <= 2
        residual = change = lost = 1.0
        for step in range(_MOST_STEPS):
            after = self._step(state, draw, own)
            lost = 1 - float(after.sum()) + float(after[:, -1].sum() + after[:, :, -1].sum())
            after /= after.sum()
            change, state = float(np.abs(after - state).sum()), after
            if lost > _SURELY_LOST:
                return None
            residual = 0.0 if exact else max(self.missed(state))
            if change < _SETTLED and residual < 2 * _BALANCED:
                return state if lost < _LOST else None
            if not exact and step >= _FREE_STEPS and self._corrected(draw, state):
                own = self._of_the_oldest(draw)
        if lost >= _LOST:
            return None
        raise NotConvergedError("the chain of batches of like lengths", max(change, residual))

    def _corrected(self, draw: _Draw, state: Vector) -> bool:
        """Move g and c to where the two laws hold; whether c moved."""
        imbalance, _ = self.missed(state)
        if imbalance > _BALANCED:
            factors = np.clip(self._flows(state) ** -_CORRECTION, 1 / _WIDEST, _WIDEST)
            draw.weights = draw.weights * factors / (draw.weights * factors @ self.shares)
        excess = self._behind(state) / self._waited(state) - 1
        if abs(excess) <= _BALANCED:
            return False
        draw.crowding = min(max(draw.crowding - _CROWDING * excess, 0.0), _MOST_CROWDED)
        return True

    def missed(self, state: Vector) -> tuple[float, float]:
        """What the flows of the bins and Little's law within them miss, relative."""
        imbalance = float(self.shares @ np.abs(self._flows(state) - 1))
        return imbalance, abs(self._behind(state) / self._waited(state) - 1)

    def _flows(self, state: Vector) -> Vector:
        """Requests that leave in batches of each bin, over those that arrive."""
        leaving = state.sum(axis=2) @ np.arange(self.size + 1.0)
        return np.asarray(leaving / leaving.sum() / self.shares)

    def _waited(self, state: Vector) -> float:
        """E[Wq] E[m]."""
        others = (state @ np.arange(self.size + 1.0))[:, 1:]
        batches = state.sum(axis=2)[:, 1:]
        return float((others * self.first).sum() + self.rate * (batches * self.second).sum() / 2)

    def _behind(self, state: Vector) -> float:
        """The same by those who are behind a request in its bin."""
        sizes = np.arange(1.0, self.size + 1)
        pairs = state.sum(axis=2)[:, 1:] @ (sizes * (sizes - 1) / 2)
        return float((pairs / self.shares).sum()) / self.rate

    def _of_the_oldest(self, draw: _Draw) -> Vector:
        """`[j, l - 1, i, c - 1]`: P(c of the l left by a batch of bin i are of j, the bin of the
        oldest).
        """
        left = 1 - np.minimum(self.shares, 1 - 1e-12)[:, None]
        share = np.minimum(self.shares / left, 1.0)
        share = np.minimum(share * (1 + draw.crowding * (1 - share) / (1 + share)), 1.0)
        return np.ascontiguousarray(_binomials(self.size, share).transpose(1, 2, 0, 3))

    def _step(self, state: Vector, draw: _Draw, own: Vector) -> Vector:
        """The state at the next batch start; what is beyond the cut is missing."""
        ended = np.swapaxes(state, 1, 2) @ self._arrived  # [bin, l, A]
        left = np.ascontiguousarray(ended[:, 1:].transpose(1, 2, 0))  # [l - 1, A, bin]
        after = np.stack(
            [self._next(left, draw.weights, own[j], j) for j in range(len(self.shares))]
        )
        alone = ended[:, 0].sum(axis=0)  # [A]: nobody had been left
        after[:, 1, 0] += alone[0] * self.shares
        for m in range(1, self.size + 1):
            # A = l + m, of whom m - 1 are of the oldest one's bin
            joined = self._joining[:, m - 1 : self.size, m - 1] * self.shares[:, None]
            after[:, m, : self.size + 1 - m] += joined * alone[m:]
        return after

    def _next(self, left: Vector, weights: Vector, own: Vector, j: int) -> Vector:
        """[m, l] of the batches of bin j that begin while others had been left."""
        size, drawn = self.size, self.shares * weights
        chosen = drawn[j] / np.maximum(drawn.sum() - drawn, 1e-300)
        chosen[j] = 0.0
        counts = (left @ (own * chosen[:, None])).transpose(1, 0, 2)  # [A, l - 1, c - 1]
        joined = counts @ self._added[j][:, 1:]  # [A, l - 1, m]
        waiting = np.zeros((2 * size + 1, size + 1))  # [l + A, m]
        for arrived in range(size + 1):
            waiting[arrived + 1 : arrived + size + 1] += joined[arrived]
        return np.stack([waiting[m : m + size + 1, m] for m in range(size + 1)])

    def means(self, state: Vector) -> BinnedQueue:
        """Of the queue in this stationary state."""
        sizes = np.arange(1.0, self.size + 1)
        batches = state.sum(axis=2)[:, 1:]
        members = batches * sizes
        batch_size = float(members.sum())
        delay = self._waited(state) / batch_size
        return BinnedQueue(
            queueing_delay=delay,
            sojourn_time=delay + float((members * self.own).sum()) / batch_size,
            batch_size=batch_size,
            utilisation=self.rate * float((batches * self.first).sum()) / batch_size,
            sizes=batches.sum(axis=0),
            residual=max(self.missed(state)),
        )


def _binomials(count: int, shares: Vector) -> Vector:
    """`[..., n, k]` = P(k of n), n and k < `count`, for each of `shares`."""
    counts = np.arange(count)
    ways = np.array([[float(comb(n, k)) for k in range(count)] for n in range(count)])
    p = shares[..., None, None]
    return np.asarray(ways * p**counts * (1 - p) ** np.maximum(counts[:, None] - counts, 0))


def _shifted(law: Vector) -> Vector:
    """`[A, c, c + d]` = P(d | A); beyond the cut missing."""
    size = len(law)
    found = np.zeros((size, size, size))
    for c in range(size):
        found[:, c, c:] = law[:, : size - c]
    return found
