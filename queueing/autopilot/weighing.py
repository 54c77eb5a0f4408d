"""What a setting would gain over another, and how far both are from saturation.

Both are simulated with the same arrivals and the same answers (common random numbers), so that the gain is far surer than either delay:

    gain = 1 - m' / m,   error of m' / m from batch means of (w'_i - m'/m w_i) / m

On top of it comes what the estimates leave open, of which most cancels too (queueing.advice.response).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from queueing.advice.forecast import Knobs
from queueing.advice.measure import Measure
from queueing.advice.response import Response
from queueing.advice.situation import Situation
from queueing.errors import PredictionError
from queueing.estimation.interval import NORMAL, UNKNOWN, Estimate
from queueing.experiment import simulate_run
from queueing.statistics import FloatArray, mean_interval

REQUESTS = 40_000
NIL = 1e-9  # seconds: delays of nobody do not divide


@dataclass(frozen=True, eq=False)
class Weighed:
    """One setting in one situation; `delays` in order of arrival, seconds, None where there is no steady state."""

    knobs: Knobs
    load: float
    delays: FloatArray | None

    @property
    def mean(self) -> float:
        """Seconds; infinite without a steady state."""
        return math.inf if self.delays is None else float(self.delays.mean())


def weigh(situation: Situation, knobs: Knobs, *, edge: float = 1.0) -> Weighed:
    """Its load and its delays; none where the load is at `edge` or above."""
    model = situation.model(knobs)
    load = model.load(situation.rate)
    if load >= edge and model.patience is None:
        return Weighed(knobs, load, None)
    run = simulate_run(model, situation.rate, REQUESTS, np.random.SeedSequence(0)).after(REQUESTS // 10)
    return Weighed(knobs, load, np.where(run.lost, model.patience or 0.0, run.queueing_delay))


def gain_of(situation: Situation, before: Weighed, after: Weighed) -> Estimate:
    """1 - after / before with its interval; of a queue without a steady state, how much lower its load becomes."""
    size = situation.effective_n
    if before.delays is None:
        value = 1.0 if after.delays is not None else 1 - after.load / before.load
        return Estimate(value, value, value, size)
    if after.delays is None:
        return UNKNOWN
    ratio = (after.mean + NIL) / (before.mean + NIL)
    error = mean_interval((after.delays - ratio * before.delays) / (before.mean + NIL)).half_width / NORMAL
    entries = [replace(situation.response(each.knobs, Measure()), own=0.0) for each in (before, after)]
    return Response(entries[1].entries, error / ratio).gain(after.mean, entries[0], before.mean, size)


def delay_of(situation: Situation, knobs: Knobs) -> Estimate:
    """The predicted mean queueing delay with its interval; unknown without a steady state."""
    try:
        return situation.forecast(knobs).mean
    except PredictionError:
        return UNKNOWN
