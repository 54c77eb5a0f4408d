"""The documents' continuous laws of output tokens (the product itself counts whole tokens).

A law is its quantile function in y = logit F, with z = F and its complement both exact, so that the
longest of b draws is

    E[L^k] = int Q(y)^k b F^b (1 - F) dy          (dF = F (1 - F) dy)

by the trapezoid rule, which converges geometrically here: 1e-10 and better for b up to 10^4.
Integrating in F itself loses the tail. `nodes` are those of that rule, for other expectations of
smooth functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import expit, log_expit, ndtr, ndtri

Vector = npt.NDArray[np.float64]
_WIDTH = 0.05
_NODES = np.arange(-45.0, 60.0, _WIDTH)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A continuous law of lengths >= 0; `quantile(F, 1 - F)`."""

    name: str
    quantile: Callable[[Vector, Vector], Vector]
    supremum: float = math.inf

    def longest_mean(self, b: float, k: int = 1) -> float:
        """E[L^k], L the longest of b."""
        F, rest = expit(_NODES), expit(-_NODES)
        density = b * np.exp(b * log_expit(_NODES)) * rest
        return float(np.sum(density * self.quantile(F, rest) ** k) * _WIDTH)

    def nodes(
        self, width: float = 0.04, lowest: float = -30.0, highest: float = 45.0
    ) -> tuple[Vector, Vector, Vector]:
        """Lengths at equidistant logits, F there, and dF/dy times the width: the weights of the
        trapezoid rule.
        """
        y = np.arange(lowest, highest, width)
        F, rest = expit(y), expit(-y)
        return self.quantile(F, rest), F, F * rest * width

    def sample(self, rng: np.random.Generator, size: int) -> Vector:
        """Independent draws by inversion."""
        uniforms = rng.random(size)
        return np.asarray(self.quantile(np.maximum(uniforms, 1e-300), 1 - uniforms))


def uniform(m: float) -> Lengths:
    """Between 0 and m."""
    return Lengths(
        f"uniform(0, {m:g})", lambda F, rest: np.where(F < 0.5, m * F, m * (1 - rest)), m
    )


def lognormal(mu: float, sigma: float) -> Lengths:
    """ln N normal."""
    return Lengths(
        f"lognormal({mu:g}, {sigma:g})",
        lambda F, rest: np.exp(mu + sigma * _normal_quantile(F, rest)),
    )


def truncated_gaussian(mean: float, deviation: float) -> Lengths:
    """Normal, kept where >= 0 (Eq. 21-22 of Yang et al.)."""
    below, above = float(ndtr(-mean / deviation)), float(ndtr(mean / deviation))
    return Lengths(
        f"truncated Gaussian({mean:g}, {deviation:g})",
        lambda F, rest: np.maximum(
            mean + deviation * _normal_quantile(below + above * F, above * rest), 0.0
        ),
    )


def exponential(mean: float) -> Lengths:
    """Of that mean."""
    return Lengths(
        f"exponential({mean:g})",
        lambda F, rest: np.where(
            F < 0.5, -mean * np.log1p(-np.minimum(F, 0.5)), -mean * np.log(rest)
        ),
    )


def _normal_quantile(F: Vector, rest: Vector) -> Vector:
    """Phi^-1, from the smaller tail."""
    return np.where(F < 0.5, ndtri(np.minimum(F, 0.5)), -ndtri(np.minimum(rest, 0.5)))


def clipped_lognormal(
    limit: float, mu: float, sigma: float, cells: int = 2000
) -> tuple[Vector, Vector]:
    """min(N, limit) as atoms: equal cells at their conditional means, and the limit with all
    that is above it.
    """
    edges = np.linspace(0, limit, cells + 1)
    with np.errstate(divide="ignore"):
        z = (np.log(edges) - mu) / sigma
    mass = np.diff(ndtr(z))
    partial = np.diff(math.exp(mu + sigma**2 / 2) * ndtr(z - sigma))
    kept = mass > 1e-14
    return np.append(partial[kept] / mass[kept], limit), np.append(mass[kept], 1 - mass[kept].sum())
