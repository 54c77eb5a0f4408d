"""What an order of service is: a rank of every request, lower first, equal ranks in the order of
arrival.

The driver keeps the queue in the order of `rank`, so that a policy takes its first requests. With
`aging` = S the rank is arrival + S x value: a request is overtaken only by those that arrive within
S x (own value - their value) seconds after it, as their arrival + S x value must be lower; S = 0 is
first come, first served, and without aging the values alone decide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kendall.policies.core import Request, Running, Server, Waiting, fitting_ids
from kendall.policies.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """First come, first served; subclasses are other orders."""

    name: ClassVar[str] = "fcfs"
    ranked: ClassVar[bool] = False  # the queue is kept in the order of `rank`; else of arrival
    predicts: ClassVar[bool] = False  # by predicted lengths
    preemptive: ClassVar[bool] = False
    wants_steps: ClassVar[bool] = False  # what runs may lose its rank with every token
    counts: ClassVar[bool] = False  # the driver keeps counters of the flows (by_flow.FlowCounters)

    def rank(self, request: Request, made: int) -> float:  # noqa: ARG002 - the subclasses'
        """Where it stands with so many tokens made; lower first."""
        return 0.0

    def may_interrupt(self, running: Running) -> bool:
        """Whether one in service may be preempted by one of a lower rank."""
        return self.preemptive and running.preemptible

    def groups(self, waiting: Sequence[Waiting]) -> Sequence[Sequence[Waiting]]:
        """Those waiting, by whom they may share a batch with; the group of the oldest first."""
        return (waiting,)

    def first(
        self,
        waiting: Sequence[Waiting],
        size: int,
        server: Server,
        now: float,
        virtual_tokens: Mapping[str, float],
    ) -> tuple[str, ...]:
        """Up to `size` of those waiting, in the order of service, that fit together on the
        server; `virtual_tokens` as `QueueState` has them.
        """
        del now, virtual_tokens
        return fitting_ids(waiting, size, server)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked(Order):
    """By a value that may age."""

    aging: float | None = None  # seconds for each unit of the value (a token, a level)
    ranked: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.aging is not None and not 0 <= self.aging < math.inf:
            raise SpecError(f"got aging={self.aging:g}; expected finite seconds >= 0")

    def value(self, request: Request, made: int) -> float:
        """What it is ranked by; lower first."""
        raise NotImplementedError

    def rank(self, request: Request, made: int) -> float:
        """The value, or with `aging` the arrival + aging x value."""
        value = self.value(request, made)
        return value if self.aging is None else request.arrived_at + self.aging * value


def predicted_tokens(request: Request) -> float:
    """The predicted length, at most the limit; the limit where none is predicted."""
    predicted = request.predicted_output_tokens
    if predicted is None:
        return float(request.max_output_tokens)
    return min(predicted, float(request.max_output_tokens))


def key(order: Order, each: Waiting | Running) -> tuple[float, float]:
    """By which a queue is sorted, and those in service are compared with it; lower first."""
    request = each.request
    return order.rank(request, each.output_tokens_so_far), request.arrived_at


def outranked(order: Order, first: Waiting, in_service: Sequence[Running]) -> list[Running]:
    """Those in service that may be preempted for the first of the queue, the worst rank first."""
    own = key(order, first)
    behind = [
        (rank, running)
        for running in in_service
        if order.may_interrupt(running) and (rank := key(order, running)) > own
    ]
    behind.sort(key=lambda each: each[0], reverse=True)
    return [running for _, running in behind]
