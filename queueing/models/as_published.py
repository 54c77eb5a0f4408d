"""The documents' formulas exactly as printed, each with its equation number and its fault, if any.

Nothing here is used to predict: the right formulas are in the modules named below. `kendall
reproduce` puts both side by side. lam requests/s, times in seconds.

Inoue (2021)
    phi0, phi1, phi            Eq. 41-43  none: bounds of the mean SOJOURN, constant
                                          H = alpha b + tau0; they fail for random H
    second_moment_of_arrivals  Eq. 7      it is the second FACTORIAL moment: E[A^2] has lam E[H]
                                          more (used rightly in Eq. 34)
Yang et al.
    psi0, psi1, psi            Eq. 16     called phi there; bounds of the queueing DELAY:
                                          phi_i = alpha + tau0 + (1 + 2 lam alpha) psi_i
    padded_line                Eq. 20     none; E[L] = m b/(b+1) becomes m: three times too high at
                                          light load
    elastic_line               Eq. 26     put into Eq. 16 it is NOT a bound: the random k3 sum N_i
                                          is replaced by its mean
    fixed_batch_delay          Eq. 25     wait of the FORMED batch + H (Bailey's mean queue / lam);
                                          delay: less H, + (b-1)/(2 lam)
    objective_patient          Eq. 10     none
    objective_impatient        Eq. 11     '+ (1 - theta) E[W]' rewards waiting; a sane objective
                                          has '-'
The serving chapter
    md1_delay                  25.4       rho^2/(2 mu (1 - rho)) is too low by the factor rho: right
                                          is rho/(2 mu (1 - rho))
    kingman_delay              25.4       the heavy-traffic approximation, not Kingman's upper
                                          bound; below the truth for c_a > 1

Right: queueing.models.batches.batch_chain (dynamic, elastic), queueing.models.batches.mgb1 (fixed),
queueing.models.mm1 (M/D/1), queueing.models.gg1 (both Kingman forms).
"""

from __future__ import annotations

import numpy as np
from scipy.special import gammaln

from kendall.queueing.errors import UnstableQueueError

TERMS = 20  # of Eq. 25


def phi0(lam: float, alpha: float, tau0: float) -> float:
    """Inoue, Eq. 41."""
    _check(lam * alpha)
    return (
        (alpha + tau0)
        / (2 * (1 - lam * alpha))
        * (1 + 2 * lam * tau0 + (1 - lam * tau0) / (1 + lam * alpha))
    )


def phi1(lam: float, alpha: float, tau0: float) -> float:
    """Inoue, Eq. 42."""
    _check(lam * alpha)
    return 1.5 * tau0 / (1 - lam * alpha) + alpha / 2 * (lam * alpha + 2) / (1 - (lam * alpha) ** 2)


def phi(lam: float, alpha: float, tau0: float) -> float:
    """Inoue, Eq. 43; phi0 is the smaller one for lam <= 1/(alpha + tau0)."""
    return min(phi0(lam, alpha, tau0), phi1(lam, alpha, tau0))


def second_moment_of_arrivals(lam: float, second_moment: float) -> float:
    """Inoue, Eq. 7, second equation; `second_moment` = E[H^2]."""
    return lam**2 * second_moment


def psi0(lam: float, alpha: float, beta: float) -> float:
    """Yang et al., Eq. 16, first line."""
    _check(lam * alpha)
    return lam * (alpha + beta) ** 2 / (2 * (1 - (lam * alpha) ** 2))


def psi1(lam: float, alpha: float, beta: float) -> float:
    """Yang et al., Eq. 16, second line."""
    _check(lam * alpha)
    return (lam * alpha * beta + lam * alpha**2 + beta) / (2 * (1 - (lam * alpha) ** 2))


def psi(lam: float, alpha: float, beta: float) -> float:
    """Yang et al., Eq. 16."""
    return min(psi0(lam, alpha, beta), psi1(lam, alpha, beta))


def padded_line(k1: float, k2: float, k3: float, k4: float, longest: float) -> tuple[float, float]:
    """Eq. 20: alpha_1 and beta_1 for lengths of at most `longest` tokens."""
    return k1 + k3 * longest, k2 + k4 * longest


def elastic_line(
    k1: float, k2: float, k3: float, k4: float, *, mean: float, longest: float
) -> tuple[float, float]:
    """Eq. 26's last line with n_b at its largest, as Eq. 16 wants it."""
    return k1 + k3 * mean, k2 + k4 * longest


def fixed_batch_delay(lam: float, service: float, b: int, terms: int = TERMS) -> float:
    """Eq. 25; `service` = H[b]. Raises UnstableQueueError."""
    mu = lam * service
    _check(mu / b)
    m = np.arange(1, terms + 1)
    c = np.exp(-mu * m / b + (m - 1) * np.log(mu * m / b) - gammaln(m + 1))
    w = np.exp(2j * np.pi * np.arange(1, b) / b)
    roots = (w[:, None] ** m) @ c
    return float((b - (b - mu) ** 2) / (2 * (b - mu)) + np.sum(1 / (1 - roots)).real) / lam


def objective_patient(theta: float, utility: float, delay: float) -> float:
    """Eq. 10, V1."""
    return theta * utility - (1 - theta) * delay


def objective_impatient(
    theta: float, utility: float, delay: float, loss: float, cost: float
) -> float:
    """Eq. 11, V2, with the sign as printed."""
    return theta * utility + (1 - theta) * delay - loss * cost


def md1_delay(lam: float, service: float) -> float:
    """Serving chapter, 25.4: W_q of M/D/1."""
    _check(lam * service)
    return (lam * service) ** 2 * service / (2 * (1 - lam * service))


def kingman_delay(lam: float, service: float, ca: float, cs: float) -> float:
    """Serving chapter, 25.4; c_a, c_s coefficients of variation."""
    _check(lam * service)
    return lam * service / (1 - lam * service) * (ca**2 + cs**2) / 2 * service


def _check(load: float) -> None:
    if load >= 1:
        raise UnstableQueueError(load)
