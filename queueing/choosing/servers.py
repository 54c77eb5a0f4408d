"""The fewest servers that keep an SLO: more servers never wait longer, so the steps 0, 1, 2, 4, ...
and a bisection find it.

A target that the largest number misses is found out in seven predictions, not in one for each
number.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kendall.policies.text import SpecError
from kendall.queueing.choosing.choices import scored
from kendall.queueing.choosing.confirmed import Moved
from kendall.queueing.choosing.objective import Objective, levels_of
from kendall.queueing.choosing.quantity import compared_by
from kendall.queueing.choosing.reach import check_reach
from kendall.queueing.choosing.search import (
    Optimum,
    Point,
    Predict,
    bisected,
    choose,
    whole_between,
)
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue

NEAR = 1.15  # times a bound: a quick value below may be longer than the full one


def fewest_servers(
    model: Queue,
    arrival_rate: float,
    objective: Objective,
    largest: int = 64,
    predict: Predict = predict_model,
    *,
    full: Predict | None = None,
) -> Optimum:
    """The fewest of 1 .. `largest`, by the values of `full` where it is given. Raises SpecError
    without an SLO, NoStableChoiceError.
    """
    if objective.name != "slo":
        why = "the delay always falls with more servers"
        raise SpecError(
            f"got objective={objective.name} for servers; expected slo, for example --slo "
            f"p99_queueing_delay=2s: {why}"
        )
    if largest < 1:
        raise SpecError(f"got largest={largest}; expected at least 1")
    check_reach(model, objective)
    model = model.with_quantiles(levels_of(objective.slos))
    points: dict[int, Point] = {}
    quantity = compared_by([model.policy], objective.slo)

    def kept(servers: int, by: Predict = predict) -> bool:
        point = scored(
            {"servers": servers},
            model.but(servers=servers),
            arrival_rate,
            objective,
            predict=by,
            quantity=quantity,
        )
        points[servers] = point | {"score": None if point["score"] is None else float(servers)}
        return point["score"] is not None

    # so many are not stable
    needed = math.floor(model.but(servers=1).load(arrival_rate))
    low = start = 0 if model.requests.patience is not None else min(needed, largest - 1)
    high, step = start + 1, 1
    while not kept(high) and high < largest:
        step *= 2
        low, high = high, min(largest, start + step)
    if points[high]["score"] is not None:
        high = 1 + bisected(lambda servers: not kept(servers), low, high, whole_between)
        if full is not None:
            first = _confirmed(
                lambda servers: kept(servers, full),
                (start + 1, high, largest),
                lambda servers: (
                    servers in points and Moved(objective).excess(points[servers]) < NEAR
                ),
            )
            for servers in points:
                points[servers] |= {"score": None} if servers < first else {}
    return choose("servers", objective, [points[servers] for servers in sorted(points)])


def _confirmed(
    kept: Callable[[int], bool], numbers: tuple[int, int, int], near: Callable[[int], bool]
) -> int:
    """The fewest servers about those that seemed to be enough, by their full values; more than the
    largest number where none is. `near`: a longer simulation may find that so many are enough.
    """
    least, servers, largest = numbers
    if not kept(servers):
        return next((more for more in range(servers + 1, largest + 1) if kept(more)), largest + 1)
    while servers > least and near(servers - 1) and kept(servers - 1):
        servers -= 1
    return servers
