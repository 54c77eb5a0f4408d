"""M/G/1 of two kinds of requests, first come, first served, with s seconds of changeover where a
request follows one of the other kind: the services are semi-Markov.

    S_n = B_k + s [the one before is of the other kind],  k = 0, 1 with probabilities p_k
    rho = lam (E[B] + 2 p_0 p_1 s) < 1

W the wait until the changeover or the service begins, g = lam - theta, f_k = lam p_k E[e^{-theta
B_k}], c_k = P(idle behind a request, of kind k):

    psi_k (g - f_k) = f_k e^{-theta s} psi_{1-k} - theta c_k,   psi_k = E[e^{-theta W}; the one
                                                                 before is of kind k]
    c_0 + c_1 = 1 - rho,   c_0 f_1 e^{-theta s} = c_1 (f_0 - g) at the root of
    (f_0 - g) (f_1 - g) = f_0 f_1 e^{-2 theta s} in (0, lam)

    E[W] (1 - rho) = sum_k lam p_k (E[B_k^2] / 2 + q (E[B_k] s + s^2 / 2))
                     + s sum_k p_k (c_j - q + lam q (s p_k + E[B_j])),   j = 1 - k, q = p_j

The determinant is negative to the right of 0 where rho < 1 and positive at lam: the root is found
between them by Brent's method. Without changeover it is Pollaczek and Khinchine's formula.
Conditions: Poisson arrivals, independent kinds and services. Source: Gaver (1963), orientation
times; Neuts (1966), semi-Markov services.

>>> import numpy as np
>>> second = ServiceTime(np.array([1.0]), np.array([1.0]))
>>> round(Changeover((0.5, 0.5), (second, second), 0.0).mean_delay(0.5), 12)  # M/D/1
0.5
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.service_time import ServiceTime


@dataclass(frozen=True, eq=False)
class Changeover:
    """Of each kind its share of the requests, with sum 1, and its service time; `seconds` of a
    changeover.
    """

    shares: tuple[float, float]
    services: tuple[ServiceTime, ServiceTime]
    seconds: float

    @property
    def mean(self) -> float:
        """E[S], with the changeovers."""
        p, q = self.shares
        own = p * self.services[0].mean + q * self.services[1].mean
        return own + 2 * p * q * self.seconds

    @property
    def scv(self) -> float:
        """Squared coefficient of variation of S."""
        return self._second_moment / self.mean**2 - 1

    @property
    def _second_moment(self) -> float:
        s = self.seconds
        return sum(
            p * (own.second_moment + (1 - p) * (2 * own.mean * s + s**2))
            for p, own in zip(self.shares, self.services, strict=True)
        )

    def mean_delay(self, arrival_rate: float) -> float:
        """E[W], seconds. Raises UnstableQueueError."""
        load = arrival_rate * self.mean
        if load >= 1:
            raise UnstableQueueError(load)
        delay = arrival_rate * self._second_moment / 2
        if self.seconds and min(self.shares) > 0:
            delay += self.seconds * self._follows(arrival_rate, load)
        return delay / (1 - load)

    def _follows(self, rate: float, load: float) -> float:
        """What a delay and the kind of the request before it have to do with each other."""
        idle, total = self._idle(rate, load), 0.0
        for kind in (0, 1):
            other, p = 1 - kind, self.shares[kind]
            q, b = self.shares[other], self.services[other].mean
            total += p * (idle[other] - q + rate * q * (self.seconds * p + b))
        return total

    def _idle(self, rate: float, load: float) -> tuple[float, float]:
        """c_0 and c_1."""
        from scipy.optimize import brentq  # noqa: PLC0415 - a quarter of a second, and only here

        theta = rate
        while self._determinant(theta, rate) >= 0:
            theta /= 2
        root = float(brentq(self._determinant, theta, rate, args=(rate,), xtol=1e-15 * rate))
        f0, f1 = self._weights(root, rate)
        one, other = f0 - (rate - root), f1 * np.exp(-root * self.seconds)
        first = (1 - load) * one / (one + other)
        return first, 1 - load - first

    def _determinant(self, theta: float, rate: float) -> float:
        f0, f1 = self._weights(theta, rate)
        g = rate - theta
        return float((f0 - g) * (f1 - g) - f0 * f1 * np.exp(-2 * theta * self.seconds))

    def _weights(self, theta: float, rate: float) -> tuple[float, float]:
        """f_0 and f_1."""
        first, other = (
            rate * p * own.transform(theta)
            for p, own in zip(self.shares, self.services, strict=True)
        )
        return first, other
