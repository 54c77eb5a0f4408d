"""What the live model says, as Prometheus gauges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kendall.queueing.measurement.check import SAID
from kendall.server.telemetry.metrics import MAX_POLICIES, Metrics

if TYPE_CHECKING:
    from prometheus_client import Gauge

    from kendall.queueing.choosing.forecast import WhatIf
    from kendall.queueing.estimation.assumptions.checks import SelfCheck
    from kendall.queueing.estimation.interval import Estimate
    from kendall.queueing.estimation.summaries import ObservedDelay
    from kendall.queueing.measurement.check import Check
    from kendall.queueing.result import Quantiles
    from kendall.server.live.answers import AssessmentSummary, NextMinutes
    from kendall.server.telemetry.energy.meter import EnergyMeter

STATS = ("mean", "p50", "p90", "p95", "p99")


class LiveGauges:
    """Shows one assessment at a time; what it does not know is absent, rather than stale."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Nothing is averaged across epochs, and no verdict or what-if of the one before is
        shown.
        """
        self._clear()
        metrics = self._metrics
        for gauge in (
            metrics.verdicts.verdict,
            metrics.verdicts.check_verdict,
            metrics.what_ifs.queueing_delay,
            metrics.what_ifs.sojourn_time,
            metrics.what_ifs.first_token,
        ):
            gauge.clear()
        metrics.load.speed.set(math.nan)
        self.needed(None)

    def needed(self, servers: int | None) -> None:
        """The fewest servers that keep the SLO; None: not known."""
        self._metrics.load.replicas_needed.set(_number(servers))

    def _clear(self) -> None:
        metrics = self._metrics
        for gauge in (
            metrics.delays.predicted,
            metrics.delays.observed,
            metrics.delays.predicted_sojourn,
            metrics.delays.observed_sojourn,
            *metrics.delays.checked.values(),
            *metrics.delays.forecast.values(),
            *metrics.delays.check_ratio.values(),
            metrics.load.error,
        ):
            gauge.clear()
        metrics.verdicts.assumption_holds.clear()
        for gauge in (
            metrics.load.load,
            metrics.load.predicted_utilisation,
            metrics.load.predicted_batch_size,
            metrics.load.predicted_queue_length,
        ):
            gauge.set(math.nan)

    def show(self, assessment: AssessmentSummary) -> None:
        """An assessment."""
        self._clear()
        metrics, comparison, predicted = self._metrics, assessment.comparison, assessment.predicted
        policy = metrics.label(predicted.policy)
        self._predicted(assessment, policy)
        if assessment.forecast.next is not None:
            self._next(assessment.forecast.next, policy, assessment.compared)
        if assessment.observed_queueing_delay is not None:
            self._observe(metrics.delays.observed, policy, assessment.observed_queueing_delay)
        if assessment.compared == "sojourn_time":
            self._observe(metrics.delays.observed_sojourn, policy, comparison.observed)
        if comparison.check is not None:
            self._checked(comparison.check, policy, assessment.compared)
        if math.isfinite(comparison.error):
            metrics.load.error.labels(policy).set(comparison.error)
        metrics.load.load.set(_number(predicted.load))
        metrics.load.predicted_utilisation.set(_number(predicted.utilisation))
        metrics.load.predicted_batch_size.set(_number(predicted.batch_size.mean))
        metrics.load.predicted_queue_length.set(_number(predicted.queue_length.mean))
        metrics.load.speed.set(_number(assessment.speed))
        for name, assumption in comparison.assumptions.items():
            metrics.verdicts.assumption_holds.labels(name).set(_number(assumption.holds))
        for verdict in SAID.values():
            metrics.verdicts.verdict.labels(verdict).set(float(comparison.verdict == verdict))

    def _checked(self, check: Check, policy: str, compared: str) -> None:
        """The model beside the very requests that came."""
        delays = self._metrics.delays
        for stat in ("observed", "modelled"):
            delays.checked[compared].labels(policy, stat).set(getattr(check, stat))
        for name, gauge in delays.check_ratio.items():
            gauge.labels(policy).set(_number(getattr(check, name)))
        for verdict, words in SAID.items():
            shown = float(check.verdict == verdict)
            self._metrics.verdicts.check_verdict.labels(words).set(shown)

    def _predicted(self, assessment: AssessmentSummary, policy: str) -> None:
        """The interval is that of the quantity that is compared."""
        predicted, delays = assessment.predicted, self._metrics.delays
        if predicted.method is None:
            return
        for field, gauge, quantiles in (
            ("queueing_delay", delays.predicted, predicted.queueing_delay),
            ("sojourn_time", delays.predicted_sojourn, predicted.sojourn_time),
        ):
            ends = _ends(assessment.interval) if field == assessment.compared else {}
            for stat, value in (quantiles.as_dict() | ends).items():
                gauge.labels(policy, predicted.method, stat).set(_number(value))
                delays.forecast[field].labels(policy, stat).set(_number(value))

    def _next(self, ahead: NextMinutes, policy: str, compared: str) -> None:
        """What the next minutes may bring."""
        for stat, value in (("mean", ahead.mean), ("low", ahead.low), ("high", ahead.high)):
            self._metrics.delays.forecast[compared].labels(policy, f"next_{stat}").set(value)

    def what_if(self, what_ifs: Sequence[WhatIf], limit: int | None) -> None:
        """The first `MAX_POLICIES` other policies under the limit in force; all, and other limits,
        are at `/admin/prediction`.

        They take no label from the policies in force: the gauge is cleared at each assessment.
        """
        metrics = self._metrics
        shown = [
            each.forecast
            for each in what_ifs
            if each.forecast.max_output_tokens == limit and each.forecast.queueing_delay is not None
        ]
        gauges = {
            "queueing_delay": metrics.what_ifs.queueing_delay,
            "sojourn_time": metrics.what_ifs.sojourn_time,
            "time_to_first_token": metrics.what_ifs.first_token,
        }
        for quantity, gauge in gauges.items():
            gauge.clear()
            for forecast in shown[:MAX_POLICIES]:
                quantiles: Quantiles = getattr(forecast, quantity)
                for stat in ("mean",) if quantity == "time_to_first_token" else STATS:
                    gauge.labels(forecast.policy, stat).set(_number(quantiles.value(stat)))

    def checks(self, found: Sequence[SelfCheck]) -> None:
        """1 where the law holds."""
        for check in found:
            self._metrics.verdicts.check_holds.labels(check.name).set(float(check.holds))

    def energy(self, meter: EnergyMeter) -> None:
        """Joules so far, and the terms of c[b] = beta b + c0 where the device tells."""
        joules, found = meter.joules(), meter.estimate()
        if joules is not None:
            self._metrics.energy.joules.set(joules)
        if found is not None:
            for name, term in (
                ("beta", found.beta),
                ("c0", found.c0),
                ("per_token", found.per_token),
            ):
                self._metrics.energy.terms.labels(name).set(term.value)

    def _observe(self, gauge: Gauge, policy: str, observed: ObservedDelay) -> None:
        quantiles = {stat: each.value for stat, each in observed.quantiles.items() if stat in STATS}
        means = {"mean": observed.mean.value} | _ends(observed.mean)
        for stat, value in (means | quantiles).items():
            gauge.labels(policy, stat).set(_number(value))


def _ends(interval: Estimate) -> dict[str, float | None]:
    return {"mean_low": interval.low, "mean_high": interval.high}


def _number(value: float | bool | None) -> float:
    return float(value) if value is not None and math.isfinite(value) else math.nan
