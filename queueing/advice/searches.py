"""The best choice of each target at a window's estimates, by the optimisers of queueing.optimisation on the estimated model.

Predictions hold the gateway's own turnaround. Of several policies the sojourn time decides (queueing.optimisation.quantity).

batch-size           any objective; v1, v2 and clipped weigh token limits, so at a given limit they mean delay
policy               likewise, among those in force and the usual ones
max-output-tokens    v1, v2, slo; delay and throughput alone would cut every answer at one token, so they mean the shortest limit
                     that cuts no more than `max_clipped_fraction`
servers              the fewest that keep the SLO; without an SLO more is always faster: one more is shown
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies import format_policy, parse_policy, policy_batch_size
from queueing.advice.answer import searched
from queueing.advice.forecast import Knobs
from queueing.advice.measure import Measure
from queueing.advice.situation import Situation
from queueing.advice.what_if import sized_policy, usual_policies
from queueing.errors import NoStableChoiceError
from queueing.optimisation.choices import best_batch_size, best_policy, with_size
from queueing.optimisation.objective import Objective
from queueing.optimisation.quantity import compared_by
from queueing.optimisation.search import Optimum, Predict, point_of
from queueing.optimisation.servers import fewest_servers
from queueing.optimisation.token_limit import best_token_limit

LARGEST_SIZE, LARGEST_SERVERS = 64, 16
NEVER = 1e-6  # limits that cut fewer requests than this are not searched
SHOWN = 40  # points of a curve

Curve = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Found:
    """The best knobs with the curve they were chosen from; `knobs` is None where there is no choice, and `why` says the reason."""

    knobs: Knobs | None
    curve: Curve = ()
    why: str = ""


def search(situation: Situation, current: Knobs, objective: Objective, target: str) -> Found:
    """One of `SEARCHES`. Raises SpecError where objective and limits do not fit (v2 without patience)."""
    refusal = situation.refusal(1 if target == "max-output-tokens" else current.max_output_tokens)
    if refusal is not None:
        return Found(None, why=refusal)
    try:
        return SEARCHES[target](situation, current, objective)
    except NoStableChoiceError as error:
        beyond = situation.lengths.refusal(None) if target == "max-output-tokens" and situation.lengths else None
        return Found(None, why="; ".join(each for each in (str(error), beyond) if each))


def measure_of(situation: Situation, current: Knobs, objective: Objective, target: str) -> Measure:
    """What the choices of that target are compared by; limits and servers are chosen by the SLO itself."""
    if target in ("max-output-tokens", "servers") and objective.slo is not None:
        return Measure(objective, objective.slo.field)
    texts = (current.policy, *usual_policies(current, situation.limits)) if target == "policy" else (current.policy,)
    goal = _at_a_limit(objective) if target in ("policy", "batch-size") else objective
    return Measure(goal, compared_by(map(parse_policy, texts), objective.slo))


def _batch_size(situation: Situation, current: Knobs, objective: Objective) -> Found:
    policy = parse_policy(current.policy)
    base, most = sized_policy(policy), situation.limits.max_num_seqs
    if base is None:
        return Found(None, why=f"{current.policy} takes one request at a time and has no batch size: see the target policy")
    model = situation.model(dataclasses.replace(current, policy=format_policy(base)))
    largest = LARGEST_SIZE if most is None else min(most, LARGEST_SIZE)
    found = best_batch_size(model, situation.rate, _at_a_limit(objective), largest, _predicting(situation, objective))
    size = int(found.best["batch_size"])
    if size == (policy_batch_size(policy) or most):
        return Found(current, _thinned(found))
    return Found(dataclasses.replace(current, policy=format_policy(with_size(base, size))), _thinned(found))


def _policy(situation: Situation, current: Knobs, objective: Objective) -> Found:
    among = usual_policies(current, situation.limits)
    found = best_policy(situation.model(current), among, situation.rate, _at_a_limit(objective), _predicting(situation, objective))
    return Found(dataclasses.replace(current, policy=str(found.best["policy"])), _thinned(found))


def _token_limit(situation: Situation, current: Knobs, objective: Objective) -> Found:
    lengths = situation.lengths
    assert lengths is not None
    goal = objective
    if objective.name in ("delay", "throughput"):
        goal = Objective(name="clipped", max_clipped_fraction=objective.max_clipped_fraction)
    model = situation.model(dataclasses.replace(current, max_output_tokens=None))
    largest = int(min(lengths.reach, lengths.whole.quantile(1 - NEVER)))
    found = best_token_limit(model, situation.rate, goal, largest, _predicting(situation, objective))
    limit = int(found.best["max_output_tokens"])
    if current.max_output_tokens is None and limit >= largest:
        return Found(current, _thinned(found))
    return Found(dataclasses.replace(current, max_output_tokens=limit), _thinned(found))


def _servers(situation: Situation, current: Knobs, objective: Objective) -> Found:
    model, predict = situation.model(current), _predicting(situation, objective)
    if objective.name == "slo":
        found = fewest_servers(model, situation.rate, objective, LARGEST_SERVERS, predict)
        return Found(dataclasses.replace(current, servers=int(found.best["servers"])), _thinned(found))
    more = dataclasses.replace(current, servers=current.servers + 1)
    curve = [
        point_of({"servers": each.servers}, dataclasses.replace(model, servers=each.servers), situation.rate, predict)[0]
        for each in (current, more)
    ]
    return Found(more if curve[-1]["stable"] else None, tuple(curve), "one more server would not be enough for a steady state")


SEARCHES: Mapping[str, Callable[[Situation, Knobs, Objective], Found]] = {
    "batch-size": _batch_size,
    "max-output-tokens": _token_limit,
    "policy": _policy,
    "servers": _servers,
}
TARGETS: Sequence[str] = tuple(SEARCHES)


def _at_a_limit(objective: Objective) -> Objective:
    return objective if objective.name in ("delay", "throughput", "slo") else Objective(name="delay")


def _predicting(situation: Situation, objective: Objective) -> Predict:
    least = situation.estimates.gateway_turnaround
    return lambda model, arrival_rate: searched(model, arrival_rate, objective.slo).with_turnaround(least)


def _thinned(found: Optimum) -> Curve:
    """At most about `SHOWN` points, the best among them."""
    every = max(1, len(found.curve) // SHOWN)
    return tuple(point for place, point in enumerate(found.curve) if place % every == 0 or point is found.best)
