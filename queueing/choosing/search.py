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
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction, Quantity

Predict = Callable[[Queue, float], Prediction]  # model, arrival rate; raises UnstableQueueError
Point = dict[
    str, Any
]  # the choice, its load, its predicted values, its `score` (None where it may not be chosen)
# Scores whose relative difference is at most TIE count as equal, and so do sojourns among these;
# of equal choices the first is taken.
TIE = 1e-3
NIL = 1e-6  # scores that differ by less than this share of the sojourn count as equal too
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Optimum:
    """The best point and the curve that it was chosen from; `note` is a remark for the reader."""

    target: str
    objective: str
    best: Point
    curve: list[Point] = field(repr=False)
    note: str | None = None
    # the duration of which the score is the mean; None where the score is something else
    compared: Quantity | None = None

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON; `note` only where there is one."""
        plain: dict[str, object] = {
            "target": self.target,
            "objective": self.objective,
            "compared": self.compared,
            "best": self.best,
            "curve": self.curve,
        }
        return plain if self.note is None else plain | {"note": self.note}


def point_of(
    choice: Point, model: Queue, arrival_rate: float, predict: Predict = predict_model
) -> tuple[Point, Prediction | None]:
    """The choice with its load and its predicted values, still without a score, and the prediction.
    For an unstable choice no values, the score None, and no prediction.
    """
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
        "queue_length": prediction.queue_length.mean,
        "number_in_system": prediction.number_in_system.mean,
    }
    if prediction.energy_use is not None:
        values |= {
            "energy_per_request": prediction.energy_per_request,
            "watts": prediction.watts,
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
    """Choose the point with the least score. With `by_sojourn`, among the points whose score is
    near the least one, the first whose sojourn is near the shortest of them. Raises
    NoStableChoiceError.

    Without a tolerance for sojourns, the rounding error of equal ones would choose the batch size.
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
    """The words for the values that break the SLOs, at the stable choice that comes nearest to
    keeping them.
    """

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
    """The points whose score equals the least one within the tolerances `TIE` and `NIL`."""
    nil = NIL * min(map(_sojourn, allowed))
    least = min(float(point["score"]) for point in allowed)
    limit = least + TIE * abs(least) + (nil if math.isfinite(nil) else 0.0)
    return [point for point in allowed if point["score"] <= limit]


def near_sojourns(points: Sequence[Point]) -> list[Point]:
    """The points whose sojourn equals the shortest one within the tolerance `TIE`."""
    shortest = min(map(_sojourn, points))
    return [point for point in points if _sojourn(point) <= (1 + TIE) * shortest]


def _sojourn(point: Point) -> float:
    sojourn = point.get("sojourn_time")
    return math.inf if sojourn is None else float(sojourn)


def score_of(point: Point) -> float | None:
    """The point's score; None where it may not be chosen."""
    score = point["score"]
    return None if score is None else float(score)


def bisected(
    kept: Callable[[Number], bool],
    low: Number,
    high: Number,
    between: Callable[[Number, Number], Number | None],
) -> Number:
    """The largest choice for which `kept` holds, by bisection: it holds at `low` and not at `high`.
    `between` returns the next choice to try, or None where its two arguments are near enough.
    """
    while (middle := between(low, high)) is not None:
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low


def whole_between(low: Number, high: Number) -> Number | None:
    """The middle of two whole numbers; None where they are neighbours."""
    return (low + high) // 2 if high - low > 1 else None


def largest_kept(kept: Callable[[int], bool], start: int, least: int, most: int) -> int | None:
    """The largest number of `least` .. `most` for which `kept` holds, if it holds for all below
    too; None where it holds for none. From `start` in doubling steps, then by bisection.
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
    """Score whole numbers of [low, high] until the best one is found, and return all that were
    scored, in order: first a geometric grid, then ever finer ones between the neighbours of the
    best.

    Finds the least score if the scores have one valley.
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
