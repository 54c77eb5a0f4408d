"""Ratios of mean delays to first come, first served, observed and predicted, by one rule.

ratio      sum over the rounds of an order's mean delay / the same of first come, first served;
           predicted: the same of what the law says of each cell at its own speed
interval   95 %, from paired batch means: request i of both orders came at the same instant with
           the same length, and x_i - R y_i is the sequence whose batch means tell how far R
           may be off (`queueing.measurement.batch_means`, which allows for autocorrelation)
holds      |observed - predicted| <= max(15 % of the predicted, interval)
ranks      no two orders differ, beyond the interval of their paired difference, the other way
           round than predicted
no gain    many slots: mean delay at most 5 % of the mean sojourn, observed and predicted, and
           mean sojourns whose ratio is as predicted within 5 % or its interval
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from bench.ordering.observed import Figures, figures_of
from bench.ordering.predicted import Predicted
from queueing.distributions.token_distribution import Vector
from queueing.measurement.batch_means import batch_means_interval

CLOSE, GAIN = 0.15, 0.05
RANKED, UNCLEAR, REVERSED = "as predicted", "not told apart", "the other way round"


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """One cell: counted requests in the order of arrival, and what the law says."""

    cell: Mapping[str, Any]
    predicted: Predicted

    def column(self, name: str) -> Vector:
        """Of the counted requests."""
        first = int(self.cell["first"])
        values: Vector = np.array(
            self.cell["columns"][name][first : first + int(self.cell["counted"])], dtype=float
        )
        return values

    @property
    def observed(self) -> Figures:
        """Of the engine."""
        names = ("queueing_delay", "sojourn_time", "output_tokens")
        return figures_of(*(self.column(name) for name in names))


@dataclass(frozen=True, slots=True)
class Compared:
    """A ratio to first come, first served."""

    policy: str
    observed: float
    half_width: float  # of its 95 % interval
    predicted: float

    @property
    def deviation(self) -> float:
        """Observed / predicted - 1."""
        return self.observed / self.predicted - 1

    def within(self, close: float) -> bool:
        """Whether observed and predicted differ by at most `close` of the predicted, or by the
        interval.
        """
        allowed = max(close * self.predicted, self.half_width)
        return abs(self.observed - self.predicted) <= allowed


@dataclass(frozen=True, slots=True)
class Pair:
    """Two orders, `first` with the smaller predicted delay; seconds."""

    first: str
    second: str
    difference: float  # observed mean delay of the second less that of the first
    half_width: float

    @property
    def says(self) -> str:
        """As predicted, not told apart, or the other way round."""
        if abs(self.difference) <= self.half_width:
            return UNCLEAR
        return RANKED if self.difference > 0 else REVERSED


Runs = Mapping[str, Sequence[Run]]  # by policy, in the order of the rounds


def ratio(own: Sequence[Vector], base: Sequence[Vector]) -> tuple[float, float]:
    """Of the means over all rounds, and half its interval."""
    scale = float(np.mean([each.mean() for each in base]))
    found = float(np.mean([each.mean() for each in own])) / scale
    residuals = [(x - found * y) / scale for x, y in zip(own, base, strict=True)]
    return found, _half_width(residuals)


def delay_share(figures: Figures) -> float:
    """Of the sojourn: more than that no order can save."""
    return figures.delay / figures.sojourn


def gains_nothing(runs: Runs, first_come: str) -> bool:
    """The rule for many slots."""
    shares = [
        delay_share(figures)
        for mine in runs.values()
        for run in mine
        for figures in (run.observed, run.predicted.predicted)
    ]
    ratios = compared(runs, first_come, "sojourn_time")
    return max(shares) <= GAIN and all(each.within(GAIN) for each in ratios)


def as_predicted(runs: Runs, first_come: str) -> bool:
    """The rule for few slots: ratios and ranks."""
    ratios, ranks = compared(runs, first_come), pairs(runs)
    return all(each.within(CLOSE) for each in ratios) and not any(
        pair.says == REVERSED for pair in ranks
    )


def _half_width(values: Sequence[Vector]) -> float:
    """Of the mean over rounds, which are independent."""
    each = [batch_means_interval(np.asarray(part, np.float64)).half_width for part in values]
    return math.sqrt(sum(half**2 for half in each)) / len(each)


def compared(runs: Runs, first_come: str, quantity: str = "queueing_delay") -> list[Compared]:
    """Every other order with first come, first served."""
    name = {"queueing_delay": "delay", "sojourn_time": "sojourn"}[quantity]
    base = [run.column(quantity) for run in runs[first_come]]
    predicted = _predicted_mean(runs[first_come], name)
    found = []
    for policy, mine in runs.items():
        if policy != first_come:
            observed, half = ratio([run.column(quantity) for run in mine], base)
            found.append(Compared(policy, observed, half, _predicted_mean(mine, name) / predicted))
    return found


def _predicted_mean(runs: Sequence[Run], name: str) -> float:
    return float(np.mean([getattr(run.predicted.predicted, name) for run in runs]))


def pairs(runs: Runs) -> list[Pair]:
    """All of them, by predicted mean delay."""
    ranked = sorted(runs, key=lambda policy: _predicted_mean(runs[policy], "delay"))
    found = []
    for first, second in combinations(ranked, 2):
        apart = [
            slower.column("queueing_delay") - faster.column("queueing_delay")
            for faster, slower in zip(runs[first], runs[second], strict=True)
        ]
        mean = float(np.mean([each.mean() for each in apart]))
        found.append(Pair(first, second, mean, _half_width(apart)))
    return found
