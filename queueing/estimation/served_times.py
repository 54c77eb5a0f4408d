"""When requests were in an engine, and how many it ran while something waited: as whoever only
watches it can tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kendall.queueing.latency.law import LatencyModel

Vector = npt.NDArray[np.float64]
SHARE = 0.1  # of the longest time that a number in service held while something waited
FEWEST = 3  # requests that waited


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class ServedTimes:
    """Requests that one or several engines served; instants in seconds, counts in tokens."""

    arrived: Vector  # at the server, which its scheduler sees up to a step later
    queued: Vector  # seconds that it waited for that slot, as the scheduler knows
    started: Vector  # the scheduler gave it a slot
    first: Vector  # its first token
    last: Vector  # its last token
    held: Vector  # seconds from its dispatch to the end of its answer
    prompts: Vector
    outputs: Vector
    server: npt.NDArray[np.int64]

    def part(self, kept: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> ServedTimes:
        """Some of them."""
        return ServedTimes(
            **{each.name: getattr(self, each.name)[kept] for each in dataclasses.fields(self)}
        )

    @property
    def step(self) -> float:
        """Mean seconds of a token behind the first; 0 where there is none."""
        tokens = float(np.maximum(self.outputs - 1, 0).sum())
        return float((self.last - self.first).sum()) / tokens if tokens else 0.0

    def of_servers(self) -> list[ServedTimes]:
        """Those of each server apart."""
        return [self.part(self.server == server) for server in np.unique(self.server)]

    def most_in_service(self) -> int:
        """Of one server at once."""
        most = 0
        for own in self.of_servers():
            at = np.concatenate([own.last, own.started])  # who leaves goes first
            change = np.repeat([-1, 1], own.last.size)
            most = max(most, int(np.cumsum(change[np.argsort(at, kind="stable")]).max()))
        return most

    def slots(self) -> int | None:
        """The most that a server ran for some time while something waited for one of its slots,
        longer than a step; None where nothing did.

        Each stay counts half a step shorter at both ends, so that one that follows another is not
        beside it: their instants come over different ways.
        """
        found = (_slots_of(own, self.step) for own in self.of_servers())
        return max((each for each in found if each is not None), default=None)


@dataclass(frozen=True, slots=True)
class ObservedLaw:
    """The law, 95 % intervals of its coefficients, the mean absolute relative error of a request's
    time in the engine, and in words what could not be told apart.
    """

    law: LatencyModel
    intervals: Mapping[str, tuple[float, float]]
    error: float
    requests: int
    doubts: tuple[str, ...]


def _slots_of(served: ServedTimes, step: float) -> int | None:
    waits = served.queued > step
    count, many = served.started.size, int(np.count_nonzero(waits))
    if many < FEWEST:
        return None
    middle = (served.started + served.last) / 2
    begins = np.minimum(served.started + step / 2, middle)
    ends = np.maximum(served.last - step / 2, middle)
    since, until = (served.started - served.queued)[waits], served.started[waits]
    at = np.concatenate([begins, ends, since, until])
    running = np.concatenate([np.ones(count), -np.ones(count), np.zeros(2 * many)])
    waiting = np.concatenate([np.zeros(2 * count), np.ones(many), -np.ones(many)])
    order = np.argsort(at, kind="stable")
    number = np.cumsum(running[order])[:-1].astype(np.int64)
    waited = np.where(np.cumsum(waiting[order])[:-1] > 0, np.diff(at[order]), 0.0)
    held = np.bincount(np.maximum(number, 0), waited)
    most = int(np.flatnonzero(held >= SHARE * held.max())[-1])
    return most if held.max() > 0 and most else None
