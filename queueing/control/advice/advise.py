"""Advice: the best choice of one knob for the stated objective, what it should gain
(queueing.optimization.gain.gain), and one sentence for the operator.

A gain whose interval holds 0 is no reason for a change. A setting without a steady state is never
advised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from policies.text import SpecError, suggest
from queueing.control.advice.searches import TARGETS, measure_of, search
from queueing.control.advice.sentence import sentence
from queueing.control.words import NO_CHANGE
from queueing.estimation.interval import UNKNOWN
from queueing.optimization.candidates import canonical
from queueing.optimization.forecast import Advice, Setting
from queueing.optimization.gain.gain import gain_of
from queueing.optimization.gain.measure import parse_objective
from queueing.optimization.gain.operating_point import OperatingPoint
from queueing.optimization.gain.reported import reported, reported_slos
from queueing.optimization.objective import Objective

__all__ = ["TARGETS", "advise", "parse_objective"]


def advise(
    operating_point: OperatingPoint,
    current: Setting,
    objective: Objective,
    targets: Sequence[str] = TARGETS,
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
    found: list[Advice] = []
    for target in targets:
        if found and over is not None and over():
            found.append(_left_out(found[0], target))
        else:
            found.append(_advice(operating_point, current, objective, target))
    return found


def _left_out(first: Advice, target: str) -> Advice:
    why = "the searches before it took too long; ask for this target alone"
    return dataclasses.replace(
        first,
        target=target,
        best=None,
        gain=UNKNOWN,
        curve=(),
        says=f"no choice of {target}: {why}",
    )


def _advice(
    operating_point: OperatingPoint, current: Setting, objective: Objective, target: str
) -> Advice:
    found = search(operating_point, current, objective, target)
    measure = measure_of(operating_point, (current, found.setting or current), objective, target)
    now = operating_point.forecast(current)
    best = None if found.setting is None else operating_point.forecast(found.setting)
    gain = UNKNOWN if best is None else gain_of(operating_point, current, best.setting, measure)
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
        None if each.prediction is None else reported(operating_point, each.setting, measure)
        for each in (now, best)
    ]
    in_force = reported_slos(operating_point, current, objective) if now.stable else None
    says = sentence(advice, best, objective, measure, values, in_force=in_force)
    return dataclasses.replace(
        advice,
        says="; ".join(each for each in (says, found.left_out) if each),
        change=best.setting != current and NO_CHANGE not in says,
    )
