"""What one setting gains over another, the same number for advice, what-ifs and the autopilot.

    gain = 1 - M(after) / M(before)

M is what the objective measures (queueing.optimization.gain.measure), smaller is better; of
settings of different families it is their sojourn times (queueing.optimization.quantity). Both
settings stand at the same estimates, so most of what is uncertain in either cancels in the gain
(queueing.optimization.gain.response).
"""

from __future__ import annotations

import math

from queueing.estimation.interval import UNKNOWN, Estimate
from queueing.optimization.forecast import Setting
from queueing.optimization.gain.measure import Measure
from queueing.optimization.gain.operating_point import OperatingPoint
from queueing.optimization.gain.reported import reported


def gain_of(
    operating_point: OperatingPoint, before: Setting, after: Setting, measure: Measure
) -> Estimate:
    """With its interval; 1 where the setting before has no steady state, unknown where the one
    after has none.
    """
    size = operating_point.effective_n
    if before == after:
        return Estimate(0.0, 0.0, 0.0, size)
    now, then = (operating_point.forecast(each) for each in (before, after))
    if then.prediction is None or (now.prediction is None and not now.load >= 1):
        return UNKNOWN
    if now.prediction is None:
        return Estimate(
            1.0, _least_gain(operating_point, now.load, (before, after), measure), 1.0, size
        )
    values = [reported(operating_point, each, measure) for each in (before, after)]
    responses = [operating_point.sensitivity.response(each, measure) for each in (before, after)]
    return responses[1].gain(values[1], responses[0], values[0], size)


def _least_gain(
    operating_point: OperatingPoint,
    load: float,
    settings: tuple[Setting, Setting],
    measure: Measure,
) -> float:
    """Over a setting without a steady state: 1 where it has none at the lower ends of rate and
    speed either.
    """
    known = operating_point.estimates
    factor = math.prod(
        max(0.0, each.low) / each.value
        for each in (known.arrival_rate, known.speed)
        if each.known and each.value
    )
    if not 0 < load * factor < 1:
        return 1.0
    before, after = (
        operating_point.sensitivity.at_rate(each, measure, factor) for each in settings
    )
    return 1 - after / before if before else 0.0
