"""M/G/1/K: one request at a time, at most K in the system; one that arrives to K is rejected.

Chain at departures, pi_i = P(i left behind), i < K, A = arrivals during a service, rho = lam E[S]:

    pi_{j+1} P(A = 0) = pi_0 P(A > j) + sum_{i=1..j} pi_i P(A > j + 1 - i)
    P(L = n) = pi_n / (pi_0 + rho), n < K        loss = P(L = K) = 1 - 1 / (pi_0 + rho)
    E[Wq] = E[(L - 1)^+] / (lam (1 - loss))      of those admitted (Little)

The first line is the flow across the level j: it goes up by any number, and down by one. All its
terms are positive, so that no digits cancel at any load. A is Poisson given S, with a gamma
residual negative binomial; its tail is cut where it is below 1e-17. Errors: 1e-15 of a probability.
Conditions: Poisson arrivals, first come first served. Source: Gross, Shortle, Thompson and Harris,
Fundamentals of Queueing Theory, chapter 5 (finite M/G/1 queues); Takagi, Queueing Analysis 2, 1993.

>>> import numpy as np
>>> one = np.ones(1)
>>> exponential = ServiceTime(one, one, cv=1.0)
>>> queue = solve_finite(exponential, 0.5, 3)  # M/M/1/3: P(L = n) ~ rho^n
>>> [round(15 * chance, 9) for chance in queue.chances.tolist()]
[8.0, 4.0, 2.0, 1.0]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.special import betainc, pdtrc

from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.errors import OutOfReachError
from kendall.queueing.latency.service_time import ServiceTime

LARGEST_ROOM = 20_000  # requests: a second
_SMALLEST, _LARGEST = 1e-150, 1e150  # P(A = 0), and the sum of a row, in the range of a float
_NEGLIGIBLE = 1e-17
_BLOCK = 64


@dataclass(frozen=True, eq=False)
class FiniteQueue:
    """An M/G/1/K queue in steady state. `chances` of 0 .. K in the system at any instant, seconds;
    delay and sojourn are means over those admitted.
    """

    loss_fraction: float
    queueing_delay: float
    sojourn_time: float
    utilisation: float
    chances: Vector

    @property
    def at_most(self) -> Vector:
        """P(L <= n), n = 0 .. K; of those that wait P((L - 1)^+ <= n) is its next value."""
        return np.asarray(np.cumsum(self.chances))


def solve_finite(service: ServiceTime, arrival_rate: float, most: int) -> FiniteQueue:
    """`most` requests in the system, `arrival_rate` per second. Raises OutOfReachError: all
    services are hundreds of gaps long.
    """
    load = arrival_rate * service.mean
    behind = _left_behind(service, arrival_rate, most)
    cycle = behind[0] + load
    loss = max(0.0, 1 - 1 / cycle)
    chances = np.append(behind / cycle, loss)
    admitted = arrival_rate * (1 - loss)
    delay = float(chances[1:] @ np.arange(most)) / admitted
    return FiniteQueue(loss, delay, delay + service.mean, admitted * service.mean, chances)


def _left_behind(service: ServiceTime, arrival_rate: float, most: int) -> Vector:
    """pi_0 .. pi_{K-1}."""
    means, shape = arrival_rate * service.values, (service.cv or 1.0) ** -2
    idle = np.exp(-means) if service.cv == 0 else (1 + means / shape) ** -shape
    none, above = float(idle @ service.weights), np.concatenate([*_tails(means, service, most)])
    if none < _SMALLEST:
        raise OutOfReachError(f"load {arrival_rate * service.mean:.3g} before a bounded queue")
    found = np.zeros(most)
    found[0] = 1.0
    for j in range(most - 1):
        first = max(1, j + 2 - above.size)
        up = found[first : j + 1] @ above[j + 1 - first : 0 : -1]
        up += above[j] if j < above.size else 0.0
        found[j + 1] = up / none
        if found[j + 1] > _LARGEST:
            found /= found[j + 1]
    return np.asarray(found / found.sum())


def _tails(means: Vector, service: ServiceTime, most: int) -> Iterator[Vector]:
    """P(A > k) for k = 0, 1, ..., in blocks, as far as they matter; `means`: of A, given S."""
    for first in range(0, most, _BLOCK):
        numbers = np.arange(first, first + _BLOCK)[:, None]
        if service.cv == 0:
            tails = pdtrc(numbers, means)
        else:
            shape = service.cv**-2
            tails = betainc(numbers + 1, shape, means / (means + shape))
        block = tails @ service.weights
        yield block
        if block[-1] < _NEGLIGIBLE:
            return
