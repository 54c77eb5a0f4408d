"""How long the request at one place of the queue still waits, given what stands before it: the
mean, and P(W <= x).

Batches of at most B on c servers, k requests before it. The batches before it are full, so the
(m + 1)-th next end starts it:

    W = R_(m mod c) + H_1 + .. + H_(m div c),   m = k div B
    R_(0) <= R_(1) <= ..     what is left of the batches in service
    R = (H - t | H > t)      t since the dispatch, H gamma with the mean and variance of a batch of
                             that size; an idle server has R = 0

Exact means for one server where H is gamma; c > 1: the servers take turns. Fixed batching adds
batch formation: W = max(that, C), C the time until the batch is full (Erlang of the arrivals that
are missing) or its oldest request has waited `max_wait`, whichever is sooner.

Slots (continuous), c of them, n taken: W = 0 while k < c - n, else the j-th departure from c full
slots, j = k + 1 - (c - n):

    E W = (j - 1 + (1 + v)/2) / X,   Var W = (f + (j - 1) (v + r C^2)/(1 + r)) / X^2
    v = (C^2 + c - 1)/c,   r = j/c,   f = v ((1 + v)/2)^2 + max(0, 1 - v)/12

X the throughput of c full slots, C^2 the scv of the slot time: departures of many slots look
Poisson over few of them and like the slots' own renewals over many; f is the first one's variance
(1 for Poisson, 1/12 for a clock). An approximation, worst where answers are all of one length and
slots keep step.

W is then gamma with these two moments. Conditions: first come, first served; nobody before it gives
up (else W is shorter); lengths of those who wait are like those that were served; token and memory
bounds of the engine do not make batches smaller (else longer).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

import numpy as np
from scipy.special import gammainc, gammaincc, gammaincinv

# probability below which a batch should have been over: what is left of it is the tail's own scale
_GONE = 1e-12
# squared coefficient of variation below which a wait is a number: rounding, and gamma functions
# lose their digits
_CERTAIN = 1e-9
_POINTS = 129  # of an integral over a distribution function
_PARTS = 32  # of a law, of equal chance
_SHARES = np.arange(1, _PARTS) / _PARTS


class WaitLaw(Protocol):
    """A wait that is not over yet, seconds."""

    @property
    def mean(self) -> float:
        """E[W]."""

    def within(self, seconds: float) -> float:
        """P(W <= seconds)."""

    def quantile(self, level: float) -> float:
        """The time that is not exceeded with probability `level`."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Gamma with this mean and variance; variance 0 is a certain wait."""

    mean: float  # seconds
    variance: float = 0.0

    @property
    def certain(self) -> bool:
        """Whether it has no spread to speak of."""
        return self.mean <= 0 or self.variance <= _CERTAIN * self.mean**2

    def within(self, seconds: float) -> float:
        """P(W <= seconds)."""
        if seconds < 0:
            return 0.0
        if self.certain:
            return float(seconds >= self.mean)
        return float(gammainc(self.mean**2 / self.variance, seconds * self.mean / self.variance))

    def quantile(self, level: float) -> float:
        """The time that is not exceeded with probability `level`."""
        if self.certain:
            return self.mean
        return float(gammaincinv(self.mean**2 / self.variance, level)) * self.variance / self.mean

    def after(self, elapsed: float) -> Wait:
        """What is left of it when it has lasted `elapsed` and is not over."""
        if self.certain:
            return Wait(max(0.0, self.mean - elapsed))
        shape, scale = self.mean**2 / self.variance, self.variance / self.mean
        going = float(gammaincc(shape, elapsed / scale))
        if going < _GONE:
            return Wait(scale, scale**2)
        first = self.mean * float(gammaincc(shape + 1, elapsed / scale)) / going
        second = (
            (self.mean**2 + self.variance) * float(gammaincc(shape + 2, elapsed / scale)) / going
        )
        left = max(0.0, first - elapsed)
        return Wait(left, max(0.0, second - first**2))


