"""GI/G/1 from two moments: Kingman's upper bound, the heavy-traffic approximation that is often
taken for it, and a better one.

    approximation   E[Wq] ~ rho/(1 - rho) (ca^2 + cs^2)/2 E[S]
                    ("Kingman's formula" of the serving literature)
    upper bound     E[Wq] <= lam (Var A + Var S) / (2 (1 - rho))      Kingman (1962)
    KLB             approximation * e^{-g}                        Kraemer and Langenbach-Belz (1976)
                    g = 2 (1 - rho)(1 - ca^2)^2 / (3 rho (ca^2 + cs^2)) for ca^2 <= 1
                    g = (1 - rho)(ca^2 - 1)/(ca^2 + 4 cs^2) above

ca^2, cs^2: squared coefficients of variation of gaps A and services S; gaps independent, first
come, first served. All three are exact or (the bound) tight as rho -> 1; the first and the last are
exact for Poisson arrivals (Pollaczek-Khinchine). The approximation is NOT a bound: below the truth
for ca^2 > 1.

Measured error of each against the exact GI/M/1 (exponential services, gamma gaps; the root is
confirmed by simulation), in per cent:

    load                   0.1     0.3     0.6    0.85    0.95
    ca^2 = 0     appr.    +1e5    +403     +56     +12      +4
                 bound    the same
                 KLB      +203      +6       0       0       0
    ca^2 = 1/4   appr.    +915    +121     +29      +7      +2
                 bound            +566         ..           +4
                 KLB       -32     +10      +5      +2       0
    ca^2 = 4     appr.     -67     -42     -19      -6      -2
                 bound            +431         ..           +6
                 KLB       -77     -55     -30     -12      -4

So: KLB for ca^2 < 1; for gaps that cluster as gamma gaps do the plain approximation is the nearer
one, and both are too low.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.models.mm1 import check_queue

LARGEST_SCV = 1000.0  # of gaps: beyond, a simulation of any length meets too few of the long ones
_REGULAR = 1e-12  # a smaller SCV is none


@dataclass(frozen=True)
class TwoMomentDelay:
    """Mean queueing delays, seconds."""

    heavy_traffic: float
    upper_bound: float
    kraemer_langenbach_belz: float
    load: float


def kingman(
    arrival_rate: float, service_mean: float, arrival_scv: float, service_scv: float
) -> TwoMomentDelay:
    """Requests/s, seconds, squared coefficients of variation. Raises SpecError, UnstableQueueError.

    >>> round(kingman(3.2, 0.25, 1.0, 1.0).heavy_traffic, 9)  # M/M/1: rho / (1 - rho) E[S]
    1.0
    """
    load = check_queue(arrival_rate, service_mean)
    for name, value in (("arrival_scv", arrival_scv), ("service_scv", service_scv)):
        if not 0 <= value < math.inf:
            raise SpecError(f"got {name}={value}; expected a finite number >= 0")
    heavy = load / (1 - load) * (arrival_scv + service_scv) / 2 * service_mean
    variances = arrival_scv / arrival_rate**2 + service_scv * service_mean**2
    bound = arrival_rate * variances / (2 * (1 - load))
    return TwoMomentDelay(
        heavy, bound, heavy * math.exp(-_correction(load, arrival_scv, service_scv)), load
    )


def best_estimate(delay: TwoMomentDelay, arrival_scv: float) -> float:
    """The one whose measured error is the smaller: Kraemer and Langenbach-Belz up to Poisson
    arrivals, the plain approximation above.
    """
    return delay.kraemer_langenbach_belz if arrival_scv <= 1 else delay.heavy_traffic


def unit_gaps(rng: np.random.Generator, arrival_scv: float, out: Vector) -> Vector:
    """Fills `out` with independent gaps of mean 1: exponential for SCV 1, constant for 0, else
    gamma.
    """
    if arrival_scv == 1:
        rng.standard_exponential(out=out)
    elif arrival_scv < _REGULAR:
        out[:] = 1.0
    else:
        rng.standard_gamma(1 / arrival_scv, out=out)
        out *= arrival_scv
    return out


def _correction(load: float, arrival_scv: float, service_scv: float) -> float:
    if arrival_scv > 1:
        return (1 - load) * (arrival_scv - 1) / (arrival_scv + 4 * service_scv)
    total = arrival_scv + service_scv
    return 2 * (1 - load) * (1 - arrival_scv) ** 2 / (3 * load * total) if total else 0.0
