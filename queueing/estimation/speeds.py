"""What the batch times of one window say of the speed, each thing found once and shared by estimates and assumptions.

Steps and wander are judged without outliers, which are neither, and the residual without stalls; the speed itself, the mean factor on
the time that the batches take, includes all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from queueing.estimation.batch_times import BatchTimes
from queueing.estimation.speed_change import SpeedChange, speed_change
from queueing.estimation.speed_process import Stalls, stalled, stalls, without_outliers
from queueing.estimation.wander import Wander, wander


@dataclass(frozen=True, eq=False)
class Speeds:
    """Computed when first asked for."""

    times: BatchTimes

    @cached_property
    def stalls(self) -> Stalls:
        """Batches far beyond the law, since the speed changed."""
        return stalls(self.recent)

    @cached_property
    def steady(self) -> BatchTimes:
        """Batches without outliers."""
        return without_outliers(self.times)

    @cached_property
    def step(self) -> SpeedChange | None:
        """The instant at which the speed changed."""
        return speed_change(self.steady)

    @cached_property
    def recent(self) -> BatchTimes:
        """All batches since then."""
        return self.times if self.step is None else self.times.part(self.times.at >= self.step.at)

    @cached_property
    def without_stalls(self) -> BatchTimes:
        """Of those the batches that met no stall."""
        return self.recent.part(~stalled(self.recent))

    @cached_property
    def slow(self) -> Wander:
        """The slow part of the speed since then."""
        return wander(self.steady if self.step is None else self.steady.part(self.steady.at >= self.step.at))
