"""Batch size, policy, servers and rate: each candidate is predicted, and the best is kept with the whole curve.

Batch size    throughput  argmax b / E[H(b)]; of a law that only rises there is no finite optimum, and the answer says so
              delay       capped batches' delay is flat at low load: delays within 0.1 % count as one, and the shorter sojourn decides
Servers       the fewest that keep the SLO
Rate          the largest stable rate, or the largest one that keeps the SLO: by bisection of the load (the delay grows with it); a fixed
              batch waits long for company at low rates too, so its loads are scanned first
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from policies.core import Policy
from policies.fixed import Fixed
from policies.text import SpecError, format_policy, parse_policy
from queueing.model import Model
from queueing.optimisation.objective import Objective
from queueing.optimisation.search import Optimum, Point, choose, point_of, refined, score_of

ALL_SIZES = 32  # up to this many every size is tried
LOADS = (0.001, 0.999)


def best_batch_size(model: Model, arrival_rate: float, objective: Objective, largest: int = 64) -> Optimum:
    """b* for fixed, capped, elastic or continuous. Raises SpecError for a policy without one, NoStableChoiceError."""
    if largest < 1:
        raise SpecError(f"got --largest {largest}; expected at least 1")
    points: dict[int, Point] = {}

    def score(size: int) -> float | None:
        sized = dataclasses.replace(model, policy=with_size(model.policy, size))
        points[size] = _scored({"batch_size": size}, sized, arrival_rate, objective)
        return score_of(points[size])

    if largest <= ALL_SIZES or objective.name == "slo":
        for size in range(1, largest + 1):
            score(size)
    else:
        list(refined(1, largest, score, first=ALL_SIZES))
    curve = [points[size] for size in sorted(points)]
    note = None
    found = choose("batch-size", objective.name, curve, by_sojourn=objective.name != "throughput")
    if objective.name == "throughput" and found.best["batch_size"] == largest:
        note = f"the throughput still rises at {largest}: no finite optimum up to there"
    return dataclasses.replace(found, note=note)


def batch_size_by_rate(model: Model, arrival_rates: Sequence[float], objective: Objective, largest: int = 64) -> list[Optimum]:
    """b* at each rate."""
    return [best_batch_size(model, rate, objective, largest) for rate in arrival_rates]


def best_policy(model: Model, candidates: Sequence[str], arrival_rate: float, objective: Objective) -> Optimum:
    """Among policy texts. Raises SpecError for a text that names none, NoStableChoiceError."""
    if not candidates:
        raise SpecError("got no candidates; expected policies, for example --candidates single --candidates capped:max_batch_size=8")
    policies = [parse_policy(text) for text in candidates]
    curve = [_scored({"policy": format_policy(p)}, dataclasses.replace(model, policy=p), arrival_rate, objective) for p in policies]
    return choose("policy", objective.name, curve, by_sojourn=objective.name != "throughput")


def fewest_servers(model: Model, arrival_rate: float, objective: Objective, largest: int = 64) -> Optimum:
    """The fewest servers that keep the SLO. Raises SpecError without an SLO, NoStableChoiceError."""
    if objective.name != "slo":
        raise SpecError(f"got --objective {objective.name} for servers; expected slo with --slo: more servers always wait less")
    curve: list[Point] = []
    first = max(1, int(np.floor(arrival_rate / dataclasses.replace(model, servers=1).largest_stable_rate)))
    for servers in range(first, max(first, largest) + 1):
        curve.append(_scored({"servers": servers}, dataclasses.replace(model, servers=servers), arrival_rate, objective))
        if curve[-1]["score"] is not None:
            break
    return choose("servers", objective.name, curve)


def largest_rate(model: Model, objective: Objective, precision: float = 1e-3) -> Optimum:
    """The largest stable rate (throughput), or the largest that keeps the SLO. Raises SpecError, NoStableChoiceError."""
    limit = model.largest_stable_rate
    if objective.name == "throughput":
        note = "at this rate itself the queue grows without end"
        return Optimum("arrival-rate", "throughput", {"arrival_rate": limit, "load": 1.0}, [], note)
    if objective.name != "slo":
        raise SpecError(f"got --objective {objective.name} for arrival-rate; expected throughput or slo")
    curve: dict[float, Point] = {}

    def kept(load: float) -> bool:
        point = _scored({"arrival_rate": load * limit}, model, load * limit, objective)
        curve[load] = point | {"score": None if point["score"] is None else -load}
        return point["score"] is not None

    low = _lowest_kept(model, kept)
    high = LOADS[1]
    if low is not None and not kept(high):
        while high - low > precision * low:
            middle = (low + high) / 2
            low, high = (middle, high) if kept(middle) else (low, middle)
    return choose("arrival-rate", objective.name, [curve[load] for load in sorted(curve)])


def with_size(policy: Policy, size: int) -> Policy:
    """The policy with another batch size. Raises SpecError for single and dynamic."""
    names = {f.name for f in dataclasses.fields(policy)}  # type: ignore[arg-type]
    key = "batch_size" if "batch_size" in names else "max_batch_size"
    if key not in names:
        raise SpecError(f"got policy {policy.name}; expected fixed, capped, elastic or continuous: they have a batch size")
    return dataclasses.replace(policy, **{key: size})  # type: ignore[type-var]


def _lowest_kept(model: Model, kept: Callable[[float], bool]) -> float | None:
    """A load that keeps the SLO, to start from: the lightest; for fixed the heaviest of a scan."""
    if not isinstance(model.policy, Fixed):
        return LOADS[0] if kept(LOADS[0]) else None
    good = [load for load in np.linspace(0.05, 0.95, 19).tolist() if kept(load)]
    return max(good) if good else None


def _scored(choice: Point, model: Model, arrival_rate: float, objective: Objective) -> Point:
    if objective.name in ("v1", "v2", "clipped"):
        raise SpecError(f"got --objective {objective.name}, which weighs token limits; expected delay, throughput or slo for this target")
    if objective.name == "throughput":
        rate = model.largest_stable_rate
        return choice | {"largest_stable_rate": rate, "load": arrival_rate / rate, "score": -rate}
    point, prediction = point_of(choice, model, arrival_rate)
    if prediction is None:
        return point
    allowed = objective.slo is None or objective.slo.kept(prediction)
    return point | {"score": prediction.queueing_delay.mean if allowed else None}
