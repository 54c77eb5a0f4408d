"""prometheus_client's histogram, its bucket found by bisection.

The library walks through the bounds, twenty for a delay of 0.2 s; every request is observed seven times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import prometheus_client


class Histogram(prometheus_client.Histogram):  # type: ignore[misc]  # the library is not followed by mypy
    """The library's in all but `observe`."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """As the library's; with an exemplar, or for what is no number, by the library."""
        if exemplar is not None or amount != amount:  # noqa: PLR0124 - NaN is in no bucket
            super().observe(amount, exemplar)
            return
        self._sum.inc(amount)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)

    def totals(self) -> tuple[float, list[float]]:
        """Over all label values: the sum of what was observed, and how many observations each bucket has for itself."""
        children = list(self._metrics.values()) if self._labelnames else [self]
        counts = [[bucket.get() for bucket in child._buckets] for child in children]
        return sum(child._sum.get() for child in children), [sum(column) for column in zip(*counts, strict=True)]

    @property
    def bounds(self) -> Sequence[float]:
        """The upper end of each bucket."""
        return tuple(self._upper_bounds)
