"""Ratios and differences of rounds that stood side by side, with their intervals, and the bounds
they are held against.

Rates of work average over what the machine does meanwhile: their logarithms get Student's interval.
A delay of one round can be four times that of the next where the machine stood still for a moment,
on whichever server: differences of delays get the interval of Wilcoxon's signed ranks (Hodges and
Lehmann 1963), which one such round cannot move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from queueing.measurement.batch_means import student

LEAST_BEFORE = 0.97  # of the throughput and the rates of an earlier checkout


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value over the rounds and the ends of its 95 % interval; infinite ones where one round
    says nothing about the next.
    """

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
    """The geometric mean of the rounds' ratios: what the machine did to both in a round falls
    out.
    """
    logarithms = mean_of([math.log(a / b) for a, b in zip(ours, theirs, strict=True)])
    return Estimate(
        math.exp(logarithms.value),
        math.exp(logarithms.low),
        math.exp(logarithms.high),
        logarithms.rounds,
    )


def difference_of(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """The middle of the rounds' differences: the median of the means of all pairs of them. Six
    rounds at least for an interval.
    """
    found = np.array([a - b for a, b in zip(ours, theirs, strict=True)])
    pairs = np.sort(
        [(found[i] + found[j]) / 2 for i in range(found.size) for j in range(i, found.size)]
    )
    outside = _left_out(found.size)
    low, high = (-math.inf, math.inf) if outside is None else (pairs[outside], pairs[-1 - outside])
    return Estimate(float(np.median(pairs)), float(low), float(high), found.size)


def _left_out(rounds: int, confidence: float = 0.95) -> int | None:
    """How many pairs lie outside the interval on each side; None where so few rounds cannot have
    one of that confidence.
    """
    ways = np.ones(1)  # to reach each sum of the ranks that are positive
    for rank in range(1, rounds + 1):
        ways = np.concatenate([ways, np.zeros(rank)]) + np.concatenate([np.zeros(rank), ways])
    rejected = int(
        np.searchsorted(np.cumsum(ways) / 2.0**rounds, (1 - confidence) / 2, side="right")
    )  # sums 0, 1, ...
    return rejected - 1 if rejected else None


@dataclass(frozen=True, slots=True)
class Finding:
    """One number of the report; with a bound it is a check."""

    what: str
    found: Estimate
    unit: str = ""
    at_least: float | None = None  # of the value
    upper_end_at_most: float | None = None  # of the interval

    @property
    def undecided(self) -> str | None:
        """Why a bound on the end of an interval cannot be judged; None where it can, or where
        there is none.
        """
        if self.upper_end_at_most is None or math.isfinite(self.found.high):
            return None
        return f"undecided: {self.found.rounds} rounds give no interval"

    @property
    def holds(self) -> bool | None:
        """Whether the bound is kept; None without one and where it is undecided."""
        if self.at_least is not None:
            return self.found.value >= self.at_least
        if self.upper_end_at_most is not None and not self.undecided:
            return self.found.high <= self.upper_end_at_most
        return None

    def line(self) -> str:
        """For the terminal."""
        found = self.found
        interval = f"[{found.low:.4g}, {found.high:.4g}] " if math.isfinite(found.high) else ""
        numbers = f"{found.value:10.4g} {interval}{self.unit}"
        return f"{self.what:<76}{numbers:<36}{self._bound()}"

    def _bound(self) -> str:
        if self.holds is None and not self.undecided:
            return ""
        bound = (
            f">= {self.at_least:.4g}"
            if self.at_least is not None
            else f"upper end <= {self.upper_end_at_most:.4g}"
        )
        return f"{bound}  {self.undecided or ('holds' if self.holds else 'BROKEN')}"

    def to_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return asdict(self) | {"holds": self.holds, "undecided": self.undecided}


def conclusion(findings: Sequence[Finding]) -> str:
    """The last line: which bounds are broken, which are undecided."""
    broken = [finding.what for finding in findings if finding.holds is False]
    undecided = [
        f"{finding.what} ({finding.undecided})" for finding in findings if finding.undecided
    ]
    parts = ([f"BROKEN: {'; '.join(broken)}"] if broken else []) + undecided
    return "\n".join(parts) if parts else "every bound is kept"
