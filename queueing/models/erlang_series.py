"""The renewal function U of M/D/1 (Erlang's series), for any load, without the series' alternating
signs.

    U(x) = sum_{k <= x/D} (-lam (x - k D))^k / k! e^{lam (x - k D)}    loses 0.87 lam x digits:
                                                                       not used
    U' = lam (U(x) - U(x - D)),  U = e^{lam x} on 0 .. D               the same function

Method: Taylor polynomials of degree 21 on pieces of at most 1/lam; an error is amplified by at most
U(x) itself. For loads above 1 U(x) = e^{theta x} V(x), where V is the renewal function of the
conjugate queue with rate lam - theta and load below 1, theta = lam (1 - e^{-theta D}). Accurate to
about 1e-14 absolutely in (1 - rho) U.

    int_0^x U = sum_{k <= x/D} (U(x - k D) - 1) / lam        from U' itself: used for loads above 1
    1 - (1 - rho) U(x) = (1 - rho) sum_{k > x/D} (lam (k D - x))^k / k! e^{-lam (k D - x)}

The last one (Abel's identity) has positive terms and is used where it is small; for rho > 0.98 its
first pole, (1 - rho)/(rho e^{g D} - 1) e^{-g x}, lam (e^{g D} - 1) = g, is all of it.

Source: Erlang (1909); Takacs (1962).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import gammaln

from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.errors import NotConvergedError
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.models.renewal import (
    RenewalFunction,
    renewal_function,
    settled,
    settling_time,
)
from kendall.queueing.models.roots import bisected

_TERMS = 22  # of Taylor's series over at most 1/lam: 1/22! = 1e-21
_MOST_PIECES = 50_000
_MOST_INSTANTS = 2**17
_LONG = 16  # service times: from here on it is asked whether U has settled


@dataclass(frozen=True, eq=False)
class ErlangSeries:
    """Poisson arrivals (1/s) and constant service (seconds), up to the horizon (seconds). Raises
    NotConvergedError: too many pieces.
    """

    arrival_rate: float
    service_time: float
    horizon: float

    def __post_init__(self) -> None:
        if self.horizon / self._width > _MOST_PIECES:
            raise NotConvergedError(
                f"Erlang's series over {self.horizon / self.service_time:.4g} service times",
                math.inf,
            )

    @cached_property
    def theta(self) -> float:
        """The rate at which U grows for loads above 1; else 0."""
        load = self.arrival_rate * self.service_time
        if load <= 1:
            return 0.0
        root = bisected(lambda t: load * -math.expm1(-t) / t - 1, 1e-12, load)
        return float(root) / self.service_time

    @property
    def _rate(self) -> float:
        return self.arrival_rate - self.theta

    @property
    def _per_service(self) -> int:
        return max(1, math.ceil(self._rate * self.service_time))

    @property
    def _width(self) -> float:
        return self.service_time / self._per_service

    @cached_property
    def _rows(self) -> Vector:
        """`rows[i, j]` multiplies (x / width - i)^j on piece i."""
        rate, per = self._rate * self._width, self._per_service
        rows: list[list[float]] = []
        start = 1.0
        for i in range(math.floor(self.horizon / self._width) + 1):
            lag = rows[i - per] if i >= per else [0.0] * _TERMS
            row = [start]
            for j in range(_TERMS - 1):
                row.append(rate * (row[j] - lag[j]) / (j + 1))
            rows.append(row)
            start = math.fsum(row)
        return np.array(rows)

    def scaled(self, x: Vector) -> Vector:
        """V(x) = U(x) e^{-theta x}; 0 where x < 0."""
        position = np.maximum(x, 0.0) / self._width
        piece = np.minimum(position.astype(np.int64), len(self._rows) - 1)
        value = np.zeros_like(position)
        for column in self._rows.T[::-1]:
            value = value * (position - piece) + column[piece]
        return np.where(x < 0, 0.0, value)

    def share(self, x: Vector) -> Vector:
        """U(x) / U(horizon)."""
        top = float(self.scaled(np.array([self.horizon]))[0])
        return np.asarray(
            self.scaled(x) / top * np.exp(self.theta * (np.minimum(x, self.horizon) - self.horizon))
        )

    def function(self) -> RenewalFunction:
        """On at least 4096 intervals, and 64 in a service time where that many are not too many."""
        services = self.horizon / self.service_time
        instants = np.linspace(
            0, self.horizon, min(max(4096, math.ceil(64 * services)), _MOST_INSTANTS) + 1
        )
        inverse = float(self.share(np.zeros(1))[0])
        load = self.arrival_rate * self.service_time
        tail = self.tail(self.horizon) if load < 1 else None
        return RenewalFunction(
            instants, self.share(instants), inverse, tail, self.horizon - self._area(inverse)
        )

    def tail(self, x: float) -> float:
        """P(Wq > x) = 1 - (1 - rho) U(x) of the queue without patience, for loads below 1;
        relative accuracy about 1e-11.
        """
        load = self.arrival_rate * self.service_time
        direct = 1 - (1 - load) * float(self.scaled(np.array([x]))[0])
        if direct > 1e-3:
            return direct
        if load > 0.98:
            return _first_pole(load, x / self.service_time)
        first = math.floor(x / self.service_time) + 1
        k = first + np.arange(
            math.ceil(45 / -(math.log(load) + 1 - load))
        )  # terms fall at least as (rho e^{1 - rho})^k
        work = load * k - self.arrival_rate * x
        return (1 - load) * float(np.exp(k * np.log(work) - work - gammaln(k + 1)).sum())

    def _area(self, inverse: float) -> float:
        """int_0^horizon of the share."""
        if self.theta:
            behind = self.horizon - self.service_time * np.arange(
                math.floor(self.horizon / self.service_time) + 1
            )
            return float((self.share(behind) - inverse).sum()) / self.arrival_rate
        powers = np.arange(1, _TERMS + 1)
        last = self.horizon / self._width - (len(self._rows) - 1)
        pieces = float((self._rows[:-1] / powers).sum()) + float(
            self._rows[-1] @ (last**powers / powers)
        )
        return self._width * pieces * inverse


def renewal_of(service: ServiceTime, arrival_rate: float, horizon: float) -> RenewalFunction:
    """U up to the horizon by the best method. Raises NotConvergedError."""
    near = (
        min(horizon, settling_time(service, arrival_rate))
        if horizon > _LONG * service.mean
        else horizon
    )
    if service.is_constant:
        found = ErlangSeries(arrival_rate, service.mean, near).function()
    else:
        found = renewal_function(service, arrival_rate, near)
    return found if near == horizon else settled(found, horizon)


def _first_pole(load: float, services: float) -> float:
    root = bisected(lambda g: load * math.expm1(g) / g - 1, 1e-12, 1.0)  # service times
    return (1 - load) / (load * math.exp(root) - 1) * math.exp(-root * services)
