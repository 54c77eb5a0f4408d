"""How many requests a cell needs, from what was asked: a number, a time, or a precision.

The precision is the half width of the 95 % interval of the mean delay over the mean. Delays remember, so the number
grows like 1 / (1 - load)^2: with the asymptotic variance of the M/M/1 queue's waiting times, about 4 / (1 - load)^2
times the squared mean in a moderately loaded queue (AGREEMENT: 6,300 requests for +-10 % at load 0.5, 22,000 at 0.75).
"""

from __future__ import annotations

import math

from queueing.model import Model

LEAST = 100
HEAVIEST = 0.95  # loads above it are planned like it: no run is long enough there


def requests_needed(model: Model, rate: float, *, num_prompts: int | None, duration: float | None, precision: float) -> int:
    """The number itself, `duration` seconds' worth, or what `precision` takes."""
    if num_prompts is not None:
        return num_prompts
    if duration is not None:
        return max(1, math.ceil(rate * duration))
    return max(LEAST, math.ceil((1.96 / precision) ** 2 * 4 / (1 - min(model.load(rate), HEAVIEST)) ** 2))
