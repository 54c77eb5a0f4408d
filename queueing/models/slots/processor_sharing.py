"""Continuous batching as a fluid: M/M(n)-PS with a cap, exact for exponential lengths; without a
cap, exact for any.

n requests present, a = min(n, c) of them served together, each gains 1 / t(a) tokens a second; the
others wait, first come first served.

    t(a) = (k3 + k0 / m) a + k4            seconds for a token of each; k0 seconds of the engine per
                                           admission, spread over m = E[N] tokens
    up lam, down mu_n = a / (m t(a))       pi_n = pi_0 prod_{j<=n} lam / mu_j, geometric with ratio
                                           lam / mu_c above c
    E[T] = E[n] / lam,  E[Wq] = E[(n - c)^+] / lam,  load = lam / mu_c
    P(Wq > x) = P(n >= c) e^{-(mu_c - lam) x}
    seconds per token = E[a] / (lam m)

No cap (c = None), rho = lam m k3 + lam k0 < 1: pi_n is negative binomial, and the law of N does not
matter (a symmetric queue, Kelly 1979):

    pi_n = C(n + s, n) rho^n (1 - rho)^{1 + s},  s = k4 / (k3 + k0 / m)
                                           Poisson(lam m k4) where k3 = k0 = 0
    E[T | N = x] = x t(1) / (1 - rho)

Special cases: c = 1 is M/M/1; k4 = 0 is M/M/1 with processor sharing, whatever c; k3 = 0 is M/M/c.
Other lengths (SCV C^2) and admissions that stop everybody for k0 at once: E[a] is kept and E[Wq]
multiplied by (1 + C^2 phi^2) / 2, with phi = 1 - mu_c k0 the share of the engine's time outside of
admissions. An approximation; exact for c = 1 (Pollaczek and Khinchine). phi: constant engine time
per departure smooths the departures of all slots, however many there are. Method: weights in log
space, so that thousands of slots neither overflow nor vanish. Conditions: Poisson arrivals, one
engine.

Measured against simulation of this fluid, model / simulation - 1 (k3 .2, k4 .8, m 1; c = 1, 2, 4,
8, 32; load .3, .6, .85, .95; 2e6 requests a cell):
  exponential lengths: within the noise (sojourn 0.1 % at load .3 to 3 % at .95), as it must be
  lognormal .7 (C^2 .63): sojourn -0.3 to +1.1 % up to load .85
  deterministic: sojourn -0.7 to +0.4 %; delay -3 % at load .85, -8 % at .6 and c = 4
  lognormal 1.2 (C^2 3.2): sojourn up to +6 % (c = 2 to 8, load .6 and .85); delay up to +30 % at
    c = 2, +49 % at c = 4, +64 % at c = 32
  admissions, exponential and lognormal .7, by their share mu_c k0: up to .18 delay within 7 % and
    sojourn within 1 % (load .95: the noise); .25 delay -3 %; .33 -10 %, sojourn -2 %; .47 and
    c = 32 delay -51 %, sojourn -7 %. Spreading them alone, without phi, would make the delay 8 %
    too long at a share of .08, and 26 % at .25
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.result import LEVELS, Quantiles


@dataclass(frozen=True, kw_only=True)
class SharedEngine:
    """Seconds and counts; `slots` None = no cap."""

    per_member: float  # k3: seconds per member and token
    per_step: float  # k4: seconds per token, whoever is there
    mean_tokens: float
    slots: int | None
    admission: float = 0.0  # k0: seconds of the whole engine per request

    def __post_init__(self) -> None:
        if min(self.per_member, self.per_step, self.admission) < 0 or not 0 < self.alone < math.inf:
            raise SpecError(
                f"got per_member={self.per_member}, per_step={self.per_step}, "
                f"admission={self.admission}, mean_tokens={self.mean_tokens}; expected seconds >= "
                "0, tokens > 0 and a request that takes time"
            )
        if self.slots is not None and self.slots < 1:
            raise SpecError(f"got slots={self.slots}; expected at least 1, or None")

    @property
    def alone(self) -> float:
        """Seconds of a request of mean length that has the engine for itself: m t(1)."""
        return self.mean_tokens * (self.per_member + self.per_step) + self.admission

    @property
    def share(self) -> float:
        """Seconds by which a request of mean length holds up each of the others: m k3 + k0."""
        return self.mean_tokens * self.per_member + self.admission

    @property
    def capacity(self) -> float:
        """Requests/s that can just not be served for ever."""
        if self.slots is None:
            return 1 / self.share if self.share > 0 else math.inf
        return float(self.rates(self.slots)[-1])

    def rates(self, most: int) -> Vector:
        """mu_1, ..., mu_most, requests/s."""
        active = np.minimum(np.arange(1, most + 1), most if self.slots is None else self.slots)
        return np.asarray(active / (self.share * active + self.mean_tokens * self.per_step))


@dataclass(frozen=True)
class SharedQueue:
    """The steady state. Without a cap nobody waits."""

    engine: SharedEngine
    arrival_rate: float
    load: float
    waiting: float  # P(Wq > 0)
    utilisation: float  # P(n > 0)
    active: float  # E[min(n, c)]
    delay: Quantiles  # quantiles only where exact
    exact: bool  # no admission time, and exponential lengths or no cap

    @property
    def sojourn_time(self) -> float:
        """E[T]."""
        return self.active / self.arrival_rate + float(self.delay.mean or 0.0)

    @property
    def seconds_per_token(self) -> float:
        """Mean over tokens, admissions of others included."""
        return self.active / (self.arrival_rate * self.engine.mean_tokens)

    def exceeds(self, seconds: float) -> float:
        """P(Wq > seconds). Raises SpecError where it is not known."""
        if not self.exact:
            raise SpecError(
                "got admission times or lengths that are not exponential; expected none and "
                "exponential ones, whose delay has a law"
            )
        return (
            0.0
            if self.engine.slots is None
            else self.waiting * math.exp(-(self.engine.capacity - self.arrival_rate) * seconds)
        )

    def sojourn_given(self, tokens: float) -> float:
        """E[T | N = tokens], any law of N (admissions spread over the tokens). Raises SpecError
        under a cap.
        """
        if self.engine.slots is not None:
            raise SpecError(
                f"got {self.engine.slots} slots; expected no cap: under one, the sojourn of a "
                "given length has no closed form"
            )
        return tokens * self.seconds_per_token


def solve_sharing(engine: SharedEngine, arrival_rate: float, scv: float = 1.0) -> SharedQueue:
    """The steady state for lengths of that SCV. Raises UnstableQueueError, SpecError."""
    if not 0 < arrival_rate < math.inf or not 0 <= scv < math.inf:
        raise SpecError(
            f"got arrival_rate={arrival_rate}, scv={scv}; expected requests/s > 0 and a finite "
            "scv >= 0"
        )
    load = arrival_rate / engine.capacity
    if load >= 1:
        raise UnstableQueueError(load)
    if engine.slots is None:
        active = arrival_rate * engine.alone / (1 - load)
        empty = math.exp(_log_empty(engine, arrival_rate))
        return SharedQueue(
            engine,
            arrival_rate,
            load,
            0.0,
            1 - empty,
            active,
            Quantiles(0.0, 0.0, 0.0, 0.0, 0.0),
            engine.admission == 0,
        )
    weights = log_weights(arrival_rate, engine.rates(engine.slots))
    below = np.exp(weights - weights.max())
    total = float(below[:-1].sum() + below[-1] / (1 - load))
    waiting = float(below[-1]) / (1 - load) / total
    active = float(np.arange(len(below) - 1) @ below[:-1]) / total + engine.slots * waiting
    decay, exact = engine.capacity - arrival_rate, engine.admission == 0 and scv == 1
    variation = scv * (1 - engine.capacity * engine.admission) ** 2
    delay = (
        _exponential(waiting, decay) if exact else Quantiles(waiting / decay * (1 + variation) / 2)
    )
    return SharedQueue(
        engine, arrival_rate, load, waiting, 1 - float(below[0]) / total, active, delay, exact
    )


def unbounded_states(engine: SharedEngine, arrival_rate: float, most: int) -> Vector:
    """pi_0, ..., pi_most without a cap, whatever the law of the lengths."""
    if engine.slots is not None:
        raise SpecError(f"got {engine.slots} slots; expected no cap")
    return np.asarray(
        np.exp(_log_empty(engine, arrival_rate) + log_weights(arrival_rate, engine.rates(most)))
    )


def log_weights(arrival_rate: float, rates: Vector) -> Vector:
    """ln(pi_n / pi_0) for n = 0, ..., len(rates)."""
    return np.append(0.0, np.cumsum(np.log(arrival_rate) - np.log(rates)))


def _log_empty(engine: SharedEngine, arrival_rate: float) -> float:
    """ln pi_0 without a cap: (1 + s) ln(1 - rho); the limit where share vanishes is -lam m k4."""
    offered, rho = arrival_rate * engine.mean_tokens * engine.per_step, arrival_rate * engine.share
    return -offered if rho == 0 else (1 + offered / rho) * math.log1p(-rho)


def _exponential(waiting: float, decay: float) -> Quantiles:
    """0 with probability 1 - waiting, else exponential."""
    found = (
        math.log(waiting / (1 - level)) / decay if waiting > 1 - level else 0.0
        for level in LEVELS.values()
    )
    return Quantiles.of(LEVELS, waiting / decay, found)
