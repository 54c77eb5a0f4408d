"""Batch size and policy: each candidate is predicted, and the best is kept with the whole curve.

Throughput  argmax b / E[H(b)]; of a law that only rises there is no finite optimum, and the answer
            says so
Delay       capped batches' delay is flat at low load: delays within 0.1 % count as one, then
            sojourns, and the smallest size decides. Across families, and for continuous, the
            sojourn itself (queueing.choosing.quantity)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from kendall.policies.text import SpecError, format_policy, parse_policy, policy_batch_size
from kendall.queueing.choosing.candidates import LARGEST_SIZE, with_size
from kendall.queueing.choosing.confirmed import confirmed_choice
from kendall.queueing.choosing.objective import Objective, levels_of
from kendall.queueing.choosing.quantity import compared_by, mean_of
from kendall.queueing.choosing.reach import check_reach
from kendall.queueing.choosing.search import (
    Optimum,
    Point,
    Predict,
    near_scores,
    near_sojourns,
    point_of,
    refined,
    score_of,
)
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import Quantity

ALL_SIZES = 32  # up to this many every size is tried


def best_batch_size(
    model: Queue,
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
    if largest < 1:
        raise SpecError(f"got largest={largest}; expected at least 1")
    if model.step_tokens is not None and model.policy.joins_running:
        largest = min(largest, model.step_tokens)  # a step takes no more sequences than tokens
    check_reach(dataclasses.replace(model, policy=with_size(model.policy, 1)), objective)
    search = SizeSearch(
        model=model.with_quantiles(levels_of(objective.slos)),
        arrival_rate=arrival_rate,
        objective=objective,
        quantity=compared_by([model.policy], objective.slo),
        predict=predict,
    )
    timed, note = objective.name != "throughput", None
    found = confirmed_choice(
        "batch-size",
        objective,
        search.curve(largest),
        None if full is None else lambda point: search.predicted(point["batch_size"], full),
        by_sojourn=timed,
    )
    if not timed and found.best["batch_size"] == largest:
        note = f"the throughput still rises at {largest}: no finite optimum up to there"
    return dataclasses.replace(found, note=note, compared=search.quantity if timed else None)


@dataclass(frozen=True, kw_only=True)
class SizeSearch:
    """Batch sizes of a policy. `points`: those that were predicted, by their sizes."""

    model: Queue
    arrival_rate: float | None
    objective: Objective
    quantity: Quantity
    predict: Predict
    points: dict[int, Point] = field(default_factory=dict)

    def curve(self, largest: int) -> list[Point]:
        """Every size up to `largest`; of many a grid that is refined about its best."""
        if largest <= ALL_SIZES or self.objective.name == "slo":
            return [self.predicted(size, self.predict) for size in range(1, largest + 1)]
        list(refined(1, largest, self.score, first=ALL_SIZES))
        if self.objective.name != "throughput":
            self.reach_smallest()
        own = policy_batch_size(self.model.policy)
        if own is not None and own <= largest and own not in self.points:
            self.score(own)  # what is asked about belongs to the curve, wherever the grid lies
        return [self.points[size] for size in sorted(self.points)]

    def reach_smallest(self) -> None:
        """Try sizes below the one that the tolerances choose, until its neighbour is outside
        them.
        """
        while allowed := [
            self.points[size]
            for size in sorted(self.points)
            if score_of(self.points[size]) is not None
        ]:
            chosen = near_sojourns(near_scores(allowed))[0]["batch_size"]
            below = max((size for size in self.points if size < chosen), default=0)
            if chosen - below <= 1:
                return
            self.score((below + chosen) // 2)

    def score(self, size: int) -> float | None:
        """The quick score of one more size."""
        self.points[size] = self.predicted(size, self.predict)
        return score_of(self.points[size])

    def predicted(self, size: int, by: Predict) -> Point:
        """The point at a size."""
        sized = dataclasses.replace(self.model, policy=with_size(self.model.policy, size))
        return scored(
            {"batch_size": size},
            sized,
            self.arrival_rate,
            self.objective,
            predict=by,
            quantity=self.quantity,
        )


def best_policy(
    model: Queue,
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
    model = model.with_quantiles(levels_of(objective.slos))
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
    model: Queue,
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
        stable = load is None or load < 1 or model.requests.patience is not None
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
