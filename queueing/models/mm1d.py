"""M/M/1+D and M/D/1+D in closed form, and the interpolation between them that Yang et al. use (Eq.
6-9).

A request waits at most tau seconds for its service to begin; one that would wait longer is lost.
With U of queueing.models.renewal:

    loss = (1 + (rho - 1) U(tau)) / (1 + rho U(tau))
    E[W_qs] = tau - int_0^tau U / U(tau),   E[Wq] = (1 - loss) E[W_qs] + loss tau
    M/M:  U = 1 + lam tau phi(u),  int U = tau + lam tau^2 psi(u)
          u = (mu - lam) tau,  phi = (1 - e^{-u})/u,  psi = (1 - phi)/u
    M/D:  U by Erlang's series (queueing.models.erlang_series)

W_qs: delay of the served; Wq: of all, the lost counted tau. Any load; for loads above 1 everything
is scaled by e^{-|u|}. Where the loss is small it comes from Z = 1 - (1 - rho) U, which is rho
e^{-u} for M/M; for M/D Z is exact to 1e-14, and so a loss below 1e-8 has fewer than six digits.
Source: Takacs (1962); THEORY b.

>>> round(mm1d(0.8, 1.0, 5.0).loss_fraction, 7)
0.0769867
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.models.erlang_series import renewal_of
from kendall.queueing.models.renewal import RenewalFunction


@dataclass(frozen=True)
class ImpatientMeans:
    """Means of a queue with patience: `delay` counts the lost at the patience, `served` those
    who got service; seconds.
    """

    loss_fraction: float
    delay: float
    served: float


def mm1d(arrival_rate: float, service_mean: float, patience: float) -> ImpatientMeans:
    """M/M/1+D, exact. Requests/s and seconds."""
    check_impatient(arrival_rate, service_mean, patience)
    load, offered = arrival_rate * service_mean, arrival_rate * patience
    u = (1 - load) * patience / service_mean
    decay = math.exp(-abs(u))
    phi = -math.expm1(-abs(u)) / abs(u) if u else 1.0
    scale = 1.0 if u >= 0 else decay
    total = scale + offered * phi  # scale * U(tau)
    tail = load * decay if load < 1 else None
    served = patience * offered * (phi - psi(u, phi, decay)) / total
    return impatient_means(lost_fraction(load, scale / total, tail), served, patience)


def md1d(arrival_rate: float, service_time: float, patience: float) -> ImpatientMeans:
    """M/D/1+D, exact. Requests/s and seconds. Raises NotConvergedError (load >= 1 and patience
    above some 10^4 service times).
    """
    check_impatient(arrival_rate, service_time, patience)
    service = ServiceTime(np.array([service_time]), np.ones(1))
    return means_from(
        renewal_of(service, arrival_rate, patience), arrival_rate * service_time, patience
    )


def de_kok_tijms(
    arrival_rate: float, service_mean: float, scv: float, patience: float
) -> ImpatientMeans:
    """Eq. 6-9 of Yang et al., after de Kok and Tijms (1985): loss and E[Wq] interpolated in the SCV
    of S between M/D/1+D and M/M/1+D.

    Exact for SCV 0 and 1; defined for 0 <= SCV <= 1, else SpecError. Measured relative error
    against `solve_mg1d`: clipped lognormal(7, 0.7) as in the paper (load 0.66 to 1.18, SCV 0.04 to
    0.35): loss -2.8 to +1.6 %, E[W_qs] -1.4 to +2.9 %. Gamma services, patience 1 to 6 E[S]: load
    0.77 to 1.18, SCV 0.07 to 0.35: loss -6 to +5 %, E[W_qs] -5 to +12 %, E[Wq] -4 to +3 %; load 0.7
    to 2, SCV 0.1 to 0.8: loss -6 to +17 %; load 0.1, patience 2.5 E[S]: loss 1.1 to 5 times the
    truth.
    """
    if not 0 <= scv <= 1:
        raise SpecError(
            f"got a service time of squared coefficient of variation {scv:.4g}; expected 0 to 1, "
            "where the interpolation holds"
        )
    constant, exponential = (
        md1d(arrival_rate, service_mean, patience),
        mm1d(arrival_rate, service_mean, patience),
    )
    loss = (1 - scv) * constant.loss_fraction + scv * exponential.loss_fraction
    delay = (1 - scv) * constant.delay + scv * exponential.delay
    return ImpatientMeans(loss, delay, (delay - patience * loss) / (1 - loss))


def means_from(renewal: RenewalFunction, load: float, patience: float) -> ImpatientMeans:
    """Of U up to the patience."""
    return impatient_means(
        lost_fraction(load, renewal.inverse, renewal.tail), renewal.shortfall, patience
    )


def lost_fraction(load: float, inverse: float, tail: float | None) -> float:
    """From 1 / U(tau) and, where it is small, from Z(tau)."""
    if tail is not None and tail < 0.5:
        return (1 - load) * tail / (1 - load * tail)
    return (inverse + load - 1) / (inverse + load)


def impatient_means(loss: float, served: float, patience: float) -> ImpatientMeans:
    """The three means of the loss and the delay of the served."""
    return ImpatientMeans(loss, (1 - loss) * served + loss * patience, served)


def check_impatient(arrival_rate: float, service_mean: float, patience: float) -> None:
    """Raises SpecError."""
    for name, value in (
        ("arrival_rate", arrival_rate),
        ("a mean service time of", service_mean),
        ("patience", patience),
    ):
        if not 0 < value < math.inf:
            raise SpecError(f"got {name} {value}; expected a finite number > 0")


def psi(u: float, phi: float, decay: float) -> float:
    """(1 - phi(u)) / u; for u < 0 times e^u, with phi that of |u|. By its series near 0, where
    it cancels.
    """
    v = abs(u)
    if v < 1e-3:
        return (
            1 / 2 - v / 6 + v**2 / 24 - v**3 / 120
            if u >= 0
            else 1 / 2 - v / 3 + v**2 / 8 - v**3 / 30
        )
    return (1 - phi) / v if u >= 0 else (phi - decay) / v
