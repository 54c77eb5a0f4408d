"""How far a predicted quantity M may be off because the estimates are, near saturation too.

    M = g / (1 - load)       a delay has a pole at load 1; g is smooth
                             (quantities without a pole: M = g)

Each estimate i that moves by its 95 % half width moves ln g by g_i and ln load by d_i:

    rate, speed    d_i = half width of its logarithm,  g_i = d_i * d ln g / d ln estimate
    cv             d_i = 0,  g_i = ln M at the upper end of its interval - ln M
    lengths        d_k, g_k = deviations from the parts' means: from part k of the lengths, at the
                   rate where that part has the same load

First order in direction, not in size: w_i ~ g_i + d_i load / (1 - load) is the direction in which M
moves most, and the ends of the interval are M a step w to either side, through the pole; open where
there is no steady state. Two settings at the same estimates share these errors: of M / M' the
direction is that of the difference, so a gain is known far better than either delay. What the
method adds (simulation noise, an approximation) is the setting's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kendall.queueing.estimation.change import Vector
from kendall.queueing.estimation.interval import NORMAL, Estimate

WIDEST = 700.0  # of an exponent
NIL = 1e-9  # seconds: delays of nobody do not divide


@dataclass(frozen=True, eq=False, kw_only=True)
class Response:
    """`smooth` and `loads`: g_i and d_i in one order for all settings; `own`: relative standard
    error of the method.
    """

    smooth: Vector
    loads: Vector
    load: float
    pole: bool
    needs_stability: bool
    own: float = 0.0

    def interval(self, value: float, effective_n: float) -> Estimate:
        """The value with what the estimates leave open."""
        direction = _unit(self._gradient)
        low, high = _ends(self._change(-direction), self._change(direction), self.own)
        return Estimate(value, value * _exp(low), value * _exp(high), effective_n)

    def gain(
        self, value: float, current: Response, current_value: float, effective_n: float
    ) -> Estimate:
        """1 - value / current value. Open where a step leaves either setting without a steady
        state.
        """
        direction = _unit(self._gradient - current._gradient)
        low, high = _ends(
            self._beside(current, -direction),
            self._beside(current, direction),
            math.hypot(self.own, current.own),
        )
        ratio = (value + NIL) / (current_value + NIL)
        return Estimate(1 - ratio, 1 - ratio * _exp(high), 1 - ratio * _exp(low), effective_n)

    @property
    def _gradient(self) -> Vector:
        return self.smooth + self.loads * (self.load / (1 - self.load) if self.pole else 0.0)

    def _change(self, direction: Vector) -> float:
        """ln M there - ln M here; infinite without a steady state."""
        moved = self.load * _exp(float(direction @ self.loads))
        if self.needs_stability and moved >= 1:
            return math.inf
        return float(direction @ self.smooth) + (
            math.log((1 - self.load) / (1 - moved)) if self.pole else 0.0
        )

    def _beside(self, current: Response, direction: Vector) -> float:
        """The change of ln(M / M'); where neither has a steady state the current one is no worse
        than the other.
        """
        mine, other = self._change(direction), current._change(direction)
        return 0.0 if math.isinf(mine) and math.isinf(other) else mine - other


@dataclass(frozen=True)
class Evaluation:
    """A quantity at one set of estimates and its load, where there is a steady state."""

    value: float
    load: float

    def smooth(self, *, pole: bool) -> float:
        """ln g."""
        return math.log((self.value + NIL) * (1 - self.load if pole else 1.0))

    def slope(self, lower: Evaluation, step: float, *, pole: bool) -> float:
        """d ln g / d ln x, where this is at x and `lower` at x (1 - step)."""
        return (self.smooth(pole=pole) - lower.smooth(pole=pole)) / -math.log1p(-step)

    def log_ratio(self, other: Evaluation) -> float:
        """ln of this quantity over the other one."""
        return self.smooth(pole=False) - other.smooth(pole=False)


def _unit(gradient: Vector) -> Vector:
    size = float(np.linalg.norm(gradient))
    return gradient / size if size else gradient


def _ends(one: float, other: float, own: float) -> tuple[float, float]:
    """Of the interval of a logarithm about 0: as far as either step goes, and the method's own
    error in both directions.
    """
    return -math.hypot(min(one, other, 0.0), NORMAL * own), math.hypot(
        max(one, other, 0.0), NORMAL * own
    )


def _exp(exponent: float) -> float:
    return math.exp(exponent) if exponent < WIDEST else math.inf
