"""Queueing theory: the prediction beside the observation, with intervals, and why they part."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from grafana.frame import Section, dashboard
from grafana.panels import ATTENTION, COUNT, FRACTION, HOLDS, SECONDS, Column, Series, bars, dashed, density, grid, lines, states
from grafana.queries import RANGE, by_policy, gauge, mean, quantile, rate

VERDICTS = {"0": ("disagree", "red"), "1": ("agree", "green"), "2": ("not enough data", "text")}
ERROR = [(-1.0, "red"), (-0.25, "orange"), (-0.1, "green"), (0.1, "orange"), (0.25, "red")]
STATS = ("mean", "p50", "p90", "p95", "p99")
PREDICTED = "kendall_predicted_queueing_delay_seconds"


def build() -> Dashboard:
    """Everything that compares."""
    says = "The queueing delay that theory predicts for the window's rate, lengths and speed, beside the one that was observed."
    sections = [_delay(), _sojourn(), _verdict(), _distribution(), _laws(), _what_if()]
    return dashboard("kendall-theory", "Kendall / Queueing theory", says, sections)


def _beside(quantity: str, title: str, says: str) -> object:
    observed, predicted = f"kendall_observed_{quantity}_seconds", f"kendall_predicted_{quantity}_seconds"
    panel = lines(
        title,
        says,
        SECONDS,
        [
            Series(by_policy(observed, 'stat="mean"', known=">= 0"), "observed {{policy}}"),
            Series(by_policy(predicted, 'stat=~"mean|mean_low|mean_high"', known=">= 0"), "predicted {{stat}} {{policy}}"),
        ],
        limits=ATTENTION,
    )
    return dashed(panel, "^predicted .*")


def _label(name: str, value: str) -> str:
    return f'{name}="{value}"'


def _delay() -> Section:
    error, sojourn = (f"policy_method:kendall_{name}_error:ratio5m" for name in ("queueing_delay", "sojourn_time"))
    return "Queueing delay", [
        _beside(
            "queueing_delay",
            "Mean queueing delay, observed and predicted",
            "Over the same window. Dashed: theory, with the interval that the estimates leave. No delay enters it.",
        ),
        lines(
            "Error of the prediction",
            "Observed over predicted, less 1: by the gateway over its window, by Prometheus over five minutes. Continuous: of the sojourn.",
            FRACTION,
            [
                Series(by_policy("kendall_prediction_error_ratio"), "gateway {{policy}}"),
                Series(by_policy(error), "Prometheus {{policy}} ({{method}})"),
                Series(by_policy(sojourn, 'policy=~"continuous.*"'), "Prometheus, sojourn {{policy}} ({{method}})"),
            ],
            limits=ERROR,
        ),
        lines(
            "Quantiles of the queueing delay, observed",
            "Over the window of the prediction.",
            SECONDS,
            [Series(by_policy("kendall_observed_queueing_delay_seconds", 'stat=~"p.*"', known=">= 0"), "{{stat}} {{policy}}")],
            limits=ATTENTION,
        ),
        lines(
            "Quantiles of the queueing delay, predicted",
            "By the same model; where it has no distribution there is nothing.",
            SECONDS,
            [Series(by_policy("kendall_predicted_queueing_delay_seconds", 'stat=~"p.*"', known=">= 0"), "{{stat}} {{policy}}")],
            limits=ATTENTION,
        ),
    ]


def _sojourn() -> Section:
    return "Sojourn time: what is compared under continuous, where waiting for the engine's next step belongs to service", [
        _beside("sojourn_time", "Mean sojourn time, observed and predicted", "Observed where sojourns are compared: under continuous."),
        lines(
            "Little's law",
            "Mean number waiting, as scraped, and arrival rate times mean queueing delay, as counted. They are equal in the long run, "
            "whatever the policy; requests that give up or are lost wait without being dispatched.",
            COUNT,
            [
                Series("avg by (instance) (avg_over_time(" + gauge("kendall_queue_length") + "[5m]))", "L {{instance}}"),
                Series(rate("kendall_queueing_delay_seconds_sum", by=("instance",), window="5m"), "lambda W {{instance}}"),
            ],
        ),
    ]


def _verdict() -> Section:
    return "Why they part", [
        states(
            "Verdict",
            "What the last look found: agree, disagree, or not enough data.",
            [Series(_verdict_code(), "{{instance}}")],
            VERDICTS,
        ),
        states(
            "Assumptions",
            "What theory assumes and the window is tested for. Red: it fails, and may be why they part. A gap: it cannot be told.",
            [Series(gauge("kendall_assumption_holds", known=">= 0"), "{{assumption}} {{instance}}")],
            HOLDS,
        ),
    ]


def _verdict_code() -> str:
    """0, 1 or 2, as VERDICTS names them."""
    codes = {word: code for code, (word, _) in VERDICTS.items()}
    parts = (
        f"max by (instance) ({code} * ({gauge('kendall_prediction_verdict', _label('verdict', word))} == 1))"
        for word, code in codes.items()
    )
    return " or ".join(parts)


def _distribution() -> Section:
    delay = "kendall_queueing_delay_seconds"
    observed = [
        Series(quantile(delay, level, window=RANGE), f"observed p{level * 100:.0f} {{{{policy}}}}") for level in (0.5, 0.9, 0.95, 0.99)
    ]
    predicted = [
        Series(
            f"avg by (policy) (avg_over_time({by_policy(PREDICTED, _label('stat', stat))}[{RANGE}]) >= 0)",
            f"predicted {stat} {{{{policy}}}}",
        )
        for stat in STATS[1:]
    ]
    return "Distribution", [
        density(
            "Distribution of the queueing delay",
            "Dispatched requests a second by their delay; a bucket is a row.",
            rate(f"{delay}_bucket", by=("le",)),
        ),
        bars(
            "Quantiles, observed beside predicted",
            "Over all that is shown: quantiles of what was observed, and the mean of what was predicted meanwhile.",
            SECONDS,
            [each for pair in zip(observed, predicted, strict=True) for each in pair],
            limits=ATTENTION,
        ),
    ]


def _laws() -> Section:
    return "What the model knows", [
        lines(
            "Speed of the engine",
            "Measured service time over the calibrated law's: above 1 it is slower than when it was calibrated.",
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
                Series(gauge("kendall_predicted_utilisation", known=">= 0"), "predicted {{instance}}"),
            ],
            limits=[(0.9, "orange")],
            width=8,
        ),
        lines(
            "Batch size, observed and predicted",
            "Mean sequences of a dispatch. The model has none for continuous.",
            COUNT,
            [
                Series(mean("kendall_batch_size", by=("instance",)), "observed {{instance}}"),
                Series(gauge("kendall_predicted_batch_size", known=">= 0"), "predicted {{instance}}"),
            ],
            width=8,
        ),
    ]


def _what_if() -> Section:
    name = "kendall_what_if_queueing_delay_seconds"
    columns = [Column(stat, f"max by (policy) ({gauge(name, _label('stat', stat), known='>= 0')})", SECONDS, ATTENTION) for stat in STATS]
    return "What if another policy were in force", [
        grid(
            "What if",
            "The queueing delay that theory predicts for every other policy at the rate, lengths and speed of now, under the token limit "
            "in force. A policy that would have no steady state is not there.",
            columns,
            key="policy",
            ascending=True,
            width=12,
        ),
        lines(
            "What if, mean queueing delay",
            "The same over time; looked at once a minute.",
            SECONDS,
            [Series(gauge(name, 'stat="mean"', known=">= 0"), "{{policy}}")],
            limits=ATTENTION,
        ),
    ]
