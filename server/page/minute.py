"""What the last minute brought, by the difference of the counters that `/metrics` shows: read once
a second, whoever looks.

Rates are per second. Counters cross epochs, so a switch of the policy leaves no mark. The times to
first token are those of requests that completed within the minute: the mean is exact, quantiles are
interpolated within the buckets of the histogram.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from kendall.server.admission.rejections import REASONS
from kendall.server.page.host import PageHost
from kendall.server.runtime.errors import FAILURES

if TYPE_CHECKING:
    from prometheus_client import Counter

MINUTE = 60.0  # seconds
SHORTEST = 5.0  # seconds after the start from which on a rate is shown
RATES = (
    *("completed_rate", "token_rate", "abandoned_rate", "cancelled_rate"),
    *(f"refused_{reason}_rate" for reason in REASONS),
    *(f"failed_{code}_rate" for code in FAILURES),
)
QUANTILES = {"first_token_p95": 0.95, "first_token_p99": 0.99}
MINUTE_COLUMNS = (*RATES, "first_token_mean", *QUANTILES)
NOTHING: tuple[float | None, ...] = (None,) * len(MINUTE_COLUMNS)


class _Reading(NamedTuple):
    """The counters at one instant; in arrays, as a minute of them would hold the memory of
    requests that were made between them.
    """

    at: float
    counts: array[float]  # as RATES
    first_token_sum: float
    first_token_counts: array[float]  # by bucket


class LastMinute:
    """Readings of the last minute, and what lies between the first and the last of them."""

    def __init__(self, gateway: PageHost) -> None:
        self._gateway = gateway
        self._readings: deque[_Reading] = deque()

    def read(self) -> tuple[float | None, ...]:
        """One more reading; the numbers of MINUTE_COLUMNS."""
        newest = self._reading()
        self._readings.append(newest)
        while newest.at - self._readings[0].at > MINUTE + 0.5:
            self._readings.popleft()
        oldest = self._readings[0]
        seconds = newest.at - oldest.at
        if seconds < SHORTEST:
            return NOTHING
        rates = [
            (new - old) / seconds for new, old in zip(newest.counts, oldest.counts, strict=True)
        ]
        return (*rates, *self._first_token(oldest, newest))

    def _reading(self) -> _Reading:
        gateway = self._gateway
        metrics = gateway.metrics
        outcomes, refused = (
            totals(metrics.requests, "outcome"),
            gateway.overload.rejections.by_reason(),
        )
        failed: Mapping[str, float] = gateway.batcher.failures
        counts = (
            *(outcomes.get("completed", 0.0), sum(totals(metrics.tokens, "policy").values())),
            *(outcomes.get("abandoned", 0.0), outcomes.get("cancelled", 0.0)),
            *(refused.get(reason, 0.0) for reason in REASONS),
            *(failed.get(code, 0.0) for code in FAILURES),
        )
        seconds, buckets = metrics.durations.first_token.totals()
        return _Reading(gateway.now(), array("d", counts), seconds, array("d", buckets))

    def _first_token(self, oldest: _Reading, newest: _Reading) -> list[float | None]:
        counts = [
            new - old
            for new, old in zip(newest.first_token_counts, oldest.first_token_counts, strict=True)
        ]
        if not (count := sum(counts)):
            return [None] * (1 + len(QUANTILES))
        bounds = self._gateway.metrics.durations.first_token.bounds
        mean = (newest.first_token_sum - oldest.first_token_sum) / count
        return [mean, *(quantile(level, bounds, counts) for level in QUANTILES.values())]


def totals(counter: Counter, label: str) -> dict[str, float]:
    """By the value of one label, over all others. `collect` would make an object of each series,
    every second.
    """
    found: dict[str, float] = {}
    place = counter._labelnames.index(label)
    for values, child in list(counter._metrics.items()):
        found[values[place]] = found.get(values[place], 0.0) + child.total
    return found


def quantile(level: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """As Prometheus's `histogram_quantile` has it: linear within the bucket; None in the last
    one, which has no end.
    """
    cumulated = list(accumulate(counts))
    rank = level * cumulated[-1]
    index = next(index for index, total in enumerate(cumulated) if total >= rank)
    if index == len(bounds) - 1:
        return None
    low = bounds[index - 1] if index else 0.0
    before = cumulated[index] - counts[index]
    return low + (bounds[index] - low) * (rank - before) / counts[index]
