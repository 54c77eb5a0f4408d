"""Whether the servers of one queue are equally fast, as the model has them.

equal_servers    of several servers. Speed of a server: measured over fitted time of its batches (of
                 its requests, where they join running ones), outliers left out; its error from
                 `BLOCKS` consecutive blocks, so that a slow drift widens it. Fails where the
                 slowest takes more than `FACTOR` times as long as the fastest, by more than
                 `BEYOND` standard errors of that ratio.

Where it fails the prediction takes each server at its own speed (`at_their_speeds`).

Not judged: servers with fewer than `LEAST` batches, and where fewer than two have as many.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from queueing.estimation.assumptions.assumption import Assumption, factor
from queueing.estimation.speed.batch_times import BatchTimes
from queueing.estimation.speed.speed_process import without_outliers
from queueing.model import Model

FACTOR = 1.1
BEYOND = 4.0  # the slowest and the fastest are chosen
LEAST, BLOCKS = 60, 10  # batches; parts of them


@dataclass(frozen=True, slots=True)
class _Pace:
    """Of one server: logarithm of its speed, with its standard error."""

    server: int
    log: float
    error: float


def equal_servers(batches: Mapping[int, BatchTimes]) -> Assumption:
    """Of several servers; `batches` by server."""
    paces = _paces(batches)
    if len(paces) < 2:
        return Assumption(
            "equal_servers", None, math.nan, f"fewer than two servers have had {LEAST} batches"
        )
    slow, fast = max(paces, key=lambda each: each.log), min(paces, key=lambda each: each.log)
    apart = slow.log - fast.log
    ratio, error = math.exp(apart), math.hypot(slow.error, fast.error)
    if apart <= max(math.log(FACTOR), BEYOND * error):
        return Assumption("equal_servers", True, ratio, "the servers are equally fast")
    says = (
        f"server {slow.server} takes {factor(ratio)} times as long as server {fast.server} for the "
        "same work; the prediction takes each at its own speed"
    )
    return Assumption("equal_servers", False, ratio, says)


def at_their_speeds(model: Model, batches: Mapping[int, BatchTimes]) -> Model:
    """The same with a speed for each server, where they are not equally fast; in the order of their
    ids. One that has served too little is as fast as all together.
    """
    paces = _paces(batches)
    if model.servers == 1 or equal_servers(batches).holds is not False:
        return model
    together = math.log(model.law.speed)
    speeds = [math.exp(pace.log - together) for pace in paces][: model.servers]
    speeds += [1.0] * (model.servers - len(speeds))
    return dataclasses.replace(model, server_speeds=tuple(speeds))


def _paces(batches: Mapping[int, BatchTimes]) -> list[_Pace]:
    usual = {server: without_outliers(times) for server, times in batches.items()}
    return [_pace(server, times) for server, times in usual.items() if times.count >= LEAST]


def _pace(server: int, times: BatchTimes) -> _Pace:
    parts = (np.array_split(each, BLOCKS) for each in (times.measured, times.fitted))
    logs = np.array([math.log(took.sum() / law.sum()) for took, law in zip(*parts, strict=True)])
    whole = math.log(float(times.measured.sum() / times.fitted.sum()))
    return _Pace(server, whole, float(logs.std(ddof=1)) / math.sqrt(BLOCKS))
