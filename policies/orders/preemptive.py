"""By predicted output length, preemptive: a request that is outranked leaves the engine and goes on
later behind the tokens that it has.

    pspjf                 shortest predicted first
    sprpt                 shortest predicted remaining length first
    trail                 as sprpt, not interrupted from c x the prediction on (TRAIL, 2025)
    threshold-preemptive  predicted up to `threshold` tokens before all others, in order of arrival
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kendall.policies.core import Request, Running
from kendall.policies.errors import SpecError
from kendall.policies.orders.by_length import ShortestFirst, Threshold
from kendall.policies.orders.order import Ranked, predicted_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptiveShortest(ShortestFirst):
    """PSPJF; PSJF where predictions are exact."""

    name: ClassVar[str] = "pspjf"
    preemptive: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortestRemaining(ShortestFirst):
    """SPRPT; SRPT where predictions are exact. What outlives its prediction goes on."""

    name: ClassVar[str] = "sprpt"
    preemptive: ClassVar[bool] = True

    def value(self, request: Request, made: int) -> float:
        """Predicted tokens that are left."""
        return predicted_tokens(request) - made


@dataclass(frozen=True, slots=True, kw_only=True)
class Trail(ShortestRemaining):
    """SPRPT with limited preemption."""

    c: float = 0.8
    name: ClassVar[str] = "trail"

    def __post_init__(self) -> None:
        Ranked.__post_init__(self)
        if not self.c >= 0:
            raise SpecError(f"got c={self.c:g}; expected a number >= 0")

    def may_interrupt(self, running: Running) -> bool:
        """While it has made less than c x its prediction."""
        return running.preemptible and running.output_tokens_so_far < self.c * predicted_tokens(
            running.request
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptiveThreshold(Threshold):
    """One bit: predicted short ones interrupt predicted long ones."""

    name: ClassVar[str] = "threshold-preemptive"
    preemptive: ClassVar[bool] = True
