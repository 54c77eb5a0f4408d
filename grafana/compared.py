"""Policies compared: each policy with the traffic of its epochs."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.frame import Section, dashboard
from grafana.panels import (
    ATTENTION,
    COUNT,
    FRACTION,
    PER_SECOND,
    SECONDS,
    Column,
    Series,
    bars,
    grid,
    lines,
)
from grafana.queries import RANGE, by_policy, mean, quantile, rate, share

DELAY, SERVICE, SOJOURN = (
    "kendall_queueing_delay_seconds",
    "kendall_service_time_seconds",
    "kendall_sojourn_time_seconds",
)


def build() -> Dashboard:
    """A table of all that is shown, and each column over time."""
    says = (
        "Each policy over the time range. Traffic differs from epoch to epoch: `kendall sweep` "
        "compares on the same arrivals, the what-if table of the theory dashboard compares at the "
        "same rate, lengths and speed."
    )
    return dashboard(
        "kendall-policies", "Kendall / Policies compared", says, [_table(), _bars(), _over_time()]
    )


def _dispatched() -> str:
    return f"sum by (policy) (increase({by_policy(f'{DELAY}_count')}[{RANGE}])) > 0"


def _table() -> Section:
    completed = rate("kendall_requests_total", 'outcome="completed"', window=RANGE)
    columns = [
        Column("requests", _dispatched(), COUNT),
        Column("delay, mean", mean(DELAY, window=RANGE), SECONDS, ATTENTION),
        Column("delay, p95", quantile(DELAY, 0.95, window=RANGE), SECONDS, ATTENTION),
        Column("delay, p99", quantile(DELAY, 0.99, window=RANGE), SECONDS, ATTENTION),
        Column("service, mean", mean(SERVICE, window=RANGE), SECONDS),
        Column("sojourn, p95", quantile(SOJOURN, 0.95, window=RANGE), SECONDS, ATTENTION),
        Column("batch size, mean", mean("kendall_batch_size", window=RANGE), COUNT),
        Column("output tokens, mean", mean("kendall_output_tokens", window=RANGE), COUNT),
        Column(
            "clipped",
            share(rate("kendall_clipped_requests_total", window=RANGE), completed),
            FRACTION,
        ),
    ]
    return "Whole time range", [
        grid("Policies", "One row for each policy that was in force.", columns, key="policy")
    ]


def _bars() -> Section:
    stat = by_policy("kendall_predicted_queueing_delay_seconds", 'stat="mean"')
    predicted = f"avg by (policy) (avg_over_time({stat}[{RANGE}]) >= 0)"
    return "Comparison", [
        bars(
            "Mean queueing delay, observed and predicted",
            "Over the whole time range. Predicted: mean of the predictions made in it.",
            SECONDS,
            [
                Series(mean(DELAY, window=RANGE), "observed {{policy}}"),
                Series(predicted, "predicted {{policy}}"),
            ],
            limits=ATTENTION,
        ),
        bars(
            "Completed requests per second",
            "Requests completed under each policy, divided by the length of the whole time range.",
            PER_SECOND,
            [
                Series(
                    rate("kendall_requests_total", 'outcome="completed"', window=RANGE),
                    "{{policy}}",
                )
            ],
        ),
    ]


def _over_time() -> Section:
    return "Over time", [
        lines(
            "Queueing delay, mean",
            "Time from arrival to dispatch.",
            SECONDS,
            [Series(mean(DELAY), "{{policy}}")],
            limits=ATTENTION,
        ),
        lines(
            "Queueing delay, p95",
            "Time from arrival to dispatch.",
            SECONDS,
            [Series(quantile(DELAY, 0.95), "{{policy}}")],
            limits=ATTENTION,
        ),
        lines(
            "Service time, mean",
            "Time from dispatch until the server is free again.",
            SECONDS,
            [Series(mean(SERVICE), "{{policy}}")],
        ),
        lines(
            "Sojourn time, p95",
            "Time from arrival to the last byte of the answer.",
            SECONDS,
            [Series(quantile(SOJOURN, 0.95), "{{policy}}")],
            limits=ATTENTION,
        ),
        lines(
            "Error of the prediction",
            "Observed / predicted - 1.",
            FRACTION,
            [Series(by_policy("kendall_prediction_error_ratio"), "{{policy}}")],
            limits=[
                (-1.0, "red"),
                (-0.25, "orange"),
                (-0.1, "green"),
                (0.1, "orange"),
                (0.25, "red"),
            ],
        ),
        lines(
            "Batch formation",
            "Under fixed: time that a request waits for its batch to fill, or for max_wait.",
            SECONDS,
            [Series(mean("kendall_batch_forming_delay_seconds"), "{{policy}}")],
        ),
    ]
