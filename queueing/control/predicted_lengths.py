"""How predicted lengths came true of late: the error of a prediction is taken for that of one of
the predictions nearest to it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence

KEPT = 1024  # requests that were served
ALIKE = 32  # predictions nearest to one
EXACT = 0.01  # relative error up to which a prediction came true
_LEAST = 1.0  # token: what is left of a request that goes on


class PredictedLengths:
    """Learns from requests that were served; before the first, predictions are taken for true."""

    def __init__(self) -> None:
        # predicted tokens, number of the request, true / predicted; in the order of their ends
        self._kept: deque[tuple[float, int, float]] = deque()
        self._predicted: list[tuple[float, int, float]] = []  # the same, sorted
        self._actual: list[float] = []  # sorted
        self._count = self._wrong = 0
        # served since somebody asked: under first come, first served nobody does
        self._new: deque[tuple[float, int]] = deque(maxlen=KEPT)

    def add(self, predicted: float, actual: int) -> None:
        """Tokens > 0 of one more that was served; the oldest is forgotten."""
        self._new.append((predicted, actual))

    def _sort_in(self, predicted: float, actual: int) -> None:
        if len(self._kept) == KEPT:
            self._forget(self._kept.popleft())
        self._count += 1
        one = predicted, self._count, actual / predicted
        self._kept.append(one)
        insort(self._predicted, one)
        insort(self._actual, actual)
        self._wrong += _is_wrong(one[2])

    def _forget(self, one: tuple[float, int, float]) -> None:
        predicted, _, ratio = one
        del self._predicted[bisect_left(self._predicted, one)]
        del self._actual[bisect_left(self._actual, round(predicted * ratio))]
        self._wrong -= _is_wrong(ratio)

    def left(self, predicted: float, made: int = 0) -> Sequence[float]:
        """Equally likely numbers of tokens > 0 that are still to come behind those made."""
        while self._new:
            self._sort_in(*self._new.popleft())
        if not self._wrong:
            return (max(predicted - made, _LEAST),)
        middle = bisect_left(self._predicted, (predicted,))
        middle += bisect_left(self._predicted, (predicted, self._count + 1))
        first = max(0, min((middle - ALIKE) // 2, len(self._predicted) - ALIKE))
        near = self._predicted[first : first + ALIKE]
        left = [total - made for _, _, ratio in near if (total := predicted * ratio) > made]
        return left or self._outlived(made)

    def _outlived(self, made: int) -> Sequence[float]:
        """Of one that is longer than all like it were."""
        longer = self._actual[bisect_right(self._actual, made) :]
        return [actual - made for actual in longer[:: 1 + len(longer) // ALIKE]] or (_LEAST,)


def _is_wrong(ratio: float) -> bool:
    return abs(ratio - 1) > EXACT
