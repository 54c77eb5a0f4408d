"""The Prometheus series of one policy, looked up by its label once: a look-up costs as much as
the observation that follows it.
"""

from __future__ import annotations

import math
from functools import partial

from prometheus_client import CollectorRegistry

from kendall.queueing.measurement.record import Record
from kendall.server.queue.sequence import Batch
from kendall.server.telemetry.cost.instruments import Counter, Histogram

OUTCOMES = ("completed", "failed", "rejected", "abandoned", "cancelled")


SECONDS = (
    *(
        0.0005,
        0.001,
        0.002,
        0.003,
        0.005,
        0.0075,
        0.01,
        0.015,
        0.02,
        0.03,
        0.04,
        0.05,
        0.075,
        0.1,
        0.15,
        0.2,
        0.3,
        0.4,
        0.5,
    ),
    *(0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0),
)
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768)


def _histogram(
    registry: CollectorRegistry,
    name: str,
    help_text: str,
    buckets: tuple[float, ...] = SECONDS,
) -> Histogram:
    return Histogram(
        f"kendall_{name}",
        help_text,
        ["policy"],
        registry=registry,
        buckets=(*buckets, math.inf),
    )


class DurationHistograms:
    """Delays and times of requests and batches, in seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = partial(_histogram, registry)
        self.queueing_delay = histogram(
            "queueing_delay_seconds", "Time from arrival to dispatch, of dispatched requests"
        )
        self.batch_forming_delay = histogram(
            "batch_forming_delay_seconds",
            (
                "Time from arrival until the batch was complete or max_wait had passed "
                "(policy fixed; otherwise 0)"
            ),
        )
        self.service_time = histogram(
            "service_time_seconds",
            "Time from a dispatch until the server was free for the next one",
        )
        self.sojourn_time = histogram(
            "sojourn_time_seconds", "Time from arrival until the last byte of the answer was sent"
        )
        self.first_token = histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token"
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds",
            "Time between consecutive tokens of an answer; tokens that come together end one gap",
        )


class PolicyMetrics:
    """The metrics that have the label `policy`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.durations = DurationHistograms(registry)
        histogram = partial(_histogram, registry)
        self.batch_size = histogram(
            "batch_size",
            "Sequences per dispatch (policy continuous: sequences in service after it)",
            SIZES,
        )
        self.output_tokens = histogram(
            "output_tokens", "Output tokens per completed request", TOKENS
        )
        self.requests = self._counter("requests", "Requests that ended, by outcome", "outcome")
        self.clipped = self._counter(
            "clipped_requests", "Answers clipped by the gateway's token limit"
        )
        self.preemptions = self._counter(
            "preemptions", "Times that a request was put back into the queue after its dispatch"
        )
        self.faults = self._counter(
            "policy_faults", "Decisions that could not be carried out, retries included"
        )
        self.tokens = self._counter(
            "generated_tokens",
            ("Output tokens generated, including those of failed and cancelled requests"),
        )

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"kendall_{name}", help_text, ["policy", *labels], registry=self.registry)


class PolicySeries:
    """What is counted and observed under one value of the label `policy`; every series exists
    from the start.
    """

    def __init__(self, metrics: PolicyMetrics, label: str) -> None:
        durations = metrics.durations
        self.waited = durations.queueing_delay.labels(label).observe  # seconds in the queue
        self._batch_forming_delay = durations.batch_forming_delay.labels(label).observe
        self._batch_size = metrics.batch_size.labels(label).observe
        self._service_time = durations.service_time.labels(label).observe
        self._sojourn_time = durations.sojourn_time.labels(label).observe
        self._output_tokens = metrics.output_tokens.labels(label).observe
        self._first_token = durations.first_token.labels(label).observe
        self._gaps = durations.inter_token.labels(label)
        self._gap = self._gaps.gather
        self._clipped = metrics.clipped.labels(label).count
        self.preempted = metrics.preemptions.labels(label).count
        self.fault = metrics.faults.labels(label).count
        self._tokens = metrics.tokens.labels(label).count
        self._requests = {
            outcome: metrics.requests.labels(label, outcome).count for outcome in OUTCOMES
        }

    def dispatched(self, batch: Batch) -> None:
        """Delays up to the dispatch, and the size; from here on the gaps between its tokens."""
        batch.on_gap = self._gap
        self._gaps.settle()
        for sequence in batch.sequences:
            if sequence.preemptions:  # its delays were counted when it was dispatched first
                continue
            request = sequence.engine_request.request
            self.waited(batch.dispatched_at - request.arrived_at)
            self._batch_forming_delay(batch.forming_delay(request))
        self._batch_size(batch.sequences[0].batch_size or 1)

    def ended(self, record: Record) -> None:
        """Outcome and durations."""
        self._requests[record.outcome]()
        if record.output_tokens:
            self._tokens(record.output_tokens)
        if record.clipped:
            self._clipped()
        if record.service_time is not None:
            self._service_time(record.service_time)
        if record.outcome == "completed":
            self._completed(record)

    def _completed(self, record: Record) -> None:
        self._sojourn_time(record.sojourn_time or 0.0)
        self._output_tokens(record.output_tokens or 0)
        first = record.first_token_at
        if first is not None and record.arrived_at is not None:
            self._first_token(first - record.arrived_at)
