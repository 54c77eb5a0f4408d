"""A queue of numbers in an array."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator

_COMPACT = 1024


class Numbers:
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

    def __iter__(self) -> Iterator[float]:
        return iter(self._values[self._head :])

    def first(self) -> float:
        """The oldest. Raises IndexError where there is none."""
        return self._values[self._head]

    def append(self, value: float) -> None:
        """The newest."""
        self._values.append(value)

    def drop_first(self) -> None:
        """Without the oldest. Raises IndexError where there is none."""
        self.first()
        self._drop_to(self._head + 1)

    def drop_below(self, least: float) -> None:
        """Without those that are less, which stand at the front: the numbers ascend."""
        self._drop_to(bisect_left(self._values, least, self._head))

    def _drop_to(self, head: int) -> None:
        self._head = head
        if self._head == len(self._values) or (
            self._head > _COMPACT and 2 * self._head > len(self._values)
        ):
            del self._values[: self._head]
            self._head = 0
