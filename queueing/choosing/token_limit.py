"""The token limit: the longest answer that the queue can afford.

Single requests without patience: every limit is scored at once from cumulative sums (exact search):

    E[N'] = sum_{k<n} P(N > k),  E[N'^2] = sum_{k<n} (2k + 1) P(N > k)
    N' = min(N, n)                                                        (Yang et al. Eq. 2-3)

Everything else: a geometric grid of limits, refined about the best down to one token (right for a
score with one valley).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from kendall.policies.immediate import Single
from kendall.policies.ordered import in_arrival_order
from kendall.policies.text import SpecError
from kendall.queueing.choosing.confirmed import Rising, confirmed_choice
from kendall.queueing.choosing.objective import Objective, levels_of, utilities
from kendall.queueing.choosing.quantity import compared_by, mean_of
from kendall.queueing.choosing.reach import check_reach
from kendall.queueing.choosing.search import (
    Optimum,
    Point,
    Predict,
    choose,
    point_of,
    refined,
    score_of,
    whole_between,
)
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue

TARGET = "max-output-tokens"
REFINED = (
    "not every limit was tried: a coarse grid, refined about its best (right for a score "
    "with one valley)"
)


def best_token_limit(
    model: Queue,
    arrival_rate: float,
    objective: Objective,
    largest: int | None = None,
    predict: Predict = predict_model,
    *,
    full: Predict | None = None,
) -> Optimum:
    """Over the limits 1 .. `largest` (the longest answer); `model` has the lengths before clipping.

    The best one by its values of `full`, where it is given. Raises SpecError, NoStableChoiceError.
    """
    if largest is not None and largest < 1:
        raise SpecError(f"got largest={largest}; expected at least 1")
    if objective.name == "v2" and model.requests.patience is None:
        raise SpecError(
            "got objective=v2 without a patience; expected one (v2 weighs lost requests), or the "
            "objective v1"
        )
    whole = model.requests.output_tokens.longest
    longest = whole if largest is None else min(largest, whole)
    compared = compared_by([model.policy]) if objective.name in ("delay", "clipped") else None
    if objective.name in ("delay", "v1", "clipped", "throughput") and (
        isinstance(model.policy, Single)
        and in_arrival_order(model.policy)
        and (model.engine.servers, model.arrivals.scv, model.arrivals.process) == (1, 1.0, None)
        and model.requests.patience is None
        and model.requests.sequences is None
        and not model.engine.disaggregated
    ):
        found = choose(TARGET, objective, _every_limit(model, arrival_rate, objective, longest))
        return dataclasses.replace(found, compared=compared)
    check_reach(model.clipped_at(1), objective)
    model = model.with_quantiles(levels_of(objective.slos))
    search = LimitSearch(
        model=model,
        arrival_rate=arrival_rate,
        objective=objective,
        predict=predict,
        useful=utilities(model.requests.output_tokens),
    )
    return dataclasses.replace(search.best(longest, full), compared=compared)


@dataclass(frozen=True, kw_only=True)
class LimitSearch:
    """The best limit of those predicted one by one; `useful`: the utility of each; `points`: those
    that were predicted quickly.
    """

    model: Queue
    arrival_rate: float
    objective: Objective
    predict: Predict
    useful: Vector
    points: dict[float, Point] = field(default_factory=dict)

    def best(self, longest: int, full: Predict | None) -> Optimum:
        """By the quick values, and then by those of `full` where it is given."""
        tried = refined(1, longest, lambda limit: score_of(self.quick(limit)))
        curve = [self.points[limit] for limit in tried]
        note = None if len(curve) == longest else REFINED
        if full is None:
            return choose(TARGET, self.objective, curve, note)
        if self.objective.name != "slo":
            return confirmed_choice(
                TARGET,
                self.objective,
                curve,
                lambda point: self.predicted(point["max_output_tokens"], full),
                note,
            )
        first = choose(TARGET, self.objective, curve).best["max_output_tokens"]
        rising = Rising(
            self.objective,
            self.points,
            self.quick,
            lambda limit: self.predicted(limit, full),
            whole_between,
            longest + 1,
        )
        return choose(TARGET, self.objective, rising.curve(rising.confirmed(first)), note)

    def quick(self, limit: float) -> Point:
        """The point at a limit, each once."""
        if limit not in self.points:
            self.points[limit] = self.predicted(limit, self.predict)
        return self.points[limit]

    def predicted(self, limit: float, by: Predict) -> Point:
        """The point at a limit."""
        objective, limit = self.objective, int(limit)
        utility, clipped = (
            float(self.useful[limit]),
            float(self.model.requests.output_tokens.survival[limit]),
        )
        limited = self.model.clipped_at(limit)
        choice = {"max_output_tokens": limit, "clipped_fraction": clipped, "utility": utility}
        point, prediction = point_of(choice, limited, self.arrival_rate, by)
        if prediction is None:
            return point
        allowed = True
        if objective.name in ("v1", "v2"):
            waits = (
                prediction.served_queueing_delay
                if objective.name == "v2"
                else prediction.queueing_delay
            )
            value = objective.utility_score(
                utility, float(waits.mean or 0.0), prediction.loss_fraction or 0.0
            )
        elif objective.name == "throughput":
            value = -limited.largest_stable_rate
        elif objective.name == "slo":
            # the longest answers that keep it
            allowed, value = objective.kept(prediction), -float(limit)
        else:
            allowed = objective.name == "delay" or clipped <= objective.max_clipped_fraction
            value = float(mean_of(prediction, compared_by([self.model.policy])) or 0.0)
        return point | objective.bounded(prediction) | {"score": value if allowed else None}


def _every_limit(
    model: Queue, arrival_rate: float, objective: Objective, longest: int
) -> list[Point]:
    """M/G/1 at the limits 1 .. `longest`, at once."""
    limits = np.arange(1, longest + 1)
    above = model.requests.output_tokens.survival[:longest]  # P(N > k), k = 0 ..
    first, second = np.cumsum(above), np.cumsum((2 * limits - 1) * above)
    law, prompts = model.engine.law, model.requests.prompt_tokens
    setup = law.setup(1, 0.0 if prompts is None else prompts.mean)
    extra = 0.0 if prompts is None else (law.speed * law.kp) ** 2 * prompts.variance
    step = law.step(1)
    mean = setup + step * first  # E[H] of a single request, seconds
    stalls = law.stall_share * law.stall * mean
    squares = (1 + law.cv**2) * (
        setup**2 + extra + 2 * setup * step * first + step**2 * second + stalls
    )
    load = arrival_rate * mean
    stable = load < 1
    with np.errstate(divide="ignore"):
        delay = np.where(stable, arrival_rate * squares / (2 * (1 - load)), np.inf)
    clipped = model.requests.output_tokens.survival[1 : longest + 1]
    useful = utilities(model.requests.output_tokens)[1 : longest + 1]
    if objective.name == "v1":
        score = -(objective.theta * useful - (1 - objective.theta) * delay)
    else:
        score = -1 / mean if objective.name == "throughput" else delay
    allowed = stable & (
        (clipped <= objective.max_clipped_fraction) if objective.name == "clipped" else True
    )
    return [
        {
            "max_output_tokens": i + 1,
            "clipped_fraction": float(clipped[i]),
            "utility": float(useful[i]),
            "load": float(load[i]),
            "stable": bool(stable[i]),
            "queueing_delay": float(delay[i]) if stable[i] else None,
            "sojourn_time": float(delay[i] + mean[i]) if stable[i] else None,
            "score": float(score[i]) if allowed[i] else None,
        }
        for i in range(longest)
    ]
