"""Overview: what an operator looks at first."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.agreement import VERDICTS, modelled, observed, predicted, verdict_code
from grafana.frame import Section, dashboard
from grafana.panels import (
    ATTENTION,
    COUNT,
    FRACTION,
    HOLDS,
    LOAD,
    PER_SECOND,
    SECONDS,
    STATE,
    Series,
    dashed,
    lines,
    number,
    states,
)
from grafana.queries import gauge, mean, quantile, rate, share

LEVELS = (0.5, 0.95, 0.99)


def build() -> Dashboard:
    """Whether theory holds; arrival rate, queue length, delays and service apart, utilisation."""
    says = (
        "Observed and predicted delay with the verdict, arrival rate, queue length, queueing "
        "delay, service time and utilisation of each gateway."
    )
    sections = [_agreement(), _now(), _queue(), _delays(), _service(), _health()]
    return dashboard("kendall", "Kendall / Overview", says, sections)


def _agreement() -> Section:
    legend = "{{quantity}} {{instance}}"
    return "Observed, model, forecast, verdict", [
        number(
            "Observed",
            "Mean queueing delay over the prediction window (for continuous: mean sojourn time).",
            SECONDS,
            Series(observed(), legend),
            width=6,
            empty="nothing observed yet",
        ),
        number(
            "Model, same requests",
            "The mean of the same quantity by the model of the very requests that came: their "
            "arrivals and lengths at the engine's speed. No observed delay enters it.",
            SECONDS,
            Series(modelled(), legend),
            width=6,
            empty="no check yet",
        ),
        number(
            "Forecast",
            "The mean that the same quantity has in the long run if the traffic goes on like this. "
            "It needs a calibrated law and some 50 answers in the present epoch.",
            SECONDS,
            Series(predicted(), legend),
            width=6,
            empty="no forecast yet",
        ),
        number(
            "Verdict",
            "Whether observation and model of the same requests agree, within 10 % or the interval "
            "of their difference. Not enough data: the interval is too wide to tell. The dashboard "
            "Queueing theory shows which assumption fails.",
            STATE,
            Series(verdict_code("kendall_check_verdict"), "{{instance}}"),
            width=6,
            names=VERDICTS,
            empty="not judged yet",
        ),
        dashed(
            lines(
                "Observed, model and forecast",
                "The three means over time. The forecast (dashed, with its 95 % interval) is of "
                "the long run: in a burst only the model of the same requests follows.",
                SECONDS,
                [
                    Series(observed(), f"observed {legend}"),
                    Series(modelled(), f"model {legend}"),
                    Series(predicted(), f"forecast {legend}"),
                    Series(predicted("mean_low"), f"forecast, low end {legend}"),
                    Series(predicted("mean_high"), f"forecast, high end {legend}"),
                ],
                limits=ATTENTION,
                width=24,
            ),
            "^forecast.*",
        ),
    ]


def _now() -> Section:
    per_gateway = "{{instance}}"
    return "Now", [
        number(
            "Policy",
            "The policy in force.",
            STATE,
            Series(gauge("kendall_policy_info"), "{{policy}}"),
        ),
        number(
            "Load",
            "Arrival rate divided by the largest stable arrival rate of the policy in force, by "
            "the model. Above 0.9 the delay grows steeply.",
            FRACTION,
            Series(gauge("kendall_load", known=">= 0"), per_gateway),
            limits=LOAD,
        ),
        number(
            "Utilisation",
            (
                "Fraction of the last minute in which a server was busy. For batches it may be "
                "near 1 at a moderate load."
            ),
            FRACTION,
            Series(gauge("kendall_utilisation"), per_gateway),
            limits=[(0.9, "orange")],
        ),
        number(
            "Arrival rate",
            (
                "Calls that arrive per second, averaged over the last minute. A call may ask for "
                "several sequences."
            ),
            PER_SECOND,
            Series(gauge("kendall_arrival_rate"), per_gateway),
        ),
        number(
            "Waiting",
            "Requests in the queue.",
            COUNT,
            Series(gauge("kendall_queue_length"), per_gateway),
        ),
        number(
            "In service",
            "Sequences in service in the engine.",
            COUNT,
            Series(gauge("kendall_in_service"), per_gateway),
        ),
    ]


def _queue() -> Section:
    return "Arrivals and queue", [
        lines(
            "Arrival rate and throughput",
            "Calls that arrive, averaged over the last minute, and sequences that complete. "
            "Where each call is of one sequence, the queue grows while the first is larger.",
            PER_SECOND,
            [
                Series(gauge("kendall_arrival_rate"), "arriving {{instance}}"),
                Series(
                    rate("kendall_requests_total", 'outcome="completed"', by=("instance",)),
                    "completed {{instance}}",
                ),
            ],
        ),
        lines(
            "Queue length",
            "Requests waiting, and sequences in service.",
            COUNT,
            [
                Series(gauge("kendall_queue_length"), "waiting {{instance}}"),
                Series(gauge("kendall_in_service"), "in service {{instance}}"),
            ],
        ),
    ]


def _quantiles(histogram: str) -> list[Series]:
    return [
        Series(quantile(histogram, level), f"p{level * 100:.0f} {{{{policy}}}}") for level in LEVELS
    ]


def _delays() -> Section:
    return "Delays", [
        lines(
            "Queueing delay",
            "Time from arrival to dispatch, of dispatched requests. It depends on the policy.",
            SECONDS,
            _quantiles("kendall_queueing_delay_seconds"),
            limits=ATTENTION,
        ),
        lines(
            "Service time",
            (
                "Time from dispatch until the server can take the next dispatch. It depends on the "
                "engine."
            ),
            SECONDS,
            _quantiles("kendall_service_time_seconds"),
            limits=ATTENTION,
        ),
        lines(
            "Sojourn time",
            "Time from arrival to the last byte of the answer, as a client measures it.",
            SECONDS,
            _quantiles("kendall_sojourn_time_seconds"),
            limits=ATTENTION,
        ),
        lines(
            "Time to first token",
            "Time from arrival to the first token.",
            SECONDS,
            _quantiles("kendall_time_to_first_token_seconds"),
            limits=ATTENTION,
        ),
    ]


def _service() -> Section:
    return "Service", [
        lines(
            "Load and utilisation",
            "Load: arrival rate divided by the largest stable one. Utilisation: fraction of time "
            "that a server is busy, observed and predicted.",
            FRACTION,
            [
                Series(gauge("kendall_load", known=">= 0"), "load {{instance}}"),
                Series(gauge("kendall_utilisation"), "utilisation {{instance}}"),
                Series(
                    gauge("kendall_predicted_utilisation", known=">= 0"),
                    "utilisation, predicted {{instance}}",
                ),
            ],
            limits=LOAD,
        ),
        lines(
            "Batch size",
            "Mean number of sequences per dispatch; for continuous: in service after it.",
            COUNT,
            [Series(mean("kendall_batch_size"), "{{policy}}")],
        ),
    ]


def _health() -> Section:
    completed = rate("kendall_requests_total", 'outcome="completed"')
    limit = "max by (instance) (" + gauge("kendall_max_clipped_fraction") + ")"
    return "Health", [
        lines(
            "Outcomes",
            "Requests by outcome. Every request has exactly one outcome.",
            PER_SECOND,
            [Series(rate("kendall_requests_total", by=("outcome",)), "{{outcome}}")],
            stacked=True,
            width=8,
        ),
        lines(
            "Clipped answers",
            (
                "Fraction of the completed answers that the gateway's token limit clipped, and the "
                "largest fraction that is allowed."
            ),
            FRACTION,
            [
                Series(share(rate("kendall_clipped_requests_total"), completed), "{{policy}}"),
                Series(limit, "allowed {{instance}}"),
            ],
            width=8,
        ),
        states(
            "Engine and self-checks",
            "Whether the engine serves, and whether conservation, Little's law and the "
            "utilisation law hold between the gateway's counters and its records.",
            [
                Series(gauge("kendall_engine_up"), "engine {{instance}}"),
                Series(gauge("kendall_self_check_holds"), "{{check}} {{instance}}"),
            ],
            HOLDS,
            width=8,
        ),
    ]
