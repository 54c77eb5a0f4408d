"""prometheus_client's histogram, its bucket found by bisection.

The library walks through the bounds, twenty for a delay of 0.2 s; every request is observed seven times.
"""

from __future__ import annotations

from bisect import bisect_left

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
