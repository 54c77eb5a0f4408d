"""The waiting queue in the order of a policy: sorted by rank (policies.orders), equal ranks in the
order of arrival; or in the order of arrival, with counters of the flows.

A rank does not change while a request waits, so that a sorted list stays sorted. Priorities that
age are such an order: at the instant t the level of a request is p - (t - a)/S, lower is earlier
(vLLM's sense), and of two requests the order of these levels, that of a + p S, never changes with
t. With |p| <= MOST_PRIORITY nobody is overtaken by one that came more than 2 MOST_PRIORITY S
seconds later.
"""

from __future__ import annotations

from bisect import bisect_right, insort_right
from collections.abc import Callable, Sequence

from kendall.policies.core import Policy, Request, Waiting
from kendall.policies.flow_counters import FlowCounters, TokenWeights
from kendall.policies.ordered import in_arrival_order, order_of
from kendall.policies.orders.by_urgency import ByPriority
from kendall.policies.orders.order import Order, key
from kendall.queueing.simulation.waiting import WaitingQueue


class RankedQueue(WaitingQueue):
    """A `WaitingQueue` in that order; one that is put back stands where its rank puts it."""

    __slots__ = ("_order",)

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order

    def append(self, waiting: Waiting) -> None:
        """Behind those of the same or a lower rank."""
        insort_right(self._items, waiting, lo=self._head, key=self._key)
        self.prompt_tokens += waiting.request.prompt_tokens

    def place_of(self, request: Request) -> int:
        """How many would stand before it."""
        own = self._key(Waiting(request))
        return bisect_right(self._items, own, lo=self._head, key=self._key) - self._head

    def put_back(self, waitings: Sequence[Waiting]) -> None:
        """Each where its own rank puts it."""
        for waiting in waitings:
            self.append(waiting)

    def renew(self, renewed: Callable[[Waiting], Waiting]) -> None:
        """Each where its new rank puts it."""
        self._items[self._head :] = sorted(map(renewed, self), key=self._key)

    def _key(self, waiting: Waiting) -> tuple[float, float]:
        return key(self._order, waiting)


class CountedQueue(WaitingQueue):
    """A `WaitingQueue` that tells the counters of the flows who joins it and who leaves it."""

    __slots__ = ("_counters",)

    def __init__(self, weights: TokenWeights) -> None:
        super().__init__()
        self.counters = self._counters = FlowCounters(weights)

    def append(self, waiting: Waiting) -> None:
        """The newest."""
        super().append(waiting)
        self._counters.join(waiting.request.flow)

    def put_back(self, waitings: Sequence[Waiting]) -> None:
        """At the head, before everyone who waits."""
        super().put_back(waitings)
        for waiting in waitings:
            self._counters.join(waiting.request.flow)

    def take(self, request_ids: Sequence[str]) -> list[Waiting]:
        """As `WaitingQueue`: they are dispatched."""
        taken = super().take(request_ids)
        for waiting in taken:
            self._counters.dispatch(waiting.request)
        return taken

    def remove(self, request_id: str) -> Waiting | None:
        """As `WaitingQueue`: it leaves without service."""
        removed = super().remove(request_id)
        if removed is not None:
            self._counters.leave(removed.request.flow)
        return removed


def queue_for(policy: Policy, priority_aging: float | None = None) -> WaitingQueue:
    """An empty queue in the policy's order; under first come, first served, priorities age by so
    many seconds a level, where they count at all.
    """
    order = order_of(policy)
    if order.ranked:
        return RankedQueue(order)
    if order.weights is not None:
        return CountedQueue(order.weights)
    if priority_aging is not None and in_arrival_order(policy):
        return RankedQueue(ByPriority(aging=priority_aging))
    return WaitingQueue()


def moved(queue: WaitingQueue, to: WaitingQueue) -> WaitingQueue:
    """`to`, which was empty, with all that wait in `queue`."""
    for waiting in sorted(queue, key=lambda waiting: waiting.request.arrived_at):
        to.append(waiting)
    return to
