"""By what clients say, or by how long they have waited; not interrupted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from kendall.policies.orders.order import Aging, Form, Order


@dataclass(frozen=True, kw_only=True)
class EarliestDeadline(Order):
    """EDF: where patience runs out first; without one, last."""

    name: ClassVar[str] = "edf"

    @cached_property
    def form(self) -> Form:
        return Form(quantity="deadline")


@dataclass(frozen=True, kw_only=True)
class ByPriority(Aging):
    """Lowest `priority` first (vLLM's sense); with `aging` = S, a level less for each S seconds
    waited.
    """

    name: ClassVar[str] = "priority"

    @cached_property
    def form(self) -> Form:
        return Form(quantity="priority", aging=self.aging)


@dataclass(frozen=True, kw_only=True)
class HighestRatio(Order):
    """HRRN: highest (waited + service) / service next, by predicted lengths. A scan of the queue at
    each dispatch, as ratios change places while time passes. Of two requests the order of (waited
    + s x tokens) / (s x tokens) is that of waited / tokens: the seconds s that a token takes do not
    matter.
    """

    name: ClassVar[str] = "hrrn"
    predicts: ClassVar[bool] = True

    @cached_property
    def form(self) -> Form:
        return Form(quantity="prediction", ratio=True)
