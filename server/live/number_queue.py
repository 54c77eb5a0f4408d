"""A queue of numbers in an array."""

from __future__ import annotations

from array import array
from bisect import bisect_left

_COMPACT = 1024


class NumberQueue:
    """Appended at the end, taken at the front.

    A deque of Python floats would hold objects that were made between those of requests: after a
    burst of clients that left, each of them keeps an arena of 1 MiB, which Python gives back as a
    whole only.
    """

    __slots__ = ("_head", "_values")

    def __init__(self) -> None:
        self._values = array("d")
        self._head = 0

    def __len__(self) -> int:
        return len(self._values) - self._head

    def __getitem__(self, place: int) -> float:
        """The oldest is 0; only of those that are there."""
        return self._values[self._head + place]

    def append(self, value: float) -> None:
        """The newest."""
        self._values.append(value)

    def below(self, least: float) -> int:
        """How many are less, which stand at the front: the numbers ascend."""
        return bisect_left(self._values, least, self._head) - self._head

    def drop(self, count: int) -> None:
        """Without the oldest."""
        self._drop_to(self._head + count)

    def drop_below(self, least: float) -> None:
        """Without those that are less."""
        self.drop(self.below(least))

    def _drop_to(self, head: int) -> None:
        self._head = head
        if self._head == len(self._values) or (
            self._head > _COMPACT and 2 * self._head > len(self._values)
        ):
            del self._values[: self._head]
            self._head = 0
