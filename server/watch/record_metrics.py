"""Metrics of a track record that grows: of the last row of each model."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Gauge

from kendall.queueing.estimation.counters.track_record import RecordRow, TrackRecord
from kendall.queueing.estimation.interval import Estimate

STATS = ("observed", "predicted", "low", "high")


class RecordMetrics:
    """Seconds; not a number where nothing was counted or predicted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(f"kendall_{name}", about, ("model", *labels), registry=registry)

        self._delay = gauge(
            "record_queueing_delay_seconds",
            "Mean queueing delay of the last row: observed, and predicted from the row before, "
            "with the interval that holds nine of ten",
            "stat",
        )
        self._sojourn = gauge(
            "record_sojourn_time_seconds", "Mean sojourn time of the last row, likewise", "stat"
        )
        self._rate = gauge("record_arrival_rate", "Requests per second of the last row")
        self._replicas = gauge("record_replicas", "Servers that were counted in the last row")
        self._rows = gauge(
            "record_rows",
            "Rows whose queueing delay was judged, and those inside their interval",
            "kind",
        )

    def on_row(self, model: str, row: RecordRow, record: TrackRecord) -> None:
        """The last row of a model."""
        seen = row.observed
        for gauge, quantity in ((self._delay, "queueing_delay"), (self._sojourn, "sojourn_time")):
            told: Estimate | None = getattr(row.forecast, quantity, None)
            ends = (math.nan,) * 3 if told is None else (told.value, told.low, told.high)
            for stat, value in zip(STATS, (getattr(seen, quantity), *ends), strict=True):
                gauge.labels(model, stat).set(value)
        self._rate.labels(model).set(seen.arrival_rate)
        self._replicas.labels(model).set(seen.replicas)
        inside, judged = record.coverage
        self._rows.labels(model, "judged").set(judged)
        self._rows.labels(model, "inside").set(inside)
