"""The fewest servers that keep an SLO: more servers never wait longer, so the steps 0, 1, 2, 4, ...
and a bisection find it.

A target that the largest number misses is found out in seven predictions, not in one for each
number.
"""

from __future__ import annotations

import dataclasses
import math

from policies.text import SpecError
from queueing.model import Model
from queueing.optimization.choices import scored
from queueing.optimization.objective import Objective
from queueing.optimization.quantity import compared_by
from queueing.optimization.search import Optimum, Point, Predict, choose
from queueing.prediction import predict_model


def fewest_servers(
    model: Model,
    arrival_rate: float,
    objective: Objective,
    largest: int = 64,
    predict: Predict = predict_model,
) -> Optimum:
    """Of 1 .. `largest`. Raises SpecError without an SLO, NoStableChoiceError."""
    _check(objective, largest)
    points: dict[int, Point] = {}
    quantity = compared_by([model.policy], objective.slo)

    def kept(servers: int) -> bool:
        point = scored(
            {"servers": servers},
            dataclasses.replace(model, servers=servers),
            arrival_rate,
            objective,
            predict=predict,
            quantity=quantity,
        )
        points[servers] = point | {"score": None if point["score"] is None else float(servers)}
        return point["score"] is not None

    # so many are not stable
    needed = math.floor(dataclasses.replace(model, servers=1).load(arrival_rate))
    low = start = 0 if model.patience is not None else min(needed, largest - 1)
    high, step = start + 1, 1
    while not kept(high) and high < largest:
        step *= 2
        low, high = high, min(largest, start + step)
    while high - low > 1 and points[high]["score"] is not None:
        middle = (low + high) // 2
        low, high = (low, middle) if kept(middle) else (middle, high)
    return choose("servers", objective, [points[servers] for servers in sorted(points)])


def _check(objective: Objective, largest: int) -> None:
    if objective.name != "slo":
        why = "the delay always falls with more servers"
        raise SpecError(
            f"got objective={objective.name} for servers; expected slo, for example --slo "
            f"p99_queueing_delay=2s: {why}"
        )
    if largest < 1:
        raise SpecError(f"got largest={largest}; expected at least 1")
