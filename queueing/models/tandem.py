"""Prefill and decode: in one server one after the other (M/G/1), or disaggregated, two stations in
series.

one server      S = setup + kp P + step N is the service time of ONE M/G/1 queue: `solve_mg1` with
                prompts; `phases` gives S
disaggregated   prefill station S1 = setup + kp P, then decode station S2 = step N, each one request
                at a time, residuals independent

The first station is M/G/1, exact. The second sees the departures of the first, which are not
Poisson:

    S1 exponential                Burke: they are Poisson; the second is M/G/1, exact
    S2 <= S1 always               nobody waits at the second, exact
    S1 = D1 < S2 = D2 constant    Friedman: the total delay is that of M/D/1 with D2 alone, exact
    else                          approximation: cd^2 = 1 - rho1^2 (1 - cs1^2), then a two-moment
                                  GI/G/1 (QNA; queueing.models.gg1: Kraemer and Langenbach-Belz,
                                  without their correction for cd^2 > 1)

A transfer of KV memory between the stations is a delay in which requests do not wait for each
other: a constant one changes no queueing delay; where it differs, only Burke's case stays exact, as
Poisson departures stay Poisson. `transfer` of `tandem_path` is constant.

pooled          one server for either phase, not interrupted; behind its prefill a request waits
                again. With the work V of both phases and the prefills of those that arrive until
                its decode starts, a request is decoded after a delay busy period:

    E[D] = (E[V] + E[S1]) / (1 - rho1),  E[V] = lam E[(S1 + S2)^2] / (2 (1 - rho))   prefill first
    E[D] = E[V] + E[S1]                                                  first come, first served

                E[T] = E[D] + E[S2]; before its prefill, where these go first, it waits
                lam (E[S1^2] + E[S2^2]) / (2 (1 - rho1)) (Cobham). Exact: no transfer.

Poisson arrivals, unlimited buffers, first come first served but for prefills first.

Measured against simulation (4e6 requests a cell; uniform, gamma, lognormal, two-valued services;
larger load 0.3, 0.6, 0.9), approximation / simulation - 1:
  first station at half the load of the second or less: second delay -7 to +7 %, sojourn -3 to +6 %
  equal loads: second delay -30 to +51 %, sojourn -19 to +4 %; low variance at both is worst: too
    high in light traffic, too low in heavy traffic, where the departures' correlation counts
  two far values at the first station (SCV 2.6), equal loads: second delay -38 to +9 %, sojourn -6
    to +3 %
For equal loads rather simulate: `tandem_path`, the exact recursion on given arrivals and services.
Source: Cobham (1954), Burke (1956), Friedman (1965), Whitt (1983).

>>> tandem_path(np.array([0.0, 1.0]), np.array([[2.0, 2.0], [3.0, 1.0]]))  # starts 0, 2 and 2, 5
array([[0., 1.],
       [0., 1.]])
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.models.gg1 import best_estimate, kingman
from kendall.queueing.models.mg1 import SingleQueue, mean_delay, solve_service
from kendall.queueing.result import LEVELS, Levels


@dataclass(frozen=True)
class TandemQueue:
    """Two stations in series. Means in seconds; `exact` says whether `second_delay` is, the
    first station always is.
    """

    first: SingleQueue
    second_delay: float
    sojourn: float
    loads: tuple[float, float]
    departure_scv: float  # of the gaps between the first station's departures, QNA
    exact: bool


def phases(
    law: LatencyModel,
    output_tokens: TokenDistribution,
    prompt_tokens: TokenDistribution | None = None,
) -> tuple[ServiceTime, ServiceTime]:
    """Prefill and decode service times of a single request. Raises SpecError where one of them
    takes no time.
    """
    seconds, chances = _prefills(law.without_stalls(), prompt_tokens)
    return ServiceTime.of_values(seconds, chances, law), ServiceTime.of(
        replace(law, k1=0.0, k2=0.0, kp=0.0), output_tokens
    )


def phase_means(
    law: LatencyModel,
    output_tokens: TokenDistribution,
    prompt_tokens: TokenDistribution | None = None,
) -> tuple[float, float]:
    """Their means, seconds, which stalls leave as they are, also where these are too many for a
    law. Raises SpecError likewise.
    """
    seconds, chances = _prefills(law, prompt_tokens)
    return float(chances @ seconds), law.step(1) * output_tokens.mean


def _prefills(law: LatencyModel, prompt_tokens: TokenDistribution | None) -> tuple[Vector, Vector]:
    lengths: Vector = np.zeros(1)
    chances: Vector = np.ones(1)
    if prompt_tokens is not None and law.kp != 0:
        support = np.flatnonzero(prompt_tokens.pmf)
        lengths, chances = support.astype(float), prompt_tokens.pmf[support]
    seconds = law.speed * (law.k1 + law.k2 + law.kp * lengths)
    if not np.all(seconds > 0):
        raise SpecError(
            "got a latency law whose prefill takes no time; expected k1 + k2 + kp prompt tokens > 0"
        )
    if law.step(1) == 0:
        raise SpecError(
            "got a latency law whose decode takes no time; expected k3 + k4 > 0, or prefill alone: "
            "one server"
        )
    return seconds, chances


def solve_disaggregated(
    law: LatencyModel,
    output_tokens: TokenDistribution,
    arrival_rate: float,
    prompt_tokens: TokenDistribution | None = None,
) -> TandemQueue:
    """Prefill on one engine, decode on another of the same law; no transfer time. Raises
    SpecError, UnstableQueueError.
    """
    return solve_tandem(*phases(law, output_tokens, prompt_tokens), arrival_rate)


def solve_tandem(
    first: ServiceTime,
    second: ServiceTime,
    arrival_rate: float,
    *,
    alike: bool = True,
    levels: Levels = LEVELS,
) -> TandemQueue:
    """Any two stations; `sojourn` without what the way between them takes, which is `alike` for all
    or not. Raises UnstableQueueError with the larger load.
    """
    loads = (arrival_rate * first.mean, arrival_rate * second.mean)
    if max(loads) >= 1:
        raise UnstableQueueError(max(loads))
    departure_scv = 1 - loads[0] ** 2 * (1 - first.scv)
    exact = is_exact(first, second, alike=alike)
    if exact:
        delay = _exact_second(first, second, arrival_rate)
    else:
        delay = best_estimate(
            kingman(arrival_rate, second.mean, departure_scv, second.scv), departure_scv
        )
    station = solve_service(first, arrival_rate, levels=levels)
    total = (station.sojourn.mean or 0.0) + delay + second.mean
    return TandemQueue(station, delay, total, loads, departure_scv, exact)


def solve_pooled(
    first: ServiceTime, second: ServiceTime, arrival_rate: float, *, prefill_first: bool
) -> tuple[float, float]:
    """Mean delays before prefill and before decode on one server of both, s. Raises
    UnstableQueueError.
    """
    loads = arrival_rate * first.mean, arrival_rate * second.mean
    if sum(loads) >= 1:
        raise UnstableQueueError(sum(loads))
    squares = first.second_moment + second.second_moment
    whole = squares + 2 * first.mean * second.mean
    work = arrival_rate * whole / (2 * (1 - sum(loads)))
    if not prefill_first:
        return work, 0.0
    before = arrival_rate * squares / (2 * (1 - loads[0]))
    return before, (work + first.mean) / (1 - loads[0]) - before - first.mean


def is_exact(first: ServiceTime, second: ServiceTime, *, alike: bool = True) -> bool:
    """Whether the mean delay at the second station is known exactly: one of the first three
    lines above; where the ways between them are not `alike`, the first.
    """
    in_order = _never_waits(first, second) or (first.is_constant and second.is_constant)
    return is_exponential(first) or (alike and in_order)


def _exact_second(first: ServiceTime, second: ServiceTime, arrival_rate: float) -> float:
    if is_exponential(first):
        return mean_delay(second, arrival_rate)[1]
    if _never_waits(first, second):
        return 0.0
    return mean_delay(second, arrival_rate)[1] - mean_delay(first, arrival_rate)[1]


def is_exponential(service: ServiceTime) -> bool:
    """Whether its departures from a first come, first served station are Poisson (Burke)."""
    return service.cv == 1 and len(service.values) == 1


def _never_waits(first: ServiceTime, second: ServiceTime) -> bool:
    return first.cv == second.cv == 0 and bool(second.values.max() <= first.values.min())


def tandem_path(arrivals: Vector, services: Vector, transfer: float = 0.0) -> Vector:
    """Delays (stations x requests) of requests arriving at `arrivals` (seconds, sorted) with
    `services` (stations x requests), which take `transfer` seconds from a station to the next.

    Exact: request n starts at a station at max(its arrival there, the end of n - 1 there), which
    with partial sums of the services is a running maximum: end_n = max_{m <= n} (arrival_m +
    service_m + ... + service_n). Everything starts empty.
    """
    instants = np.asarray(arrivals, dtype=float)
    delays = np.empty(np.shape(services))
    for station, service in enumerate(np.asarray(services, dtype=float)):
        total = np.cumsum(service)
        ends = np.maximum.accumulate(instants - (total - service)) + total
        delays[station, :1] = 0.0
        delays[station, 1:] = np.maximum(
            ends[:-1] - instants[1:], 0.0
        )  # of the sums' rounding nothing is left where nobody waits
        instants = instants + delays[station] + service + transfer
    return delays
