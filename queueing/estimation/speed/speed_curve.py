"""How the mean delay depends on the speed, from a few simulated points, so that a band costs
nothing more.

With u the log of the speed relative to the window's, W the mean, and rho the load at u = 0,

    log W(u) - log W(0) = a u + b u^2 + c (log (1 - rho) - log (1 - rho e^u)),    0 <= c <= 1

The last term is the pole at capacity, the rest is smooth. A M/G/1 queue has a = 2, b = 0, c = 1,
exactly; batches whose bound seldom binds have no pole within reach. a, b and c are least squares
over points to either side of the window's speed. With patience there is no pole: rho = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from queueing.estimation.change import Vector

REACH = 0.3  # of u, to either side
FREE = 0.7  # of the way to capacity, at most


@dataclass(frozen=True, slots=True)
class SpeedCurve:
    """a, b and c. May be kept for minutes, at loads not far from that where it was measured."""

    slope: float
    curvature: float
    pole: float

    def ratio(self, log_factor: float, load: float) -> float:
        """W(u) / W(0) at the load of u = 0; infinite beyond capacity."""
        there = load * math.exp(min(700.0, log_factor))
        if there >= 1:
            return math.inf
        smooth = self.slope * log_factor + self.curvature * log_factor**2
        return math.exp(min(700.0, smooth + self.pole * math.log((1 - load) / (1 - there))))


def speed_curve(at: Callable[[float], float], load: float) -> SpeedCurve:
    """`at(factor)`: mean delay at a multiple of the window's speed; by five of them. `load` < 1,
    0 with patience.
    """
    above = REACH if load <= 0 else min(REACH, FREE * -math.log(load))
    logs = np.array([-REACH, -REACH / 2, above / 2, above])
    here = at(1.0)
    if not 0 < here < math.inf:
        return SpeedCurve(0.0, 0.0, 1.0)
    means = np.array([at(math.exp(u)) for u in logs]) / here
    usable = np.isfinite(means) & (means > 0)
    if usable.sum() < 3:
        return SpeedCurve(0.0, 0.0, 1.0)
    logs, values = logs[usable], np.log(means[usable])
    pole = np.log((1 - load) / (1 - load * np.exp(logs)))
    powers = np.column_stack([logs, logs**2])
    share = (
        float(np.clip(_least_squares(np.column_stack([powers, pole]), values)[2], 0.0, 1.0))
        if load > 0
        else 0.0
    )
    slope, curvature = _least_squares(powers, values - share * pole)
    return SpeedCurve(float(slope), float(curvature), share)


def _least_squares(design: Vector, values: Vector) -> Vector:
    return np.asarray(np.linalg.lstsq(design, values, rcond=None)[0])