@dataclass(frozen=True, slots=True)
class BatchFormation:
    """Until `missing` (>= 1) more have arrived at `rate` per second, or `left` seconds are over."""

    missing: int
    rate: float
    left: float

    def within(self, seconds: float) -> float:
        """P(C <= seconds)."""
        if seconds >= self.left:
            return 1.0
        return float(gammainc(self.missing, self.rate * max(0.0, seconds)))


@dataclass(frozen=True, slots=True)
class WaitForFormation:
    """The longer of a wait for the server and an independent batch formation delay."""

    server: Wait
    formation: BatchFormation

    @property
    def mean(self) -> float:
        """E S + the integral of P(S <= x) P(C > x), seconds; infinite where nobody will come."""
        server, formation = self.server, self.formation
        if formation.rate <= 0 and math.isinf(formation.left):
            return math.inf
        arrivals = (
            (formation.missing + 8 * math.sqrt(formation.missing) + 8) / formation.rate
            if formation.rate > 0
            else math.inf
        )
        start, end = server.mean if server.certain else 0.0, min(formation.left, arrivals)
        if end <= start:
            return server.mean
        instants = np.linspace(start, end, _POINTS)
        alone = gammaincc(formation.missing, formation.rate * instants)  # up to just before `left`
        if not server.certain:
            alone = alone * gammainc(
                server.mean**2 / server.variance, instants * server.mean / server.variance
            )
        return server.mean + float(np.trapezoid(alone, instants))

    def within(self, seconds: float) -> float:
        """P(W <= seconds)."""
        return self.server.within(seconds) * self.formation.within(seconds)

    def quantile(self, level: float) -> float:
        """By bisection; infinite where nobody will come."""
        high = max(1e-3, self.server.quantile(level))
        for _ in range(60):
            if self.within(high) >= level:
                break
            high *= 2
        else:
            return math.inf
        low = 0.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if self.within(middle) >= level else (middle, high)
        return high


@dataclass(frozen=True, slots=True)
class Followed:
    """A wait, and an independent time behind it: by that time's mean in `_PARTS` parts of equal
    chance.
    """

    wait: WaitLaw
    after: Wait

    @property
    def mean(self) -> float:
        """E[W] + E[after], seconds."""
        return self.wait.mean + self.after.mean

    def within(self, seconds: float) -> float:
        """P(W + after <= seconds)."""
        parts = self._parts()
        return sum([self.wait.within(seconds - part) for part in parts]) / len(parts)

    def quantile(self, level: float) -> float:
        """By bisection."""
        if self.after.certain:
            return self.wait.quantile(level) + self.after.mean
        share = (1 + level) / 2  # of both at once at least `level`
        high = self.wait.quantile(share) + self.after.quantile(share)
        if math.isinf(high):
            return math.inf
        low, parts = 0.0, self._parts()
        for _ in range(30):
            middle = (low + high) / 2
            within = sum([self.wait.within(middle - part) for part in parts]) / len(parts)
            low, high = (low, middle) if within >= level else (middle, high)
        return high

    def _parts(self) -> list[float]:
        if self.after.certain:
            return [self.after.mean]
        shape = self.after.mean**2 / self.after.variance
        scale = self.after.variance / self.after.mean
        ends = gammaincinv(shape, _SHARES)
        below = np.append(gammainc(shape + 1, ends), 1.0)
        means: list[float] = (np.diff(below, prepend=0.0) * _PARTS * shape * scale).tolist()
        return means


@dataclass(frozen=True, slots=True)
class BatchInService:
    """A batch that is being served: its size, and seconds since its dispatch."""

    size: int
    elapsed: float


