"""Batch size and policy: each candidate is predicted, and the best is kept with the whole curve.

Throughput  argmax b / E[H(b)]; of a law that only rises there is no finite optimum, and the answer
            says so
Delay       capped batches' delay is flat at low load: delays within 0.1 % count as one, then
            sojourns, and the smallest size decides. Across families, and for continuous, the
            sojourn itself (queueing.optimization.quantity)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from policies.text import SpecError, format_policy, parse_policy, policy_batch_size
from queueing.model import Model, with_quantiles
from queueing.optimization.candidates import LARGEST_SIZE, with_size
from queueing.optimization.confirmed import confirmed_choice
from queueing.optimization.objective import Objective, levels_of
from queueing.optimization.quantity import compared_by, mean_of
from queueing.optimization.reach import check_reach
from queueing.optimization.search import (
    Optimum,
    Point,
    Predict,
    near_scores,
    near_sojourns,
    point_of,
    refined,
    score_of,
)
from queueing.prediction import predict_model
from queueing.result import Quantity

ALL_SIZES = 32  # up to this many every size is tried


def best_batch_size(
    model: Model,
    arrival_rate: float | None,
    objective: Objective,
    largest: int = LARGEST_SIZE,
    predict: Predict = predict_model,
    *,
    full: Predict | None = None,
) -> Optimum:
    """b* for fixed, capped, elastic or continuous; throughput alone needs no rate.

    The best one by its values of `full`, where it is given. Raises SpecError for a policy without a
    size, NoStableChoiceError.
    """
    largest = _largest(model, largest)
    check_reach(dataclasses.replace(model, policy=with_size(model.policy, 1)), objective)
    model = with_quantiles(model, levels_of(objective.slos))
    points: dict[int, Point] = {}
    quantity = compared_by([model.policy], objective.slo)

    def predicted(size: int, by: Predict) -> Point:
        sized = dataclasses.replace(model, policy=with_size(model.policy, size))
        return scored(
            {"batch_size": size}, sized, arrival_rate, objective, predict=by, quantity=quantity
        )

    def score(size: int) -> float | None:
        points[size] = predicted(size, predict)
        return score_of(points[size])

    if largest <= ALL_SIZES or objective.name == "slo":
        for size in range(1, largest + 1):
            score(size)
    else:
        list(refined(1, largest, score, first=ALL_SIZES))
        if objective.name != "throughput":
            _reach_smallest(points, score)
        own = policy_batch_size(model.policy)
        if own is not None and own <= largest and own not in points:
            score(own)  # what is asked about belongs to the curve, wherever the grid lies
    curve = [points[size] for size in sorted(points)]
    note = None
    found = confirmed_choice(
        "batch-size",
        objective,
        curve,
        None if full is None else lambda point: predicted(point["batch_size"], full),
        by_sojourn=objective.name != "throughput",
    )
    if objective.name == "throughput" and found.best["batch_size"] == largest:
        note = f"the throughput still rises at {largest}: no finite optimum up to there"
    return dataclasses.replace(
        found, note=note, compared=None if objective.name == "throughput" else quantity
    )


def _reach_smallest(points: dict[int, Point], score: Callable[[int], float | None]) -> None:
    """Try sizes below the one that the tolerances choose, until its neighbour is outside them."""
    while allowed := [
        points[size] for size in sorted(points) if score_of(points[size]) is not None
    ]:
        chosen = near_sojourns(near_scores(allowed))[0]["batch_size"]
        below = max((size for size in points if size < chosen), default=0)
        if chosen - below <= 1:
            return
        score((below + chosen) // 2)


def _largest(model: Model, asked: int) -> int:
    """No more sequences than an engine step has tokens."""
    if asked < 1:
        raise SpecError(f"got largest={asked}; expected at least 1")
    if model.step_tokens is None or not model.policy.joins_running:
        return asked
    return min(asked, model.step_tokens)


def batch_size_by_rate(
    model: Model, arrival_rates: Sequence[float], objective: Objective, largest: int = LARGEST_SIZE
) -> list[Optimum]:
    """b* at each rate."""
    return [best_batch_size(model, rate, objective, largest) for rate in arrival_rates]


def best_policy(
    model: Model,
    candidates: Sequence[str],
    arrival_rate: float | None,
    objective: Objective,
    predict: Predict = predict_model,
    *,
    full: Predict | None = None,
) -> Optimum:
    """Among policy texts, the best one by its values of `full`, where it is given. Raises SpecError
    for a text that names none, NoStableChoiceError.
    """
    if not candidates:
        raise SpecError(
            "got no candidates; expected policies, for example --candidates single --candidates "
            "capped:max_batch_size=8"
        )
    policies = [parse_policy(text) for text in candidates]
    quantity = compared_by(policies, objective.slo)
    model = with_quantiles(model, levels_of(objective.slos))
    models = {
        format_policy(policy): dataclasses.replace(model, policy=policy) for policy in policies
    }

    def predicted(text: str, by: Predict) -> Point:
        choice = {"policy": text}
        return scored(choice, models[text], arrival_rate, objective, predict=by, quantity=quantity)

    timed = objective.name != "throughput"
    found = confirmed_choice(
        "policy",
        objective,
        [predicted(text, predict) for text in models],
        None if full is None else lambda point: predicted(point["policy"], full),
        by_sojourn=timed,
    )
    return dataclasses.replace(found, compared=quantity if timed else None)


def scored(
    choice: Point,
    model: Model,
    arrival_rate: float | None,
    objective: Objective,
    *,
    predict: Predict = predict_model,
    quantity: Quantity = "queueing_delay",
) -> Point:
    """The choice with its prediction and its score, the mean of `quantity`: None where it is
    unstable at this rate, or breaks the SLO.
    """
    if objective.name in ("v1", "v2", "clipped"):
        raise SpecError(
            f"got objective={objective.name}, which weighs token limits; expected delay, "
            "throughput or slo for this target"
        )
    if objective.name == "throughput":
        rate = model.largest_stable_rate
        load = None if arrival_rate is None else model.load(arrival_rate)
        stable = load is None or load < 1 or model.patience is not None
        return choice | {
            "largest_stable_rate": rate,
            "load": load,
            "stable": stable,
            "score": -rate if stable else None,
        }
    if arrival_rate is None:
        raise SpecError(
            f"got objective={objective.name} without a rate; expected --arrival-rate in requests "
            "per second > 0"
        )
    point, prediction = point_of(choice, model, arrival_rate, predict)
    if prediction is None:
        return point
    score = mean_of(prediction, quantity) if objective.kept(prediction) else None
    return point | objective.bounded(prediction) | {"score": score}
