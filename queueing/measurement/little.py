"""Little's law L = lambda W on a finite window, with the edge terms that make it an identity.

Over [start, end), T = end - start, requests with arrival a and departure d:

    L = (1/T) int N(t) dt,   lambda = arrivals in the window / T
    W = mean of d - a over those arrivals
    L = lambda W + (carried in - carried out) / T

carried in: seconds inside the window of requests that came before it; carried out: seconds after
the window's end of requests that came in it. Exact for every sample path, whatever the discipline:
`residual` is rounding, or the records are wrong. L is measured on its own, by sorting the instants
and adding up N(t), not from the sojourns. Source: Little (1961); Whitt (1991) for the edges.

>>> little(np.array([0.0, 1.0]), np.array([2.0, 4.0]), 0.0, 3.0).number_in_system  # N = 1, 2, 1
1.3333333333333333
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kendall.policies.text import SpecError

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LittleBalance:
    """L, lambda (1/s) and W (seconds; nan without arrivals), and what crosses the edges (seconds
    of request time).
    """

    number_in_system: float
    arrival_rate: float
    sojourn_time: float
    carried_in: float
    carried_out: float
    residual: float  # L - lambda W - (in - out)/T

    @property
    def gap(self) -> float:
        """L - lambda W: what the edges leave; small against L on a long run of a stable queue."""
        return self.number_in_system - (
            self.arrival_rate * self.sojourn_time if self.arrival_rate else 0.0
        )


def little(arrived_at: Vector, departed_at: Vector, start: float, end: float) -> LittleBalance:
    """The balance over [start, end); instants in any order, `departed_at` inf for a request that
    never left is an error.
    """
    arrived, departed = np.asarray(arrived_at, dtype=float), np.asarray(departed_at, dtype=float)
    if (
        arrived.shape != departed.shape
        or not np.all(np.isfinite(departed))
        or not np.all(departed >= arrived)
    ):
        raise SpecError(
            "got arrivals and departures that do not match; expected as many finite departures, "
            "none before its arrival"
        )
    if not -math.inf < start < end < math.inf:
        raise SpecError(f"got the window {start} to {end}; expected start < end")
    length, inside = end - start, (arrived >= start) & (arrived < end)
    sojourns = departed[inside] - arrived[inside]
    early = np.minimum(departed[arrived < start], end) - start
    carried_in = float(np.maximum(early, 0.0).sum())
    carried_out = float(np.maximum(departed[inside] - end, 0.0).sum())
    number = mean_number(arrived, departed, start, end)
    residual = number - (float(sojourns.sum()) + carried_in - carried_out) / length
    mean = float(sojourns.mean()) if len(sojourns) else math.nan
    return LittleBalance(number, len(sojourns) / length, mean, carried_in, carried_out, residual)


def mean_number(arrived_at: Vector, departed_at: Vector, start: float, end: float) -> float:
    """Time average of N(t) over [start, end), from the path of N itself."""
    instants = np.clip(
        np.concatenate([arrived_at, departed_at]), start, end
    )  # before the window: counts from its start on
    changes = np.repeat([1, -1], [len(arrived_at), len(departed_at)])
    order = np.argsort(instants, kind="stable")
    number = np.cumsum(changes[order])
    return float(number @ np.diff(np.append(instants[order], end))) / (end - start)
