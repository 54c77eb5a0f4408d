"""The Prometheus series of the live model; a gauge without a value is not there, or NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Gauge

from kendall.server.telemetry.cost.instruments import Counter

QUANTITIES = {"queueing_delay": "queueing delay", "sojourn_time": "sojourn time"}


def gauge(
    registry: CollectorRegistry, name: str, help_text: str, labels: Sequence[str] = ()
) -> Gauge:
    """`kendall_NAME` in this registry."""
    return Gauge(f"kendall_{name}", help_text, labels, registry=registry)


class DelayGauges:
    """Predicted and observed delays of the policy in force."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge_of = partial(gauge, registry)
        self.predicted = gauge_of(
            "predicted_queueing_delay_seconds",
            "Predicted queueing delay (the forecast), by method and statistic",
            ["policy", "method", "stat"],
        )
        self.observed = gauge_of(
            "observed_queueing_delay_seconds",
            "Observed queueing delay over the prediction window, by statistic",
            ["policy", "stat"],
        )
        self.predicted_sojourn = gauge_of(
            "predicted_sojourn_time_seconds",
            "Predicted sojourn time (the forecast), by method and statistic",
            ["policy", "method", "stat"],
        )
        self.observed_sojourn = gauge_of(
            "observed_sojourn_time_seconds",
            "Observed sojourn time over the prediction window (policy continuous)",
            ["policy", "stat"],
        )
        self.checked = {
            quantity: gauge_of(
                f"checked_{quantity}_seconds",
                (
                    f"Mean {words} of the requests that came: observed, and modelled (the same "
                    "requests served by the model)"
                ),
                ["policy", "stat"],
            )
            for quantity, words in QUANTITIES.items()
        }
        self.forecast = {
            quantity: gauge_of(
                f"forecast_{quantity}_seconds",
                f"Forecast of the {words} if traffic continues as it is: of the steady state, and "
                "of the next five minutes (stat next_mean, next_low, next_high)",
                ["policy", "stat"],
            )
            for quantity, words in QUANTITIES.items()
        }
        self.check_ratio = {
            name: gauge_of(f"check_{name}", f"{what} of the same requests: the check", ["policy"])
            for name, what in (
                ("ratio", "Observed over modelled mean"),
                ("ratio_low", "Low end (95 %) of observed over modelled mean"),
                ("ratio_high", "High end (95 %) of observed over modelled mean"),
            )
        }


class WhatIfGauges:
    """Predicted delays under other policies."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge_of = partial(gauge, registry)
        self.queueing_delay = gauge_of(
            "what_if_queueing_delay_seconds",
            ("Predicted queueing delay under each other policy, with all other settings unchanged"),
            ["policy", "stat"],
        )
        self.sojourn_time = gauge_of(
            "what_if_sojourn_time_seconds",
            (
                "Predicted sojourn time under each other policy, with all other "
                "settings unchanged; compare policies by this one"
            ),
            ["policy", "stat"],
        )
        self.first_token = gauge_of(
            "what_if_time_to_first_token_seconds",
            (
                "Predicted mean time to first token under each other policy, with all "
                "other settings unchanged"
            ),
            ["policy", "stat"],
        )


class VerdictSeries:
    """What is held of the prediction and of the counters, and what the autopilot decided."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge_of = partial(gauge, registry)
        self.assumption_holds = gauge_of(
            "assumption_holds",
            "Whether an assumption of the model holds (1: yes, 0: no, NaN: unknown)",
            ["assumption"],
        )
        self.verdict = gauge_of(
            "prediction_verdict",
            "Verdict of the check (1: the current one, 0: the others), as kendall_check_verdict",
            ["verdict"],
        )
        self.check_verdict = gauge_of(
            "check_verdict",
            "Verdict of the check of the model by the requests that came (1: the current one)",
            ["verdict"],
        )
        self.check_holds = gauge_of(
            "self_check_holds",
            (
                "Whether a check of the gateway's own counters holds (1: yes, 0: no, do "
                "not trust the measured delays)"
            ),
            ["check"],
        )
        self.decisions = Counter(
            "kendall_autopilot_decisions",
            "Decisions of the autopilot, by kind",
            ["kind"],
            registry=registry,
        )


class EnergyGauges:
    """Joules of the devices, and the terms of the energy of a batch."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge_of = partial(gauge, registry)
        self.joules = gauge_of(
            "energy_joules", "Energy reported by the engine's devices since the gateway started"
        )
        self.terms = gauge_of(
            "energy_estimate_joules",
            (
                "Estimated energy: beta and c0 in beta b + c0 for a batch of b "
                "sequences, and energy per output token"
            ),
            ["term"],
        )


class LoadGauges:
    """How much arrives, how fast the engine is, how busy it is and is predicted to be."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge_of = partial(gauge, registry)
        self.speed = gauge_of(
            "engine_speed_ratio",
            (
                "Measured service time divided by the calibrated latency law's service "
                "time; above 1: slower than calibrated"
            ),
        )
        self.predicted_utilisation = gauge_of(
            "predicted_utilisation", "Predicted fraction of time during which a server is busy"
        )
        self.predicted_batch_size = gauge_of(
            "predicted_batch_size", "Predicted mean number of sequences per dispatch"
        )
        self.predicted_queue_length = gauge_of(
            "predicted_queue_length", "Predicted mean number of sequences waiting for dispatch"
        )
        self.replicas_needed = gauge_of(
            "replicas_needed",
            (
                "Fewest servers that keep --slo at the arrival rate of the window; NaN without an "
                "SLO, and where 16 do not keep it"
            ),
        )
        self.replicas_needed.set(math.nan)  # 0 would tell an autoscaler to shrink
        self.error = gauge_of(
            "prediction_error_ratio",
            "Relative error of the predicted mean queueing delay: observed / predicted - 1",
            ["policy"],
        )
        self.load = gauge_of(
            "load", "Arrival rate divided by the largest stable arrival rate of the policy in force"
        )
        self.utilisation = gauge_of(
            "utilisation", "Fraction of the last minute during which a server was busy"
        )
        self.arrival_rate = gauge_of(
            "arrival_rate",
            (
                "Calls arriving per second, over the last minute; a call with n or "
                "several prompts is one arrival"
            ),
        )
