"""Advice: the best choice of one knob for the stated objective, what it should gain
(`OperatingPoint.gain`), and one sentence for the operator.

A gain whose interval holds 0 is no reason for a change. A setting without a steady state is never
advised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kendall.policies.text import SpecError, suggest
from kendall.queueing.choosing.advice.searches import TARGETS, UNASKED, measure_of, search
from kendall.queueing.choosing.advice.sentence import sentence
from kendall.queueing.choosing.candidates import canonical
from kendall.queueing.choosing.forecast import Advice, Setting
from kendall.queueing.choosing.gain.criterion import parse_objective
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.choosing.objective import Objective
from kendall.queueing.choosing.phrases import NO_CHANGE
from kendall.queueing.estimation.interval import UNKNOWN

__all__ = ["TARGETS", "UNASKED", "advise", "parse_objective"]


def advise(
    operating_point: OperatingPoint,
    current: Setting,
    objective: Objective,
    targets: Sequence[str] = UNASKED,
    over: Callable[[], bool] | None = None,
) -> list[Advice]:
    """One advice a target, in their order. On demand: a few seconds, most of them for batch sizes
    and token limits; minutes for a policy that only simulation predicts. Once `over` says so, the
    targets that are left get no choice.

    Raises SpecError: an unknown target or family, v2 without patience.
    """
    for target in targets:
        if target not in TARGETS:
            raise SpecError(
                f"got target {target!r}; expected one of "
                f"{', '.join(TARGETS)}{suggest(target, tuple(TARGETS))}"
            )
    current = canonical(current)
    given: list[Advice] = []
    for target in targets:
        if not given or over is None or not over():
            given.append(_advice(operating_point, current, objective, target))
            continue
        why = "the searches before it took too long; ask for this target alone"
        given.append(
            dataclasses.replace(
                given[0],
                target=target,
                best=None,
                gain=UNKNOWN,
                curve=(),
                says=f"no choice of {target}: {why}",
            )
        )
    return given


def _advice(point: OperatingPoint, current: Setting, objective: Objective, target: str) -> Advice:
    choice = search(point, current, objective, target)
    measure = measure_of(point, (current, choice.setting or current), objective, target)
    now = point.forecast(current)
    best = None if choice.setting is None else point.forecast(choice.setting)
    advice = Advice(
        target=target,
        objective=objective.name,
        compared=measure.compared,
        current=now,
        best=best,
        gain=UNKNOWN if best is None else point.gain(current, best.setting, measure),
        curve=choice.curve,
        says=f"no choice of {target}: {choice.why}",
    )
    if best is None:
        return advice
    values = [
        None if each.prediction is None else point.reported(each.setting, measure)
        for each in (now, best)
    ]
    in_force = point.reported_slos(current, objective) if now.stable else None
    says = sentence(advice, best, objective, measure, values, in_force=in_force)
    return dataclasses.replace(
        advice,
        says="; ".join(each for each in (says, choice.left_out) if each),
        change=best.setting != current and NO_CHANGE not in says,
    )
