"""What the built-in policies share: the order of service and its parameters, and the choice among
free servers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_type_hints

from kendall.policies.core import (
    IDLE,
    UNBOUNDED,
    Decision,
    Policy,
    Preempt,
    QueueState,
    Running,
    Server,
    Waiting,
)
from kendall.policies.errors import SpecError
from kendall.policies.orders import FIRST_COME, ORDERS, PARAMETERS, make_order
from kendall.policies.orders.order import Order, key, outranked
from kendall.policies.routes import LEAST_LOADED, PREFIX, check_route

KEYS = ("order", *PARAMETERS, "max_preemptions")
_HINTS = {name: hint for cls in ORDERS.values() for name, hint in get_type_hints(cls).items()}
_Parameters: Any = dataclasses.make_dataclass(
    "_Parameters",
    [
        ("order", str, field(default=FIRST_COME.name)),
        *((name, _HINTS[name] | None, field(default=None)) for name in PARAMETERS),
    ],
    frozen=True,
    slots=True,
    kw_only=True,
)  # of every order; None: not given


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered(_Parameters):  # type: ignore[misc]
    """The order of service and its parameters. `interrupts`: it may take requests out of service
    for others, and serves no batches; `max_preemptions`: each one so many times at most. `route`:
    as `policies.routes` has it.
    """

    order: str = FIRST_COME.name
    max_preemptions: int | None = None
    route: str = LEAST_LOADED
    ranking: Order = field(init=False, repr=False, compare=False)
    name: ClassVar[str]
    interrupts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_route(self.route)
        self._check_order()
        given = {key: getattr(self, key) for key in PARAMETERS}
        order = make_order(
            self.order, {key: value for key, value in given.items() if value is not None}
        )
        self._check_preemptions(order)
        object.__setattr__(self, "ranking", order)

    def _check_order(self) -> None:
        asked = ORDERS.get(self.order)
        if asked is None or self.serves(asked):
            return
        why, others = "forms batches of like lengths", "dynamic, fixed, capped or elastic"
        if asked.preemptive:
            why, others = "interrupts a batch", "single or continuous"
        raise SpecError(
            f"got order {self.order}, which {why}; expected {', '.join(self.orders())}, or the "
            f"policy {others}"
        )

    def _check_preemptions(self, order: Order) -> None:
        if self.max_preemptions is None:
            return
        if not order.preemptive:
            names = [name for name, cls in ORDERS.items() if cls.preemptive and self.serves(cls)]
            expected = f"order {', '.join(names)}" if names else f"no such key for {self.name}"
            raise SpecError(
                f"got max_preemptions, and order {order.name}, which takes nothing out of "
                f"service; expected {expected}"
            )
        if self.max_preemptions < 1:
            raise SpecError(
                f"got max_preemptions={self.max_preemptions}; expected a whole number, at least 1"
            )

    @classmethod
    def orders(cls) -> tuple[str, ...]:
        """Names of those that it serves."""
        return tuple(name for name, order in ORDERS.items() if cls.serves(order))

    @classmethod
    def serves(cls, order: type[Order]) -> bool:
        """Whether the order is one for this policy: batches are not interrupted, and only batches
        have members of like length.
        """
        if cls.interrupts:
            return not order.batches
        return not order.preemptive


def with_ranking(policy: Ordered, ranking: Order) -> Ordered:
    """The same policy, its order with what it learned: equal to `policy`, with the same text."""
    found = dataclasses.replace(policy)
    object.__setattr__(found, "ranking", ranking)
    return found


def order_of(policy: Policy) -> Order:
    """The order that a policy asks for; first come, first served for one from outside, which may
    choose among all that wait.
    """
    return getattr(policy, "ranking", FIRST_COME)


def check_continued(policy: Policy) -> None:
    """For an engine that continues no answer, as a server that runs already. Raises SpecError where
    the order takes requests out of service.
    """
    if isinstance(policy, Ordered) and policy.ranking.preemptive:
        names = [name for name in policy.orders() if not ORDERS[name].preemptive]
        raise SpecError(
            f"got order {policy.order}, which interrupts requests, for an engine that continues no "
            f"answer (http); expected {', '.join(names)}"
        )


def routes_by_prefix(policy: Policy) -> bool:
    """Whether its driver says which servers have served a prompt's prefix."""
    return isinstance(policy, Ordered) and policy.route == PREFIX


def in_arrival_order(policy: Policy) -> bool:
    """Whether its order is first come, first served."""
    return order_of(policy).name == FIRST_COME.name


def in_order(policy: Policy, waiting: Sequence[Waiting]) -> Sequence[Waiting]:
    """Those waiting, as the driver shows them to the policy."""
    order = order_of(policy)
    return sorted(waiting, key=lambda each: key(order, each)) if order.ranked else waiting


def counts(policy: Policy) -> bool:
    """Whether its driver keeps counters of the flows."""
    return order_of(policy).weights is not None


def wants_steps(policy: Policy) -> bool:
    """Whether the policy is asked after every engine step."""
    return policy.wants_steps or order_of(policy).wants_steps


def preempted(policy: Ordered, state: QueueState, size: int | None) -> Decision:
    """Take the lowest ranks out of service so that the first of the queue can start: at most
    `size` are in service on a server. As few as possible, on the server with the lowest rank of
    all.
    """
    order = policy.ranking
    if not order.preemptive:
        return IDLE
    first = state.waiting[0]
    most = math.inf if policy.max_preemptions is None else policy.max_preemptions
    found = []
    for server in state.servers:
        movable = [running for running in server.in_service if running.preemptions < most]
        behind = outranked(order, first, movable)
        chosen = _enough(first, behind, server, size)
        if chosen:
            found.append(chosen)
    if not found:
        return IDLE
    worst = max(found, key=lambda each: key(order, each[0]))
    return Preempt(tuple(running.request.id for running in worst))


def _enough(
    first: Waiting, behind: Sequence[Running], server: Server, size: int | None
) -> Sequence[Running]:
    """The fewest of `behind` without whom the first has a place and memory; none if all are too
    few.
    """
    bound = server.max_batch_size if size is None else min(size, server.max_batch_size)
    count, tokens = len(server.in_service) + 1, 0
    if server.max_context_tokens < UNBOUNDED:
        tokens = first.request.context_tokens + server.context_tokens
    for taken, running in enumerate(behind, 1):
        count -= 1
        tokens -= running.request.context_tokens
        if count <= bound and (count == 1 or tokens <= server.max_context_tokens):
            return behind[:taken]
    return ()
