"""The Prometheus series of one policy, looked up by its label once: a look-up costs as much as
the observation that follows it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from queueing.measurement.record import Record
from server.queue.batch import Batch

if TYPE_CHECKING:
    from server.telemetry.metrics import Metrics

OUTCOMES = ("completed", "failed", "rejected", "abandoned", "cancelled")


class PolicySeries:
    """What is counted and observed under one value of the label `policy`; every series exists
    from the start.
    """

    def __init__(self, metrics: Metrics, label: str) -> None:
        self._queueing_delay = metrics.queueing_delay.labels(label).observe
        self._batch_forming_delay = metrics.batch_forming_delay.labels(label).observe
        self._batch_size = metrics.batch_size.labels(label).observe
        self._service_time = metrics.service_time.labels(label).observe
        self._sojourn_time = metrics.sojourn_time.labels(label).observe
        self._output_tokens = metrics.output_tokens.labels(label).observe
        self._first_token = metrics.first_token.labels(label).observe
        self._inter_token = metrics.inter_token.labels(label).observe
        self._clipped = metrics.clipped.labels(label).count
        self._tokens = metrics.tokens.labels(label).count
        self._requests = {
            outcome: metrics.requests.labels(label, outcome).count for outcome in OUTCOMES
        }

    def dispatched(self, batch: Batch) -> None:
        """Delays up to the dispatch, and the size."""
        for ticket in batch.tickets:
            request = ticket.work.request
            self._queueing_delay(batch.dispatched_at - request.arrived_at)
            self._batch_forming_delay(batch.forming_delay(request))
        self._batch_size(batch.tickets[0].batch_size or 1)

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
        tokens = record.output_tokens or 0
        self._output_tokens(tokens)
        first, last = record.first_token_at, record.last_token_at
        if first is None or last is None or record.arrived_at is None:
            return
        self._first_token(first - record.arrived_at)
        if tokens > 1:
            self._inter_token((last - first) / (tokens - 1))
