"""M/M/1, M/M/c and M/D/1 in closed form: the yardsticks.

    M/M/1   E[W] = 1/(mu - lam),  E[Wq] = rho/(mu - lam),  P(Wq > t) = rho e^{-(mu - lam) t},  P(W > t) = e^{-(mu - lam) t}
    M/M/c   P(Wq > t) = C e^{-(c mu - lam) t},  C = Erlang's delay probability
    M/D/1   E[Wq] = rho / (2 mu (1 - rho))

The serving chapter prints rho^2/(2 mu (1 - rho)) for M/D/1: that is too small by the factor rho (rho^2/(2 (1 - rho)) is the mean queue
length). Conditions: Poisson arrivals, first come first served, rho < 1. Source: any textbook (Shortle et al., 2018); THEORY g.

The chapter's case study, 3.2 requests/s of 0.25 s:
>>> queue = solve_mm1(3.2, 4.0)
>>> round(queue.sojourn.mean, 9), round(queue.delay.mean, 9), round(queue.sojourn.p99, 3)
(1.25, 1.0, 5.756)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from queueing.errors import UnstableQueueError
from queueing.result import LEVELS, Quantiles


@dataclass(frozen=True)
class MarkovQueue:
    """Delay and sojourn (seconds), load per server, probability of having to wait."""

    delay: Quantiles
    sojourn: Quantiles
    load: float
    waiting: float


def solve_mm1(arrival_rate: float, service_rate: float) -> MarkovQueue:
    """M/M/1. Raises UnstableQueueError."""
    load = arrival_rate / service_rate
    if load >= 1:
        raise UnstableQueueError(load)
    slack = service_rate - arrival_rate
    sojourn = Quantiles(1 / slack, *(-math.log1p(-level) / slack for level in LEVELS.values()))
    return MarkovQueue(_exponential_tail(load, slack), sojourn, load, load)


def solve_mmc(arrival_rate: float, service_rate: float, servers: int) -> MarkovQueue:
    """M/M/c; the sojourn's quantiles are left out. Raises UnstableQueueError."""
    load = arrival_rate / (servers * service_rate)
    if load >= 1:
        raise UnstableQueueError(load)
    waiting = erlang_c(arrival_rate / service_rate, servers)
    delay = _exponential_tail(waiting, servers * service_rate - arrival_rate)
    return MarkovQueue(delay, Quantiles(float(delay.mean or 0.0) + 1 / service_rate), load, waiting)


def mean_md1(arrival_rate: float, service_time: float) -> float:
    """E[Wq] of M/D/1, seconds. Raises UnstableQueueError.

    >>> mean_md1(0.5, 1.0)
    0.5
    """
    load = arrival_rate * service_time
    if load >= 1:
        raise UnstableQueueError(load)
    return load * service_time / (2 * (1 - load))


def erlang_c(offered: float, servers: int) -> float:
    """P(all servers busy) in M/M/c at offered load lam/mu < c, by Erlang B's recursion (no factorials).

    >>> round(erlang_c(2.0, 3), 6)
    0.444444
    """
    if offered >= servers:
        raise UnstableQueueError(offered / servers)
    blocking = 1.0
    for n in range(1, servers + 1):
        blocking = offered * blocking / (n + offered * blocking)
    return blocking / (1 - offered / servers * (1 - blocking))


def _exponential_tail(waiting: float, rate: float) -> Quantiles:
    quantiles = (max(0.0, math.log(waiting / (1 - level)) / rate) for level in LEVELS.values())
    return Quantiles(waiting / rate, *quantiles)
