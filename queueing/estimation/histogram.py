"""Observed delays as a histogram, and what the model has in the same classes: of the same requests,
or, where these cannot be driven through it, of the steady state at the window's estimates
(`drawn`, by simulation: with `DRAWN` requests about 0.3 points of a share of 10 % are noise).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.estimation.summaries import DelayHistogram
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS
from kendall.queueing.simulation.experiment import begin_of, steady_run
from kendall.queueing.simulation.fast import is_compiled

DRAWN = 60_000  # requests; some 20 ms
DRAWN_ONE_BY_ONE = 6_000  # where the policy's own code is driven
CLASSES = 28  # at most
SHOWN = 0.99  # of the longer of both distributions; the rest is one share of its own
FEWEST = 20  # delays


def drawn(model: Queue, arrival_rate: float, *, sojourn: bool = False) -> Vector:
    """Delays, or sojourns, of the served in the queue's steady state."""
    requests = DRAWN if is_compiled(model) else DRAWN_ONE_BY_ONE
    begin = begin_of(model, arrival_rate, requests)
    run = steady_run(model, arrival_rate, begin, np.random.SeedSequence(0))
    values = run.sojourn_time if sojourn else run.queueing_delay
    return np.asarray(values[~run.lost], dtype=float)


def beside(observed: Vector, predicted: Vector) -> DelayHistogram | None:
    """Shares of both in classes of one round width. None where there are too few.

    >>> found = beside(np.arange(100) / 100, np.zeros(100))
    >>> found.width, found.observed[0], found.predicted[:2]
    (0.05, 0.05, [1.0, 0.0])
    """
    if observed.size < FEWEST or not predicted.size:
        return None
    longest = max(float(np.quantile(values, SHOWN)) for values in (observed, predicted))
    width = round_up(max(longest, 1e-4) / CLASSES)
    edges = width * np.arange(math.floor(longest / width) + 2)
    shares = [np.histogram(values, edges)[0] / values.size for values in (observed, predicted)]
    return DelayHistogram(
        width=width,
        observed=[round(float(share), 5) for share in shares[0]],
        predicted=[round(float(share), 5) for share in shares[1]],
        beyond=[max(0.0, round(1 - float(each.sum()), 5)) for each in shares],
        n=int(observed.size),
        drawn=int(predicted.size),
    )


def quantiles(draws: npt.NDArray[np.float64]) -> dict[str, float]:
    """Mean and quantiles of all draws together (a row each); seconds."""
    found = np.quantile(draws, list(LEVELS.values()))
    return {"mean": float(draws.mean()), **dict(zip(LEVELS, map(float, found), strict=True))}


def round_up(width: float) -> float:
    """To 1, 2, 2.5 or 5 times a power of ten.

    >>> round_up(0.0021), round_up(0.7)
    (0.0025, 1.0)
    """
    power = 10.0 ** math.floor(math.log10(width))
    return float(
        f"""{
            next(step for step in (1, 2, 2.5, 5, 10) if step * power >= width * (1 - 1e-9))
            * power:.12g}"""
    )
