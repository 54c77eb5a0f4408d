"""Prometheus metrics: what the gateway observes, in DESIGN's names, with buckets fine enough to see
a queue.

Histograms hold what happened; gauges are read when scraped. `/metrics` shows the gateway's own
metrics, then those of its process and of vLLM. vLLM registers its collectors, all named `vllm:...`,
in prometheus_client's default registry and takes the old ones out when an engine is started again;
the gateway's, all named `kendall_...`, are in one registry per gateway. The two are read one after
the other: no name can be in both, and neither can take the other's away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import metadata
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric

from kendall.queueing.measurement.record import Record
from kendall.server.queue.observers import Observer
from kendall.server.queue.sequence import Batch, SequenceState
from kendall.server.runtime.errors import FAILURES
from kendall.server.runtime.log_writer import REASONS
from kendall.server.runtime.logs import log_writer
from kendall.server.telemetry.cost.instruments import Counter
from kendall.server.telemetry.cost.stages import OwnTime, ProcessorTime
from kendall.server.telemetry.live_series import (
    DelayGauges,
    EnergyGauges,
    LoadGauges,
    VerdictSeries,
    WhatIfGauges,
    gauge,
)
from kendall.server.telemetry.policy_series import PolicyMetrics, PolicySeries

disable_created_metrics()  # a second series for every first one, and nobody reads it
ENGINE_LABELS = ("engine", "model", "version")
POLICY_LABELS = ("policy", "max_output_tokens", "epoch")
# of the default registry; whatever else a library registers there stays there
NEIGHBOURS = ("vllm:", "process_")
MAX_POLICIES = 32  # distinct label values of policies that were in force in a process, then "other"


class _Failures:
    """A collector of one counter; every series exists from the start."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Any]:
        """By reason."""
        family = CounterMetricFamily(
            "kendall_failures", "Failed requests, by error code", labels=["reason"]
        )
        for reason, count in (dict.fromkeys(FAILURES, 0) | dict(self._counts)).items():
            family.add_metric([reason], count)
        yield family


class CallCounters:
    """What arrived, and the calls that were refused before they became requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self.received = counter(
            "kendall_requests_received",
            "Requests that arrived, including rejected ones; one per prompt and choice",
        )
        self.refused = counter(
            "kendall_refused_calls",
            (
                "Calls refused before they became requests because they are invalid or "
                "not supported, by error code"
            ),
            ["code"],
        )
        self.denied = counter(
            "kendall_denied_calls",
            "Calls refused by authentication or authorization, by reason",
            ["reason"],
        )


class Metrics(PolicyMetrics, Observer):
    """An observer of the batcher, and what `/metrics` shows."""

    def __init__(self) -> None:
        super().__init__(CollectorRegistry())
        self.registry.register(ProcessorTime())
        self.registry.register(_DroppedLines())
        self.own_time = OwnTime(self.registry)
        self._policies: set[str] = set()
        self._series: dict[str, PolicySeries] = {}
        self.calls = CallCounters(self.registry)
        self.dropped_records = Counter(
            "kendall_dropped_records",
            "Records that could not be written to the run file (--record-file)",
            registry=self.registry,
        )
        self.switches = Counter(
            "kendall_policy_switches", "Policy switches", registry=self.registry
        )
        gauge_of = partial(gauge, self.registry)
        self.engine_info = gauge_of(
            "engine_info", "Engine, model and Kendall version; always 1", ENGINE_LABELS
        )
        self.policy_info = gauge_of(
            "policy_info", "Policy, token limit and epoch in force; always 1", POLICY_LABELS
        )
        self.delays = DelayGauges(self.registry)
        self.what_ifs = WhatIfGauges(self.registry)
        self.verdicts = VerdictSeries(self.registry)
        self.energy = EnergyGauges(self.registry)
        self.load = LoadGauges(self.registry)

    def gauge_of(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when scraped."""
        gauge(self.registry, name, help_text).set_function(read)

    def failures_of(self, counts: Mapping[str, int]) -> None:
        """Requests that failed, by the code of the error, read when scraped."""
        self.registry.register(_Failures(counts))

    def serves(self, engine: str, model: str) -> None:
        """An engine came up: dashboards find the gateways of a model by this."""
        self.engine_info.labels(engine, model, metadata.version("kendall")).set(1)

    def on_arrival(self, sequence: SequenceState) -> None:
        """Its outcome is counted when it is known."""
        del sequence
        self.calls.received.count()

    def on_dispatch(self, batch: Batch) -> None:
        """Delays up to the dispatch, and the size."""
        self._series_of(batch.policy_text).dispatched(batch)

    def on_preempt(self, sequence: SequenceState) -> None:
        """Counted when it happens, under the policy that dispatched it, and not under the one
        that will dispatch it again.
        """
        assert sequence.batch is not None
        self._series_of(sequence.batch.policy_text).preempted()

    def on_record(self, record: Record) -> None:
        """Outcome and durations."""
        self._series_of(record.policy or "").ended(record)

    def on_watched(self, record: Record) -> None:
        """A request that somebody else's servers have served."""
        self.calls.received.count()
        series = self._series_of(record.policy or "")
        series.waited(record.queueing_delay or 0.0)
        series.ended(record)

    def switched(
        self, policy: str, max_output_tokens: int | None, epoch: int, *, changed_policy: bool
    ) -> None:
        """A new epoch began."""
        if changed_policy:
            self.switches.inc()
        self.policy_info.clear()
        self.policy_info.labels(
            self.label(policy),
            "none" if max_output_tokens is None else str(max_output_tokens),
            str(epoch),
        ).set(1)
        self._series_of(policy)  # they exist from the start

    def policy_failed(self, policy: str) -> None:
        """A decision of it was not carried out."""
        self._series_of(policy).fault()

    def label(self, policy: str) -> str:
        """The text of a policy that is or was in force, or `other` once there are too many."""
        if policy not in self._policies:
            if len(self._policies) >= MAX_POLICIES:
                return "other"
            self._policies.add(policy)
        return policy

    def _series_of(self, policy: str) -> PolicySeries:
        series = self._series.get(policy)
        if series is None:
            label = self.label(policy)
            series = self._series.get(label) or PolicySeries(self, label)
            self._series[label] = series
        return series

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return bytes(generate_latest(self.registry))


class _DroppedLines:
    """A collector of one counter: what the log writer of this process dropped."""

    def collect(self) -> Iterator[Any]:
        """By reason, all of them from the start."""
        family = CounterMetricFamily(
            "kendall_dropped_log_lines",
            (
                "Dropped log lines, by reason: stderr was not read (blocked), too many lines of "
                "one kind (repeated), a write failed (unwritable)"
            ),
            labels=["reason"],
        )
        writer = log_writer()
        for reason in REASONS:
            family.add_metric([reason], 0 if writer is None else writer.dropped[reason])
        yield family


class _Neighbours:
    """The part of the default registry that is shown."""

    def collect(self) -> Iterator[Metric]:
        """Families as they stand now."""
        return (family for family in REGISTRY.collect() if family.name.startswith(NEIGHBOURS))


def exposition(metrics: Metrics) -> bytes:
    """The text that Prometheus scrapes: every family once."""
    return metrics.exposition() + bytes(generate_latest(_Neighbours()))
