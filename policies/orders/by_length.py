"""By predicted output length, not interrupted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from kendall.policies.orders.order import MOST_BINS, Aging, Form, Order, parameter


@dataclass(frozen=True, kw_only=True)
class ShortestFirst(Aging):
    """SPJF: the shortest predicted first; SJF where predictions are exact."""

    name: ClassVar[str] = "spjf"
    predicts: ClassVar[bool] = True

    @cached_property
    def form(self) -> Form:
        return Form(quantity="prediction", aging=self.aging)


@dataclass(frozen=True, kw_only=True)
class LongestFirst(Aging):
    """LJF: the longest predicted first."""

    name: ClassVar[str] = "ljf"
    predicts: ClassVar[bool] = True

    @cached_property
    def form(self) -> Form:
        return Form(quantity="prediction", weight=-1.0, aging=self.aging)


@dataclass(frozen=True, kw_only=True)
class Threshold(Aging):
    """Predicted up to `threshold` tokens before all others: one bit of advice."""

    threshold: float = parameter(
        "a finite number of tokens > 0", lambda tokens: 0 < tokens < math.inf
    )
    name: ClassVar[str] = "threshold"
    predicts: ClassVar[bool] = True

    @cached_property
    def form(self) -> Form:
        return Form(quantity="prediction", above=self.threshold, aging=self.aging)


@dataclass(frozen=True, kw_only=True)
class Binned(Order):
    """Batches of requests of like predicted length: of the bin of the oldest request, first come,
    first served among the bins. Bin k of K: predicted in (k - 1, k] / K of the token limit
    (multi-bin batching, 2024).
    """

    bins: int = parameter(
        f"a whole number from 1 to {MOST_BINS}", lambda bins: 1 <= bins <= MOST_BINS
    )
    name: ClassVar[str] = "binned"
    predicts: ClassVar[bool] = True
    batches: ClassVar[bool] = True

    @cached_property
    def form(self) -> Form:
        return Form(bins=self.bins)
