"""The largest stable rate, or the largest that keeps an SLO: by bisection of the load, with which
the delay grows.

Batch formation of a fixed batch takes long at low rates too: its delay falls, then rises. Its loads
are scanned; where none of them keeps the SLO, the valley between the best one's neighbours is
searched for its floor. With patience loads above 1 are steady, and are tried too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import minimize_scalar

from kendall.policies.fixed import Fixed
from kendall.policies.registry import is_first_come
from kendall.policies.text import SpecError
from kendall.queueing.choosing.choices import scored
from kendall.queueing.choosing.confirmed import Rising
from kendall.queueing.choosing.objective import Objective, levels_of
from kendall.queueing.choosing.reach import check_reach
from kendall.queueing.choosing.search import Optimum, Point, Predict, bisected, choose, point_of
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue

LIGHTEST, HEAVIEST, IMPATIENT = (
    0.001,
    0.999,
    16.0,
)  # loads: the last is the largest one tried with patience
SCAN = [LIGHTEST, *np.linspace(0.05, 0.95, 19).tolist(), HEAVIEST]


def largest_rate(
    model: Queue,
    objective: Objective,
    precision: float = 1e-3,
    predict: Predict = predict_model,
    *,
    full: Predict | None = None,
) -> Optimum:
    """The largest stable rate (throughput), or the largest that keeps the SLO, by the values of
    `full` where it is given. Raises SpecError, NoStableChoiceError.
    """
    if objective.name == "throughput":
        if model.requests.patience is not None:
            raise SpecError(
                f"got patience={model.requests.patience:g}; expected none: with patience every "
                "rate is stable"
            )
        best: Point = {"arrival_rate": model.largest_stable_rate, "load": 1.0}
        note = "at this rate itself the queue grows without end"
        return Optimum("arrival-rate", "throughput", best, [best], note)
    if objective.name != "slo" or objective.slo is None:
        raise SpecError(
            f"got objective={objective.name} for arrival-rate; expected throughput or slo"
        )
    for slo in objective.slos:
        patience = model.requests.patience
        if patience is not None and slo.field == "queueing_delay" and slo.seconds >= patience:
            raise SpecError(
                f"got slo={slo} with patience={patience:g}; expected a shorter bound: no request "
                "waits longer than that"
            )
    check_reach(model, objective)
    model = model.with_quantiles(levels_of(objective.slos))
    search = RateSearch(model=model, objective=objective, precision=precision, predict=predict)
    return search.largest(full)


@dataclass(frozen=True, kw_only=True)
class RateSearch:
    """The largest rate that keeps the SLOs. `points`: those that were predicted, by their loads."""

    model: Queue
    objective: Objective
    precision: float
    predict: Predict
    points: dict[float, Point] = field(default_factory=dict)

    def largest(self, full: Predict | None) -> Optimum:
        """By the quick values, and then by those of `full` where it is given."""
        note, low = None, self.start()
        high = HEAVIEST if self.model.requests.patience is None else IMPATIENT
        if low is not None and self.kept(high):
            note, low = f"the SLO still holds at load {high:g}, the largest that was tried", high
        elif low is not None:
            low = bisected(self.kept, low, high, self.between)
        if full is None or low is None:
            curve = [self.points[load] for load in sorted(self.points)]
            return choose("arrival-rate", self.objective, curve, note)
        rising = Rising(
            self.objective,
            self.points,
            self.quick,
            lambda load: self.predicted(load, full),
            self.between,
            math.nextafter(high, math.inf),
        )
        found = rising.confirmed(low)
        note = note if found[low]["score"] is not None else None
        return choose("arrival-rate", self.objective, rising.curve(found), note)

    def predicted(self, load: float, by: Predict) -> Point:
        """The point at a load."""
        rate = load * self.model.largest_stable_rate
        point = scored({"arrival_rate": rate}, self.model, rate, self.objective, predict=by)
        return point | {"score": None if point["score"] is None else -load}

    def quick(self, load: float) -> Point:
        """The same, each load once."""
        if load not in self.points:
            self.points[load] = self.predicted(load, self.predict)
        return self.points[load]

    def kept(self, load: float) -> bool:
        """Whether its quick values keep the SLOs."""
        return self.quick(load)["score"] is not None

    def between(self, low: float, high: float) -> float | None:
        """The middle of two loads that are not near enough."""
        return (low + high) / 2 if high - low > self.precision * low else None

    def start(self) -> float | None:
        """A load that keeps the SLOs: the lightest; for fixed the heaviest of a scan, or the floor
        of its valley.
        """
        if is_first_come(self.model.policy) and not isinstance(self.model.policy, Fixed):
            return LIGHTEST if self.kept(LIGHTEST) else None
        if (heaviest := heaviest_scanned(self.kept)) is not None:
            return heaviest
        place = 1 + int(np.argmin([self.excess(load) for load in SCAN[1:-1]]))
        bounds = SCAN[place - 1], SCAN[place + 1]
        floor = minimize_scalar(
            self.excess, bounds=bounds, method="bounded", options={"xatol": 1e-4}
        )
        return float(floor.x) if self.kept(float(floor.x)) else None

    def excess(self, load: float) -> float:
        """The largest quick value over the bound of its SLO."""
        rate, slos = load * self.model.largest_stable_rate, self.objective.slos
        _, prediction = point_of({}, self.model, rate, self.predict)
        found = [None if prediction is None else slo.value(prediction) for slo in slos]
        return max(
            math.inf if value is None else value / slo.seconds
            for value, slo in zip(found, slos, strict=True)
        )


def heaviest_scanned(kept: Callable[[float], bool]) -> float | None:
    """The heaviest load of a scan that keeps the SLO: a load to start from under fixed, whose
    batches form more slowly at low loads.
    """
    return max([load for load in SCAN[1:-1] if kept(load)], default=None)
