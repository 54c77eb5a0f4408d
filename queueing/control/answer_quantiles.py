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
from queueing.estimation.cached_prediction import moved_to
from queueing.estimation.speed.own_shape import Scatter
from queueing.model import Model
from queueing.prediction.steady_state import with_quantiles_of
from queueing.result import APPROXIMATE_MEANS, Prediction
from queueing.simulation.budget import affordable_requests, enough_slots
from queueing.simulation.experiment import WARM_UP, simulate_run, summary
from queueing.simulation.fast import COLUMNS, SimulatedRun, is_compiled

DRAWN = 300_000  # requests: a p95 to 1 or 3 %
KEPT = 20.0  # seconds
STEP = 0.03  # of rate and capacity
DURATIONS = (
    "queueing_delay",
    "sojourn_time",
    "served_queueing_delay",
    "time_to_first_token",
    "inter_token_latency",
)


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
        """With its own means."""
        moved: dict[str, Any] = {}
        for name in DURATIONS:
            then, now = getattr(self.beside, name).mean, getattr(prediction, name).mean
            found = dataclasses.replace(getattr(self.simulated, name), mean=then)
            moved[name] = found if now is None else moved_to(found, now)
        noted = prediction
        if prediction.method != "simulation":
            note = f"{APPROXIMATE_MEANS}quantiles from a simulation of {DRAWN:,} requests"
            noted = dataclasses.replace(prediction, assumptions=(*prediction.assumptions, note))
        return with_quantiles_of(dataclasses.replace(self.simulated, **moved), noted, DURATIONS)

    def _serves(self, found: Assessment, model: Model) -> bool:
        age = found.estimates.now - self.at
        return (
            self.epoch == found.estimates.epoch
            and 0 <= age < KEPT
            and abs(math.log(found.estimates.arrival_rate.value / self.rate)) < STEP
            and abs(math.log(model.largest_stable_rate / self.capacity)) < STEP
        )


def _simulated(model: Model, rate: float, scatter: Scatter | None) -> Prediction | None:
    if not is_compiled(enough_slots(model, rate)):
        return None
    try:
        count = affordable_requests(model, rate, DRAWN)
    except OutOfReachError:
        return None
    warm_up = int(WARM_UP * count)
    whole = simulate_run(
        enough_slots(model, rate), rate, count, np.random.SeedSequence(0), since=warm_up
    )
    run = scattered(whole.after(warm_up), scatter)
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
