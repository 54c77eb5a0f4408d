"""Quantiles of what the clients of a continuous engine see, for live looks: of delay, sojourn, time
to first token and gaps between tokens. The formula gives their means only.

They come from a simulation at the window's estimates in which each request, beside what the law
says, takes what one of the window's requests took (`Scatter`): the steps of a real engine vary,
those of the law do not, and a p95 of the time to the first token was 4 to 13 % too short without
(measured: docs/production-validation.md). A simulation costs some 0.1 s of a processor, so
one is kept while rate and capacity are within `STEP` of where it was made, and for `KEPT` seconds;
meanwhile quantiles move in proportion to their mean.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from queueing.errors import OutOfReachError
from queueing.estimation.assess import Assessment
from queueing.estimation.cached_prediction import difference, scaled, total
from queueing.estimation.speed.own_shape import Scatter
from queueing.model import Model
from queueing.prediction.steady_state import with_quantiles_of
from queueing.result import APPROXIMATE_MEANS, LEVELS, Prediction, Quantiles
from queueing.simulation.budget import affordable_requests, enough_slots
from queueing.simulation.experiment import begin_of, steady_run, summary
from queueing.simulation.fast import COLUMNS, SimulatedRun, is_compiled

DRAWN = 300_000  # requests: a p95 to 1 or 3 %
KEPT = 60.0  # seconds
STEP = 0.03  # of rate and capacity
SERVED = "served_queueing_delay"


@dataclass(frozen=True, eq=False, kw_only=True)
class AnswerQuantiles:
    """`simulated`, beside the prediction of that instant; seconds."""

    epoch: int
    at: float
    rate: float
    capacity: float
    simulated: Prediction
    beside: Prediction

    @classmethod
    def of(cls, found: Assessment, kept: AnswerQuantiles | None = None) -> AnswerQuantiles | None:
        """Those that are kept while they will do. None under other policies, and where a simulation
        costs too much.
        """
        model, prediction = found.model, found.prediction
        if model is None or prediction is None or not model.policy.joins_running:
            return None
        if kept is not None and kept._serves(found, model):
            return kept
        rate = found.estimates.arrival_rate.value
        simulated = _simulated(model, rate, found.scatter)
        if simulated is None:
            return None
        return cls(
            epoch=found.estimates.epoch,
            at=found.estimates.now,
            rate=rate,
            capacity=model.largest_stable_rate,
            simulated=simulated,
            beside=prediction,
        )

    def added_to(self, prediction: Prediction) -> Prediction:
        """With its own means: what comes before the dispatch moves with the mean delay, what comes
        after it with the mean of that.
        """
        moved: dict[str, Any] = {
            name: self._stretched(prediction, name)
            for name in ("queueing_delay", SERVED, "inter_token_latency")
        }
        for name in ("sojourn_time", "time_to_first_token"):
            moved[name] = self._later(prediction, name, moved[SERVED])
        noted = prediction
        if prediction.method != "simulation":
            note = f"{APPROXIMATE_MEANS}quantiles from a simulation of {DRAWN:,} requests"
            noted = dataclasses.replace(prediction, assumptions=(*prediction.assumptions, note))
        return with_quantiles_of(dataclasses.replace(self.simulated, **moved), noted, tuple(moved))

    def _stretched(self, prediction: Prediction, name: str) -> Quantiles:
        """In proportion to its mean."""
        then, now = (getattr(each, name).mean for each in (self.beside, prediction))
        return scaled(getattr(self.simulated, name), _ratio(now, then))

    def _later(self, prediction: Prediction, name: str, delay: Quantiles) -> Quantiles:
        """The delay, and what a quantile is above that of the delay in proportion to its mean."""

        def above(found: Prediction, level: str) -> float | None:
            return difference(
                getattr(getattr(found, name), level), getattr(found.served_queueing_delay, level)
            )

        ratio = _ratio(above(prediction, "mean"), above(self.beside, "mean"))
        levels = (
            total(getattr(delay, level), above(self.simulated, level), ratio) for level in LEVELS
        )
        return Quantiles.of(LEVELS, None, levels)

    def _serves(self, found: Assessment, model: Model) -> bool:
        age = found.estimates.now - self.at
        return (
            self.epoch == found.estimates.epoch
            and 0 <= age < KEPT
            and abs(math.log(found.estimates.arrival_rate.value / self.rate)) < STEP
            and abs(math.log(model.largest_stable_rate / self.capacity)) < STEP
        )


def _ratio(now: float | None, then: float | None) -> float:
    return now / then if now and then else 1.0


def _simulated(model: Model, rate: float, scatter: Scatter | None) -> Prediction | None:
    roomy = enough_slots(model, rate)
    if not is_compiled(roomy):
        return None
    try:
        count = affordable_requests(model, rate, DRAWN)
    except OutOfReachError:
        return None
    begin = begin_of(roomy, rate, count)
    run = scattered(steady_run(roomy, rate, begin, np.random.SeedSequence(0)), scatter)
    return summary([run], model, model.load(rate), ())


def scattered(run: SimulatedRun, scatter: Scatter | None) -> SimulatedRun:
    """Every request takes longer, or shorter, by what one of the window's requests did."""
    if scatter is None:
        return run
    drawn = np.random.default_rng(0).integers(0, scatter.first.size, run.arrived_at.size)
    first = np.maximum(run.first_token_at + scatter.first[drawn], run.dispatched_at)
    later: dict[str, Any] = {
        name: np.maximum(getattr(run, name) + scatter.whole[drawn], first)
        for name in ("released_at", "server_free_at")
    }
    columns = {name: getattr(run, name) for name in COLUMNS} | {"first_token_at": first} | later
    return SimulatedRun(run.arrived_at, run.output_tokens, columns, gaps=run.gaps)
