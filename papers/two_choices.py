"""The power of two choices with one bit of advice, in the limit of many queues (fluid limit).

Each of N servers receives lam jobs/s on average; a job looks at d queues at random and joins the
one with the fewest jobs. Two exponential classes; a bit tells the class, wrong with given
probabilities; at each server predicted short jobs preempt predicted long ones, order of arrival
within either. As N grows, queues become independent, and a queue of n jobs receives

    lam_n = lam (S_n^d - S_{n+1}^d) / (S_n - S_{n+1}),   S_n = P(at least n jobs)

so that the state of one queue (predicted short jobs i, predicted long ones j, true class of the
first of either) is a Markov chain whose rates depend on its own law: a fixed point. Method: the
chain cut at `most` jobs, solved as a sparse linear system, repeated until the law rests. One class:
E[T] = sum_i lam^{(d^i - d)/(d - 1)}. Sources: Mitzenmacher, The power of two choices in randomized
load balancing (2001), Queues with small advice (2020).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csc_matrix
from scipy.sparse.linalg import spsolve

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.errors import NotConvergedError, UnstableQueueError

_ROUNDS, _CLOSE = 400, 1e-10
State = tuple[int, int, int, int]  # predicted short, predicted long, class of the first of either


@dataclass(frozen=True)
class TwoClasses:
    """Means in seconds, the share of long jobs, and how often the bit is wrong."""

    short_mean: float
    long_mean: float
    long_share: float
    short_wrong: float = 0.0  # P(predicted long | short)
    long_wrong: float = 0.0  # P(predicted short | long)

    def __post_init__(self) -> None:
        chances = (self.long_share, self.short_wrong, self.long_wrong)
        if min(self.short_mean, self.long_mean) <= 0 or not all(0 <= p <= 1 for p in chances):
            raise SpecError(f"got {self}; expected means > 0 and probabilities")

    @property
    def mean(self) -> float:
        """Mean service time."""
        return (1 - self.long_share) * self.short_mean + self.long_share * self.long_mean

    @property
    def predicted_long(self) -> float:
        """P(predicted long)."""
        return (1 - self.long_share) * self.short_wrong + self.long_share * (1 - self.long_wrong)

    def truly_long(self) -> tuple[float, float]:
        """P(long | predicted short), P(long | predicted long)."""
        told = self.predicted_long
        among_short = self.long_share * self.long_wrong
        among_long = self.long_share * (1 - self.long_wrong)
        return (
            among_short / (1 - told) if told < 1 else 0.0,
            among_long / told if told > 0 else 0.0,
        )


@dataclass(frozen=True, eq=False)
class ManyQueues:
    """`at_least[n]` = P(a queue has at least n jobs); E[T] in seconds."""

    sojourn: float
    at_least: Vector


def two_choices(
    classes: TwoClasses, load: float, choices: int = 2, most: int | None = None
) -> ManyQueues:
    """The fixed point at `load` = lam E[S] per server. Raises UnstableQueueError, NotConvergedError
    (more than 1e-6 of the queues at the cut, or no rest).
    """
    if load >= 1:
        raise UnstableQueueError(load)
    rate = load / classes.mean
    most = most or (24 if choices > 1 else 110)
    chain = _Chain(classes, most)
    above = load ** np.arange(most + 2.0)
    for _ in range(_ROUNDS):
        law = chain.law(_joining(rate, above, choices))
        found = np.append(np.cumsum(law[::-1])[::-1], 0.0)
        change = float(np.abs(found - above).max())
        above = found
        if change < _CLOSE or choices == 1:  # then the rates do not depend on the law
            break
    else:
        raise NotConvergedError("the fixed point of many queues", change)
    if law[-1] > 1e-6:
        raise NotConvergedError(f"queues cut at {most} jobs", float(law[-1]))
    return ManyQueues(float(above[1:].sum()) / rate, above)


def _joining(rate: float, above: Vector, choices: int) -> Vector:
    """lam_n for n = 0, ..., most; nobody joins at the cut."""
    a, b = above[:-1], above[1:]
    powers = sum(a**k * b ** (choices - 1 - k) for k in range(choices))
    joining = rate * np.asarray(powers)
    joining[-1] = 0.0
    return joining


class _Chain:
    """The states of one queue and the transitions between them."""

    def __init__(self, classes: TwoClasses, most: int) -> None:
        self._classes, self._most = classes, most
        truly = classes.truly_long()
        self._drawn = [((0, 1 - p), (1, p)) for p in truly]
        self._rates = (1 / classes.short_mean, 1 / classes.long_mean)
        self._told = ((0, 1 - classes.predicted_long), (1, classes.predicted_long))
        states = [
            (i, j, a, b)
            for i in range(most + 1)
            for j in range(most + 1 - i)
            for a in ((0, 1) if i else (0,))
            for b in ((0, 1) if j else (0,))
        ]
        index = {state: k for k, state in enumerate(states)}
        self._jobs = np.array([i + j for i, j, _, _ in states])
        ups = [(index[s], index[t], p) for s in states for t, p in self._arrivals(s)]
        downs = [(index[s], index[t], p) for s in states for t, p in self._departures(s)]
        self._up, self._down = (np.array(rows) for rows in (ups, downs))

    def _first(self, state: State, told: int, count: int) -> Iterator[tuple[State, float]]:
        """The state with `count` jobs of that prediction, of which a new one is the first."""
        i, j, a, b = state
        for true, p in self._drawn[told] if count else ((0, 1.0),):
            yield ((count, j, true, b) if told == 0 else (i, count, a, true)), p

    def _arrivals(self, state: State) -> Iterator[tuple[State, float]]:
        i, j, a, b = state
        if i + j == self._most:
            return
        for told, p in self._told:
            if state[told] == 0:
                yield from ((t, p * q) for t, q in self._first(state, told, 1))
            else:
                yield ((i + 1, j, a, b) if told == 0 else (i, j + 1, a, b)), p

    def _departures(self, state: State) -> Iterator[tuple[State, float]]:
        i, j, a, b = state
        if i:
            yield from ((t, self._rates[a] * q) for t, q in self._first(state, 0, i - 1))
        elif j:
            yield from ((t, self._rates[b] * q) for t, q in self._first(state, 1, j - 1))

    def law(self, joining: Vector) -> Vector:
        """P(n jobs), n = 0, ..., most, where a queue of n jobs receives joining[n]."""
        up, down, size = self._up, self._down, len(self._jobs)
        origin = np.concatenate([up[:, 0], down[:, 0]]).astype(np.int64)
        target = np.concatenate([up[:, 1], down[:, 1]]).astype(np.int64)
        flow = np.concatenate([up[:, 2] * joining[self._jobs[up[:, 0].astype(int)]], down[:, 2]])
        kept = target > 0  # the balance of the empty state is replaced by the sum 1
        out = np.bincount(origin, flow, size)
        inner = np.arange(1, size)
        rows = np.concatenate([target[kept], inner, np.zeros(size, np.int64)])
        columns = np.concatenate([origin[kept], inner, np.arange(size)])
        values = np.concatenate([flow[kept], -out[1:], np.ones(size)])
        one = np.zeros(size)
        one[0] = 1.0
        solved = spsolve(csc_matrix((values, (rows, columns)), (size, size)), one)
        return np.asarray(np.bincount(self._jobs, np.maximum(solved, 0.0)))
