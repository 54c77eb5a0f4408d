"""What the live model says, as Prometheus gauges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kendall.queueing.measurement.check import SAID
from kendall.server.telemetry.metrics import MAX_POLICIES, Metrics

if TYPE_CHECKING:
    from kendall.queueing.estimation.assumptions.checks import SelfCheck
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
        ):
            gauge.set(math.nan)

    def show(self, found: Mapping[str, Any]) -> None:
        """An assessment, as `/admin/prediction` has it."""
        self._clear()
        metrics, comparison = self._metrics, found["comparison"]
        policy = metrics.label(found["policy"])
        self._predicted(found, policy)
        self._next(found["forecast"]["next"], policy, found["compared"])
        if found["observed_queueing_delay"] is not None:
            self._observe(metrics.delays.observed, policy, found["observed_queueing_delay"])
        if found["compared"] == "sojourn_time":
            self._observe(metrics.delays.observed_sojourn, policy, comparison["observed"])
        if comparison["check"] is not None:
            self._checked(comparison["check"], policy, found["compared"])
        if comparison["error"] is not None:
            metrics.load.error.labels(policy).set(comparison["error"])
        metrics.load.load.set(_number(found["load"]))
        metrics.load.predicted_utilisation.set(_number(found.get("utilisation")))
        metrics.load.predicted_batch_size.set(_number((found.get("batch_size") or {}).get("mean")))
        metrics.load.speed.set(_number(found["speed"]))
        for name, assumption in comparison["assumptions"].items():
            metrics.verdicts.assumption_holds.labels(name).set(_number(assumption["holds"]))
        for verdict in SAID.values():
            metrics.verdicts.verdict.labels(verdict).set(float(comparison["verdict"] == verdict))

    def _checked(self, check: Mapping[str, Any], policy: str, compared: str) -> None:
        """The model beside the very requests that came."""
        delays = self._metrics.delays
        for stat in ("observed", "modelled"):
            delays.checked[compared].labels(policy, stat).set(check[stat])
        for name, gauge in delays.check_ratio.items():
            gauge.labels(policy).set(_number(check[name]))
        for verdict, words in SAID.items():
            shown = float(check["verdict"] == verdict)
            self._metrics.verdicts.check_verdict.labels(words).set(shown)

    def _predicted(self, found: Mapping[str, Any], policy: str) -> None:
        """The interval is that of the quantity that is compared."""
        gauges = {
            "queueing_delay": self._metrics.delays.predicted,
            "sojourn_time": self._metrics.delays.predicted_sojourn,
        }
        for field, gauge in gauges.items() if found["method"] is not None else ():
            ends = _ends(found["interval"]) if field == found["compared"] else {}
            for stat, value in (found[field] | ends).items():
                gauge.labels(policy, found["method"], stat).set(_number(value))
                self._metrics.delays.forecast[field].labels(policy, stat).set(_number(value))

    def _next(self, found: Mapping[str, Any] | None, policy: str, compared: str) -> None:
        """What the next minutes may bring."""
        if found is None:
            return
        for stat in ("mean", "low", "high"):
            gauge = self._metrics.delays.forecast[compared].labels(policy, f"next_{stat}")
            gauge.set(found[stat])

    def what_if(self, forecasts: Sequence[Mapping[str, Any]], limit: int | None) -> None:
        """The first `MAX_POLICIES` other policies under the limit in force; all, and other limits,
        are at `/admin/prediction`.

        They take no label from the policies in force: the gauge is cleared at each assessment.
        """
        metrics = self._metrics
        shown = [
            each
            for each in forecasts
            if each["max_output_tokens"] == limit and each["queueing_delay"] is not None
        ]
        gauges = {
            "queueing_delay": metrics.what_ifs.queueing_delay,
            "sojourn_time": metrics.what_ifs.sojourn_time,
            "time_to_first_token": metrics.what_ifs.first_token,
        }
        for quantity, gauge in gauges.items():
            gauge.clear()
            for each in shown[:MAX_POLICIES]:
                for stat in ("mean",) if quantity == "time_to_first_token" else STATS:
                    gauge.labels(each["policy"], stat).set(_number(each[quantity][stat]))

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

    def _observe(self, gauge: Any, policy: str, observed: Mapping[str, Any]) -> None:
        gauge.labels(policy, "mean").set(_number(observed["value"]))
        for stat, value in _ends(observed).items():
            gauge.labels(policy, stat).set(_number(value))
        for stat in STATS[1:]:
            if stat in observed:
                gauge.labels(policy, stat).set(_number(observed[stat]["value"]))


def _ends(interval: Mapping[str, Any]) -> dict[str, Any]:
    return {"mean_low": interval["low"], "mean_high": interval["high"]}


def _number(value: float | bool | None) -> float:
    return math.nan if value is None else float(value)
