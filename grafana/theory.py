"""Queueing theory: prediction and observation with intervals, and why they differ."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.agreement import VERDICTS, verdict_code
from grafana.frame import Section, dashboard
from grafana.panels import (
    ATTENTION,
    COUNT,
    FRACTION,
    HOLDS,
    SECONDS,
    Column,
    Series,
    bars,
    dashed,
    density,
    grid,
    lines,
    states,
)
from grafana.queries import RANGE, by_policy, gauge, mean, quantile, rate

ERROR = [(-1.0, "red"), (-0.25, "orange"), (-0.1, "green"), (0.1, "orange"), (0.25, "red")]
STATS = ("mean", "p50", "p90", "p95", "p99")
PREDICTED = "kendall_predicted_queueing_delay_seconds"


def build() -> Dashboard:
    """Everything that compares."""
    says = (
        "The predicted queueing delay, computed from the window's arrival rate, output lengths "
        "and engine speed, next to the observed one."
    )
    sections = [_delay(), _sojourn(), _verdict(), _distribution(), _laws(), _what_if()]
    return dashboard("kendall-theory", "Kendall / Queueing theory", says, sections)


def _beside(quantity: str, title: str, says: str) -> object:
    observed, predicted = (
        f"kendall_observed_{quantity}_seconds",
        f"kendall_predicted_{quantity}_seconds",
    )
    panel = lines(
        title,
        says,
        SECONDS,
        [
            Series(by_policy(observed, 'stat="mean"', known=">= 0"), "observed {{policy}}"),
            Series(
                by_policy(predicted, 'stat=~"mean|mean_low|mean_high"', known=">= 0"),
                "predicted {{stat}} {{policy}}",
            ),
        ],
        limits=ATTENTION,
    )
    return dashed(panel, "^predicted .*")


def _label(name: str, value: str) -> str:
    return f'{name}="{value}"'


def _delay() -> Section:
    error, sojourn = (
        f"policy_method:kendall_{name}_error:ratio5m" for name in ("queueing_delay", "sojourn_time")
    )
    return "Queueing delay", [
        _beside(
            "queueing_delay",
            "Mean queueing delay, observed and predicted",
            (
                "Both over the same window. Dashed: the prediction with its 95 % interval; no "
                "observed delay enters it."
            ),
        ),
        lines(
            "Error of the prediction",
            "Observed / predicted - 1, computed by the gateway over its window and by Prometheus "
            "over five minutes. For continuous: of the sojourn time.",
            FRACTION,
            [
                Series(by_policy("kendall_prediction_error_ratio"), "gateway {{policy}}"),
                Series(by_policy(error), "Prometheus {{policy}} ({{method}})"),
                Series(
                    by_policy(sojourn, 'policy=~"continuous.*"'),
                    "Prometheus, sojourn {{policy}} ({{method}})",
                ),
            ],
            limits=ERROR,
        ),
        lines(
            "Quantiles of the queueing delay, observed",
            "Observed over the window of the prediction.",
            SECONDS,
            [
                Series(
                    by_policy(
                        "kendall_observed_queueing_delay_seconds", 'stat=~"p.*"', known=">= 0"
                    ),
                    "{{stat}} {{policy}}",
                )
            ],
            limits=ATTENTION,
        ),
        lines(
            "Quantiles of the queueing delay, predicted",
            "Predicted by the same model. Empty where the model gives no distribution.",
            SECONDS,
            [
                Series(
                    by_policy(
                        "kendall_predicted_queueing_delay_seconds", 'stat=~"p.*"', known=">= 0"
                    ),
                    "{{stat}} {{policy}}",
                )
            ],
            limits=ATTENTION,
        ),
    ]


def _sojourn() -> Section:
    return (
        "Sojourn time (compared under continuous, where the wait for the engine's next step "
        "counts as service)",
        [
            _beside(
                "sojourn_time",
                "Mean sojourn time, observed and predicted",
                (
                    "The observed mean is available under continuous only, where sojourn times are "
                    "compared."
                ),
            ),
            lines(
                "Little's law",
                "Mean number of waiting requests, as scraped, and arrival rate times mean "
                "queueing delay, from the counters. In the long run they are equal under every "
                "policy, except for requests that abandon or fail before they are dispatched.",
                COUNT,
                [
                    Series(
                        "avg by (instance) (avg_over_time("
                        + gauge("kendall_queue_length")
                        + "[5m]))",
                        "L {{instance}}",
                    ),
                    Series(
                        rate("kendall_queueing_delay_seconds_sum", by=("instance",), window="5m"),
                        "lambda W {{instance}}",
                    ),
                ],
            ),
        ],
    )


def _verdict() -> Section:
    return "Why prediction and observation differ", [
        states(
            "Verdict",
            "Result of the last assessment: agree, disagree, or not enough data.",
            [Series(verdict_code("kendall_prediction_verdict"), "{{instance}}")],
            VERDICTS,
        ),
        states(
            "Assumptions",
            "Assumptions of the theory, tested on the requests of the window. Red: it fails and "
            "may explain a difference. A gap: not enough data to test it.",
            [
                Series(
                    gauge("kendall_assumption_holds", known=">= 0"), "{{assumption}} {{instance}}"
                )
            ],
            HOLDS,
        ),
    ]


def _distribution() -> Section:
    delay = "kendall_queueing_delay_seconds"
    observed = [
        Series(quantile(delay, level, window=RANGE), f"observed p{level * 100:.0f} {{{{policy}}}}")
        for level in (0.5, 0.9, 0.95, 0.99)
    ]
    predicted = [
        Series(
            "avg by (policy) "
            f"(avg_over_time({by_policy(PREDICTED, _label('stat', stat))}[{RANGE}]) >= 0)",
            f"predicted {stat} {{{{policy}}}}",
        )
        for stat in STATS[1:]
    ]
    return "Distribution", [
        density(
            "Distribution of the queueing delay",
            "Dispatched requests per second by queueing delay; one row per histogram bucket.",
            rate(f"{delay}_bucket", by=("le",)),
        ),
        bars(
            "Quantiles, observed and predicted",
            (
                "Over the whole time range: quantiles of the observed delays, and the mean of the "
                "predicted quantiles."
            ),
            SECONDS,
            [each for pair in zip(observed, predicted, strict=True) for each in pair],
            limits=ATTENTION,
        ),
    ]


def _laws() -> Section:
    return "Estimates of the model", [
        lines(
            "Speed of the engine",
            (
                "Measured service time divided by that of the calibrated law. Above 1 the engine "
                "is slower than at its calibration."
            ),
            FRACTION,
            [Series(gauge("kendall_engine_speed_ratio", known="> 0"), "{{instance}}")],
            limits=[(1.15, "orange"), (1.5, "red")],
            width=8,
        ),
        lines(
            "Utilisation, observed and predicted",
            "Fraction of time that a server is busy.",
            FRACTION,
            [
                Series(gauge("kendall_utilisation"), "observed {{instance}}"),
                Series(
                    gauge("kendall_predicted_utilisation", known=">= 0"), "predicted {{instance}}"
                ),
            ],
            limits=[(0.9, "orange")],
            width=8,
        ),
        lines(
            "Batch size, observed and predicted",
            "Mean number of sequences per dispatch. There is no prediction for continuous.",
            COUNT,
            [
                Series(mean("kendall_batch_size", by=("instance",)), "observed {{instance}}"),
                Series(
                    gauge("kendall_predicted_batch_size", known=">= 0"), "predicted {{instance}}"
                ),
            ],
            width=8,
        ),
        lines(
            "Queue length, observed and predicted",
            "Sequences that wait; predicted is the mean, by Little's law.",
            COUNT,
            [
                Series(gauge("kendall_queue_length"), "observed {{instance}}"),
                Series(
                    gauge("kendall_predicted_queue_length", known=">= 0"), "predicted {{instance}}"
                ),
            ],
            width=24,
        ),
    ]


def _what_if() -> Section:
    delay, sojourn, first = (
        f"kendall_what_if_{name}_seconds"
        for name in ("queueing_delay", "sojourn_time", "time_to_first_token")
    )
    shown = [
        ("sojourn", sojourn, "mean"),
        ("first token", first, "mean"),
        *((f"delay {stat}", delay, stat) for stat in STATS),
    ]
    columns = [
        Column(
            heading,
            f"max by (policy) ({gauge(name, _label('stat', stat), known='>= 0')})",
            SECONDS,
            ATTENTION if name == delay else (),
        )
        for heading, name, stat in shown
    ]
    return "Other policies", [
        grid(
            "What if",
            "Predicted mean sojourn time, mean time to first token and queueing delay of every "
            "other policy at the current arrival rate, output lengths, engine speed and token "
            "limit. Compare policies by the sojourn time: their services differ. Policies without "
            "a steady state are left out.",
            columns,
            key="policy",
            ascending=True,
            width=12,
        ),
        lines(
            "What if, mean sojourn time",
            "The same over time, computed once a minute.",
            SECONDS,
            [Series(gauge(sojourn, 'stat="mean"', known=">= 0"), "{{policy}}")],
        ),
    ]
