"""Load test: what a load generator's report says, live, from the gateway's side."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.frame import Section, dashboard
from grafana.panels import ATTENTION, COUNT, FRACTION, LOAD, PER_SECOND, SECONDS, TOKENS_PER_SECOND, Series, density, lines, number
from grafana.queries import gauge, mean, quantile, rate, within

ALL = ("instance",)
LEVELS = (0.5, 0.95, 0.99)


def build() -> Dashboard:
    """Offered against served, latencies as `vllm bench serve` names them, and who was refused."""
    says = "A run of `kendall load` or of any other generator, seen by the gateway: what arrived, what was served, how long it took."
    return dashboard("kendall-load", "Kendall / Load test", says, [_offered(), _latency(), _waiting()])


def _offered() -> Section:
    arrived = rate("kendall_requests_total", by=ALL)
    completed = rate("kendall_requests_total", 'outcome="completed"', by=ALL)
    return "Offered and served", [
        number(
            "Arriving", "Requests that arrive, over the last minute.", PER_SECOND, Series(gauge("kendall_arrival_rate"), "{{instance}}")
        ),
        number("Completed", "Requests completed.", PER_SECOND, Series(completed, "{{instance}}")),
        number(
            "Success",
            "Completed of all that ended.",
            FRACTION,
            Series(f"{completed} / ({arrived} > 0)", "{{instance}}"),
        ),
        number(
            "Output tokens", "Of completed answers.", TOKENS_PER_SECOND, Series(rate("kendall_output_tokens_sum", by=ALL), "{{instance}}")
        ),
        number(
            "Load",
            "Arrival rate over the largest that is stable.",
            FRACTION,
            Series(gauge("kendall_load", known=">= 0"), "{{instance}}"),
            limits=LOAD,
        ),
        number(
            "Unfinished",
            "Waiting and in service.",
            COUNT,
            Series(f"{gauge('kendall_queue_length')} + {gauge('kendall_in_service')}", "{{instance}}"),
        ),
    ]


def _quantiles(histogram: str) -> list[Series]:
    return [Series(quantile(histogram, level, by=ALL), f"p{level * 100:.0f} {{{{instance}}}}") for level in LEVELS]


def _latency() -> Section:
    first, between, whole = "kendall_time_to_first_token_seconds", "kendall_inter_token_latency_seconds", "kendall_sojourn_time_seconds"
    good = [Series(within(first, bound, by=ALL), f"first token within {bound:g} s {{{{instance}}}}") for bound in (0.5, 1.0, 5.0)]
    return "Latency", [
        lines("Time to first token", "From arrival to the first token, the queue included.", SECONDS, _quantiles(first), limits=ATTENTION),
        lines("Between tokens", "Mean time between the tokens of an answer (TPOT).", SECONDS, _quantiles(between)),
        lines("End to end", "From arrival to the last byte.", SECONDS, _quantiles(whole), limits=ATTENTION),
        lines("In time", "Fraction of the answers whose first token came in time: goodput, where that is the objective.", FRACTION, good),
        density("Distribution of the end-to-end time", "Answers a second by their sojourn.", rate(f"{whole}_bucket", by=("le",))),
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
    return "Waiting and refusing", [
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
            "Refused",
            "Requests refused, by what refused them.",
            PER_SECOND,
            [Series(refused, "{{reason}} {{instance}}")],
            limits=[(0.01, "orange")],
            width=8,
        ),
        lines(
            "Waits told at arrival",
            "Sum of the waits over the sum of what was told when they arrived, less 1: how right the queue's promises are.",
            FRACTION,
            [Series(f"{rate(seen, by=ALL)} / ({rate(told, by=ALL)} > 0) - 1", "{{instance}}")],
            limits=[(-1.0, "red"), (-0.25, "orange"), (-0.1, "green"), (0.1, "orange"), (0.25, "red")],
            width=8,
        ),
    ]
