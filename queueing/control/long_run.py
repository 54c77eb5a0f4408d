"""The steady state that a queue tends to, at the estimates of one instant.

It is kept while the estimates move little: for `KEPT` seconds of its epoch, rate and largest stable
rate within `STEP` of where they were, the load within `MOVED` of what is free, the variance that
residual and stalls give to the shortest batch within `SCATTER`. It stays what it is then, with the
instant that it is of: a forecast of the long run need not follow each look.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.criterion import Criterion
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.choosing.quantity import served_mean
from kendall.queueing.control.answer_quantiles import with_answer_quantiles
from kendall.queueing.errors import PredictionError, UnstableQueueError
from kendall.queueing.estimation.assumptions.assumption import StalledDelay
from kendall.queueing.estimation.estimates import Estimates
from kendall.queueing.estimation.interval import NORMAL, UNKNOWN, Estimate, without_interval
from kendall.queueing.estimation.speed.fitted_law import ResidualVariance
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction, Quantity

KEPT = 150.0  # seconds
STEP = 0.03
MOVED, LEAST_FREE = 0.2, 0.02
SCATTER = 0.004  # of cv^2; the mean goes as 1 + cv^2


@dataclass(frozen=True, eq=False, kw_only=True)
class LongRun:
    """Of the setting in force, as the gateway would measure it."""

    point: OperatingPoint
    setting: Setting
    model: Queue
    load: Estimate
    prediction: Prediction | None  # None where there is no steady state or no answer
    scatter: ResidualVariance | None  # of a continuous engine about its law, where it is known

    @property
    def estimates(self) -> Estimates:
        """What it rests on."""
        return self.point.estimates

    @property
    def compared(self) -> Quantity:
        """The duration that is compared."""
        return "sojourn_time" if self.model.policy.joins_running else "queueing_delay"

    @property
    def mean(self) -> float | None:
        """The mean of that duration, of dispatched requests, seconds."""
        return None if self.prediction is None else served_mean(self.prediction, self.compared)

    @cached_property
    def interval(self) -> Estimate:
        """The mean with what the estimates leave open."""
        return UNKNOWN if self.mean is None else self.intervals[self.compared]

    @cached_property
    def intervals(self) -> dict[Quantity, Estimate]:
        """Of both durations; without a steady state none is known."""
        forecast, known = self.point.forecast(self.setting), self.estimates
        found: dict[Quantity, Estimate] = {
            "queueing_delay": forecast.mean,
            "sojourn_time": forecast.sojourn,
        }
        if known.arrival_rate.known and known.speed.known:
            return found
        return {name: without_interval(each.value) for name, each in found.items()}

    @cached_property
    def answered(self) -> Prediction | None:
        """With the quantiles of what a continuous engine's clients see."""
        if self.prediction is None or not self.model.policy.joins_running:
            return self.prediction
        least = self.estimates.gateway_turnaround
        return with_answer_quantiles(
            self.prediction, self.model, self.point.rate, self.scatter, least
        )

    @cached_property
    def stalled(self) -> StalledDelay | None:
        """The mean beside that of the same machine without stalls; None without stalls."""
        mean, smooth = self.mean, None
        if not mean:
            return None
        backlog = self.point.backlog(self.model, self.point.rate)
        if backlog:
            smooth = mean - backlog
        elif self.model.engine.law.stall_share:
            calm = self.model.but(law=self.model.engine.law.without_stalls())
            try:
                found = self.point.measured(predict_model)(calm, self.point.rate)
            except PredictionError:
                return None
            smooth = served_mean(found, self.compared)
        return None if smooth is None else StalledDelay(mean, smooth)

    @cached_property
    def speed_elasticity(self) -> float:
        """d ln mean / d ln speed; 0 without a steady state."""
        if self.mean is None:
            return 0.0
        return self.point.sensitivity.speed_elasticity(self.setting, self._measure)

    @cached_property
    def with_independent_lengths(self) -> float:
        """The mean with independent lengths in a call, over it; 1 without a steady state."""
        if self.mean is None:
            return 1.0
        return self.point.sensitivity.with_independent_lengths(self.setting, self._measure)

    @property
    def wander_effect(self) -> float | None:
        """By what share the slow wander of the speed moves the mean of a window, at most (95 %):
        what is fast against the queue's relaxation time averages out in it.
        """
        slow, window = self.estimates.wander, self.estimates.now - self.estimates.start
        if not slow.significant or self.mean is None:
            return None
        left = slow.tau / (slow.tau + self.relaxation_time)
        spread = slow.sigma.value * math.sqrt(left * min(1.0, 2 * slow.tau / window))
        return NORMAL * abs(self.speed_elasticity) * spread

    @cached_property
    def relaxation_time(self) -> float:
        """Seconds in which the queue forgets where it began; infinite without a steady state."""
        if self.prediction is None:
            return math.inf
        size, load = self.prediction.batch_size.mean or 1.0, self.load.value
        if self.model.policy.joins_running:
            apart = (self.prediction.sojourn_time.mean or 0.0) / max(1.0, size)
            return relaxation_time(load, apart, one_by_one=True)
        service = self.model.batch_time.mean(max(1, round(size)))
        one_by_one = self.model.bound == 1
        return relaxation_time(load, service / self.model.engine.servers, one_by_one=one_by_one)

    @property
    def _measure(self) -> Criterion:
        return Criterion(quantity=self.compared)

    def stands(self, now: Estimates, model: Queue, load: float) -> bool:
        """Whether it may stand for these estimates too."""
        then, was = self.estimates, self.model
        if now.epoch != then.epoch or not 0 <= now.now - then.now < KEPT:
            return False
        near = abs(load - self.load.value) <= MOVED * max(1 - load, LEAST_FREE)
        pairs = [
            (now.arrival_rate.value, then.arrival_rate.value),
            (model.largest_stable_rate, was.largest_stable_rate),
            *zip(model.engine.server_speeds, was.engine.server_speeds, strict=False),
        ]
        return (
            near
            and (self.load.value < 1) == (load < 1)
            and len(model.engine.server_speeds) == len(was.engine.server_speeds)
            and all(abs(math.log(one / other)) <= STEP for one, other in pairs)
            and abs(_scatter(model) - _scatter(was)) <= SCATTER
            and abs(model.requests.intraclass_correlation - was.requests.intraclass_correlation)
            <= STEP
        )


