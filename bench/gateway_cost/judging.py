"""Ratios and differences of servers that took turns in rounds, with their intervals, and the bounds
on them.

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

from kendall.queueing.measurement.batch_means import student

CONFIDENCE = 0.95
LEAST_BEFORE = 0.97  # of the throughput and the rates of an earlier checkout


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value over the rounds and the ends of its 95 % interval, which are infinite where there are
    too few rounds for one.
    """

    value: float
    low: float
    high: float
    rounds: int


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean, with Student's interval."""
    rounds, mean = len(values), float(np.mean(values))
    if rounds < 2:
        return Estimate(mean, -math.inf, math.inf, rounds)
    half = student(rounds - 1, CONFIDENCE) * float(np.std(values, ddof=1)) / math.sqrt(rounds)
    return Estimate(mean, mean - half, mean + half, rounds)


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """The geometric mean of the rounds' ratios, in which what the machine did to both cancels."""
    mean = mean_of([math.log(a / b) for a, b in zip(ours, theirs, strict=True)])
    return Estimate(math.exp(mean.value), math.exp(mean.low), math.exp(mean.high), mean.rounds)


def difference_of(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """The median of the means of all pairs of the rounds' differences. An interval takes six rounds
    at least.
    """
    apart = np.array([a - b for a, b in zip(ours, theirs, strict=True)])
    rounds = apart.size
    pairs = np.sort([(apart[i] + apart[j]) / 2 for i in range(rounds) for j in range(i, rounds)])
    ways = np.ones(1)  # to reach each sum of the ranks that are positive
    for rank in range(1, rounds + 1):
        ways = np.concatenate([ways, np.zeros(rank)]) + np.concatenate([np.zeros(rank), ways])
    tail = np.cumsum(ways) / 2.0**rounds
    rejected = int(np.searchsorted(tail, (1 - CONFIDENCE) / 2, side="right"))  # sums 0, 1, ...
    low, high = (pairs[rejected - 1], pairs[-rejected]) if rejected else (-math.inf, math.inf)
    return Estimate(float(np.median(pairs)), float(low), float(high), rounds)


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
        """True where the bound is kept; None without one and where it is undecided."""
        if self.at_least is not None:
            return self.found.value >= self.at_least
        if self.upper_end_at_most is not None and not self.undecided:
            return self.found.high <= self.upper_end_at_most
        return None

    @property
    def bound(self) -> str:
        """The bound in words; empty without one."""
        if self.at_least is not None:
            return f">= {self.at_least:.3g}"
        if self.upper_end_at_most is not None:
            return f"upper end <= {self.upper_end_at_most:.3g} {self.unit}"
        return ""

    def line(self) -> str:
        """The finding as the terminal shows it."""
        found = self.found
        interval = f"[{found.low:.4g}, {found.high:.4g}] " if math.isfinite(found.high) else ""
        numbers = f"{found.value:10.4g} {interval}{self.unit}"
        verdict = self.undecided or ("BROKEN" if self.holds is False else "holds")
        bound = f"{self.bound}  {verdict}" if self.bound else ""
        return f"{self.what:<76}{numbers:<36}{bound}"

    def row(self) -> str:
        """The finding as a row of a Markdown table."""
        found = self.found
        interval = f"{found.low:.4g} to {found.high:.4g}" if math.isfinite(found.high) else ""
        verdict = self.undecided or ("**broken**" if self.holds is False else "holds")
        bound = f"{self.bound}: {verdict}" if self.bound else ""
        return (
            f"| {self.what} | {f'{found.value:.4g} {self.unit}'.strip()} | {interval} | {bound} |"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"holds": self.holds, "undecided": self.undecided}


def conclusion(findings: Sequence[Finding]) -> str:
    """The last line: which bounds are broken, which are undecided."""
    broken = [finding.what for finding in findings if finding.holds is False]
    undecided = [
        f"{finding.what} ({finding.undecided})" for finding in findings if finding.undecided
    ]
    parts = ([f"BROKEN: {'; '.join(broken)}"] if broken else []) + undecided
    return "\n".join(parts) if parts else "every bound is kept"
