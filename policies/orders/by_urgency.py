"""By what clients say, or by how long they have waited; not interrupted.

edf       earliest deadline first: where patience runs out first; without one, last
priority  lowest `priority` first (vLLM's sense); with `aging`, a level less for each
              S seconds waited
hrrn      highest response ratio next: (waited + service) / service, by predicted lengths
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kendall.policies.core import Request, Server, Waiting, fitting_ids
from kendall.policies.orders.order import Order, Ranked, predicted_tokens

# largest priority of either sign: without a bound on it the bound on overtaking would bound nothing
MOST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class EarliestDeadline(Order):
    """EDF."""

    name: ClassVar[str] = "edf"
    ranked: ClassVar[bool] = True

    def rank(self, request: Request, made: int) -> float:
        """The deadline."""
        del made
        return request.deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class ByPriority(Ranked):
    """Priorities, which age."""

    name: ClassVar[str] = "priority"

    def value(self, request: Request, made: int) -> float:
        """The priority; one that was admitted before priorities aged may have any."""
        del made
        return float(max(-MOST, min(MOST, request.priority)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HighestRatio(Order):
    """HRRN: a scan of the queue at each dispatch, as ratios change places while time passes. Of two
    requests the order of (waited + s x tokens) / (s x tokens) is that of waited / tokens: the
    seconds s that a token takes do not matter.
    """

    name: ClassVar[str] = "hrrn"
    predicts: ClassVar[bool] = True

    def first(
        self,
        waiting: Sequence[Waiting],
        size: int,
        server: Server,
        now: float,
        virtual_tokens: Mapping[str, float],
    ) -> tuple[str, ...]:
        """Highest ratio first, equal ones oldest first."""
        del virtual_tokens

        def ratio(each: Waiting) -> float:
            return (each.request.arrived_at - now) / max(predicted_tokens(each.request), 1e-9)

        return fitting_ids(sorted(waiting, key=ratio), size, server)
