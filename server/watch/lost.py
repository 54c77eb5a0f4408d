"""What the servers' own counters tell beside their spans: spans that did not come (requests that
ended, less those whose spans are here), and what no span has: prefix hits, preemptions, KV memory.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kendall.queueing.measurement.server_signals import VLLM
from kendall.remote import Trust
from kendall.server.watch.fleet import Fleet
from kendall.server_metrics import NoMetricsError, metrics_of

log = logging.getLogger("kendall.watch")
(ENDED,) = VLLM.signals["finished"]
REASON = "finished_reason"
NO_SPAN = "abort"  # reason of an end without a span
KEPT = 600  # readings


class NoCounterError(ValueError):
    """A server's metrics lack the counter."""


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """One exposition of a vLLM; not a number where it has no such metric."""

    ended: float  # requests that sent a span
    prefix_hits: float  # prompt tokens that the prefix cache held
    prefix_queries: float  # of so many
    preempted: float
    kv_usage: float  # now, a share

    @classmethod
    def read(cls, text: str) -> ServerCounts:
        """Raises NoCounterError."""
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

        values: dict[str, list[float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in VLLM.names and sample.labels.get(REASON) != NO_SPAN:
                    values.setdefault(sample.name, []).append(float(sample.value))
        used = {signal: name for name, (signal, part) in VLLM.used(values).items() if not part}
        if "finished" not in used:
            raise NoCounterError(f"got no {ENDED}; expected the /metrics of a vLLM server")
        hits, queries, preempted = (
            sum(values[used[signal]]) if signal in used else math.nan
            for signal in ("prefix_hits", "prefix_queries", "preempted")
        )
        most = max(values[used["kv_usage"]]) if "kv_usage" in used else math.nan
        return cls(sum(values[used["finished"]]), hits, queries, preempted, most)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersState:
    """Of all servers together, since the first reading; None where they do not tell."""

    prefix_hits: float | None  # share of the prompt tokens
    preemptions: int | None
    kv_usage: float | None  # of the fullest, at the last reading


@dataclass(frozen=True, slots=True)
class _CounterReading:
    at: float
    counts: tuple[ServerCounts, ...]  # of each server

    def total(self, name: str) -> float:
        """Over all servers."""
        return float(sum(getattr(each, name) for each in self.counts))


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
        if any(new.ended < old.ended for new, old in zip(known, before, strict=True)):
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
        ended = round(last.total("ended") - first.total("ended"))
        return max(0, ended - fleet.ended_between(first.at, last.at)), ended

    def state(self) -> ServersState | None:
        """What the counters tell beside that; None before there are two readings."""
        if len(self._readings) < 2:
            return None
        first, last = self._readings[0], self._readings[-1]
        hits, asked, preempted = (
            last.total(name) - first.total(name)
            for name in ("prefix_hits", "prefix_queries", "preempted")
        )
        full = max(each.kv_usage for each in last.counts)
        return ServersState(
            prefix_hits=hits / asked if asked > 0 and hits >= 0 else None,
            preemptions=round(preempted) if preempted >= 0 else None,
            kv_usage=full if math.isfinite(full) else None,
        )

    async def _count(self, url: str) -> ServerCounts | None:
        try:
            return ServerCounts.read(await metrics_of(url, self.headers, self.trust))
        except (NoMetricsError, ValueError) as error:
            if self.why_not is None:
                log.warning("lost spans are not counted: %s: %s", url, error)
            self.why_not = f"{url}: {error}"
            return None
