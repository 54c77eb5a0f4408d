"""How fast the machine was in a run, against the law: one factor and the scatter around it.

    speed = sum of measured service times / sum of the law's, for the same batches with their actual
    lengths
    cv    = sqrt(sum (measured - speed fitted)^2 / sum (speed fitted)^2),   over batches

The shape k1..k4 is never fitted here: slow periods grow batches, so a run's own batches give
nonsense constants.

A continuous engine has no batches: a slot is held longer the more share the engine. Its speed is
the one at which the law's simulation of the run's own arrivals and lengths has the measured mean
holding time, found by secant in the logarithm; its steps carry no residual (cv 0). It uses measured
service times, never delays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from policies import Policy
from queueing.latency.law import LatencyModel
from queueing.measurement.batch_means import FloatArray
from queueing.measurement.recursion import Served, batches

TOLERANCE = 0.002  # of the logarithm of the holding time
ROUNDS = 5

Replay = Callable[
    [Policy, Sequence[Served], LatencyModel], dict[str, tuple[float, float]]
]  # id -> start and release, seconds


@dataclass(frozen=True, slots=True)
class Speed:
    """Factor on every duration (> 1: slower than the law) and the residual's coefficient of
    variation.
    """

    factor: float
    cv: float
    n: int  # batches (continuous: requests) it was taken from

    def law(self, law: LatencyModel) -> LatencyModel:
        """The law as the run had it."""
        return dataclasses.replace(law, speed=self.factor, cv=self.cv)


def measured_speed(
    policy: Policy, group: Sequence[Served], law: LatencyModel, replay: Replay | None = None
) -> Speed | None:
    """Speed of a run; None where no batch was served whole, or for continuous without a
    simulator.
    """
    if policy.joins_running:
        return None if replay is None else _slot_speed(policy, group, law, replay)
    whole = [
        members
        for members in batches(group)
        if len(members) == members[0].batch_size
        and all(member.completed and member.output_tokens for member in members)
    ]
    # an interruption wastes a part of a step, which no record tells
    whole = [each for each in whole if not any(member.preemptions for member in each)] or whole
    if not whole:
        return None
    pairs = [
        (
            max(member.server_free_at for member in members) - members[0].dispatched_at,
            service_time(policy, members, law.at_speed(1.0)),
        )
        for members in whole
    ]
    measured, fitted = np.array(pairs).T
    factor = float(measured.sum() / fitted.sum())
    return Speed(factor, residual_cv(measured, factor * fitted), measured.size)


def residual_cv(measured: FloatArray, fitted: FloatArray) -> float:
    """Of a batch's residual, such that the law has the squares of these times: a hiccup on a short
    batch weighs as many seconds as it took.

    Both in seconds, of about the same sum; 0 for a single batch, which shows no scatter.
    """
    if measured.size < 2:
        return 0.0
    return math.sqrt(
        float(np.sum((measured - fitted) ** 2))
        / float(np.sum(fitted**2))
        * measured.size
        / (measured.size - 1)
    )


def service_time(policy: Policy, members: Sequence[Served], law: LatencyModel) -> float:
    """The law's mean service time of this very batch, seconds. A resume is charged as an admission
    of the prompt and `kr`: what it recomputes of the answer is not known.
    """
    lengths = [member.output_tokens for member in members]
    prompts = sum(member.prompt_tokens for member in members)
    resumes = sum(
        member.preemptions * law.setup(1, member.prompt_tokens, 1)
        for member in members
        if member.preemptions
    )
    if policy.padded:
        return law.padded(len(members), max(lengths), prompts) + resumes
    return law.unpadded(len(members), sum(lengths), max(lengths), prompts) + resumes


def _slot_speed(
    policy: Policy, group: Sequence[Served], law: LatencyModel, replay: Replay
) -> Speed | None:
    finished = [
        request
        for request in group
        if request.completed and request.output_tokens and request.released_at is not None
    ]
    if not finished:
        return None
    measured = math.log(
        math.fsum(request.server_free_at - request.dispatched_at for request in finished)
    )

    def excess(log_speed: float) -> float:
        replayed = replay(
            policy, group, dataclasses.replace(law, speed=math.exp(log_speed), cv=0.0)
        )
        return (
            math.log(math.fsum(replayed[r.id][1] - replayed[r.id][0] for r in finished)) - measured
        )

    return Speed(math.exp(_secant(excess)), 0.0, len(finished))


def _secant(excess: Callable[[float], float]) -> float:
    """A zero near 0 of an increasing function with a slope of about one."""
    at, value = 0.0, excess(0.0)
    slope = 1.0
    for _ in range(ROUNDS):
        if abs(value) < TOLERANCE:
            break
        following = at - value / slope
        new = excess(following)
        slope = max(1.0, (new - value) / (following - at))
        at, value = following, new
    return at
