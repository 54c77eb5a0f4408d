"""The speed of each of several servers, and whether they are equally fast.

Speed of a server: measured over fitted time of its batches (of its requests, where they join
running ones), outliers left out; its error from `BLOCKS` consecutive blocks, so that a slow drift
widens it. They are not equally fast where the slowest takes more than `FACTOR` times as long as the
fastest, by more than `BEYOND` standard errors of that ratio. Servers with fewer than `LEAST`
batches are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kendall.queueing.estimation.speed.batch_times import BatchTimes
from kendall.queueing.estimation.speed.speed_process import without_outliers

FACTOR = 1.1
BEYOND = 4.0  # the slowest and the fastest are chosen
LEAST, BLOCKS = 60, 10  # batches; parts of them


@dataclass(frozen=True, slots=True)
class ServerSpeed:
    """Logarithm of the speed of one server, with its standard error."""

    server: int
    log: float
    error: float


def speeds_of(batches: Mapping[int, BatchTimes]) -> list[ServerSpeed]:
    """Of the servers that have served enough."""
    found = []
    for server, every in batches.items():
        times = without_outliers(every)
        if times.count < LEAST:
            continue
        parts = (np.array_split(each, BLOCKS) for each in (times.measured, times.fitted))
        logs = np.array(
            [math.log(took.sum() / law.sum()) for took, law in zip(*parts, strict=True)]
        )
        whole = math.log(float(times.measured.sum() / times.fitted.sum()))
        found.append(ServerSpeed(server, whole, float(logs.std(ddof=1)) / math.sqrt(BLOCKS)))
    return found


def ends_of(speeds: Sequence[ServerSpeed]) -> tuple[ServerSpeed, ServerSpeed]:
    """The slowest and the fastest."""
    return max(speeds, key=lambda each: each.log), min(speeds, key=lambda each: each.log)


def differ(speeds: Sequence[ServerSpeed]) -> bool:
    """Whether they are not equally fast, beyond chance."""
    if len(speeds) < 2:
        return False
    slow, fast = ends_of(speeds)
    return slow.log - fast.log > max(math.log(FACTOR), BEYOND * math.hypot(slow.error, fast.error))


def factors(speeds: Sequence[ServerSpeed], batches: Mapping[int, BatchTimes]) -> dict[int, float]:
    """Of each server its speed over that of all together; empty where they are equally fast. One
    that has served too little is as fast as all together.
    """
    if not differ(speeds):
        return {}
    measured, fitted = (
        sum(float(getattr(times, name).sum()) for times in batches.values())
        for name in ("measured", "fitted")
    )
    together = math.log(measured / fitted)
    known = {each.server: math.exp(each.log - together) for each in speeds}
    return {server: known.get(server, 1.0) for server in batches}
