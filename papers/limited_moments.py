"""Limited moments LM_k(x) = E[min(N, x)^k] of the documents' lognormal law: a token limit x without
a sum.

    e^{k mu + k^2 s^2 / 2} Phi(z - k s) + x^k Phi(-z),   z = (ln x - mu) / s

k > 0 real, N continuous (the product's own counts are integers:
queueing.distributions.token_distribution). With S = a min(N, x) + c: E[S^2] = a^2 LM_2 + 2 a c LM_1
+ c^2, and Yang et al. Eq. 1-5 follow. Their utility E[u] = E[min(1, x / N)] is `kept_of_lognormal`.

>>> moments = [lognormal_limited_moment(k, 1600, 7.0, 0.7) for k in (1, 2)]
>>> a, c, lam = 0.022032, 0.7764, 1 / 40  # Yang et al., Fig. 4a
>>> mean, second = a * moments[0] + c, a**2 * moments[1] + 2 * a * c * moments[0] + c**2
>>> round(lam * second / (2 * (1 - lam * mean)), 2)  # 23 s at a limit of 1600 tokens
23.0
"""

from __future__ import annotations

import math

from scipy.special import ndtr

from kendall.policies.text import SpecError


def lognormal_limited_moment(k: float, limit: float, mu: float, sigma: float) -> float:
    """E[min(N, limit)^k], ln N normal(mu, sigma)."""
    _check(k, limit, sigma, "sigma")
    z = (math.log(limit) - mu) / sigma
    below = (
        math.exp(k * mu + (k * sigma) ** 2 / 2) * float(ndtr(z - k * sigma))
        if z > -math.inf
        else 0.0
    )
    return below + _above(limit, k, float(ndtr(-z)))


def kept_of_lognormal(limit: float, mu: float, sigma: float) -> float:
    """E[min(1, limit / N)], the mean share of a reply that a token limit keeps."""
    _check(1.0, limit, sigma, "sigma")
    z = (math.log(limit) - mu) / sigma
    return float(ndtr(z)) + limit * math.exp(sigma**2 / 2 - mu) * float(ndtr(-z - sigma))


def _above(limit: float, k: float, probability: float) -> float:
    return float(limit**k) * probability if probability else 0.0  # without a limit inf * 0


def _check(k: float, limit: float, scale: float, name: str) -> None:
    if not k > 0 or not limit > 0 or not 0 < scale < math.inf:
        raise SpecError(f"got order {k}, limit {limit}, {name} {scale}; expected all > 0")
