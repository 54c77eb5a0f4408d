"""Prefill and decode as two stations in series, each first come first served (disaggregated serving).

First station: M/G/1, exact. Second station: its arrivals are the first one's departures, with SCV

    cd2 = 1 - rho1^2 (1 - cs1^2)                      (Marshall 1968 with Wq of M/G/1; QNA, Whitt 1983)

Poisson where the first service is exponential (Burke: then the second station is M/G/1 and exact); else E[Wq2] by
Kraemer and Langenbach-Belz (queueing.gg1), an APPROXIMATION. In one server the two phases are one service time
S = kp P + c + a N: queueing.mg1 with prompt lengths. Measured error of E[Wq2], both services gamma with cs2 in 0.1 .. 2, loads .3 to .9:
within 15 % (25 % where the first station is much busier than the second); tests/queueing/test_single_server.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from queueing.distributions import Vector
from queueing.gg1 import klb
from queueing.mg1 import mean_delay
from queueing.service_time import ServiceTime


@dataclass(frozen=True)
class Tandem:
    """Mean delays before either station and the mean sojourn through both, seconds; `exact` where Burke's theorem holds."""

    first_delay: float
    second_delay: float
    sojourn: float
    first_load: float
    second_load: float
    exact: bool


def solve_tandem(prefill: ServiceTime, decode: ServiceTime, arrival_rate: float) -> Tandem:
    """Mean delays. Raises UnstableQueueError for either station."""
    first_load, first_delay = mean_delay(prefill, arrival_rate)
    second_load, poisson_delay = mean_delay(decode, arrival_rate)
    exact = len(prefill.values) == 1 and prefill.cv == 1
    departures = 1 - first_load**2 * (1 - prefill.scv)
    second_delay = poisson_delay if exact else klb(arrival_rate, decode.mean, departures, decode.scv)
    sojourn = first_delay + prefill.mean + second_delay + decode.mean
    return Tandem(first_delay, second_delay, sojourn, first_load, second_load, exact)


def tandem_path(arrived_at: Vector, prefill: Vector, decode: Vector) -> tuple[Vector, Vector]:
    """Delays before either station of given requests: the recursion W' = (W + S - gap)^+ twice, in closed form."""
    first = _waits(arrived_at, prefill)
    departed = arrived_at + first + prefill
    return first, _waits(departed, decode)


def _waits(arrived_at: Vector, service: Vector) -> Vector:
    """W_n = Y_n - min_{k <= n} Y_k, Y_n the work that came before n less the time since the first arrival."""
    level = np.append(0.0, np.cumsum(service)[:-1]) - arrived_at
    return np.asarray(level - np.minimum.accumulate(level))
