"""U(x) = sum_n rho^n Fe^{*n}(x), the renewal function behind every delay law of a single server
with Poisson arrivals.

    U(x) = 1 + lam int_0^x U(x - y) P(S > y) dy
           rho = lam E[S] of any size (above 1 U grows exponentially)
    Z(x) = 1 - (1 - rho) U(x) = rho P(Se > x) + lam int_0^x Z(x - y) P(S > y) dy
           (the tail of the M/G/1 delay, rho < 1)

Z has its own equation because 1 - (1 - rho) U loses all digits where it is small. U is returned as
its share U(x) / U(horizon) and 1 / U(horizon), which do not overflow.

Method: product trapezoid (U and Z linear between lattice points, the kernel integrated exactly from
the excess of S), a discrete renewal equation with positive terms. It is divided out in O(n log n)
by Newton's power-series inverse, after the kernel is tilted by e^{gamma x} to total mass 1
(Lundberg's exponent of the kernel up to the horizon): in that scale solutions neither grow nor die,
so that the FFT's absolute errors of 1e-13 are relative errors. Two widths and Richardson's
extrapolation: error O(h^4) for a smooth law of S; atoms off the lattice leave O(h^2) times their
probability. Source: Takacs (1962); THEORY b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.errors import NotConvergedError
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.models.roots import bisected

_PER_SERVICE = 1024  # lattice points in a mean service time, fewer over long horizons, but
_AT_LEAST = 100
_FEWEST, _USUAL, _MOST = 2**10, 2**14, 2**18
_TOLERANCE = 1e-5
_SETTLING = 4096


@dataclass(frozen=True, eq=False)
class RenewalFunction:
    """U on a lattice of instants 0 .. horizon (seconds)."""

    instants: Vector
    share: Vector  # U(x) / U(horizon)
    inverse: float  # 1 / U(horizon)
    tail: float | None  # Z(horizon), accurate where it is small; None for loads >= 1
    shortfall: float  # int_0^horizon of 1 - share, seconds


def renewal_function(service: ServiceTime, arrival_rate: float, horizon: float) -> RenewalFunction:
    """Up to the horizon, for S that is not constant. Raises NotConvergedError where the lattice
    cannot be fine enough.
    """
    services = horizon / service.mean
    # a gamma residual: smooth, but dear at every point
    usual = _USUAL // (1 + len(service.values) // 8) if service.cv else _USUAL
    wanted = max(_FEWEST, min(_PER_SERVICE * services, usual), _AT_LEAST * services)
    points = 2 ** math.ceil(math.log2(min(wanted, _MOST)))
    fine = _on_lattice(service, arrival_rate, horizon, points)
    coarse = _on_lattice(service, arrival_rate, horizon, points // 2)
    residual = (
        max(abs(fine.inverse - coarse.inverse), abs(fine.shortfall / coarse.shortfall - 1)) / 3
    )
    if not residual < _TOLERANCE:
        raise NotConvergedError(
            f"the renewal function of M/G/1 up to {horizon:.4g} s on {points} points", residual
        )
    return RenewalFunction(
        coarse.instants,
        _better(fine.share[::2], coarse.share),
        _better(fine.inverse, coarse.inverse),
        None if fine.tail is None or coarse.tail is None else _better(fine.tail, coarse.tail),
        _better(fine.shortfall, coarse.shortfall),
    )


def settling_time(service: ServiceTime, arrival_rate: float) -> float:
    """Seconds after which Z, which is at most e^{-gamma x}, is below e^{-35} and U constant;
    infinite for loads >= 1.
    """
    if arrival_rate * service.mean >= 1:
        return math.inf
    width = service.longest / _SETTLING
    second = service.excess(width * np.arange(_SETTLING + 1))[1]
    kernel = arrival_rate * np.diff(np.append(second[0] + width * service.mean, second), 2) / width
    return 40 * width / _lundberg(kernel)


def settled(renewal: RenewalFunction, horizon: float) -> RenewalFunction:
    """The same, known to be constant from its last instant on, up to a later horizon (load below
    1): Z falls as it did before.
    """
    last = float(renewal.instants[-1])
    tail = 0.0 if renewal.tail is None else renewal.tail ** (horizon / last)
    instants, share = np.append(renewal.instants, horizon), np.append(renewal.share, 1.0)
    return RenewalFunction(instants, share, renewal.inverse, tail, renewal.shortfall)


def _better(fine: Any, coarse: Any) -> Any:
    return fine + (fine - coarse) / 3


def _on_lattice(
    service: ServiceTime, arrival_rate: float, horizon: float, points: int
) -> RenewalFunction:
    instants, width = np.linspace(0, horizon, points + 1), horizon / points
    first, second = service.excess(np.append(instants, horizon + width))
    slopes, steps = np.diff(second) / width, np.arange(points + 1)
    rising = arrival_rate * np.append(
        0.0, -slopes[:-1] - first[1:-1]
    )  # half hats left and right of each instant,
    kernel = rising + arrival_rate * (first[:-1] + slopes)  # integrated against P(S > y)
    exponent = _lundberg(kernel)
    renewals = _inverse(_tilted(kernel, exponent * steps))
    tail = None
    if arrival_rate * service.mean < 1:
        falling = _solution(renewals, arrival_rate * first[:-1], rising, exponent * steps)
        tail = float(falling[-1]) * math.exp(-exponent * points)
    calm = min(
        exponent, 0.0
    )  # U does not fall: where the kernel is defective it is divided out untilted
    U = _solution(
        renewals * np.exp((calm - exponent) * steps), np.ones(points + 1), rising, calm * steps
    )
    share = U / U[-1] * np.exp(calm * (points - steps))
    shortfall = float((1 - share).sum() - (1 - share[0]) / 2) * width
    return RenewalFunction(instants, share, math.exp(calm * points) / float(U[-1]), tail, shortfall)


def _solution(renewals: Vector, source: Vector, rising: Vector, tilt: Vector) -> Vector:
    """f_n = source_n + f_0 rising_n + sum_{k < n} kernel_k f_{n-k}, f_0 = source_0, times
    e^tilt: node 0 carries half a hat only.
    """
    right = _tilted(source + source[0] * rising, tilt)
    right[0] = 0.0
    found = _product(renewals, right)
    found[0] = source[0]
    return found


def _lundberg(kernel: Vector) -> float:
    """The exponent per lattice step: sum_k kernel_k e^{exponent k} = 1."""
    used = np.flatnonzero(kernel > 0)
    logs = np.log(kernel[used])

    def excess(exponent: float) -> float:
        terms = logs + exponent * used
        top = float(terms.max())
        return top + math.log(float(np.exp(terms - top).sum()))

    low, high = -1 / len(kernel), 1 / len(kernel)
    while excess(low) > 0:
        low *= 2
    while excess(high) < 0:
        high *= 2
    return float(bisected(excess, low, high))


def _tilted(values: Vector, tilt: Vector) -> Vector:
    """values * e^tilt; where a value is 0 the factor, which may overflow, is not asked for."""
    return np.asarray(values * np.exp(np.where(values > 0, tilt, 0.0)))


def _inverse(kernel: Vector) -> Vector:
    """The power series 1 / (1 - kernel(z)), by Newton's doubling."""
    series = -kernel
    series[0] += 1
    found, size = np.array([1 / series[0]]), 1
    while size < len(series):
        size *= 2
        f, g = np.fft.rfft(series[:size], 2 * size), np.fft.rfft(found, 2 * size)
        found = np.fft.irfft(g * (2 - f * g), 2 * size)[:size]
    return np.asarray(found[: len(series)])


def _product(left: Vector, right: Vector) -> Vector:
    size = 2 ** math.ceil(math.log2(2 * len(left)))
    return np.asarray(
        np.fft.irfft(np.fft.rfft(left, size) * np.fft.rfft(right, size), size)[: len(left)]
    )
