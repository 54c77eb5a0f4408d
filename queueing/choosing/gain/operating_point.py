"""What settings would do at an operating point: forecasts and their intervals, each found once; and
what one setting gains over another, the same number for advice, what-ifs and the autopilot.

    gain = 1 - M(after) / M(before)

M is what the objective measures (queueing.choosing.gain.criterion), smaller is better; of
settings of different families it is their sojourn times (queueing.choosing.quantity). Both
settings stand at the same estimates, so most of what is uncertain in either cancels in the gain
(queueing.choosing.gain.estimation_error).

Searches simulate dozens of choices; what is reported of the chosen one may be exact and differ by a
few percent. An SLO is kept by the value that is reported.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property

from kendall.queueing.choosing.answer import SIMULATED, rough
from kendall.queueing.choosing.forecast import Forecast, Setting
from kendall.queueing.choosing.gain.criterion import Criterion
from kendall.queueing.choosing.gain.sensitivity import Sensitivity
from kendall.queueing.choosing.gain.window_model import WindowModel
from kendall.queueing.choosing.objective import Objective
from kendall.queueing.choosing.quantity import mean_of, served_mean
from kendall.queueing.errors import PredictionError, UnstableQueueError
from kendall.queueing.estimation.interval import UNKNOWN, Estimate
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction, Quantity

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
        load = self.load(setting)
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

    def predicted_mean(self, setting: Setting, quantity: Quantity) -> Estimate:
        """The forecast mean with its interval; unknown without a steady state or an answer."""
        try:
            return self.forecast(setting).interval(quantity)
        except PredictionError:
            return UNKNOWN

    def reported(self, setting: Setting, measure: Criterion) -> float:
        """What is measured of the setting, as advice reports it: simulated where the setting's
        method cannot give it. Raises UnstableQueueError.
        """
        assert self.lengths is not None
        model, whole = self.model(setting), self.lengths.whole
        value = measure.of(self.predicted(setting), model, whole)
        if not math.isnan(value):
            return value
        simulated = self.predicted(
            setting, lambda queue, rate: rough(queue, rate, measure.slos, SIMULATED)
        )
        return measure.of(simulated, model, whole)

    def reported_slos(self, setting: Setting, objective: Objective) -> list[float]:
        """What each SLO bounds, seconds; infinite without a steady state."""
        alone = [dataclasses.replace(objective, slo=slo, also=()) for slo in objective.slos]
        try:
            return [
                self.reported(setting, Criterion(each, slo.field))
                for each, slo in zip(alone, objective.slos, strict=True)
            ]
        except UnstableQueueError:
            return [math.inf] * len(alone)

    def keeps_slo(self, setting: Setting, objective: Objective) -> bool:
        """Whether the reported values keep every SLO; also true without one."""
        values = self.reported_slos(setting, objective)
        return all(value <= slo.seconds for value, slo in zip(values, objective.slos, strict=True))

    def gain(self, before: Setting, after: Setting, measure: Criterion) -> Estimate:
        """With its interval; 1 where the setting before has no steady state, unknown where the one
        after has none.
        """
        size = self.effective_n
        if before == after:
            return Estimate(0.0, 0.0, 0.0, size)
        now, then = (self.forecast(each) for each in (before, after))
        if then.prediction is None or (now.prediction is None and not now.load >= 1):
            return UNKNOWN
        if now.prediction is not None:
            values = [self.reported(each, measure) for each in (before, after)]
            responses = [self.sensitivity.response(each, measure) for each in (before, after)]
            return responses[1].gain(values[1], responses[0], values[0], size)
        # at the lower ends of rate and speed the setting before may have a steady state too
        factor = math.prod(
            max(0.0, each.low) / each.value
            for each in (self.estimates.arrival_rate, self.estimates.speed)
            if each.known and each.value
        )
        if not 0 < now.load * factor < 1:
            return Estimate(1.0, 1.0, 1.0, size)
        slow, quick = (self.sensitivity.at_rate(each, measure, factor) for each in (before, after))
        return Estimate(1.0, 1 - quick / slow if slow else 0.0, 1.0, size)

    def _left_out(self, model: Queue, found: Prediction) -> tuple[str, ...]:
        """What the prediction leaves out of the queue behind a stall."""
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
        """The mean of dispatched requests; unknown without a steady state."""
        mean = None if found is None else served_mean(found, quantity)
        if mean is None:
            return UNKNOWN
        response = self.sensitivity.response(setting, Criterion(quantity=quantity))
        least = self.estimates.gateway_turnaround
        return response.interval(mean, self.effective_n).at_least(least)
