"""A window's estimates as the common ground on which settings are compared: the same rate, lengths,
speed and residual for all.

No delay that is printed is shorter than the gateway's own way from an arrival to a dispatch
(`Estimates.gateway_turnaround`). A window says how fast the engine runs, not how: the speed and the
stalls that one policy's batches showed are taken for every policy's. Steps of a continuous engine
show no residual, so from there other policies get the calibrated one; nor do they get its stalls:
its speed holds most of them already (measured: with both, means of whole batches came out 40 % too
long, without 10 %).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import stdtrit

from policies import parse_policy
from policies.text import counted
from queueing.control.advice.answer import own_error, precise, rough
from queueing.control.advice.forecast import Forecast, Knobs
from queueing.control.advice.known_lengths import FEWEST, KnownLengths, known_lengths
from queueing.control.advice.measure import Measure
from queueing.control.advice.response import Asked, Response, slope
from queueing.distributions.token_distribution import TokenDistribution, Vector
from queueing.errors import UnstableQueueError
from queueing.estimation.assess import Limits
from queueing.estimation.estimates import Estimates
from queueing.estimation.interval import NORMAL, UNKNOWN, Estimate
from queueing.estimation.stall_backlog import behind_stalls, stall_backlog, utilisation_of
from queueing.latency.law import LatencyModel
from queueing.model import Model
from queueing.optimization.search import Predict
from queueing.result import Prediction, Quantity

# relative and downwards: never into an unstable queue, and wide enough to stand out of a
# simulation's noise
STEP = 0.05
NAMED = 0.01  # of the mean sojourn: a smaller backlog of stalls is not worth a word
UNKNOWN_HALF = 2.0  # half width of the logarithm of what was not seen


@dataclass(frozen=True, eq=False, kw_only=True)
class Situation:
    """`shape` is the calibrated law, `limits` what engine and clients bound; `family` names the law
    of lengths beyond the known ones.

    `predict` is the price that a forecast may have (queueing.control.advice.answer).
    """

    estimates: Estimates
    shape: LatencyModel
    limits: Limits
    family: str | None = None
    predict: Predict = precise

    @cached_property
    def law(self) -> LatencyModel:
        """The shape at the window's speed, residual and stalls."""
        law = self.estimates.law(self.shape)
        return (
            dataclasses.replace(law, cv=self.shape.cv)
            if parse_policy(self.estimates.policy).joins_running
            else law
        )

    @cached_property
    def lengths(self) -> KnownLengths | None:
        """None where there are too few."""
        return known_lengths(self.estimates.output_tokens, self.family)

    @property
    def rate(self) -> float:
        """Arrivals per second."""
        return self.estimates.arrival_rate.value

    @property
    def effective_n(self) -> float:
        """Observations that tell as much as the estimates do."""
        return min(self.estimates.arrival_rate.effective_n, self.estimates.speed.effective_n)

    def refusal(self, limit: int | None) -> str | None:
        """Why no setting with that token limit can be forecast; None where it can."""
        if self.lengths is None:
            known = self.estimates.output_tokens.counts.size
            return (
                f"nothing is known of the lengths yet: got {counted(known, 'answer')}, "
                f"expected at least {FEWEST}"
            )
        if not self.rate > 0:
            return "nothing arrived in the window: there is no rate to forecast at"
        return self.lengths.refusal(limit)

    def model(
        self, knobs: Knobs, whole: TokenDistribution | None = None, law: LatencyModel | None = None
    ) -> Model:
        """The queue of a setting; `whole` and `law` in place of the estimated ones. Where
        `refusal` has nothing to say.
        """
        law = self.law if law is None else law
        prompts = self.estimates.prompt_tokens
        given: dict[str, Any] = {
            "max_num_seqs": self.limits.max_num_seqs,
            "servers": knobs.servers,
            "patience": self.limits.patience,
        }
        if whole is None:
            assert self.lengths is not None
            whole = self.lengths.whole
        return Model(
            policy=parse_policy(knobs.policy),
            output_tokens=whole
            if knobs.max_output_tokens is None
            else whole.clip(knobs.max_output_tokens),
            law=law,
            prompt_tokens=prompts.law() if law.kp and prompts.counts.size else None,
            sequences=self.estimates.call_sizes,
            **given,
        )

    def forecast(self, knobs: Knobs) -> Forecast:
        """The setting's steady state here."""
        if knobs not in self._forecasts:
            self._forecasts[knobs] = self._forecast(knobs)
        return self._forecasts[knobs]

    def response(self, knobs: Knobs, measure: Measure) -> Response:
        """How what is measured of the setting moves with the estimates. Only for a setting with
        a steady state.
        """
        if (knobs, measure) not in self._responses:
            self._responses[knobs, measure] = self._response(knobs, measure)
        return self._responses[knobs, measure]

    def predicted(self, knobs: Knobs, predict: Predict | None = None) -> Prediction:
        """The setting's steady state as the gateway would measure it. Raises UnstableQueueError."""
        if predict is not None:
            return self._measured(knobs, predict)
        if knobs not in self._predictions:
            self._predictions[knobs] = self._measured(knobs, self.predict)
        return self._predictions[knobs]

    def _measured(self, knobs: Knobs, predict: Predict) -> Prediction:
        return self.measured(predict)(self.model(knobs), self.rate)

    def backlog(self, model: Model, arrival_rate: float) -> float:
        """Seconds that stalls add to the mean sojourn beyond what law and speed hold: of a
        continuous engine.
        """
        stalls = self.estimates.stalls
        if not stalls.count or not model.policy.joins_running:
            return 0.0
        busy = (
            None
            if parse_policy(self.estimates.policy).joins_running
            else utilisation_of(model, arrival_rate)
        )
        return stall_backlog(stalls, model.load(arrival_rate), model.patience, utilisation=busy)

    def measured(self, predict: Predict, *, stalling: bool = True) -> Predict:
        """What the gateway would measure of a model of this situation: with its own turnaround, and
        behind the stalls.

        Whatever ranks or reports settings by their predictions asks this. `stalling`: with the
        backlog.
        """

        def found(model: Model, arrival_rate: float) -> Prediction:
            bare = predict(model, arrival_rate).with_turnaround(self.estimates.gateway_turnaround)
            return behind_stalls(bare, self.backlog(model, arrival_rate)) if stalling else bare

        return found

    def at_rate(self, knobs: Knobs, measure: Measure, factor: float) -> float:
        """What is measured of the setting at another arrival rate, by simulation. Where it has a
        steady state there.
        """
        return self._ask(knobs, measure, rate=factor).value

    def _response(self, knobs: Knobs, measure: Measure) -> Response:
        patient = self.limits.patience is None
        base, pole = self._ask(knobs, measure), measure.has_pole and patient
        more = slope(base, self._ask(knobs, measure, rate=1 - STEP), STEP, pole=pole)
        slower = slope(base, self._ask(knobs, measure, speed=1 - STEP), STEP, pole=pole)
        rate, speed = _half_width(self.estimates.arrival_rate), _half_width(self.estimates.speed)
        loads, smooth = self._by_lengths(knobs, measure, base, more, pole=pole)
        found = self.forecast(knobs).prediction
        return Response(
            smooth=np.concatenate(
                [
                    [
                        more * rate,
                        slower * speed,
                        self._by_residual(knobs, measure, base),
                        self._by_stalls(knobs, measure, base),
                    ],
                    smooth,
                ]
            ),
            loads=np.concatenate([[rate, speed, 0.0, 0.0], loads]),
            load=base.load,
            pole=pole,
            needs_stability=patient and measure.needs_stability,
            own=0.0 if found is None else own_error(found, measure.quantity),
        )

    def _by_lengths(
        self, knobs: Knobs, measure: Measure, base: Asked, more: float, *, pole: bool
    ) -> tuple[Vector, Vector]:
        """What the parts of the lengths do to ln load and ln g, scaled to a 95 % half width of
        all of them.
        """
        assert self.lengths is not None
        loads, smooth = [], []
        for part in self.lengths.parts:
            heavier = self.model(knobs, part).load(self.rate) / base.load
            asked = self._ask(knobs, measure, rate=1 / heavier, whole=part)
            loads.append(math.log(heavier))
            smooth.append(asked.smooth(pole=pole) + more * loads[-1])
        degrees = len(loads) - 1
        scale = float(stdtrit(degrees, 0.975)) * self.lengths.to_error / math.sqrt(degrees)
        return scale * (np.array(loads) - np.mean(loads)), scale * (
            np.array(smooth) - np.mean(smooth)
        )

    def _by_stalls(self, knobs: Knobs, measure: Measure, base: Asked) -> float:
        """Of n stalls, each as likely as any other moment, what they add to M has the relative
        error 1 / sqrt(n).
        """
        if not self.law.stall_share and not self.backlog(self.model(knobs), self.rate):
            return 0.0
        assert self.lengths is not None
        without = self._asked(
            knobs, measure, self.law.without_stalls(), self.lengths.whole, 1.0, stalling=False
        )
        return (
            NORMAL
            * (1 - without.value / base.value)
            / math.sqrt(max(1, self.estimates.stalls.count))
            if base.value
            else 0.0
        )

    @cached_property
    def _predictions(self) -> dict[Knobs, Prediction]:
        return {}

    @cached_property
    def _simulated(self) -> dict[Hashable, Prediction]:
        return {}

    @cached_property
    def _responses(self) -> dict[tuple[Knobs, Measure], Response]:
        return {}

    @cached_property
    def _forecasts(self) -> dict[Knobs, Forecast]:
        return {}

    def _forecast(self, knobs: Knobs) -> Forecast:
        cut = (
            None if self.lengths is None else self.lengths.clipped_fraction(knobs.max_output_tokens)
        )
        refusal = self.refusal(knobs.max_output_tokens)
        if refusal is not None or self.lengths is None:
            return Forecast(
                knobs=knobs,
                load=math.nan,
                prediction=None,
                mean=UNKNOWN,
                clipped_fraction=cut,
                notes=(refusal or "",),
            )
        model, notes = self.model(knobs), self.lengths.notes(knobs.max_output_tokens)
        load = model.load(self.rate)
        try:
            found = self.predicted(knobs)
        except UnstableQueueError as error:
            return Forecast(
                knobs=knobs,
                load=load,
                prediction=None,
                mean=UNKNOWN,
                clipped_fraction=cut,
                notes=(*notes, str(error)),
            )
        notes = (*notes, *self._left_out(model, found))
        bare = Forecast(
            knobs=knobs,
            load=load,
            prediction=found,
            mean=UNKNOWN,
            clipped_fraction=cut,
            notes=notes,
        )
        self._forecasts[knobs] = bare  # `response` reads its method's error
        return dataclasses.replace(
            bare,
            mean=self._interval(bare, "queueing_delay"),
            sojourn=self._interval(bare, "sojourn_time"),
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

    def _interval(self, bare: Forecast, quantity: Quantity) -> Estimate:
        assert bare.prediction is not None
        found = (
            bare.prediction.served_queueing_delay
            if quantity == "queueing_delay"
            else bare.prediction.sojourn_time
        )
        if found.mean is None:
            return UNKNOWN
        least = self.estimates.gateway_turnaround
        return (
            self.response(bare.knobs, Measure(quantity=quantity))
            .interval(found.mean, self.effective_n)
            .at_least(least)
        )

    def _ask(
        self,
        knobs: Knobs,
        measure: Measure,
        *,
        rate: float = 1.0,
        speed: float = 1.0,
        cv: float | None = None,
        whole: TokenDistribution | None = None,
    ) -> Asked:
        """The number at other estimates, by simulation."""
        assert self.lengths is not None
        law = dataclasses.replace(
            self.law, speed=self.law.speed * speed, cv=self.law.cv if cv is None else cv
        )
        return self._asked(
            knobs, measure, law, self.lengths.whole if whole is None else whole, rate
        )

    def _asked(
        self,
        knobs: Knobs,
        measure: Measure,
        law: LatencyModel,
        whole: TokenDistribution,
        rate: float,
        *,
        stalling: bool = True,
    ) -> Asked:
        """One simulation for all measures that need no quantile."""
        model, at = self.model(knobs, whole, law), self.rate * rate
        key = (knobs, measure.slo, law, id(whole), rate, stalling)
        if key not in self._simulated:
            ask = self.measured(
                lambda queue, arrivals: rough(queue, arrivals, measure.slo), stalling=stalling
            )
            self._simulated[key] = ask(model, at)
        return Asked(measure.of(self._simulated[key], model, whole), model.load(at))

    def _by_residual(self, knobs: Knobs, measure: Measure, base: Asked) -> float:
        cv = self.estimates.cv
        if not cv.known or cv.high <= self.law.cv or parse_policy(knobs.policy).joins_running:
            return 0.0
        return self._ask(knobs, measure, cv=cv.high).smooth(pole=False) - base.smooth(pole=False)


def _half_width(estimate: Estimate) -> float:
    """Of the logarithm."""
    return estimate.relative if estimate.known and estimate.value else UNKNOWN_HALF
