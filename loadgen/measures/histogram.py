"""A histogram of durations for people: bins of one round width, the last one open.

The width is 1, 2 or 5 times a power of ten, so that 4 to 11 bins reach from the least value to the
99th percentile, or to three times the mean where that is less. What is slower lies in one bin,
which ends at the largest value: a few slow answers must not press all others into the first bin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kendall.queueing.measurement.statistics import FloatArray

BINS = 10  # round widths that span the range; one more where its ends lie between them
REACH, MEANS = 99.0, 3.0  # percentile; times the mean
EQUAL, RESOLUTION = 1e-6, 1e-9  # relative and absolute range below which values are one
ROUND = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Bin:
    """Values from `low` up to, not including, `high`; the last bin contains its `high`."""

    low: float
    high: float
    count: int


def histogram(values: FloatArray) -> tuple[Bin, ...]:
    """Bins without gaps that hold every value; one bin where all are equal."""
    if not values.size:
        return ()
    least, most = float(values.min()), float(values.max())
    if _equal(least, most):
        return (Bin(least, most, values.size),)
    reach = min(float(np.percentile(values, REACH)), MEANS * float(values.mean()))
    if _equal(least, reach):
        reach = most
    # the least round number of which BINS reach over the span
    span = reach - least
    power: float = 10.0 ** math.floor(math.log10(span / BINS))
    width = next(digit * power for digit in ROUND if digit * power * BINS >= span)
    first, last = math.floor(least / width), math.floor(reach / width) + 1
    edges = [width * place for place in range(first, last + 1)]
    edges[0] = min(edges[0], least)  # rounded, it can lie above
    if edges[-1] < most:
        edges.append(most)
    counts, _ = np.histogram(values, edges)
    ends = zip(edges[:-1], edges[1:], counts.tolist(), strict=True)
    return tuple(Bin(low, high, count) for low, high, count in ends)


def _equal(low: float, high: float) -> bool:
    return high - low <= RESOLUTION + EQUAL * abs(high)
