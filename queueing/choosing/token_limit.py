"""The token limit: the longest answer that the queue can afford.

A limit n cuts the N tokens of an answer to N' = min(N, n) (Yang et al. Eq. 2-3):

    E[N'] = sum_{k<n} P(N > k),  E[N'^2] = sum_{k<n} (2k + 1) P(N > k)

Single requests that arrive by a Poisson process at one server without patience are M/G/1: all
limits are scored from these sums. The service time at the law's setup C (random by the prompts) and
time per token d, with residual X and stalls (queueing.latency.stalls), and the delay
(Pollaczek-Khinchine) are

    E[H] = E[C] + d E[N'],  E[H^2] = (1 + cv^2) (E[(C + d N')^2] + q s E[H])
    E[Wq] = lambda E[H^2] / (2 (1 - lambda E[H]))

Any other queue is predicted limit by limit: on a geometric grid, refined about the best down to one
token (right for a score with one valley).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from kendall.policies.immediate import Single
from kendall.policies.ordered import in_arrival_order
from kendall.policies.text import SpecError
from kendall.queueing.choosing.confirmed import Rising, confirmed_choice
from kendall.queueing.choosing.objective import Objective, levels_of
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
from kendall.queueing.result import Prediction

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
    """The best of the limits 1 .. `largest`, by default up to the longest answer; `model` has the
    lengths before any limit.

    Limits that are predicted one by one are scored by `predict`; the best of them is the best by
    `full`, slower and more exact, where it is given. Raises SpecError, NoStableChoiceError.
    """
    if largest is not None and largest < 1:
        raise SpecError(f"got largest={largest}; expected at least 1")
    if objective.name == "v2" and model.requests.patience is None:
        raise SpecError(
            "got objective=v2 without a patience; expected one (v2 weighs lost requests), or the "
            "objective v1"
        )
    longest = model.requests.output_tokens.longest
    if largest is not None:
        longest = min(largest, longest)
    if objective.name != "slo" and _is_mg1(model):
        found = choose(TARGET, objective, _mg1_curve(model, arrival_rate, objective, longest))
    else:
        check_reach(model.clipped_at(1), objective)
        search = LimitSearch(
            model=model.with_quantiles(levels_of(objective.slos)),
            arrival_rate=arrival_rate,
            objective=objective,
            predict=predict,
            utility=model.requests.output_tokens.utilities,
        )
        found = search.best(longest, full)
    compared = compared_by([model.policy]) if objective.name in ("delay", "clipped") else None
    return dataclasses.replace(found, compared=compared)


def _is_mg1(model: Queue) -> bool:
    """Whether requests come by a Poisson process, are served one by one in the order of arrival by
    one server, and wait without patience.
    """
    arrivals, requests, engine = model.arrivals, model.requests, model.engine
    return (
        isinstance(model.policy, Single)
        and in_arrival_order(model.policy)
        and arrivals.scv == 1
        and arrivals.process is None
        and requests.patience is None
        and requests.sequences is None
        and engine.servers == 1
        and not engine.disaggregated
    )


def _mg1_curve(
    model: Queue, arrival_rate: float, objective: Objective, longest: int
) -> list[Point]:
    """The points of the limits 1 .. `longest`, by the equations above."""
    law = model.engine.law
    lengths, prompts = model.requests.output_tokens, model.requests.prompt_tokens
    limits = np.arange(1, longest + 1)
    above = lengths.survival[:longest]  # P(N > k), k = 0 .. longest - 1
    tokens = np.cumsum(above)  # E[N']
    squared_tokens = np.cumsum((2 * limits - 1) * above)  # E[N'^2]
    setup = law.setup(1, 0.0 if prompts is None else prompts.mean)
    setup_variance = 0.0 if prompts is None else (law.speed * law.kp) ** 2 * prompts.variance
    step = law.step(1)
    service = setup + step * tokens  # E[H]
    stalls = law.stall_share * law.stall * service  # q s E[H]
    squared_service = (1 + law.cv**2) * (  # E[H^2]
        setup**2 + setup_variance + 2 * setup * step * tokens + step**2 * squared_tokens + stalls
    )
    load = arrival_rate * service
    stable = load < 1
    with np.errstate(divide="ignore"):
        delay = np.where(stable, arrival_rate * squared_service / (2 * (1 - load)), np.inf)
    clipped = lengths.survival[1 : longest + 1]
    utility = lengths.utilities[1 : longest + 1]
    allowed = stable
    if objective.name == "v1":
        score = -(objective.theta * utility - (1 - objective.theta) * delay)
    elif objective.name == "throughput":
        score = -1 / service
    else:
        score = delay
    if objective.name == "clipped":
        allowed = stable & (clipped <= objective.max_clipped_fraction)
    return [
        {
            "max_output_tokens": i + 1,
            "clipped_fraction": float(clipped[i]),
            "utility": float(utility[i]),
            "load": float(load[i]),
            "stable": bool(stable[i]),
            "queueing_delay": float(delay[i]) if stable[i] else None,
            "sojourn_time": float(delay[i] + service[i]) if stable[i] else None,
            "score": float(score[i]) if allowed[i] else None,
        }
        for i in range(longest)
    ]


@dataclass(frozen=True, kw_only=True)
class LimitSearch:
    """A search among limits that are predicted one by one; `points` keeps the limits that `predict`
    has answered.
    """

    model: Queue
    arrival_rate: float
    objective: Objective
    predict: Predict
    utility: Vector  # of each limit, from 0
    points: dict[float, Point] = field(default_factory=dict)

    def best(self, longest: int, full: Predict | None) -> Optimum:
        """The best limit by `predict`, and by `full` where it is given."""
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
                lambda point: self.point(point["max_output_tokens"], full),
                note,
            )
        rising = Rising(
            objective=self.objective,
            points=self.points,
            quick=self.quick,
            full=lambda limit: self.point(limit, full),
            between=whole_between,
            ceiling=longest + 1,
        )
        start = choose(TARGET, self.objective, curve).best["max_output_tokens"]
        return choose(TARGET, self.objective, rising.curve(rising.confirmed(start)), note)

    def quick(self, limit: float) -> Point:
        """The point of a limit by `predict`, which is asked once for each limit."""
        if limit not in self.points:
            self.points[limit] = self.point(limit, self.predict)
        return self.points[limit]

    def point(self, limit: float, predict: Predict) -> Point:
        """The point of a limit, a whole number, by these predictions."""
        limit = int(limit)
        limited = self.model.clipped_at(limit)
        choice = {
            "max_output_tokens": limit,
            "clipped_fraction": float(self.model.requests.output_tokens.survival[limit]),
            "utility": float(self.utility[limit]),
        }
        point, prediction = point_of(choice, limited, self.arrival_rate, predict)
        if prediction is None:
            return point
        score = self._score(choice, limited, prediction)
        return point | self.objective.bounded(prediction) | {"score": score}

    def _score(self, choice: Point, limited: Queue, prediction: Prediction) -> float | None:
        """The score of a stable choice, smaller is better; None where it may not be chosen."""
        objective, loss = self.objective, prediction.loss_fraction or 0.0
        match objective.name:
            case "v1":
                delay = prediction.queueing_delay.mean or 0.0
                return objective.utility_score(choice["utility"], float(delay), loss)
            case "v2":
                delay = prediction.served_queueing_delay.mean or 0.0
                return objective.utility_score(choice["utility"], float(delay), loss)
            case "throughput":
                return -limited.largest_stable_rate
            case "slo":  # the longest limit that keeps the SLOs
                return -float(choice["max_output_tokens"]) if objective.kept(prediction) else None
            case _:  # delay and clipped
                cut = choice["clipped_fraction"]
                if objective.name == "clipped" and cut > objective.max_clipped_fraction:
                    return None
                return float(mean_of(prediction, compared_by([self.model.policy])) or 0.0)
