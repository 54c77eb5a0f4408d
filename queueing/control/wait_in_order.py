"""How long a request still waits in a queue with an order of its own, given what ranks before it
and how fast others arrive that will overtake it.

One slot, in the mean exact, whatever order the others are served in:

    W = (left in service + services ahead) / (1 - load of those who will overtake)

and where a rank ages, so that fewer overtake the later they come,

    W = left + ahead + int_0^W rho(u) du,   rho(u) the load of those who would overtake u s from now

Several slots: no such formula, as a long service holds one slot while short ones pass on the
others; with many ahead, whose work all slots share, it is near. With few, `FUTURES` futures are
drawn, each served in the order of rank until a slot is free that nobody takes before it.

Service takes setup + step n seconds for n tokens while all slots are taken (`Pace`); n is
predicted, and follows predictions as they came true of late
(`queueing.control.predicted_lengths`). Conditions: Poisson arrivals like those of late, nobody
gives up waiting, no bound on tokens or memory.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from kendall.queueing.control.wait_ahead import Pace, Wait

FUTURES = 24
MANY = 64  # ahead, from which on all slots share the work
STRATA = 256  # of those who overtake, from which their load is taken
ARRIVALS = 100  # that overtake in one future; what waits then goes by its mean
_DRAWN = 4096

Ranked = tuple[float, float]  # rank, tokens or seconds


@dataclass(frozen=True, slots=True)
class SampledWait:
    """A wait as equally likely values, seconds, ascending."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """E[W]."""
        return sum(self.values) / len(self.values)

    def within(self, seconds: float) -> float:
        """P(W <= seconds)."""
        return sum(value <= seconds for value in self.values) / len(self.values)

    def quantile(self, level: float) -> float:
        """The least value that is not exceeded with probability `level`."""
        return self.values[max(0, math.ceil(level * len(self.values)) - 1)]


class RandomDraws:
    """Random numbers, drawn in blocks: one at a time a generator is slow."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._uniform: list[float] = []
        self._exponential: list[float] = []

    def one_of(self, values: Sequence[float]) -> float:
        """Equally likely."""
        return values[0] if len(values) == 1 else values[self.below(len(values))]

    def below(self, count: int) -> int:
        """0 to count - 1."""
        if not self._uniform:
            self._uniform = self._rng.random(_DRAWN).tolist()
        return int(self._uniform.pop() * count)

    def gap(self, rate: float) -> float:
        """Exponential."""
        if not self._exponential:
            self._exponential = self._rng.standard_exponential(_DRAWN).tolist()
        return self._exponential.pop() / rate


@dataclass(frozen=True, slots=True, kw_only=True)
class OvertakingArrivals:
    """Those who may overtake, by samples of late: rank of one that arrives now, and its tokens,
    ascending. A rank grows by `moves` (0 or 1) in every second that its request arrives later.
    """

    rate: float  # of all arrivals, per second
    sampled: Sequence[Ranked]
    pace: Pace
    moves: float = 0.0

    def overtaking(self, rank: float) -> int:
        """How many of those sampled rank before it, if they came now."""
        return bisect_left(self.sampled, (rank,))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceInOrder:
    """A request in the queue and what ranks before it; of each the equally likely seconds.
    `before` them `seconds` of work for every slot.
    """

    rank: float
    slots: int
    left: Sequence[Sequence[float]]  # of those in service that will not make way
    ahead: Sequence[tuple[float, Sequence[float]]]  # rank and service, in the order of rank
    before: float = 0.0

    @property
    def work(self) -> Wait:
        """Mean and variance of what each slot has to do, seconds."""
        times = [*self.left, *(seconds for _, seconds in self.ahead)]
        means = [sum(each) / len(each) for each in times]
        squares = [sum(x * x for x in each) / len(each) for each in times]
        variance = sum(square - mean**2 for square, mean in zip(squares, means, strict=True))
        share = 1 / self.slots
        return Wait(self.before + share * sum(means), share**2 * max(0.0, variance))

    def wait(self, arrivals: OvertakingArrivals, draws: RandomDraws) -> Wait | SampledWait:
        """Infinite where those who overtake are more than the slots can serve."""
        if self.slots == 1 or self.before > 0:
            return self.by_work(arrivals)
        return self.sampled(arrivals, draws)

    def by_work(self, arrivals: OvertakingArrivals) -> Wait:
        """From the work ahead and the load of those who overtake."""
        work = self.work
        passing = arrivals.sampled[: arrivals.overtaking(self.rank)]
        some = passing[:: 1 + len(passing) // STRATA]  # in the order of rank: as good as all
        all_sampled = len(arrivals.sampled) * len(some) * self.slots
        each = arrivals.rate * len(passing) / all_sampled if some else 0.0  # of those, per second
        services = [(rank, arrivals.pace.seconds(tokens)) for rank, tokens in some]
        load, added = each * sum(seconds for _, seconds in services), 0.0
        if arrivals.moves:
            for rank, seconds in reversed(services):  # those who stop overtaking first
                until = (self.rank - rank) / arrivals.moves
                if load < 1 and work.mean + added <= (1 - load) * until:
                    break
                load -= each * seconds
                added += each * seconds * until
        if load >= 1:
            return Wait(math.inf)
        mean = (work.mean + added) / (1 - load)
        squares = each * sum(seconds**2 for _, seconds in services) / self.slots
        variance = (work.variance + mean * squares) / (1 - load) ** 2
        return Wait(mean, variance)

    def sampled(self, arrivals: OvertakingArrivals, draws: RandomDraws) -> SampledWait:
        """Futures; one where it is certain."""
        overtaking = arrivals.overtaking(self.rank)
        times = (*self.left, *(seconds for _, seconds in self.ahead))
        certain = not overtaking and all(len(seconds) == 1 for seconds in times)
        count = 1 if certain else FUTURES
        waits = [self._future(arrivals, overtaking, draws) for _ in range(count)]
        return SampledWait(tuple(sorted(waits)))

    def _future(self, arrivals: OvertakingArrivals, overtaking: int, draws: RandomDraws) -> float:
        free = [draws.one_of(seconds) for seconds in self.left]
        free += [0.0] * (self.slots - len(free))
        heapify(free)
        waiting = [(rank, draws.one_of(seconds)) for rank, seconds in self.ahead]
        rate = arrivals.rate * overtaking / len(arrivals.sampled) if overtaking else 0.0
        arrives_at, left, last = draws.gap(rate) if rate > 0 else math.inf, ARRIVALS, 0.0
        while True:
            now = free[0]
            while arrives_at <= now and left:
                rank, tokens = arrivals.sampled[draws.below(overtaking)]
                if (rank := rank + arrivals.moves * arrives_at) < self.rank:
                    heappush(waiting, (rank, arrivals.pace.seconds(tokens)))
                last, left = arrives_at, left - 1
                arrives_at += draws.gap(rate)
            if not waiting and arrives_at > now:
                return now
            if not left:
                since = now if arrives_at > now else last
                return since + self._rest(arrivals, waiting, since, now - since)
            heapreplace(free, now + heappop(waiting)[1])

    def _rest(
        self, arrivals: OvertakingArrivals, waiting: Sequence[Ranked], since: float, busy: float
    ) -> float:
        """Mean seconds from then on, where all slots are taken for `busy` of them."""
        behind = PlaceInOrder(
            rank=self.rank - arrivals.moves * since,
            slots=self.slots,
            left=(),
            ahead=[(rank, (seconds,)) for rank, seconds in waiting],
            before=busy,
        )
        return behind.by_work(arrivals).mean
