"""The largest stable rate, or the largest that keeps an SLO: by bisection of the load, with which
the delay grows.

Batch formation of a fixed batch takes long at low rates too: its delay falls, then rises. Its loads
are scanned; where none of them keeps the SLO, the valley between the best one's neighbours is
searched for its floor. With patience loads above 1 are steady, and are tried too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import minimize_scalar

from policies.fixed import Fixed
from policies.registry import is_first_come
from policies.text import SpecError
from queueing.model import Model
from queueing.optimization.choices import scored
from queueing.optimization.objective import Objective, Slo
from queueing.optimization.search import Optimum, Point, Predict, choose, point_of
from queueing.prediction import predict_model

LIGHTEST, HEAVIEST, IMPATIENT = (
    0.001,
    0.999,
    16.0,
)  # loads: the last is the largest one tried with patience
SCAN = [LIGHTEST, *np.linspace(0.05, 0.95, 19).tolist(), HEAVIEST]


def largest_rate(
    model: Model,
    objective: Objective,
    precision: float = 1e-3,
    predict: Predict = predict_model,
) -> Optimum:
    """The largest stable rate (throughput), or the largest that keeps the SLO. Raises SpecError,
    NoStableChoiceError.
    """
    limit = model.largest_stable_rate
    if objective.name == "throughput":
        return _largest_stable(model)
    if objective.name != "slo" or objective.slo is None:
        raise SpecError(
            f"got objective={objective.name} for arrival-rate; expected throughput or slo"
        )
    for slo in objective.slos:
        _check_binding(model, slo)
    curve: dict[float, Point] = {}

    def kept(load: float) -> bool:
        choice = {"arrival_rate": load * limit}
        point = scored(choice, model, load * limit, objective, predict=predict)
        curve[load] = point | {"score": None if point["score"] is None else -load}
        return point["score"] is not None

    note, low = None, _lowest_kept(model, kept, objective.slos, predict)
    if low is not None:
        high = HEAVIEST if model.patience is None else IMPATIENT
        if kept(high):
            note = f"the SLO still holds at load {high:g}, the largest that was tried"
        else:
            largest_kept(kept, low, high, relative=precision)
    return choose("arrival-rate", objective, [curve[load] for load in sorted(curve)], note)


def _largest_stable(model: Model) -> Optimum:
    if model.patience is not None:
        raise SpecError(
            f"got patience={model.patience:g}; expected none: with patience every rate is stable"
        )
    best: Point = {"arrival_rate": model.largest_stable_rate, "load": 1.0}
    note = "at this rate itself the queue grows without end"
    return Optimum("arrival-rate", "throughput", best, [best], note)


def largest_kept(
    kept: Callable[[float], bool],
    low: float,
    high: float,
    *,
    relative: float = 0.0,
    absolute: float = 0.0,
) -> float:
    """The largest load that keeps the SLO, by bisection between one that does and one that does
    not, within a tolerance as `math.isclose` has it.
    """
    while high - low > max(relative * low, absolute):
        middle = (low + high) / 2
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low


def heaviest_scanned(kept: Callable[[float], bool]) -> float | None:
    """The heaviest load of a scan that keeps the SLO: a load to start from under fixed, whose
    batches form more slowly at low loads.
    """
    return max([load for load in SCAN[1:-1] if kept(load)], default=None)


def _check_binding(model: Model, slo: Slo) -> None:
    """With patience nobody waits longer than that: such an SLO says nothing."""
    if (
        model.patience is not None
        and slo.field == "queueing_delay"
        and slo.seconds >= model.patience
    ):
        raise SpecError(
            f"got slo={slo} with patience={model.patience:g}; expected a shorter bound: no "
            "request waits longer than that"
        )


def _lowest_kept(
    model: Model, kept: Callable[[float], bool], slos: Sequence[Slo], predict: Predict
) -> float | None:
    """A load that keeps the SLO, to start from: the lightest; for fixed the heaviest of a scan,
    or the floor of its valley.
    """
    if is_first_come(model.policy) and not isinstance(model.policy, Fixed):
        return LIGHTEST if kept(LIGHTEST) else None
    if (heaviest := heaviest_scanned(kept)) is not None:
        return heaviest

    def value(load: float) -> float:
        _, prediction = point_of({}, model, load * model.largest_stable_rate, predict)
        found = [None if prediction is None else slo.value(prediction) for slo in slos]
        return max(
            math.inf if value is None else value / slo.seconds
            for value, slo in zip(found, slos, strict=True)
        )

    place = 1 + int(np.argmin([value(load) for load in SCAN[1:-1]]))
    floor = minimize_scalar(
        value, bounds=(SCAN[place - 1], SCAN[place + 1]), method="bounded", options={"xatol": 1e-4}
    )
    return float(floor.x) if kept(float(floor.x)) else None
