"""The value of a setting as advice reports it, and whether that value keeps an SLO.

Searches simulate dozens of choices; what is reported of the chosen one may be exact and differ by a
few percent. So the choice is checked by the reported value, and near the SLO the search goes on
with it: no advice breaks the SLO by its own numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from queueing.errors import UnstableQueueError
from queueing.optimization.answer import SIMULATED, rough
from queueing.optimization.forecast import Setting
from queueing.optimization.gain.measure import Measure
from queueing.optimization.gain.operating_point import OperatingPoint
from queueing.optimization.objective import Objective
from queueing.optimization.search import Optimum, Point, choose


def reported(operating_point: OperatingPoint, setting: Setting, measure: Measure) -> float:
    """Simulated where the setting's method cannot give it. Raises UnstableQueueError."""
    assert operating_point.lengths is not None
    model, whole = operating_point.model(setting), operating_point.lengths.whole
    value = measure.of(operating_point.predicted(setting), model, whole)
    if not math.isnan(value):
        return value
    return measure.of(
        operating_point.predicted(
            setting, lambda queue, rate: rough(queue, rate, measure.slos, SIMULATED)
        ),
        model,
        whole,
    )


def reported_slos(
    operating_point: OperatingPoint, setting: Setting, objective: Objective
) -> list[float]:
    """What each SLO bounds, seconds; infinite without a steady state."""
    alone = [dataclasses.replace(objective, slo=slo, also=()) for slo in objective.slos]
    measures = [Measure(each, slo.field) for each, slo in zip(alone, objective.slos, strict=True)]
    try:
        return [reported(operating_point, setting, measure) for measure in measures]
    except UnstableQueueError:
        return [math.inf] * len(measures)


def keeps_slo(operating_point: OperatingPoint, setting: Setting, objective: Objective) -> bool:
    """Whether the reported values keep every SLO; also true without one."""
    values = reported_slos(operating_point, setting, objective)
    return all(value <= slo.seconds for value, slo in zip(values, objective.slos, strict=True))


def verified(
    operating_point: OperatingPoint,
    objective: Objective,
    found: Optimum,
    setting_of: Callable[[Point], Setting],
    current: Setting,
) -> Optimum:
    """The best choice that keeps the SLO by its reported value; the setting in force counts by
    its own. Raises NoStableChoiceError.
    """
    if objective.slo is None or found.compared is None:
        return found
    kept, compared = keeps_slo(operating_point, current, objective), found.compared

    def corrected(point: Point) -> Point:
        if not kept:  # it may have no steady state, and no value
            return point | {"score": None}
        return point | {"score": point[compared] if point["score"] is None else point["score"]}

    curve = [corrected(point) if setting_of(point) == current else point for point in found.curve]
    while True:
        best = dataclasses.replace(
            choose(found.target, objective, curve, found.note, by_sojourn=True),
            compared=found.compared,
        )
        if keeps_slo(operating_point, setting_of(best.best), objective):
            return best
        curve = [point | {"score": None} if point is best.best else point for point in curve]


def largest_kept(keeps: Callable[[int], bool], start: int, least: int, most: int) -> int | None:
    """The largest of `least` .. `most` that keeps, where all below it do: from `start` by
    doubling steps, then by bisection.
    """
    step = 1
    if keeps(start):
        low, high = start, most + 1
        while low < most and high > most:
            probe = min(low + step, most)
            low, high = (probe, high) if keeps(probe) else (low, probe)
            step *= 2
    else:
        low, high = least - 1, start
        while high > least and low < least:
            probe = max(high - step, least)
            low, high = (probe, high) if keeps(probe) else (low, probe)
            step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low if low >= least else None