@dataclass(frozen=True, slots=True)
class Pace:
    """Service of a request of n tokens while all slots are taken: setup + step n seconds."""

    setup: float
    step: float

    def seconds(self, tokens: float) -> float:
        """From the dispatch to the last token."""
        return self.setup + self.step * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchService:
    """Servers that take the next batch when one is over: mean and variance of the service time
    at some sizes, ascending.
    """

    largest: int  # B, the most that one dispatch takes
    servers: int
    sizes: tuple[int, ...]
    means: tuple[float, ...]  # seconds
    variances: tuple[float, ...]
    first_token: float = 0.0  # from the dispatch, seconds
    pace: Pace | None = None  # of batches of one, where it is known

    def time(self, size: int) -> Wait:
        """The service time of a batch of `size`: between known sizes on a straight line, beyond
        them the nearest one's.
        """
        at = bisect_left(self.sizes, size)
        if at == len(self.sizes):
            return Wait(self.means[-1], self.variances[-1])
        if at == 0 or self.sizes[at] == size:
            return Wait(self.means[at], self.variances[at])
        low, high = self.sizes[at - 1], self.sizes[at]
        share = (size - low) / (high - low)
        mean = self.means[at - 1] + share * (self.means[at] - self.means[at - 1])
        return Wait(
            mean, self.variances[at - 1] + share * (self.variances[at] - self.variances[at - 1])
        )

    def wait(self, place: int, in_service: Sequence[BatchInService]) -> Wait:
        """Of the one with `place` requests before it."""
        before = place // self.largest
        left = self._left(in_service)[before % self.servers]
        turns = before // self.servers
        if not turns:
            return left
        full = self.time(self.largest)
        return Wait(left.mean + turns * full.mean, left.variance + turns * full.variance)

    def until_gone(self, count: int, in_service: Sequence[BatchInService]) -> float:
        """Mean time until `count` of those in the system have left it, counted with the ends of
        their batches; seconds.
        """
        ends = sorted((self._end(batch).mean, batch.size) for batch in in_service)
        last, gone = 0.0, 0
        for last, size in ends:
            gone += size
            if gone >= count:
                return last
        batches = -(-(count - gone) // self.largest)
        return last + batches * self.time(self.largest).mean / self.servers

    def _end(self, batch: BatchInService) -> Wait:
        return self.time(batch.size).after(batch.elapsed)

    def _left(self, in_service: Sequence[BatchInService]) -> list[Wait]:
        left = [self._end(batch) for batch in in_service[: self.servers]]
        left += [Wait(0.0)] * (self.servers - len(left))
        return sorted(left, key=attrgetter("mean"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotService:
    """Slots that are taken again one by one (continuous); all servers together."""

    slots: int  # c
    throughput: float  # X, departures per second while all slots are taken
    scv: float = 1.0  # C^2 of the slot time
    first_token: float = 0.0  # from the dispatch, seconds
    pace: Pace | None = None  # where it is known

    def wait(self, place: int, taken: int) -> Wait:
        """Of the one with `place` requests before it while `taken` slots are in service."""
        departure = place + 1 - max(0, self.slots - taken)
        if departure <= 0:
            return Wait(0.0)
        one = (self.scv + self.slots - 1) / self.slots
        ratio = departure / self.slots
        many = (one + ratio * self.scv) / (1 + ratio)
        first = one * ((1 + one) / 2) ** 2 + max(0.0, 1 - one) / 12
        mean = (departure - 1 + (1 + one) / 2) / self.throughput
        return Wait(mean, (first + (departure - 1) * many) / self.throughput**2)

    def until_gone(self, count: int) -> float:
        """Mean time until `count` of those in the system have left it, seconds."""
        return max(0, count) / self.throughput


def batch_formation(
    place: int, waiting: int, batch_size: int, rate: float, left: float
) -> BatchFormation | None:
    """Of the batch of the request at `place` under fixed batching, with `waiting` requests in the
    queue (itself included); None: its batch is full.

    `left`: seconds until the oldest of its batch has waited `max_wait`.
    """
    behind = waiting - place // batch_size * batch_size
    return (
        BatchFormation(batch_size - behind, rate, max(0.0, left)) if behind < batch_size else None
    )
