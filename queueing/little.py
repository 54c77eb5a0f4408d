"""Little's law, L = lambda W, on a finite window: an identity of the sample path, so a check of the measurement and not of the theory.

Over [start, end], with every request's stay cut to the window, the area under the number present is the sum of the cut stays:
L = area / T. With arrivals inside the window only, lambda W differs from L by the stays that cross its edges; `edge` is that share.
Source: Little (1961); Stidham (1974).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.text import SpecError
from queueing.distributions import Vector


@dataclass(frozen=True)
class Little:
    """`number` = L, time average; `arrival_rate` = lambda; `stay` = W of those who arrived in the window, seconds."""

    number: float
    arrival_rate: float
    stay: float
    edge: float  # L / (lambda W) - 1

    @property
    def residual(self) -> float:
        """|L - lambda W| / L."""
        return abs(self.number - self.arrival_rate * self.stay) / self.number if self.number else 0.0


def little(entered_at: Vector, left_at: Vector, start: float, end: float) -> Little:
    """From the instants at which each request entered and left (the queue, the service or the system). Raises SpecError."""
    if not end > start or np.any(left_at < entered_at):
        raise SpecError(f"got a window from {start} to {end}, or a request that left before it came; expected start < end and stays >= 0")
    cut = np.minimum(left_at, end) - np.maximum(entered_at, start)
    area = float(np.sum(np.maximum(cut, 0.0)))
    inside = (entered_at >= start) & (entered_at < end)
    count = int(np.count_nonzero(inside))
    stay = float(np.mean((left_at - entered_at)[inside])) if count else 0.0
    number, rate = area / (end - start), count / (end - start)
    return Little(number, rate, stay, number / (rate * stay) - 1 if rate * stay else 0.0)


def crossed(entered_at: Vector, left_at: Vector) -> float:
    """Mean number present between the first entry and the last departure: there no stay is cut, and L = lambda W exactly."""
    start, end = float(entered_at.min()), float(left_at.max())
    return float(np.sum(left_at - entered_at)) / (end - start)
