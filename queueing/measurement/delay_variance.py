"""How much the mean delay of a run varies from run to run, by theory: known from arrivals and
service times, not from the delays.

A run that saw no long busy period has a low mean delay and, for the same reason, a low estimate of
its own variance. Rate and service times do not share that luck: at utilisation 0.9 a run of 6,000
M/M/1 requests misses its mean delay by 26 % (standard error), its utilisation by 2 %. For one
request at a time (M/G/1) the asymptotic variance of the mean follows from them exactly:
g(x) = a x^2 + (2 a / lam) x with a = lam / (2 (1 - rho)) solves Poisson's equation
g(x) - E g((x + S - T)^+) = x - w, so

    sigma^2 = lam / (1 - rho) (E W^3 - w E W^2) + (1 + rho) / (1 - rho) Var W

with E W^k by Takacs' recursion (M/M/1: Daley 1968). The mean of n delays then has standard error
sigma / sqrt(n). A duration D = W + R that contains the delay (sojourn time, time to first token)
has at most (sigma + sigma_R)^2, by Cauchy and Schwarz.

>>> moments = mg1_delay_moments(0.9, [1.0, 2.0, 6.0, 24.0])  # M/M/1
>>> round(moments.mean, 9), round(moments.asymptotic_variance)
(9.0, 35901)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kendall.queueing.measurement.batch_means import BATCHES, FloatArray, variance_of_mean

OVERLAP = 0.02  # of the busy time: clocks of client and server, not a second request in service
LEAST = 100  # requests


@dataclass(frozen=True, slots=True)
class DelayMoments:
    """Of the stationary queueing delay; seconds."""

    mean: float
    variance: float
    asymptotic_variance: float  # of the mean of n delays, times n


@dataclass(frozen=True, slots=True)
class AsymptoticVariance:
    """sigma^2 of a stationary sequence (the variance of the mean of n values is sigma^2 / n),
    free of units.
    """

    relative: float  # sigma^2 over the squared mean
    memory: float  # sigma^2 over the variance of one value, in values

    @classmethod
    def of(cls, moments: DelayMoments) -> AsymptoticVariance:
        """From the moments of the delay; infinite where nobody waits."""
        if not moments.mean > 0:
            return cls(math.inf, 1.0)
        return cls(
            moments.asymptotic_variance / moments.mean**2,
            moments.asymptotic_variance / moments.variance,
        )

    def with_rest(self, delays: FloatArray, durations: FloatArray) -> AsymptoticVariance:
        """Of durations that contain the delays, request by request; an upper bound."""
        rest = durations - delays
        sigma = math.sqrt(self.relative) * float(delays.mean())
        total = (sigma + math.sqrt(rest.size * variance_of_mean(rest - rest[0], BATCHES)[0])) ** 2
        mean, variance = float(durations.mean()), float(durations.var())
        if not (mean > 0 and variance > 0):
            return AsymptoticVariance(math.inf, 1.0)
        return AsymptoticVariance(total / mean**2, max(1.0, total / variance))


UNSTABLE = AsymptoticVariance(math.inf, math.inf)


def mg1_delay_moments(rate: float, service_moments: Sequence[float]) -> DelayMoments:
    """M/G/1, rate * E S < 1; `service_moments` are E S .. E S^4."""
    load = rate * service_moments[0]
    waits = [1.0]
    for n in (1, 2, 3):
        terms = (
            math.comb(n, i) * service_moments[i] / (i + 1) * waits[n - i] for i in range(1, n + 1)
        )
        waits.append(rate / (1 - load) * sum(terms))
    _, mean, second, third = waits
    variance = second - mean**2
    asymptotic = rate / (1 - load) * (third - mean * second) + (1 + load) / (1 - load) * variance
    return DelayMoments(mean, variance, asymptotic)


def single_server_variance(
    arrived_at: FloatArray, delays: FloatArray, service_times: FloatArray
) -> AsymptoticVariance | None:
    """Of the delays of a run, from its arrivals and service times in order of arrival; the delays
    say only whether the server is single.

    None where the formula does not hold: several requests were served at once, or the gaps between
    arrivals are not exponential.
    """
    n = arrived_at.size
    if n < LEAST or not _one_by_one(arrived_at + delays, service_times):
        return None
    gaps = np.diff(arrived_at)
    mean = float(gaps.mean())
    # the squared coefficient of variation is 1 within four standard errors
    if not mean > 0 or abs(float(gaps.var()) / mean**2 - 1) > 4 * math.sqrt(8 / gaps.size):
        return None
    rate = (n - 1) / float(arrived_at[-1] - arrived_at[0])
    moments = [float(np.mean(service_times**k)) for k in (1, 2, 3, 4)]
    return (
        AsymptoticVariance.of(mg1_delay_moments(rate, moments))
        if rate * moments[0] < 1
        else UNSTABLE
    )


def _one_by_one(starts: FloatArray, service_times: FloatArray) -> bool:
    """Whether the intervals of service do not overlap, but for a share that clocks explain."""
    order = np.argsort(starts, kind="stable")
    begin, end = starts[order], (starts + service_times)[order]
    before = np.maximum.accumulate(end)[:-1]
    overlap = float(np.sum(np.clip(np.minimum(before, end[1:]) - begin[1:], 0.0, None)))
    return overlap <= OVERLAP * float(service_times.sum())
