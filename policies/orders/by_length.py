"""By predicted output length, not interrupted.

spjf       shortest predicted first
ljf        longest predicted first
threshold  predicted up to `threshold` tokens before all others: one bit of advice
binned     batches of requests of like predicted length: of the bin of the oldest request. Bin
           k of K: predicted in (k - 1, k] / K of the token limit (multi-bin batching, 2024)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kendall.policies.core import Request, Server, Waiting, fitting_ids
from kendall.policies.errors import SpecError
from kendall.policies.orders.order import Order, Ranked, predicted_tokens

MOST_BINS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortestFirst(Ranked):
    """SPJF; SJF where predictions are exact."""

    name: ClassVar[str] = "spjf"
    predicts: ClassVar[bool] = True

    def value(self, request: Request, made: int) -> float:
        """Predicted tokens."""
        del made
        return predicted_tokens(request)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestFirst(Ranked):
    """LJF."""

    name: ClassVar[str] = "ljf"
    predicts: ClassVar[bool] = True

    def value(self, request: Request, made: int) -> float:
        """Predicted tokens, the other way round."""
        del made
        return -predicted_tokens(request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold(Ranked):
    """One bit: predicted short before predicted long."""

    threshold: float
    name: ClassVar[str] = "threshold"
    predicts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Ranked.__post_init__(self)
        if not 0 < self.threshold < math.inf:
            raise SpecError(
                f"got threshold={self.threshold:g}; expected a finite number of tokens > 0"
            )

    def value(self, request: Request, made: int) -> float:
        """0 short, 1 long."""
        del made
        return float(predicted_tokens(request) > self.threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binned(Order):
    """Batches of like lengths; first come, first served among the bins."""

    bins: int
    name: ClassVar[str] = "binned"
    predicts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.bins <= MOST_BINS:
            raise SpecError(f"got bins={self.bins}; expected a whole number from 1 to {MOST_BINS}")

    def groups(self, waiting: Sequence[Waiting]) -> Sequence[Sequence[Waiting]]:
        """By bin."""
        found: dict[int, list[Waiting]] = {}
        for each in waiting:
            found.setdefault(self.bin_of(each.request), []).append(each)
        return list(found.values())

    def first(
        self,
        waiting: Sequence[Waiting],
        size: int,
        server: Server,
        now: float,
        virtual_tokens: Mapping[str, float],
    ) -> tuple[str, ...]:
        """The oldest request and those of its bin."""
        del now, virtual_tokens
        own = self.bin_of(waiting[0].request)
        alike = [each for each in waiting if self.bin_of(each.request) == own]
        return fitting_ids(alike, size, server)

    def bin_of(self, request: Request) -> int:
        """From 1 to `bins`."""
        share = predicted_tokens(request) / request.max_output_tokens
        return max(1, math.ceil(self.bins * share))
