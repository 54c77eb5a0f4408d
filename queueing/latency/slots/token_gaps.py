"""The gaps between the tokens of an answer, each counted once, as clients and
`vllm:inter_token_latency_seconds` count them.

In a step everyone in service has the same gap, but for those whose first token it brings. So a run
counts them by length, in bins of 0.2 %; of each bin the longest gap is kept.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.floating[Any]]

_PARTS = 512  # bins between a number of seconds and twice as many
_LEAST, _MOST = -40, 24  # powers of two of `frexp`: 5e-13 s, three months
BINS = (_MOST - _LEAST) * _PARTS


class GapCounts(NamedTuple):
    """Of the requests from number `since` on: how many gaps are in each bin, and the longest of
    them (s).
    """

    times: npt.NDArray[np.int64]
    longest: Vector
    since: int


def no_gaps(since: int = 0) -> GapCounts:
    """Of a run that has not begun."""
    return GapCounts(np.zeros(BINS, dtype=np.int64), np.zeros(BINS), since)


def bin_of(seconds: float) -> int:
    """The place of a gap among the bins. Compiled too."""
    if seconds <= 0:
        return 0
    fraction, power = math.frexp(seconds)
    place = (power - _LEAST) * _PARTS + int((2 * fraction - 1) * _PARTS)
    return min(max(place, 0), BINS - 1)


class Gaps(NamedTuple):
    """Of a run: `seconds` each, and how many `times`."""

    seconds: Vector
    times: npt.NDArray[Any]


def found(counts: GapCounts) -> Gaps:
    """The bins that are not empty."""
    (places,) = counts.times.nonzero()
    return Gaps(counts.longest[places], counts.times[places])


class GapCounter:
    """What a `ServiceProcess` counts them with. `of`: the ids of the members that count."""

    def __init__(self, of: Container[str]) -> None:
        self.of, self.counts = of, no_gaps()

    def add(self, seconds: float, times: int) -> None:
        """So many gaps of so many seconds."""
        if times > 0:
            place = bin_of(seconds)
            self.counts.times[place] += times
            self.counts.longest[place] = max(self.counts.longest[place], seconds)
