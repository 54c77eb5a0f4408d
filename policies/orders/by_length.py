"""By predicted output length, not interrupted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from kendall.policies.errors import SpecError
from kendall.policies.orders.order import MOST_BINS, Aging, ByLength, Form, Order, parameter

BY = ("tokens", "memory", "service")


@dataclass(frozen=True, kw_only=True)
class WithoutInterruption(ByLength):
    """`by` memory: predicted tokens of KV memory, summed over the steps of a request."""

    by: str = parameter("tokens, memory or service", BY.__contains__, BY[0], choices=BY)


@dataclass(frozen=True, kw_only=True)
class ShortestFirst(WithoutInterruption):
    """SPJF: the shortest predicted first; SJF where predictions are exact."""

    name: ClassVar[str] = "spjf"

    @cached_property
    def form(self) -> Form:
        return self.by_length()


@dataclass(frozen=True, kw_only=True)
class LongestFirst(WithoutInterruption):
    """LJF: the longest predicted first."""

    name: ClassVar[str] = "ljf"

    @cached_property
    def form(self) -> Form:
        return self.by_length(weight=-1.0)


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


LEAST_BOOST = 1e-15  # gamma x token_time


@dataclass(frozen=True, kw_only=True)
class Boost(Order):
    """By arrival, less a boost of b(s) seconds for a request of s seconds of service:

        b(s) = ln(1 / (1 - e^{-gamma s})) / gamma,      s = token_time x predicted tokens

    A long request is passed only by short ones that come soon after it. With exact lengths, and
    gamma the decay rate of the delay's tail under first come, first served, no order has a lighter
    tail (Yu and Scully 2024).
    """

    gamma: float = parameter(
        "a number per second from 1e-12 to 1e12", lambda rate: 1e-12 <= rate <= 1e12
    )
    token_time: float = parameter(
        "finite seconds > 0", lambda seconds: 0 < seconds < math.inf, seconds=True
    )
    name: ClassVar[str] = "boost"
    predicts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not LEAST_BOOST <= self.gamma * self.token_time <= 1 / LEAST_BOOST:
            raise SpecError(
                f"got gamma={self.gamma:g} and token_time={self.token_time:g}; expected a product "
                f"of {LEAST_BOOST:g} to {1 / LEAST_BOOST:g}"
            )

    @cached_property
    def form(self) -> Form:
        scale = 1 / (self.gamma * self.token_time)
        return Form(quantity="prediction", boosts=scale, aging=1 / self.gamma)


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
