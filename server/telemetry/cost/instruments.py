"""prometheus_client's histogram and counter without a lock, and without a walk through the bounds,
for each observation.

Every request is observed seven times and counted thrice. Here an observation stays with the event
loop, which alone observes, and is handed to the library when it is asked for.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import prometheus_client

GATHERED = 10_000  # values, beyond which `settle` counts them


class Histogram(prometheus_client.Histogram):  # type: ignore[misc]  # the library is not followed by mypy
    """The library's in all but the speed of `observe`."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._pending = [0] * len(self._upper_bounds)
        self._pending_sum = 0.0
        self._gathered = array("d")

    @property
    def gather(self) -> Callable[[float], None]:
        """Observes what comes with every token: kept until `settle`, or until it is asked for."""
        return self._gathered.append

    def settle(self) -> None:
        """Once in a while: nobody may ask for days."""
        if len(self._gathered) >= GATHERED:
            self._hand_over()

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """As the library's; with an exemplar, or for what is no number, by the library."""
        if exemplar is not None or amount != amount:  # noqa: PLR0124 - NaN is in no bucket
            super().observe(amount, exemplar)
            return
        self._pending_sum += amount
        self._pending[bisect_left(self._upper_bounds, amount)] += 1

    def totals(self) -> tuple[float, list[float]]:
        """Over all label values: the sum of what was observed, and how many observations each
        bucket has for itself.
        """
        children = list(self._metrics.values()) if self._labelnames else [self]
        for child in children:
            child._hand_over()
        counts = [[bucket.get() for bucket in child._buckets] for child in children]
        return sum(child._sum.get() for child in children), [
            sum(column) for column in zip(*counts, strict=True)
        ]

    @property
    def bounds(self) -> Sequence[float]:
        """The upper end of each bucket."""
        return tuple(self._upper_bounds)

    def _hand_over(self) -> None:
        if self._gathered:
            values = np.array(self._gathered)
            places = np.searchsorted(self._upper_bounds, values)
            for place, count in enumerate(np.bincount(places).tolist()):
                self._pending[place] += count
            self._pending_sum += float(values.sum())
            del self._gathered[:]
        for place, count in enumerate(self._pending):
            if count:
                self._buckets[place].inc(count)
                self._pending[place] = 0
        self._sum.inc(self._pending_sum)
        self._pending_sum = 0.0

    def _child_samples(self) -> Iterable[Any]:
        self._hand_over()
        samples: Iterable[Any] = super()._child_samples()
        return samples


class Counter(prometheus_client.Counter):  # type: ignore[misc]
    """The library's, with a `count` that costs less than its `inc`."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._pending = 0.0

    def count(self, amount: float = 1) -> None:
        """`amount` is not negative."""
        self._pending += amount

    @property
    def total(self) -> float:
        """What was counted so far."""
        self._hand_over()
        total: float = self._value.get()
        return total

    def _hand_over(self) -> None:
        self._value.inc(self._pending)
        self._pending = 0.0

    def _child_samples(self) -> Iterable[Any]:
        self._hand_over()
        samples: Iterable[Any] = super()._child_samples()
        return samples
