"""Load test: the numbers of a load generator's report, measured at the gateway."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.frame import Section, dashboard
from grafana.panels import (
    ATTENTION,
    COUNT,
    FRACTION,
    LOAD,
    PER_SECOND,
    SECONDS,
    TOKENS_PER_SECOND,
    Series,
    density,
    lines,
    number,
)
from grafana.queries import gauge, mean, quantile, rate, within

ALL = ("instance",)
LEVELS = (0.5, 0.95, 0.99)


def build() -> Dashboard:
    """Offered against served, latencies as `vllm bench serve` names them, and rejections."""
    says = (
        "A run of `kendall load` or of another load generator, measured at the gateway: "
        "arrivals, completions and latencies."
    )
    return dashboard(
        "kendall-load", "Kendall / Load test", says, [_offered(), _latency(), _waiting()]
    )


def _offered() -> Section:
    arrived = rate("kendall_requests_total", by=ALL)
    completed = rate("kendall_requests_total", 'outcome="completed"', by=ALL)
    return "Throughput", [
        number(
            "Arriving",
            (
                "Calls that arrive per second, averaged over the last minute. A call may ask for "
                "several sequences."
            ),
            PER_SECOND,
            Series(gauge("kendall_arrival_rate"), "{{instance}}"),
        ),
        number(
            "Completed",
            "Requests completed per second.",
            PER_SECOND,
            Series(completed, "{{instance}}"),
        ),
        number(
            "Success",
            "Fraction of the ended requests that completed.",
            FRACTION,
            Series(f"{completed} / ({arrived} > 0)", "{{instance}}"),
        ),
        number(
            "Output tokens",
            "Output tokens of completed answers per second.",
            TOKENS_PER_SECOND,
            Series(rate("kendall_output_tokens_sum", by=ALL), "{{instance}}"),
        ),
        number(
            "Load",
            "Arrival rate divided by the largest stable arrival rate.",
            FRACTION,
            Series(gauge("kendall_load", known=">= 0"), "{{instance}}"),
            limits=LOAD,
        ),
        number(
            "Unfinished",
            "Requests waiting or in service.",
            COUNT,
            Series(
                f"{gauge('kendall_queue_length')} + {gauge('kendall_in_service')}", "{{instance}}"
            ),
        ),
    ]


def _quantiles(histogram: str) -> list[Series]:
    return [
        Series(quantile(histogram, level, by=ALL), f"p{level * 100:.0f} {{{{instance}}}}")
        for level in LEVELS
    ]


def _latency() -> Section:
    first, between, whole = (
        "kendall_time_to_first_token_seconds",
        "kendall_inter_token_latency_seconds",
        "kendall_sojourn_time_seconds",
    )
    good = [
        Series(within(first, bound, by=ALL), f"first token within {bound:g} s {{{{instance}}}}")
        for bound in (0.5, 1.0, 5.0)
    ]
    return "Latency", [
        lines(
            "Time to first token",
            "Time from arrival to the first token, queueing included.",
            SECONDS,
            _quantiles(first),
            limits=ATTENTION,
        ),
        lines(
            "Between tokens",
            "Gaps between the tokens of an answer (ITL).",
            SECONDS,
            _quantiles(between),
        ),
        lines(
            "End to end",
            "Time from arrival to the last byte of the answer.",
            SECONDS,
            _quantiles(whole),
            limits=ATTENTION,
        ),
        lines(
            "First tokens within a target",
            "Fraction of the answers whose first token came within the target.",
            FRACTION,
            good,
        ),
        density(
            "Distribution of the end-to-end time",
            "Answers per second by sojourn time.",
            rate(f"{whole}_bucket", by=("le",)),
        ),
        lines(
            "Answer length",
            "Mean output tokens of completed answers.",
            COUNT,
            [Series(mean("kendall_output_tokens", by=ALL), "{{instance}}")],
        ),
    ]


def _waiting() -> Section:
    told, seen = "kendall_wait_predicted_seconds_total", "kendall_wait_observed_seconds_total"
    none = f'label_replace(0 * {gauge("kendall_engine_up")}, "reason", "none", "", "")'
    refused = f"{rate('kendall_rejections_total', by=('instance', 'reason'))} or {none}"
    return "Queue and rejections", [
        lines(
            "Waiting",
            "Requests in the queue, and their prompt tokens.",
            COUNT,
            [
                Series(gauge("kendall_queue_length"), "requests {{instance}}"),
                Series(gauge("kendall_queued_tokens"), "prompt tokens {{instance}}"),
            ],
            width=8,
        ),
        lines(
            "Rejected",
            "Rejected requests per second, by reason.",
            PER_SECOND,
            [Series(refused, "{{reason}} {{instance}}")],
            limits=[(0.01, "orange")],
            width=8,
        ),
        lines(
            "Error of the predicted waits",
            (
                "Sum of the observed waits divided by the sum of the waits predicted at arrival, "
                "minus 1."
            ),
            FRACTION,
            [Series(f"{rate(seen, by=ALL)} / ({rate(told, by=ALL)} > 0) - 1", "{{instance}}")],
            limits=[
                (-1.0, "red"),
                (-0.25, "orange"),
                (-0.1, "green"),
                (0.1, "orange"),
                (0.25, "red"),
            ],
            width=8,
        ),
    ]
