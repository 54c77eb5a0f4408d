"""How far a predicted quantity M may be off because the estimates are: one entry for each thing that was estimated.

    x_i = d ln M / d ln (estimate i) * relative standard error of estimate i            rate, speed
    x_c = ln M at the upper end of cv's interval - ln M, over 1.96                       residual cv
    x_g = (ln M_g - mean ln M_g) / sqrt(G - 1) * (standard error of the whole / standard deviation of the parts) * t / 1.96    lengths

M_g from part g of the lengths. A delay has a pole at load 1, so its slope is taken of what is left without it:

    d ln M / d ln rate = d ln (M (1 - load)) / d ln rate + load / (1 - load)

Two settings at the same estimates share these errors: of ln(M / M') the entries are x_i - x'_i, so a gain is known far better than
either delay. What the method adds (simulation noise, an approximation) is the setting's own. Intervals are at 95 %, of ln M.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from queueing.estimation.change import Vector
from queueing.estimation.interval import NORMAL, Estimate

WIDEST = 700.0  # of the exponent: beyond, the interval is open
NIL = 1e-9  # seconds: delays of nobody do not divide


@dataclass(frozen=True, eq=False)
class Response:
    """The entries, and the relative standard error of the method. An entry is infinite where that perturbation has no steady state."""

    entries: Vector
    own: float = 0.0

    def interval(self, value: float, effective_n: float) -> Estimate:
        """The value with what the estimates leave open."""
        factor = _factor(math.hypot(float(np.linalg.norm(self.entries)), self.own))
        return Estimate(value, value / factor, value * factor, effective_n)

    def gain(self, value: float, current: Response, current_value: float, effective_n: float) -> Estimate:
        """1 - value / current value.

        Where a perturbation leaves only the current setting without a steady state the gain is open above, where it leaves only
        the other one without, below.
        """
        with np.errstate(invalid="ignore"):
            entries = np.nan_to_num(self.entries - current.entries, nan=0.0, posinf=math.inf, neginf=-math.inf)
        finite = entries[np.isfinite(entries)]
        factor = _factor(math.hypot(float(np.linalg.norm(finite)), self.own, current.own))
        ratio = (value + NIL) / (current_value + NIL)
        low = -math.inf if np.any(entries == math.inf) else 1 - ratio * factor
        high = 1.0 if np.any(entries == -math.inf) else 1 - ratio / factor
        return Estimate(1 - ratio, low, high, effective_n)


@dataclass(frozen=True)
class Asked:
    """A quantity at one set of estimates and its load; infinite without a steady state."""

    value: float
    load: float

    def log(self, *, pole: bool = False) -> float:
        """Its logarithm; with `pole` that of value (1 - load)."""
        return math.inf if math.isinf(self.value) else math.log((self.value + NIL) * (1 - self.load if pole else 1.0))


def slope(here: Asked, lower: Asked, step: float, *, pole: bool) -> float:
    """d ln M / d ln x at `here`, from there and from x (1 - step), where the load is `lower.load`."""
    plain = (here.log(pole=pole) - lower.log(pole=pole)) / -math.log1p(-step)
    return plain + here.load / (1 - here.load) if pole else plain


def scatter(values: Sequence[Asked], to_error: float) -> Vector:
    """The entries of the parts, widened for being judged from few; `to_error`: standard error over standard deviation of the parts."""
    logs = np.array([value.log() for value in values])
    if not np.all(np.isfinite(logs)):
        return np.where(np.isfinite(logs), 0.0, math.inf)
    degrees = len(values) - 1
    widened = float(stdtrit(degrees, 0.975)) / NORMAL
    return np.asarray((logs - logs.mean()) / math.sqrt(degrees) * to_error * widened)


def _factor(error: float) -> float:
    return math.exp(NORMAL * error) if NORMAL * error < WIDEST else math.inf
