"""Stalls of the machine in a batch's service time: rare, long, at random instants of it.

    H = X ((1 - q) h + s K),   K ~ Poisson(q h / s)

h is the law's time without them at its mean speed, X the gamma residual, q the share of the time
that stalls hold, s what one lasts. E[H | h] = h, E[H^2 | h] = (1 + cv^2) (h^2 + q s h). A member's
own release, the end of a step and the end of a batch each see the stalls that began before it: one
Poisson process on the clock of h.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import gammaln, pdtrc

from kendall.queueing.distributions.lattice import Vector, blocks, spread
from kendall.queueing.errors import NotConvergedError
from kendall.queueing.latency.law import LatencyModel

_NEVER = 1e-17
_MOST = 200  # in one batch
_ORDER = 8  # of a shift's stencil
_CACHED = 16_000  # numbers that stay in a core's cache
SPARE_GAPS = 1024  # between stalls, that a simulation draws for each server beyond one a request
# what one more stall costs `with_stalls` for each number, in the terms of a length's power
TERMS_OF_A_STALL = 5


def most_stalls(mean: float) -> int:
    """A number that a Poisson variable of this mean practically never exceeds. Raises
    NotConvergedError beyond what a law can hold.
    """
    if mean == 0:
        return 0
    if mean > _MOST:
        raise NotConvergedError("the law of the service time (stalls in the longest batch)", mean)
    return int(np.argmax(pdtrc(np.arange(4 * _MOST), mean) < _NEVER))


def stalled_values(
    values: Vector, weights: Vector, law: LatencyModel, most: int
) -> tuple[Vector, Vector]:
    """Values (seconds, X = 1) of the law without its stalls, and their probabilities, with up to
    `most` stalls.
    """
    if not most:
        return values, weights
    mean = _mean_number(law, values)
    numbers = range(most + 1)
    seconds = [values + law.stall * number for number in numbers]
    return np.concatenate(seconds), np.concatenate(
        [weights * _number_is(number, mean) for number in numbers]
    )


def with_stalls(
    laws: Vector, law: LatencyModel, width: float, most: int, origin: int = 0
) -> Vector:
    """Lattice laws (a row each, `width` seconds apart, 0 at `origin`) of the law without its
    stalls, with up to `most`: longer rows.
    """
    if not most:
        return laws
    points, room = laws.shape[1], room_for_stalls(law, width, most)
    mean = _mean_number(law, width * (np.arange(points) - origin))
    answer = np.zeros((len(laws), points + room))
    answer[:, :points] = laws * _number_is(0, mean)
    for number in range(1, most + 1):
        weights = _number_is(number, mean)
        stencil = spread(np.array([number * law.stall]), np.ones(1), width, room, _ORDER)
        shifts = np.flatnonzero(stencil)
        for rows in blocks(len(laws), max(1, _CACHED // points)):
            part = laws[rows] * weights
            for shift in (
                shifts
            ):  # in time, not by a transform: its rounding would be mass far above the laws'
                answer[rows, shift : shift + points] += stencil[shift] * part
    return answer


def room_for_stalls(law: LatencyModel, width: float, most: int) -> int:
    """Lattice points that `most` stalls add to a law."""
    return math.ceil(most * law.stall / width) + _ORDER if most else 0


def _mean_number(law: LatencyModel, seconds: Vector) -> Vector:
    """Of the stalls while so many seconds are served without them."""
    return np.asarray(law.stall_rate / (1 - law.stall_share) * seconds)


def _number_is(number: int, mean: Vector) -> Vector:
    logs = number * np.log(np.maximum(np.abs(mean), 1e-300)) - mean - gammaln(number + 1.0)
    return np.asarray(np.exp(logs) * np.where(mean < 0, (-1.0) ** number, 1.0))
