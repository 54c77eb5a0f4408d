"""Did the speed change at an instant (another model, a throttled device), or does it wander?

Over the block means y_j of the log ratios with noise v_j,

    Q = sum_j (y_j - mean)^2 / v_j

is chi-squared if the speed is constant. If Q says it is not, the likeliest step is taken out: a
step that explains `EXPLAINS` of Q's excess over its mean, is at least `SMALLEST` and leaves at
least two blocks on either side is a change; whatever else is slow is wander.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import chdtrc

from kendall.queueing.estimation.speed.batch_times import BatchTimes
from kendall.queueing.estimation.speed.drift import BlockSpeeds, block_speeds

BLOCKS = 24
LEVEL = 1e-4
EXPLAINS = 0.8
SMALLEST = 0.1  # of the log speed


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """Instant (s) and the new speed over the old one."""

    at: float
    ratio: float


def speed_change(times: BatchTimes) -> SpeedChange | None:
    """The step, if there is one."""
    blocks = block_speeds(times, BLOCKS)
    if blocks is None or blocks.fast_cv == 0:
        return None
    total = _spread(blocks, 0, blocks.level.size)
    degrees = blocks.level.size - 1
    if float(chdtrc(degrees, total)) > LEVEL:
        return None
    splits = range(2, blocks.level.size - 1)
    left = [_spread(blocks, 0, k) + _spread(blocks, k, blocks.level.size) for k in splits]
    split = splits[int(np.argmin(left))]
    step = _mean(blocks, split, blocks.level.size) - _mean(blocks, 0, split)
    if abs(step) < SMALLEST or total - min(left) < EXPLAINS * (total - degrees):
        return None
    return SpeedChange(float(blocks.at[split - 1] + blocks.at[split]) / 2, math.exp(step))


def _mean(blocks: BlockSpeeds, first: int, last: int) -> float:
    return float(np.average(blocks.level[first:last], weights=1 / blocks.noise[first:last]))


def _spread(blocks: BlockSpeeds, first: int, last: int) -> float:
    return float(
        np.sum(
            (blocks.level[first:last] - _mean(blocks, first, last)) ** 2 / blocks.noise[first:last]
        )
    )
