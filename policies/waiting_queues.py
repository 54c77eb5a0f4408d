"""The waiting queue as a policy sees it, of the gateway and of the simulator: a sequence, oldest
first, from which a prefix is taken in constant time each; or sorted by the rank of an order of
service, equal ranks in the order of arrival; or with counters of the flows.

A rank does not change while a request waits, so that a sorted list stays sorted. Priorities that
age are such an order: at the instant t the level of a request is p - (t - a)/S, lower is earlier
(vLLM's sense), and of two requests the order of these levels, that of a + p S, never changes with
t. With |p| <= MOST_PRIORITY nobody is overtaken by one that came more than 2 MOST_PRIORITY S
seconds later.
"""

from __future__ import annotations

from bisect import bisect_right, insort_right
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from kendall.policies.core import Policy, Request, Waiting
from kendall.policies.flow_counters import FlowCounters, TokenWeights
from kendall.policies.ordered import in_arrival_order, order_of
from kendall.policies.orders.by_urgency import ByPriority
from kendall.policies.orders.order import Order, key

_COMPACT = 4096
_TAKEN = Waiting(
    Request(id="", arrived_at=0.0, prompt_tokens=0, max_output_tokens=1)
)  # in place of those taken, which are not kept


class WaitingQueue(Sequence[Waiting]):
    """First come, first served. Slices copy only what they cover; nothing is copied to show the
    queue to a policy.
    """

    __slots__ = ("_head", "_items", "counters", "prompt_tokens")

    def __init__(self) -> None:
        self._items: list[Waiting] = []
        self._head = 0
        self.prompt_tokens = 0  # of all that wait
        self.counters: FlowCounters | None = None  # of an order that counts

    def __len__(self) -> int:
        return len(self._items) - self._head

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._items[self._head :])

    @overload
    def __getitem__(self, index: int) -> Waiting: ...
    @overload
    def __getitem__(self, index: slice) -> list[Waiting]: ...
    def __getitem__(self, index: int | slice) -> Waiting | list[Waiting]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return (
                self._items[self._head + start : self._head + stop : step]
                if step > 0
                else self._items[self._head :][index]
            )
        if not -len(self) <= index < len(self):
            raise IndexError(f"got index {index} in a queue of {len(self)}")
        return self._items[self._head + index if index >= 0 else index]

    def append(self, waiting: Waiting) -> None:
        """The newest."""
        self._items.append(waiting)
        self.prompt_tokens += waiting.request.prompt_tokens

    def place_of(self, request: Request) -> int:
        """How many would stand before it if it were appended now."""
        del request
        return len(self._items) - self._head

    def put_back(self, waitings: Sequence[Waiting]) -> None:
        """At the head, before everyone who waits."""
        self._items[: self._head] = waitings
        self._head = 0
        self.prompt_tokens += _prompt_tokens(waitings)

    def take(self, request_ids: Sequence[str]) -> list[Waiting]:
        """Remove these, and return them in the order asked. Raises KeyError where one does not
        wait.
        """
        end = self._head + len(request_ids)
        taken = self._items[self._head : end]
        if [waiting.request.id for waiting in taken] == list(request_ids):
            self._items[self._head : end] = [_TAKEN] * len(taken)
            self._head = end
            self.prompt_tokens -= _prompt_tokens(taken)
            self._compact()
            return taken
        waits = {waiting.request.id: waiting for waiting in self}
        chosen = [waits.pop(request_id) for request_id in request_ids]
        self._items, self._head = list(waits.values()), 0
        self.prompt_tokens -= _prompt_tokens(chosen)
        return chosen

    def renew(self, renewed: Callable[[Waiting], Waiting]) -> None:
        """Each as `renewed` has it, with the same prompt."""
        self._items[self._head :] = map(renewed, self)

    def remove(self, request_id: str) -> Waiting | None:
        """Remove one, wherever it stands; None where it does not wait."""
        for index in range(self._head, len(self._items)):
            if self._items[index].request.id == request_id:
                self.prompt_tokens -= self._items[index].request.prompt_tokens
                return self._items.pop(index)
        return None

    def _compact(self) -> None:
        """Close the gap of those taken: where nobody waits any more, else when they are many and
        more than those who wait.
        """
        if self._head == len(self._items) or (
            self._head > _COMPACT and 2 * self._head > len(self._items)
        ):
            del self._items[: self._head]
            self._head = 0


def _prompt_tokens(waitings: Sequence[Waiting]) -> int:
    return sum([waiting.request.prompt_tokens for waiting in waitings])


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
