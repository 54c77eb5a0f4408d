"""Ratios and differences of rounds that stood side by side, with Student's intervals, and the bounds they are held against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from queueing.batch_means import student


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value over the rounds and the ends of its 95 % interval; infinite ones where one round says nothing about the next."""

    value: float
    low: float
    high: float
    rounds: int


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean."""
    found = np.asarray(values, dtype=np.float64)
    mean = float(found.mean())
    if found.size < 2:
        return Estimate(mean, -math.inf, math.inf, found.size)
    half = student(found.size - 1, 0.95) * float(found.std(ddof=1)) / math.sqrt(found.size)
    return Estimate(mean, mean - half, mean + half, found.size)


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """The geometric mean of the rounds' ratios: what the machine did to both in a round falls out."""
    logarithms = mean_of([math.log(a / b) for a, b in zip(ours, theirs, strict=True)])
    return Estimate(math.exp(logarithms.value), math.exp(logarithms.low), math.exp(logarithms.high), logarithms.rounds)


def difference_of(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """The mean of the rounds' differences."""
    return mean_of([a - b for a, b in zip(ours, theirs, strict=True)])


@dataclass(frozen=True, slots=True)
class Finding:
    """One number of the report; with a bound it is a check."""

    what: str
    found: Estimate
    unit: str = ""
    at_least: float | None = None  # of the value
    upper_end_at_most: float | None = None  # of the interval

    @property
    def holds(self) -> bool | None:
        """Whether the bound is kept; None without one."""
        if self.at_least is not None:
            return self.found.value >= self.at_least
        if self.upper_end_at_most is not None:
            return self.found.high <= self.upper_end_at_most
        return None

    def line(self) -> str:
        """For the terminal."""
        found = self.found
        numbers = f"{found.value:10.4g} [{found.low:.4g}, {found.high:.4g}] {self.unit}"
        return f"{self.what:<76}{numbers:<36}{self._bound()}"

    def _bound(self) -> str:
        if self.holds is None:
            return ""
        bound = f">= {self.at_least:.4g}" if self.at_least is not None else f"upper end <= {self.upper_end_at_most:.4g}"
        return f"{bound}  {'holds' if self.holds else 'BROKEN'}"

    def to_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return asdict(self) | {"holds": self.holds}
