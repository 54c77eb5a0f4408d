"""Advice: the best choice of one knob for the stated objective, what it should gain, and one
sentence for the operator.

    gain = 1 - M(best) / M(current)

M is what the objective measures (queueing.control.advice.measure), smaller is better; of settings
of different families it is their sojourn times (queueing.optimization.quantity). Both settings
stand at the same estimates, so most of what is uncertain in either cancels in the gain
(queueing.control.advice.response). A gain whose interval holds 0 is no reason to turn a knob. A
setting without a steady state is never advised.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from policies import format_policy, parse_policy
from policies.text import SpecError, suggest
from queueing.control.advice.forecast import Advice, Forecast, Knobs
from queueing.control.advice.measure import Measure, parse_objective
from queueing.control.advice.reported import reported, reported_slo
from queueing.control.advice.response import Response
from queueing.control.advice.searches import TARGETS, measure_of, search
from queueing.control.advice.sentence import sentence
from queueing.control.advice.situation import Situation
from queueing.estimation.assess import Limits
from queueing.estimation.estimates import Estimates
from queueing.estimation.interval import UNKNOWN, Estimate
from queueing.latency.law import LatencyModel
from queueing.optimization.objective import Objective

__all__ = ["TARGETS", "advise", "parse_objective"]


def advise(
    estimates: Estimates,
    shape: LatencyModel,
    current: Knobs,
    limits: Limits,
    objective: Objective,
    *,
    targets: Sequence[str] = TARGETS,
    family: str | None = None,
) -> list[Advice]:
    """One advice a target, in their order. On demand: a few seconds, most of them for batch sizes
    and token limits.

    Raises SpecError: an unknown target or family, v2 without patience.
    """
    for target in targets:
        if target not in TARGETS:
            raise SpecError(
                f"got target {target!r}; expected one of "
                f"{', '.join(TARGETS)}{suggest(target, tuple(TARGETS))}"
            )
    situation = Situation(estimates=estimates, shape=shape, limits=limits, family=family)
    current = dataclasses.replace(current, policy=format_policy(parse_policy(current.policy)))
    return [_advice(situation, current, objective, target) for target in targets]


def _advice(situation: Situation, current: Knobs, objective: Objective, target: str) -> Advice:
    found = search(situation, current, objective, target)
    measure = measure_of(situation, current, objective, target)
    now = situation.forecast(current)
    best = None if found.knobs is None else situation.forecast(found.knobs)
    gain = UNKNOWN if best is None else gained(situation, now, best, measure)
    advice = Advice(
        target=target,
        objective=objective.name,
        compared=measure.compared,
        current=now,
        best=best,
        gain=gain,
        curve=found.curve,
        says=f"no choice of {target}: {found.why}",
    )
    if best is None:
        return advice
    values = [
        None if each.prediction is None else measured(situation, each, measure)
        for each in (now, best)
    ]
    in_force = reported_slo(situation, current, objective) if now.stable else None
    return dataclasses.replace(
        advice, says=sentence(advice, best, objective, measure, values, in_force=in_force)
    )


def gained(situation: Situation, now: Forecast, then: Forecast, measure: Measure) -> Estimate:
    """The gain of one setting over another, with its interval; 1 where the first has no steady
    state, unknown where either is.
    """
    size = situation.effective_n
    if now.knobs == then.knobs:
        return Estimate(0.0, 0.0, 0.0, size)
    if then.prediction is None or (now.prediction is None and not now.load >= 1):
        return UNKNOWN
    if now.prediction is None:
        return Estimate(1.0, _least_gain(situation, now, then, measure), 1.0, size)
    before, after = (measured(situation, each, measure) for each in (now, then))
    responses: list[Response] = [situation.response(each.knobs, measure) for each in (now, then)]
    return responses[1].gain(after, responses[0], before, size)


def _least_gain(situation: Situation, now: Forecast, then: Forecast, measure: Measure) -> float:
    """Over a setting without a steady state: 1 where it has none at the lower ends of rate and
    speed either.
    """
    known = situation.estimates
    factor = math.prod(
        max(0.0, each.low) / each.value
        for each in (known.arrival_rate, known.speed)
        if each.known and each.value
    )
    if not 0 < now.load * factor < 1:
        return 1.0
    before, after = (situation.at_rate(each.knobs, measure, factor) for each in (now, then))
    return 1 - after / before if before else 0.0


def measured(situation: Situation, found: Forecast, measure: Measure) -> float:
    """Of a stable setting, as it is reported."""
    return reported(situation, found.knobs, measure)
