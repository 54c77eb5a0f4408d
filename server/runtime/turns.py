"""Places that callers share fairly: each caller has its own queue, and callers take turns."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque


class Turns:
    """`places` at once. One caller never holds all of them, so that its long work leaves a place
    to others.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._most = max(1, places - 1)  # of one caller
        self._held: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Of all callers."""
        return sum(map(len, self._queues.values()))

    def waiting_of(self, caller: str) -> int:
        """Of this one."""
        return len(self._queues.get(caller, ()))

    async def take(self, caller: str) -> None:
        """Returns with a place, which `give` returns."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(caller, deque()).append(turn)
        self._hand_out()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.give(caller)
            else:
                self._forget(caller, turn)
            raise

    def give(self, caller: str) -> None:
        """The place is free."""
        self._free += 1
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free and (caller := self._next()) is not None:
            turn = self._queues[caller].popleft()
            self._queues.move_to_end(caller)
            if not self._queues[caller]:
                del self._queues[caller]
            if turn.done():
                continue  # it was cancelled, and has not run since
            self._free -= 1
            self._held[caller] += 1
            turn.set_result(None)

    def _next(self) -> str | None:
        """The caller that has waited longest for its turn, among those with the fewest places."""
        may = [caller for caller in self._queues if self._held[caller] < self._most]
        return min(may, key=self._held.__getitem__, default=None)

    def _forget(self, caller: str, turn: asyncio.Future[None]) -> None:
        queue = self._queues.get(caller)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._queues[caller]
