"""Spans that did not come: requests that ended, by the servers' own counters, less those whose
spans are here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from kendall.remote import Trust
from kendall.server.watch.fleet import Fleet
from kendall.server_metrics import NoMetricsError, metrics_of

log = logging.getLogger("kendall.watch")
ENDED = "vllm:request_success"
NO_SPAN = "abort"  # reason of an end without a span
KEPT = 600  # readings


class NoCounterError(ValueError):
    """A server's metrics lack the counter."""


def ended_requests(text: str) -> float:
    """Requests that have ended, of vLLM's exposition. Raises NoCounterError."""
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    found = [
        float(sample.value)
        for family in text_string_to_metric_families(text)
        if family.name == ENDED
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels.get("finished_reason") != NO_SPAN
    ]
    if not found:
        raise NoCounterError(f"got no {ENDED}_total; expected the /metrics of a vLLM server")
    return sum(found)


@dataclass(frozen=True, slots=True)
class _CounterReading:
    at: float
    counts: tuple[float, ...]  # of each server


@dataclass(slots=True)
class LostSpans:
    """Of all servers of the URLs together."""

    urls: Sequence[str]
    headers: dict[str, str]
    trust: Trust
    why_not: str | None = None  # why the last reading failed
    _readings: list[_CounterReading] = field(default_factory=list)

    async def read(self, now: float) -> None:
        """Once, of every server; `now` on the receiver's clock."""
        counts = await asyncio.gather(*map(self._count, self.urls))
        known = [each for each in counts if each is not None]
        if len(known) < len(self.urls):
            return
        self.why_not = None
        before = self._readings[-1].counts if self._readings else known
        if any(new < old for new, old in zip(known, before, strict=True)):
            self._readings.clear()  # a server began anew
        self._readings.append(_CounterReading(now, tuple(known)))
        del self._readings[1 : max(1, len(self._readings) - KEPT)]

    def lost(self, fleet: Fleet, now: float) -> tuple[int, int] | None:
        """Spans that are missing, and requests that ended, between the first reading and the last
        of which every span must have come; None where that is not known.
        """
        until = fleet.known_until(now)
        known = [each for each in self._readings if each.at <= until]
        if len(known) < 2:
            return None
        first, last = known[0], known[-1]
        ended = round(sum(last.counts) - sum(first.counts))
        return max(0, ended - fleet.ended_between(first.at, last.at)), ended

    async def _count(self, url: str) -> float | None:
        try:
            return ended_requests(await metrics_of(url, self.headers, self.trust))
        except (NoMetricsError, ValueError) as error:
            if self.why_not is None:
                log.warning("lost spans are not counted: %s: %s", url, error)
            self.why_not = f"{url}: {error}"
            return None
