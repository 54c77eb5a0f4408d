"""The best choice of each target at a window's estimates, by the optimisers of
queueing.optimization on the estimated model.

Predictions hold the gateway's own turnaround and the stalls, as those that are reported do
(`WindowModel.measured`). Of several policies the sojourn time decides
(queueing.optimization.quantity).

batch-size           any objective; v1, v2 and clipped weigh token limits, so at a given limit they
                     mean delay
policy               likewise, among those in force and the usual ones
max-output-tokens    v1, v2; slo: the longest limit that keeps it, if that cuts no more than
                     `max_clipped_fraction`; delay and throughput alone would cut every answer at
                     one token, so they mean the shortest limit that cuts no more
servers              the fewest that keep the SLO; without an SLO more is always faster: one more
                     is shown

An SLO is kept by the value that is reported (queueing.optimization.gain.reported).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies import format_policy, parse_policy, policy_batch_size
from queueing.control.words import small_share
from queueing.errors import NoStableChoiceError
from queueing.optimization.candidates import (
    LARGEST_SIZE,
    canonical,
    sized_policy,
    usual_policies,
    with_size,
)
from queueing.optimization.choices import best_batch_size, best_policy
from queueing.optimization.forecast import Setting
from queueing.optimization.gain.measure import Measure
from queueing.optimization.gain.operating_point import OperatingPoint
from queueing.optimization.gain.reported import keeps_slo, largest_kept, verified
from queueing.optimization.objective import Objective, utilities
from queueing.optimization.quantity import compared_by
from queueing.optimization.search import Optimum, Point, point_of
from queueing.optimization.servers import fewest_servers
from queueing.optimization.token_limit import best_token_limit

LARGEST_SERVERS = 16
NEVER = 1e-6  # limits that cut fewer requests than this are not searched
SHOWN = 40  # points of a curve

Curve = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Found:
    """The best setting with the curve they were chosen from; `setting` is None where there is no
    choice, and `why` says the reason. `left_out`: what could not be compared, with the reason.
    """

    setting: Setting | None
    curve: Curve = ()
    why: str = ""
    left_out: str = ""


def search(
    operating_point: OperatingPoint, current: Setting, objective: Objective, target: str
) -> Found:
    """One of `SEARCHES`. Raises SpecError where objective and limits do not fit (v2 without
    patience).
    """
    refusal = operating_point.refusal(
        1 if target == "max-output-tokens" else current.max_output_tokens
    )
    if refusal is not None:
        return Found(None, why=refusal)
    try:
        return SEARCHES[target](operating_point, current, objective)
    except NoStableChoiceError as error:
        beyond = (
            operating_point.lengths.refusal(None)
            if target == "max-output-tokens" and operating_point.lengths
            else None
        )
        return Found(None, why="; ".join(each for each in (str(error), beyond) if each))


def measure_of(
    operating_point: OperatingPoint,
    settings: tuple[Setting, Setting],
    objective: Objective,
    target: str,
) -> Measure:
    """What two settings are compared by; limits and servers are chosen by the SLO itself. Where
    they are one, all choices of the target.
    """
    if target in ("max-output-tokens", "servers") and objective.slo is not None:
        return Measure(objective, objective.slo.field)
    current, best = settings
    texts = [each.policy for each in settings]
    if target == "policy" and current == best:
        texts = [current.policy, *usual_policies(current, operating_point.limits.max_num_seqs)]
    goal = _at_a_limit(objective) if target in ("policy", "batch-size") else objective
    return Measure(goal, compared_by(map(parse_policy, texts), objective.slo))


def _batch_size(operating_point: OperatingPoint, current: Setting, objective: Objective) -> Found:
    policy = parse_policy(current.policy)
    base, most = sized_policy(policy), operating_point.limits.max_num_seqs
    if base is None:
        alone = "takes one request at a time and " if policy_batch_size(policy) == 1 else ""
        return Found(
            None,
            why=(f"{current.policy} {alone}has no batch size: see the target policy"),
        )
    model = operating_point.model(dataclasses.replace(current, policy=format_policy(base)))
    largest = LARGEST_SIZE if most is None else min(most, LARGEST_SIZE)
    found = best_batch_size(
        model,
        operating_point.rate,
        _at_a_limit(objective),
        largest,
        operating_point.ranking(objective.slos),
    )

    def setting(point: Point) -> Setting:
        if point["batch_size"] == (policy_batch_size(policy) or most):
            return current
        return dataclasses.replace(
            current, policy=format_policy(with_size(base, int(point["batch_size"])))
        )

    found = verified(operating_point, objective, found, setting, current)
    return Found(setting(found.best), _thinned(found))


def _policy(operating_point: OperatingPoint, current: Setting, objective: Objective) -> Found:
    usual = usual_policies(current, operating_point.limits.max_num_seqs)
    in_force = canonical(current).policy
    cut = [
        text
        for text in usual
        if text != in_force
        and operating_point.cut_by_memory(dataclasses.replace(current, policy=text))
    ]
    among = [text for text in usual if text not in cut]
    found = best_policy(
        operating_point.model(current),
        among,
        operating_point.rate,
        _at_a_limit(objective),
        operating_point.ranking(objective.slos),
    )

    def setting(point: Point) -> Setting:
        return dataclasses.replace(current, policy=str(point["policy"]))

    found = verified(operating_point, objective, found, setting, current)
    reason = f"not compared, as KV memory may cut their batches: {', '.join(cut)}" if cut else ""
    return Found(setting(found.best), _thinned(found), left_out=reason)


def _token_limit(operating_point: OperatingPoint, current: Setting, objective: Objective) -> Found:
    lengths = operating_point.lengths
    assert lengths is not None
    goal = objective
    if objective.name in ("delay", "throughput"):
        goal = Objective(name="clipped", max_clipped_fraction=objective.max_clipped_fraction)
    model = operating_point.model(dataclasses.replace(current, max_output_tokens=None))
    largest = int(min(lengths.reach, lengths.whole.quantile(1 - NEVER)))
    found = best_token_limit(
        model, operating_point.rate, goal, largest, operating_point.ranking(objective.slos)
    )
    if objective.name == "slo":
        return _longest_limit(operating_point, current, objective, found, largest)
    return Found(_limited(current, int(found.best["max_output_tokens"]), largest), _thinned(found))


def _longest_limit(
    operating_point: OperatingPoint,
    current: Setting,
    objective: Objective,
    found: Optimum,
    largest: int,
) -> Found:
    limit = largest_kept(
        lambda each: keeps_slo(operating_point, _limited(current, each, largest), objective),
        int(found.best["max_output_tokens"]),
        1,
        largest,
    )
    if limit is None:
        why = f"no token limit keeps the SLO {objective.constraint}"
        return Found(None, why=f"{why}; add servers, lower the arrival rate, or relax the SLO")
    setting = _limited(current, limit, largest)
    assert operating_point.lengths is not None
    cut, most = operating_point.lengths.clipped_fraction(limit), objective.max_clipped_fraction
    if cut is not None and cut > most and setting != current:
        why = (
            f"the longest limit that keeps the SLO {objective.constraint}, {limit}, cuts "
            f"{small_share(cut)} of the answers, more than max_clipped_fraction={most:g}"
        )
        return Found(None, why=f"{why}; allow more, add servers, or relax the SLO")
    best = _limit_point(operating_point, setting, limit)
    shorter = [point for point in found.curve if point["max_output_tokens"] < limit]
    longer = [
        point | {"score": None} for point in found.curve if point["max_output_tokens"] > limit
    ]
    return Found(
        setting, _thinned(dataclasses.replace(found, best=best, curve=[*shorter, best, *longer]))
    )


def _limit_point(operating_point: OperatingPoint, setting: Setting, limit: int) -> Point:
    """The longest limit that keeps an SLO, as it is reported."""
    assert operating_point.lengths is not None
    choice = {
        "max_output_tokens": limit,
        "clipped_fraction": operating_point.lengths.clipped_fraction(limit),
        "utility": float(utilities(operating_point.lengths.whole)[limit]),
    }
    point, _ = point_of(
        choice,
        operating_point.model(setting),
        operating_point.rate,
        lambda *_: operating_point.predicted(setting),
    )
    return point | {"score": -float(limit)}


def _limited(current: Setting, limit: int, largest: int) -> Setting:
    """With that limit; without one, where there is none and this one would cut nothing."""
    if current.max_output_tokens is None and limit >= largest:
        return current
    return dataclasses.replace(current, max_output_tokens=limit)


def _servers(operating_point: OperatingPoint, current: Setting, objective: Objective) -> Found:
    model, predict = operating_point.model(current), operating_point.ranking(objective.slos)
    if objective.name == "slo":
        found = fewest_servers(model, operating_point.rate, objective, LARGEST_SERVERS, predict)
        return _fewest(operating_point, current, objective, found)
    more = dataclasses.replace(current, servers=current.servers + 1)
    curve = [
        point_of(
            {"servers": each.servers},
            dataclasses.replace(model, servers=each.servers),
            operating_point.rate,
            predict,
        )[0]
        for each in (current, more)
    ]
    return Found(
        more if curve[-1]["stable"] else None,
        tuple(curve),
        "one more server would not be enough for a steady state",
    )


def _fewest(
    operating_point: OperatingPoint, current: Setting, objective: Objective, found: Optimum
) -> Found:
    def keeps(spare: int) -> bool:
        return keeps_slo(
            operating_point,
            dataclasses.replace(current, servers=LARGEST_SERVERS - spare),
            objective,
        )

    spare = largest_kept(
        keeps, LARGEST_SERVERS - int(found.best["servers"]), 0, LARGEST_SERVERS - 1
    )
    if spare is None:
        return Found(
            None,
            why=(
                f"{LARGEST_SERVERS} servers do not keep the SLO {objective.constraint}; lower the "
                "arrival rate, or relax the SLO"
            ),
        )
    servers = LARGEST_SERVERS - spare
    curve = [
        point | {"score": None} if point["servers"] < servers else point for point in found.curve
    ]
    return Found(dataclasses.replace(current, servers=servers), tuple(curve))


SEARCHES: Mapping[str, Callable[[OperatingPoint, Setting, Objective], Found]] = {
    "batch-size": _batch_size,
    "max-output-tokens": _token_limit,
    "policy": _policy,
    "servers": _servers,
}
TARGETS: Sequence[str] = tuple(SEARCHES)


def _at_a_limit(objective: Objective) -> Objective:
    return (
        objective if objective.name in ("delay", "throughput", "slo") else Objective(name="delay")
    )


def _thinned(found: Optimum) -> Curve:
    """At most about `SHOWN` points, the best among them."""
    every = max(1, len(found.curve) // SHOWN)
    return tuple(
        point
        for place, point in enumerate(found.curve)
        if place % every == 0 or point is found.best
    )
