"""M/M/1 and M/D/1: the two closed forms between which most service laws lie. Delays and sojourns
with their distributions.

    M/M/1   P(Wq > x) = rho e^{-(mu - lam) x},   E[Wq] = rho / (mu - lam)
            P(W > x) = e^{-(mu - lam) x},        E[W] = 1 / (mu - lam)
    M/D/1   P(Wq <= x) = (1 - rho) U(x) by Erlang's series (queueing.models.erlang_series)
            E[Wq] = rho / (2 mu (1 - rho)),      W = Wq + D

lam arrivals/s, mu = 1 / E[S], rho = lam / mu < 1. First come, first served. M/D/1 waits half as
long as M/M/1: variability drives delay. Often printed for M/D/1: W_q = rho^2 / (2 mu (1 - rho))
(`misprinted_md1_delay`). That is E[S] times the mean number waiting, rho^2 / (2 (1 - rho)), and too
low by the factor rho.

0.25 s of service at 3.2 requests/s (load 0.8), exponential: five service times in the system, and
p99 is 4.6 times that.

>>> q = mm1(3.2, 0.25)
>>> round(q.mean_sojourn, 9), round(q.mean_delay, 9), round(q.sojourn_quantile(0.99), 3)
(1.25, 1.0, 5.756)
>>> [round(mm1(rho, 1.0).mean_sojourn, 9) for rho in (0.5, 0.8, 0.9, 0.95)]
[2.0, 5.0, 10.0, 20.0]
>>> round(md1(3.2, 0.25).mean_delay, 9), round(misprinted_md1_delay(3.2, 0.25), 9)
(0.5, 0.4)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kendall.policies.text import SpecError
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.models.erlang_series import ErlangSeries
from kendall.queueing.models.roots import bisected
from kendall.queueing.result import LEVELS, Quantiles


@dataclass(frozen=True)
class ExponentialQueue:
    """M/M/1 in steady state; seconds."""

    arrival_rate: float
    service_mean: float

    @property
    def load(self) -> float:
        """rho = lam E[S]."""
        return self.arrival_rate * self.service_mean

    @property
    def decay(self) -> float:
        """mu - lam, 1/s."""
        return (1 - self.load) / self.service_mean

    @property
    def mean_delay(self) -> float:
        """E[Wq]."""
        return self.load / self.decay

    @property
    def mean_sojourn(self) -> float:
        """E[W]."""
        return 1 / self.decay

    def delay_tail(self, x: float) -> float:
        """P(Wq > x)."""
        return self.load * math.exp(-self.decay * x) if x >= 0 else 1.0

    def delay_quantile(self, level: float) -> float:
        """0 where P(Wq = 0) = 1 - rho reaches the level."""
        check_level(level)
        return math.log(self.load / (1 - level)) / self.decay if level > 1 - self.load else 0.0

    def sojourn_quantile(self, level: float) -> float:
        """-ln(1 - u) / (mu - lam)."""
        check_level(level)
        return -math.log1p(-level) / self.decay

    @property
    def delay(self) -> Quantiles:
        """Mean and quantiles of the queueing delay."""
        return Quantiles(self.mean_delay, *map(self.delay_quantile, LEVELS.values()))

    @property
    def sojourn(self) -> Quantiles:
        """Mean and quantiles of the sojourn time."""
        return Quantiles(self.mean_sojourn, *map(self.sojourn_quantile, LEVELS.values()))


@dataclass(frozen=True)
class ConstantQueue:
    """M/D/1 in steady state; seconds."""

    arrival_rate: float
    service_time: float

    @property
    def load(self) -> float:
        """rho = lam D."""
        return self.arrival_rate * self.service_time

    @property
    def mean_delay(self) -> float:
        """E[Wq]."""
        return self.load * self.service_time / (2 * (1 - self.load))

    @property
    def mean_sojourn(self) -> float:
        """E[W]."""
        return self.mean_delay + self.service_time

    def delay_tail(self, x: float) -> float:
        """P(Wq > x), to about 1e-11 relatively. Raises NotConvergedError beyond some 10^4
        service times.
        """
        return ErlangSeries(self.arrival_rate, self.service_time, x).tail(x) if x >= 0 else 1.0

    def delay_quantile(self, level: float) -> float:
        """0 where P(Wq = 0) = 1 - rho reaches the level."""
        check_level(level)
        if level <= 1 - self.load:
            return 0.0
        high = self.service_time
        while self.delay_tail(high) > 1 - level:
            high *= 2
        series = ErlangSeries(self.arrival_rate, self.service_time, high)
        return float(bisected(lambda x: math.log(series.tail(x) / (1 - level)), 0.0, high))

    @property
    def delay(self) -> Quantiles:
        """Mean and quantiles of the queueing delay."""
        return Quantiles(self.mean_delay, *map(self.delay_quantile, LEVELS.values()))

    @property
    def sojourn(self) -> Quantiles:
        """Mean and quantiles of the sojourn time: the delay's, one service time later."""
        return Quantiles(
            self.mean_sojourn,
            *(self.delay_quantile(level) + self.service_time for level in LEVELS.values()),
        )


def mm1(arrival_rate: float, service_mean: float) -> ExponentialQueue:
    """Requests/s and seconds. Raises SpecError, UnstableQueueError."""
    check_queue(arrival_rate, service_mean)
    return ExponentialQueue(arrival_rate, service_mean)


def md1(arrival_rate: float, service_time: float) -> ConstantQueue:
    """Requests/s and seconds. Raises SpecError, UnstableQueueError."""
    check_queue(arrival_rate, service_time)
    return ConstantQueue(arrival_rate, service_time)


def misprinted_md1_delay(arrival_rate: float, service_time: float) -> float:
    """W_q = rho^2 / (2 mu (1 - rho)) as often printed for M/D/1: WRONG, rho times the truth. To
    compare with, not to use.
    """
    return md1(arrival_rate, service_time).mean_delay * arrival_rate * service_time


def check_queue(arrival_rate: float, service_mean: float, servers: int = 1) -> float:
    """The load per server. Raises SpecError, UnstableQueueError."""
    for name, value in (("arrival_rate", arrival_rate), ("a mean service time of", service_mean)):
        if not 0 < value < math.inf:
            raise SpecError(f"got {name} {value}; expected a finite number > 0")
    if servers < 1:
        raise SpecError(f"got servers={servers}; expected at least 1")
    load = arrival_rate * service_mean / servers
    if load >= 1:
        raise UnstableQueueError(load)
    return load


def check_level(level: float) -> None:
    """Raises SpecError."""
    if not 0 <= level < 1:
        raise SpecError(f"got level {level}; expected a probability, at least 0 and below 1")
