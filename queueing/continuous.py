"""Continuous batching: c slots on an engine whose step slows down with the sequences in it. An approximation.

With n slots taken, each one passes through a gap (turnaround, then the wait for the next step) and l = E[N] steps:

    f = A / S                                                        share of its slot time that a slot spends in steps
    A = a + l (k4 + k3 (1 + (n - 1) f)) + (n - 1) f a,   a = k1 + kp E[P]
    S = A + gap,   throughput X(n) = n / S(n)

gap: `turnaround` plus what is left of a step, half of it on average, if another slot is in one. While requests wait, a slot
is refilled at the end of a step, so its gap is a whole number of steps: to the first end at or after the turnaround.
Birth-death in the number of requests n: up lam, down X(min(n, c)), the refilled X above c; gives E[slots taken] and the delay
Wq_M of exponential work. General lengths (c slots, slot time S):

    Wq = Wq_M (1 + C^2)/2 * 2 w_D / (2 alpha w_D + 1 - alpha),   w_D = Wq(M/D/c) / Wq(M/M/c),  C^2 = SCV of the slot time
    alpha = ((1 + C^2) E[S] / g - c - 1) / (c - 1),   g = int_0^inf P(Se > x)^c dx,  Se the residual slot time

(Boxma, Cohen and Huffels 1979, with w_D by Kimura 1986 after Cosmetatos): right in light and heavy traffic, exact for c = 1.
Conditions: Poisson arrivals, one server. `load` = lam / refilled X(c).

Measured error of the delay against simulation of the same model (not an engine), prediction / simulation - 1:
  k's of a 128x2 Llama (profile `reference`), c = 4, load 0.3 to 0.85, 6e6 requests a cell: uniform(1, 32) -2.0 to +1.2 %,
  lognormal(2.5, 0.7) clipped at 64 +0.6 to +2.7 %; sojourn -0.1 to +1.2 %
  also k4 = 10 ms with k3 = 0.1 ms, and turnaround 0, and geometric lengths; c = 4 and 8, load 0.6 and 0.85: -8 to +7 %
  k3 = k4, c = 4 and 8, load 0.6 and 0.85: -1 to +6 %; sojourn up to 3 %
  c = 8 at load 0.3 (delays of microseconds): -15 % to -6 %; c = 32: tens of per cent
  outputs of a few tokens (k3 = k4, 1 to 4 tokens: about +70 %) and deterministic lengths, which synchronise: not to be trusted
The refilled X(c) is within 0.1 % of the simulated capacity (k3 = k4: 0.9 %), but for short or deterministic lengths (up to 5 % low).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln, pdtr

from queueing.distributions import TokenDistribution, Vector
from queueing.errors import UnstableQueueError
from queueing.latency import LatencyModel

_LARGEST = 100_000


@dataclass(frozen=True)
class SlotQueue:
    """Means of a continuous engine; `batch_size` counts the slots taken just after a dispatch."""

    queueing_delay: float
    sojourn_time: float
    batch_size: float
    utilisation: float
    load: float


@dataclass(frozen=True)
class SlotTime:
    """How long a slot is taken when n are, one of them in question. Means."""

    law: LatencyModel
    output_tokens: TokenDistribution
    prompt_tokens: TokenDistribution | None = None

    def mean(self, slots: int, *, refilled: bool) -> float:
        """S(n), the mean time that a slot is taken."""
        return self.parts(slots, refilled=refilled)[0]

    def parts(self, slots: int, *, refilled: bool) -> tuple[float, float]:
        """S(n) and its share in steps, by fixed-point iteration; `refilled` = a slot is taken again at the step in which it became free."""
        share, total = 0.5, math.inf
        for _ in range(500):
            active = self._active(slots, share)
            previous, total = total, active + self.gap(slots, share, refilled=refilled)
            share = active / total
            if abs(total - previous) < 1e-13 * total:
                break
        return total, share

    def gap(self, slots: int, share: float, *, refilled: bool) -> float:
        """Slot taken, not in a step: turnaround and the wait for a boundary; `share` of the others is in steps."""
        turnaround = self.law.turnaround * self.law.speed
        others = slots - 1
        alone = (1 - share) ** others
        step = self.law.step(1 + (others - 1) * share) + self._admitted * others * share / self.output_tokens.mean if others else 0.0
        if not refilled:
            return turnaround + (1 - alone) * step / 2
        chances = _binomial(others, share)
        waits = [turnaround] + [self._aligned(turnaround, active) for active in range(1, slots)]
        return float(chances @ waits)

    def throughput(self, slots: int, *, refilled: bool) -> float:
        """X(n) = n / S(n)."""
        return slots / self.mean(slots, refilled=refilled)

    def limit(self) -> float:
        """The throughput of infinitely many slots: each request costs its own share only."""
        seconds = self._admitted + self.law.speed * self.law.k3 * self.output_tokens.mean
        return 1 / seconds if seconds > 0 else math.inf

    @property
    def _admitted(self) -> float:
        return self.law.admission(1, 0.0 if self.prompt_tokens is None else self.prompt_tokens.mean)

    def _active(self, slots: int, share: float) -> float:
        others = (slots - 1) * share
        return self._admitted * (1 + others) + self.output_tokens.mean * self.law.step(1 + others)

    def _aligned(self, turnaround: float, active: int) -> float:
        """E[end of the first step at or after the turnaround], steps with `active` others, admissions among them Poisson."""
        step, rate = self.law.step(active), active / self.output_tokens.mean
        if turnaround == 0:
            return 0.0
        most = math.ceil(turnaround / step)
        room = [(turnaround - k * step) / self._admitted if self._admitted else math.inf for k in range(1, most)]
        steps = 1.0 + sum(_at_most(count, k * rate) for k, count in enumerate(room, start=1))
        return steps * (step + rate * self._admitted)

    def pace(self, mean: float, share: float) -> float:
        """Seconds per token: only the time in steps grows with the length, the gap and the own admission do not."""
        return (mean * share - self._admitted) / self.output_tokens.mean

    def smallest_of(self, slots: int, mean: float, pace: float) -> float:
        """g = int P(Se > x)^c dx: until the first of c slots is free, seen at a random instant; Se the residual slot time."""
        fixed = mean - pace * self.output_tokens.mean
        tail = 1 - self.output_tokens.cdf  # P(N > n): the slot time exceeds fixed + pace n
        left = (pace * np.append(np.cumsum(tail[::-1])[::-1], 0.0)) / mean  # P(Se > fixed + pace n)
        heights = np.append(1.0, left[:-1])
        lows = np.append(left[0], left[1:])
        widths = np.append(fixed, np.full(len(lows) - 1, pace))
        return float(sum(w * _power_mean(a, b, slots) for w, a, b in zip(widths, heights, lows, strict=True)))


def solve_continuous(time: SlotTime, arrival_rate: float, slots: int | None) -> SlotQueue:
    """The approximate means. Raises UnstableQueueError."""
    load = arrival_rate / (time.limit() if slots is None else time.throughput(slots, refilled=True))
    if load >= 1:
        raise UnstableQueueError(load)
    down = _throughputs(time, arrival_rate, slots)
    weights = np.cumsum(np.log(arrival_rate) - np.log(down))
    weights = np.exp(np.append(0.0, weights) - max(0.0, float(weights.max())))
    if slots is None:
        return _summary(weights / weights.sum(), arrival_rate, load, 0.0, math.inf)
    geometric = arrival_rate / time.throughput(slots, refilled=True)
    waiting = weights[-1] * geometric / (1 - geometric)  # mass of the states above c
    total = weights.sum() + waiting
    exponential = waiting / (1 - geometric) / total / arrival_rate
    delay = exponential * _general_lengths(time, slots, geometric)
    states = np.append(weights, waiting) / total
    return _summary(states, arrival_rate, load, delay, slots)


def _summary(states: Vector, arrival_rate: float, load: float, delay: float, slots: float) -> SlotQueue:
    taken = np.minimum(np.arange(len(states)), slots)
    after = float(states @ np.minimum(taken + 1, slots))
    return SlotQueue(delay, delay + float(states @ taken) / arrival_rate, after, 1 - float(states[0]), load)


def _throughputs(time: SlotTime, arrival_rate: float, slots: int | None) -> Vector:
    """X(1), ..., X(c); without a bound as many as matter."""
    if slots is not None:
        return np.array([time.throughput(n, refilled=False) for n in range(1, slots + 1)])
    values, height = [], 0.0
    for n in range(1, _LARGEST):
        values.append(time.throughput(n, refilled=False))
        height += math.log(arrival_rate / values[-1])
        if values[-1] > arrival_rate and height < -35:  # e^-35 of the first state, and falling
            break
    return np.array(values)


def _general_lengths(time: SlotTime, slots: int, load: float) -> float:
    """Wq / Wq_M."""
    mean, share = time.parts(slots, refilled=True)
    pace = time.pace(mean, share)
    scv = pace**2 * time.output_tokens.variance / mean**2
    if slots == 1:
        return (1 + scv) / 2
    deterministic = _deterministic_ratio(slots, load)
    alpha = ((1 + scv) * mean / time.smallest_of(slots, mean, pace) - slots - 1) / (slots - 1)
    return (1 + scv) * deterministic / (2 * alpha * deterministic + 1 - alpha)


def _deterministic_ratio(slots: int, load: float) -> float:
    """Wq(M/D/c) / Wq(M/M/c), Kimura's refinement of Cosmetatos: c / (c + 1) in light traffic, 1/2 in heavy."""
    theta = (slots - 1) / (slots + 1)
    heavy = theta / (8 * (1 + theta)) * (math.sqrt((9 + theta) / (1 - theta)) - 2)
    light = (1 - load) / load * -math.expm1(-theta * load / ((1 - load) * heavy))
    return 0.5 * (1 + heavy * light)


def _power_mean(high: float, low: float, power: int) -> float:
    """Mean of u^power over u uniform between low and high."""
    if high - low <= 1e-9 * high:
        return high**power
    return (high ** (power + 1) - low ** (power + 1)) / ((power + 1) * (high - low))


def _binomial(n: int, p: float) -> Vector:
    k = np.arange(n + 1)
    if p in (0.0, 1.0):
        return np.asarray(k == n * p, dtype=float)
    log = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1) + k * math.log(p) + (n - k) * math.log1p(-p)
    return np.asarray(np.exp(log))


def _at_most(count: float, mean: float) -> float:
    """P(a Poisson count stays strictly below `count`)."""
    return 1.0 if count == math.inf else float(pdtr(math.ceil(count) - 1, mean))
