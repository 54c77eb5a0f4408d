"""The waiting queue with priorities that age: in the order of arrival + priority x aging.

A request gains a level for each `aging` seconds that it waits: at the instant t its level is p - (t
- a)/aging, lower is earlier (vLLM's sense). Of two requests the order of these levels never changes
  with t, so that a sorted list of a + p aging stays sorted
while everyone ages. The starvation bound follows: a request is overtaken only by those of lower p'
that arrive within (p - p') aging seconds after it, whatever the load; with |p| <= MOST that is at
most 2 MOST aging. Equal priorities are served in the order of arrival. The order knows nothing of
lengths: the mean wait over all requests is that of first come, first served.
"""

from __future__ import annotations

from bisect import bisect_right, insort_right
from collections.abc import Sequence

from policies.core import Request, Waiting
from queueing.simulation.waiting import WaitingQueue

# largest priority of either sign: without a bound on it the starvation bound would bound nothing
MOST = 100


class PriorityQueue(WaitingQueue):
    """A `WaitingQueue` in that order; one that is put back stands where it stood."""

    __slots__ = ("_aging",)

    def __init__(self, aging: float) -> None:
        super().__init__()
        self._aging = aging

    def append(self, waiting: Waiting) -> None:
        """Behind those of the same or an earlier key."""
        insort_right(self._items, waiting, lo=self._head, key=self._key)
        self.prompt_tokens += waiting.request.prompt_tokens

    def place_of(self, request: Request) -> int:
        """How many would stand before it."""
        return (
            bisect_right(self._items, self._key(Waiting(request)), lo=self._head, key=self._key)
            - self._head
        )

    def put_back(self, waitings: Sequence[Waiting]) -> None:
        """Each where its own key puts it: before all that arrived later, but for earlier
        priorities.
        """
        for waiting in waitings:
            self.append(waiting)

    def _key(self, waiting: Waiting) -> float:
        # one that was admitted before priorities aged may have any priority
        request = waiting.request
        return request.arrived_at + max(-MOST, min(MOST, request.priority)) * self._aging
