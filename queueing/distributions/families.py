"""What the fit of a named law searches over: parameters as functions of unbounded coordinates, and
where it starts.

Coordinates are of order one and start at 0, at the moments of the sample (clipped counts taken as
they are). A bounded parameter is a logistic function of its coordinate, a positive one an
exponential.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from kendall.queueing.distributions.censoring import Sample

Coordinates = npt.NDArray[np.floating[Any]]
Parameters = Callable[[Coordinates], tuple[float, ...]]


def _moments(of: Sample, logarithms: bool = False) -> tuple[float, float]:
    values = np.log(of.values) if logarithms else of.values.astype(float)
    weights = (of.ended + of.clipped) / of.size
    mean = float(weights @ values)
    return mean, math.sqrt(float(weights @ (values - mean) ** 2))


def _ended(of: Sample) -> tuple[int, int]:
    values = of.values[of.ended > 0]
    return int(values[0]), int(values[-1])


def _lower_edge(of: Sample) -> tuple[float, float]:
    """Where the smallest possible draw may lie: it was rounded to the shortest count (anything
    below 3/2 to 1).
    """
    shortest = _ended(of)[0]
    return (shortest - 0.5 if shortest > 1 else 0.0), shortest + 0.5


def _uniform(of: Sample) -> Parameters:
    low, low_end = _lower_edge(of)
    longest = _ended(of)[1]
    clipped = of.values[of.clipped > 0]
    if len(clipped) and clipped[-1] >= longest:  # no upper bound is known
        floor, spread = clipped[-1] - 0.5, _moments(of)[1]
        return lambda t: (
            low + (low_end - low) * float(expit(t[0])),
            floor + spread * math.exp(t[1]),
        )
    return lambda t: (
        low + (low_end - low) * float(expit(t[0])),
        longest - 0.5 + float(expit(t[1])),
    )


def _normal(of: Sample) -> Parameters:
    mean, std = _moments(of)
    return lambda t: (mean + std * t[0], std * math.exp(t[1]))


def _lognormal(of: Sample) -> Parameters:
    mu, sigma = _moments(of, logarithms=True)
    return lambda t: (mu + sigma * t[0], sigma * math.exp(t[1]))


def _exponential(of: Sample) -> Parameters:
    mean = _moments(of)[0]
    return lambda t: (mean * math.exp(t[0]),)


def _geometric(of: Sample) -> Parameters:
    above = _moments(of)[0] - 1
    return lambda t: (1 + above * math.exp(t[0]),)


def _weibull(of: Sample) -> Parameters:
    mu, sigma = _moments(of, logarithms=True)
    shape = math.pi / math.sqrt(6) / sigma  # of a Weibull law, Var log X = pi^2 / (6 shape^2)
    scale = math.exp(mu + 0.5772156649 / shape)
    return lambda t: (shape * math.exp(t[0]), scale * math.exp(t[1]))


def _pareto(of: Sample) -> Parameters:
    low, high = _lower_edge(of)
    alpha = 1 / max(_moments(of, logarithms=True)[0] - math.log((low + high) / 2), 1e-3)
    return lambda t: (alpha * math.exp(t[0]), low + (high - low) * float(expit(t[1])))


SEARCHES: dict[str, Callable[[Sample], Parameters]] = {
    "uniform": _uniform,
    "normal": _normal,
    "lognormal": _lognormal,
    "exponential": _exponential,
    "geometric": _geometric,
    "weibull": _weibull,
    "pareto": _pareto,
}
