"""What settings would do at an operating point: forecasts and their intervals, each found once."""

from __future__ import annotations

import math
from functools import cached_property

from queueing.errors import UnstableQueueError
from queueing.estimation.interval import UNKNOWN, Estimate
from queueing.model import Model
from queueing.optimization.forecast import Forecast, Setting
from queueing.optimization.gain.measure import Measure
from queueing.optimization.gain.sensitivity import Sensitivity
from queueing.optimization.gain.window_model import WindowModel
from queueing.optimization.quantity import mean_of
from queueing.result import Prediction, Quantity

NAMED = 0.01  # of the mean sojourn: a smaller backlog of stalls is not worth a word


class OperatingPoint(WindowModel):
    """A window's model with what was found out about settings there."""

    @cached_property
    def sensitivity(self) -> Sensitivity:
        """How settings respond to the estimates."""
        return Sensitivity(self)

    @cached_property
    def _forecasts(self) -> dict[Setting, Forecast]:
        return {}

    @cached_property
    def _ranked(self) -> dict[Setting, Prediction | None]:
        return {}

    def forecast(self, setting: Setting) -> Forecast:
        """The setting's steady state here."""
        if setting not in self._forecasts:
            self._forecasts[setting] = self._forecast(setting)
        return self._forecasts[setting]

    def outline(self, setting: Setting) -> Forecast:
        """Its load alone, which a closed form gives; the whole forecast where that says that there
        is no steady state, or where it was asked for before.
        """
        if setting in self._forecasts or self.refusal(setting.max_output_tokens) is not None:
            return self.forecast(setting)
        load = self.model(setting).load(self.rate)
        if load >= 1 and self.limits.patience is None:
            return self.forecast(setting)
        return Forecast(
            setting=setting,
            load=load,
            prediction=None,
            mean=UNKNOWN,
            clipped_fraction=None,
            pending=True,
        )

    def ranking_mean(self, setting: Setting, quantity: Quantity) -> float:
        """The mean by which dozens of settings are put in order, seconds; infinite without a
        steady state.
        """
        if setting not in self._ranked:
            try:
                self._ranked[setting] = self.ranking()(self.model(setting), self.rate)
            except UnstableQueueError:
                self._ranked[setting] = None
        found = self._ranked[setting]
        mean = None if found is None else mean_of(found, quantity)
        return math.inf if mean is None else mean

    def _forecast(self, setting: Setting) -> Forecast:
        limit, load = setting.max_output_tokens, math.nan
        notes: tuple[str, ...] = (self.refusal(limit) or "",)
        found: Prediction | None = None
        if self.refusal(limit) is None and self.lengths is not None:
            model, notes = self.model(setting), self.lengths.notes(limit)
            load = model.load(self.rate)
            try:
                found = self.predicted(setting)
                notes = (*notes, *self._left_out(model, found))
                if self.cut_by_memory(setting):
                    notes = (*notes, "batches that KV memory cuts are not modelled")
            except UnstableQueueError as error:
                notes = (*notes, str(error))
        return Forecast(
            setting=setting,
            load=load,
            prediction=found,
            mean=self._interval(setting, found, "queueing_delay"),
            sojourn=self._interval(setting, found, "sojourn_time"),
            clipped_fraction=None if self.lengths is None else self.lengths.clipped_fraction(limit),
            notes=notes,
        )

    def _left_out(self, model: Model, found: Prediction) -> tuple[str, ...]:
        """Of the queue behind a stall."""
        stalls, joins, backlog = (
            self.estimates.stalls,
            model.policy.joins_running,
            self.backlog(model, self.rate),
        )
        if joins and backlog > NAMED * (found.sojourn_time.mean or 0.0):
            left_out = (
                "queueing delay, quantiles and time to first token leave out the queue "
                "behind a stall"
            )
            return (f"{left_out} ({1000 * backlog:.3g} ms of the mean sojourn)",)
        if joins or not stalls.count or self.law.stall_share:
            return ()
        return (
            f"leaves out the queue behind a stall (stalls hold {stalls.time_share:.1%} of the "
            "busy time)",
        )

    def _interval(self, setting: Setting, found: Prediction | None, quantity: Quantity) -> Estimate:
        """Of dispatched requests; unknown without a steady state."""
        if found is None:
            return UNKNOWN
        mean = (
            found.served_queueing_delay if quantity == "queueing_delay" else found.sojourn_time
        ).mean
        if mean is None:
            return UNKNOWN
        response = self.sensitivity.response(setting, Measure(quantity=quantity))
        least = self.estimates.gateway_turnaround
        return response.interval(mean, self.effective_n).at_least(least)
