"""The answer of a search, and the ways to search: every choice; a coarse grid that is refined about
its best; bisection for the last choice that is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from kendall.policies.text import counted, short_number
from kendall.queueing.choosing.objective import Objective
from kendall.queueing.errors import NoStableChoiceError, UnstableQueueError
from kendall.queueing.model import Model
from kendall.queueing.prediction import predict_model
from kendall.queueing.result import Prediction, Quantity

Predict = Callable[[Model, float], Prediction]  # model, arrival rate; raises UnstableQueueError
Point = dict[
    str, Any
]  # the choice, its load, its predicted values, its `score` (None where it may not be chosen)
TIE = 1e-3  # delays, and then sojourns, nearer than this are one: the first choice decides
NIL = 1e-6  # of the sojourn: delays that differ by less are one, however small they are
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Optimum:
    """The best point and the curve it was chosen from; `note` says what the number alone does
    not.
    """

    target: str
    objective: str
    best: Point
    curve: list[Point] = field(repr=False)
    note: str | None = None
    # the duration that the score is the mean of; None where it is none
    compared: Quantity | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        answer: dict[str, Any] = {
            "target": self.target,
            "objective": self.objective,
            "compared": self.compared,
        }
        answer |= {"best": self.best, "curve": self.curve}
        return answer if self.note is None else answer | {"note": self.note}


def point_of(
    choice: Point, model: Model, arrival_rate: float, predict: Predict = predict_model
) -> tuple[Point, Prediction | None]:
    """The choice with what is predicted for it; no values where it is unstable."""
    load = model.load(arrival_rate)
    try:
        prediction = predict(model, arrival_rate)
    except UnstableQueueError:
        return choice | {"load": load, "stable": False, "score": None}, None
    values = {
        "load": load,
        "stable": True,
        "method": prediction.method,
        "queueing_delay": prediction.queueing_delay.mean,
        "p99_queueing_delay": prediction.queueing_delay.p99,
        "sojourn_time": prediction.sojourn_time.mean,
        "time_to_first_token": prediction.time_to_first_token.mean,
        "loss_fraction": prediction.loss_fraction,
    }
    return choice | values, prediction


def choose(
    target: str,
    goal: Objective,
    curve: Sequence[Point],
    note: str | None = None,
    *,
    by_sojourn: bool = False,
) -> Optimum:
    """The least score; `by_sojourn`: among near scores the shortest sojourns, of these the first.
    Raises NoStableChoiceError.

    Without the second tolerance the rounding error of sojourns that are equal would choose the
    batch size.
    """
    allowed = [point for point in curve if point["score"] is not None]
    if not allowed:
        stable = [point for point in curve if point["stable"]]
        kept = f"none keeps the constraint {goal.constraint}{_nearest(goal, stable)}"
        why = kept if stable else "none is stable"
        raise NoStableChoiceError(
            counted(len(curve), f"choice of {target}", f"choices of {target}"),
            why,
            min(point["load"] for point in curve),
            idle=target == "arrival-rate" and bool(stable),
        )
    best = min(allowed, key=lambda point: float(point["score"]))  # of equal scores the first
    if by_sojourn:
        best = near_sojourns(near_scores(allowed))[0]
    return Optimum(target, goal.name, best, list(curve), note)


def _nearest(goal: Objective, stable: Sequence[Point]) -> str:
    """What breaks the SLOs at the choice that comes nearest to them."""

    def excess(point: Point) -> dict[str, float]:
        values = {slo: point.get(slo.name) for slo in goal.slos}
        return {
            f"{slo.name} {short_number(value, 3)} s": value / slo.seconds
            for slo, value in values.items()
            if value is not None and value > slo.seconds
        }

    found = [each for each in map(excess, stable) if each]
    if not found:
        return ""
    nearest = min(found, key=lambda each: max(each.values()))
    return f" (nearest: {', '.join(nearest)})"


def near_scores(allowed: Sequence[Point]) -> list[Point]:
    """Those whose score is the least one, within the tolerances."""
    nil = NIL * min(map(_sojourn, allowed))
    least = min(float(point["score"]) for point in allowed)
    limit = least + TIE * abs(least) + (nil if math.isfinite(nil) else 0.0)
    return [point for point in allowed if point["score"] <= limit]


def near_sojourns(points: Sequence[Point]) -> list[Point]:
    """Those whose sojourn is the shortest, within the tolerance."""
    shortest = min(map(_sojourn, points))
    return [point for point in points if _sojourn(point) <= (1 + TIE) * shortest]


def _sojourn(point: Point) -> float:
    sojourn = point.get("sojourn_time")
    return math.inf if sojourn is None else float(sojourn)


def score_of(point: Point) -> float | None:
    """Its score; None where it may not be chosen."""
    score = point["score"]
    return None if score is None else float(score)


def bisected(
    kept: Callable[[Number], bool],
    low: Number,
    high: Number,
    between: Callable[[Number, Number], Number | None],
) -> Number:
    """The largest choice that is kept, between `low`, which is, and `high`, which is not. `between`
    gives the next one to try; None where the two are near enough.
    """
    while (middle := between(low, high)) is not None:
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low


def whole_between(low: Number, high: Number) -> Number | None:
    """The middle of two whole numbers; None where they are neighbours."""
    return (low + high) // 2 if high - low > 1 else None


def largest_kept(kept: Callable[[int], bool], start: int, least: int, most: int) -> int | None:
    """The largest of `least` .. `most` that is kept, where all below it are: from `start` by
    doubling steps, then by bisection. None where none is.
    """
    step = 1
    if kept(start):
        low, high = start, most + 1
        while low < most and high > most:
            probe = min(low + step, most)
            low, high = (probe, high) if kept(probe) else (low, probe)
            step *= 2
    else:
        low, high = least - 1, start
        while high > least and low < least:
            probe = max(high - step, least)
            low, high = (probe, high) if kept(probe) else (low, probe)
            step *= 2
    low = bisected(kept, low, high, whole_between)
    return low if low >= least else None


def refined(
    low: int, high: int, score: Callable[[int], float | None], first: int = 24
) -> Iterable[int]:
    """Whole numbers of [low, high] to try: a geometric grid, then the gap about the best, down to
    one.

    Finds the best of a score with one valley.
    """
    tried = {
        int(n) for n in np.unique(np.round(np.geomspace(low, high, min(first, high - low + 1))))
    }
    scores = {n: score(n) for n in sorted(tried)}
    while True:
        known = sorted(n for n, value in scores.items() if value is not None)
        if not known:
            return sorted(scores)
        best = min(known, key=lambda n: (scores[n], n))
        order = sorted(scores)
        place = order.index(best)
        left, right = order[max(place - 1, 0)], order[min(place + 1, len(order) - 1)]
        new = set(np.linspace(left, right, 7).round().astype(int).tolist()) - set(scores)
        if not new:
            return order
        scores |= {n: score(n) for n in sorted(new)}