def _scatter(model: Queue) -> float:
    stalls = model.engine.law.stall_share * model.engine.law.stall
    return model.engine.law.cv**2 + (stalls / model.batch_time.mean(1) if stalls else 0.0)


def long_run(
    point: OperatingPoint,
    setting: Setting,
    model: Queue,
    load: Estimate,
    *,
    scatter: ResidualVariance | None = None,
    before: LongRun | None = None,
) -> LongRun:
    """That of `before` while it stands. `model`: the setting's at the point; `load`: without
    interruptions, where these are too many.
    """
    prediction = None
    if before is not None and before.stands(point.estimates, model, load.value):
        return before
    try:
        prediction = point.in_full(setting)
    except UnstableQueueError as error:
        load = load.scaled(error.load / load.value) if load.value < 1 else load
    except PredictionError:
        pass
    return LongRun(
        point=point,
        setting=setting,
        model=model,
        load=load,
        prediction=prediction,
        scatter=scatter,
    )


def relaxation_time(
    load: float, service_time: float, *, one_by_one: bool, scv: float = 1.0
) -> float:
    """Seconds in which a queue forgets where it began; infinite at load 1.

    One by one: that of M/M/1, s / (1 - sqrt(load))^2, times (1 + scv) / 2. Batches of all that
    wait: the number found falls by the factor `load` a batch, so s / (1 - load).
    """
    if load >= 1:
        return math.inf
    return (
        service_time * (1 + scv) / 2 / (1 - math.sqrt(load)) ** 2
        if one_by_one
        else service_time / (1 - load)
    )
