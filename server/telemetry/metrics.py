"""Prometheus metrics: what the gateway observes, in DESIGN's names, with buckets fine enough to see
a queue.

Histograms hold what happened; gauges are read when scraped. One registry per gateway, so that
vLLM's own collectors cannot clash with ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily

from queueing.measurement.record import Record
from server.errors import FAILURES
from server.queue.ticket import Batch, Ticket
from server.runtime.log_writer import REASONS
from server.runtime.logs import log_writer
from server.telemetry.cost.instruments import Counter
from server.telemetry.cost.processor import ProcessorTime
from server.telemetry.cost.stages import OwnTime
from server.telemetry.policy_series import PolicyMetrics, PolicySeries

disable_created_metrics()  # a second series for every first one, and nobody reads it
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


class Metrics(PolicyMetrics):
    """An observer of the batcher, and what `/metrics` shows."""

    def __init__(self) -> None:
        super().__init__(CollectorRegistry())
        self.registry.register(ProcessorTime())
        self.registry.register(_DroppedLines())
        self.own_time = OwnTime(self.registry)
        self._policies: set[str] = set()
        self._series: dict[str, PolicySeries] = {}
        self.received = Counter(
            "kendall_requests_received",
            "Requests that arrived, including rejected ones; one per prompt and choice",
            registry=self.registry,
        )
        self.refused = Counter(
            "kendall_refused_calls",
            (
                "Calls refused before they became requests because they are invalid or not "
                "supported, by error code"
            ),
            ["code"],
            registry=self.registry,
        )
        self.denied = Counter(
            "kendall_denied_calls",
            "Calls refused by authentication or authorization, by reason",
            ["reason"],
            registry=self.registry,
        )
        self.dropped_records = Counter(
            "kendall_dropped_records",
            "Records that could not be written to the run file (--record-file)",
            registry=self.registry,
        )
        self.switches = Counter(
            "kendall_policy_switches", "Policy switches", registry=self.registry
        )
        self.engine_info = self._gauge(
            "engine_info",
            "Engine, model and Kendall version; always 1",
            ["engine", "model", "version"],
        )
        self.policy_info = self._gauge(
            "policy_info",
            "Policy, token limit and epoch in force; always 1",
            ["policy", "max_output_tokens", "epoch"],
        )
        self.predicted = self._gauge(
            "predicted_queueing_delay_seconds",
            "Predicted queueing delay, by method and statistic",
            ["policy", "method", "stat"],
        )
        self.observed = self._gauge(
            "observed_queueing_delay_seconds",
            "Observed queueing delay over the prediction window, by statistic",
            ["policy", "stat"],
        )
        self.predicted_sojourn = self._gauge(
            "predicted_sojourn_time_seconds",
            "Predicted sojourn time, by method and statistic",
            ["policy", "method", "stat"],
        )
        self.observed_sojourn = self._gauge(
            "observed_sojourn_time_seconds",
            "Observed sojourn time over the prediction window (policy continuous)",
            ["policy", "stat"],
        )
        self.what_if = self._gauge(
            "what_if_queueing_delay_seconds",
            ("Predicted queueing delay under each other policy, with all other settings unchanged"),
            ["policy", "stat"],
        )
        self.what_if_sojourn = self._gauge(
            "what_if_sojourn_time_seconds",
            (
                "Predicted sojourn time under each other policy, with all other settings "
                "unchanged; compare policies by this one"
            ),
            ["policy", "stat"],
        )
        self.what_if_first_token = self._gauge(
            "what_if_time_to_first_token_seconds",
            (
                "Predicted mean time to first token under each other policy, with all other "
                "settings unchanged"
            ),
            ["policy", "stat"],
        )
        self.assumption_holds = self._gauge(
            "assumption_holds",
            "Whether an assumption of the model holds (1: yes, 0: no, NaN: unknown)",
            ["assumption"],
        )
        self.verdict = self._gauge(
            "prediction_verdict",
            "Verdict on the prediction (1: the current one, 0: the others)",
            ["verdict"],
        )
        self.check_holds = self._gauge(
            "self_check_holds",
            (
                "Whether a check of the gateway's own counters holds (1: yes, 0: no, do not trust "
                "the measured delays)"
            ),
            ["check"],
        )
        self.decisions = Counter(
            "kendall_autopilot_decisions",
            "Decisions of the autopilot, by kind",
            ["kind"],
            registry=self.registry,
        )
        self.joules = self._gauge(
            "energy_joules", "Energy reported by the engine's devices since the gateway started"
        )
        self.energy = self._gauge(
            "energy_estimate_joules",
            (
                "Estimated energy: beta and c0 in beta b + c0 for a batch of b sequences, and "
                "energy per output token"
            ),
            ["term"],
        )
        self.speed = self._gauge(
            "engine_speed_ratio",
            (
                "Measured service time divided by the calibrated latency law's service time; "
                "above 1: slower than calibrated"
            ),
        )
        self.predicted_utilisation = self._gauge(
            "predicted_utilisation", "Predicted fraction of time during which a server is busy"
        )
        self.predicted_batch_size = self._gauge(
            "predicted_batch_size", "Predicted mean number of sequences per dispatch"
        )
        self.error = self._gauge(
            "prediction_error_ratio",
            "Relative error of the predicted mean queueing delay: observed / predicted - 1",
            ["policy"],
        )
        self.load = self._gauge(
            "load", "Arrival rate divided by the largest stable arrival rate of the policy in force"
        )
        self.utilisation = self._gauge(
            "utilisation", "Fraction of the last minute during which a server was busy"
        )
        self.arrival_rate = self._gauge(
            "arrival_rate",
            (
                "Calls arriving per second, over the last minute; a call with n or several "
                "prompts is one arrival"
            ),
        )

    def gauge_of(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when scraped."""
        self._gauge(name, help_text).set_function(read)

    def failures_of(self, counts: Mapping[str, int]) -> None:
        """Requests that failed, by the code of the error, read when scraped."""
        self.registry.register(_Failures(counts))

    def serves(self, engine: str, model: str) -> None:
        """An engine came up: dashboards find the gateways of a model by this."""
        self.engine_info.labels(engine, model, metadata.version("kendall")).set(1)

    def on_arrival(self, ticket: Ticket) -> None:
        """Its outcome is counted when it is known."""
        del ticket
        self.received.count()

    def on_dispatch(self, batch: Batch) -> None:
        """Delays up to the dispatch, and the size."""
        self._series_of(batch.policy_text).dispatched(batch)

    def on_idle(self, server_id: int, at: float) -> None:
        """The live window sees to it."""

    def on_settle(self, ticket: Ticket) -> None:
        """Counted with its record."""

    def on_record(self, record: Record) -> None:
        """Outcome and durations."""
        self._series_of(record.policy or "").ended(record)

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

    def _gauge(self, name: str, help_text: str, labels: tuple[str, ...] | list[str] = ()) -> Gauge:
        return Gauge(f"kendall_{name}", help_text, labels, registry=self.registry)


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
