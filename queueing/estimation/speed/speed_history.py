"""The wander of the engine's speed (queueing.estimation.speed.drift) from an hour of batches
instead of one window's.

The hour is cut into stretches of at most `STRETCH` seconds, and at every epoch: each has a mean
speed of its own, integrated out of its likelihood, so that neither a law that fits one policy
better than another nor a drift over many minutes counts as wander. The likelihoods of all stretches
are added on one grid of sigma and tau. The likelihood of a stretch that is over is kept in place of
its batches. Where the speed made a step, the batches of the stretch before it are dropped.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kendall.policies import Policy
from kendall.queueing.estimation.change import Vector
from kendall.queueing.estimation.speed.batch_times import BatchTimes
from kendall.queueing.estimation.speed.drift import (
    FEWEST_BLOCKS,
    TauLikelihoods,
    block_speeds,
    most_likely,
)
from kendall.queueing.estimation.speed.fitted_law import FittedLaw, fitted_law
from kendall.queueing.estimation.speed.speeds import Speeds
from kendall.queueing.estimation.summaries import SpeedDrift
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.latency.law import LatencyModel

HOUR = 3600.0
STRETCH, BLOCK = 240.0, 2.0  # seconds
# of shared machines from minute to minute: 5 to 22 % (docs/why/agreement.md), as if so often
USUAL_APART, USUAL_STRETCHES = 0.05, 2.0
SHAPE_KEPT, GROWN = 30.0, 1.3  # seconds, times as many requests
GOES_ON = 1.1  # times as many batches
TAUS = np.geomspace(BLOCK / 2, STRETCH / 2, 12)


@dataclass(frozen=True, eq=False)
class SpeedStretch:
    """What one says of the process."""

    end: float  # seconds
    likelihood: TauLikelihoods
    fast: float  # variance of what is not slow, times the number of batches
    count: int  # batches
    level: float = 0.0  # mean logarithm of measured over lawful times

    @classmethod
    def of(cls, parts: list[BatchTimes]) -> SpeedStretch | None:
        """None where there are too few batches."""
        times = BatchTimes.chained(parts)
        if times.count < FEWEST_BLOCKS:
            return None
        span = float(times.at[-1] - times.at[0])
        blocks = block_speeds(times, max(FEWEST_BLOCKS, round(span / BLOCK)))
        if blocks is None or blocks.fast_cv == 0:
            return None
        return cls(
            float(times.at[-1]),
            blocks.likelihoods(TAUS),
            times.count * blocks.fast_cv**2,
            times.count,
            float(np.log(times.measured.sum() / times.fitted.sum())),
        )


@dataclass(slots=True)
class SpeedHistory:
    """Fed with every assessment; windows may overlap."""

    seconds: float = HOUR
    over: deque[SpeedStretch] = field(default_factory=deque)
    open: list[BatchTimes] = field(default_factory=list)  # of the stretch that goes on
    _epoch: int | None = None
    _until: float = -math.inf  # dispatch of the last batch, or slot, that was taken in
    _now: SpeedStretch | None = None
    # with its epoch, instant and number of requests
    _shape: tuple[int, float, int, FittedLaw] | None = None

    def fitted_law(
        self, policy: Policy, seen: Snapshot, shape: LatencyModel, step_tokens: int | None = None
    ) -> FittedLaw:
        """The engine's: that of some seconds ago, unless much more is known now."""
        count = len(seen.rows)
        if self._shape is not None:
            epoch, at, known, found = self._shape
            near = 0 <= seen.now - at < SHAPE_KEPT and count < GROWN * known
            if epoch == seen.epoch and near:
                return found
        found = fitted_law(policy, seen, shape, step_tokens)
        self._shape = seen.epoch, seen.now, count, found
        return found

    def add(self, speeds: Speeds, epoch: int) -> SpeedDrift | None:
        """Take in the batches that are new; the wander of the hour, None where there is too
        little of it.
        """
        if epoch != self._epoch:
            self._close()
            self._epoch = epoch
        times = speeds.steady
        if speeds.step is not None:
            self.open = [part.part(part.at >= speeds.step.at) for part in self.open]
            times = times.part(times.at >= speeds.step.at)
        new = times.part(times.at > self._until)
        if new.count:
            self.open.append(new)
            self._until = max(float(new.at[-1]), speeds.last_at)  # no group shares a slot
        now = self._so_far()
        if now is not None and now.end - float(BatchTimes.chained(self.open).at[0]) >= STRETCH:
            self._close()
            now = None
        while self.over and self.over[0].end < self._until - self.seconds:
            self.over.popleft()
        stretches = [*self.over, *([] if now is None else [now])]
        if not stretches:
            return None
        likelihood: Vector = np.sum([each.likelihood for each in stretches], axis=0)
        count = sum(each.count for each in stretches)
        fast = math.sqrt(sum(each.fast for each in stretches) / count)
        return most_likely(likelihood, TAUS, span=STRETCH * len(stretches), fast_cv=fast)

    def _so_far(self) -> SpeedStretch | None:
        """The one that goes on: as it was, until it has a tenth more batches."""
        count = sum(part.count for part in self.open)
        if self._now is None or not self._now.count <= count < GOES_ON * self._now.count:
            self._now = SpeedStretch.of(self.open)
        return self._now

    @property
    def apart(self) -> float:
        """Standard deviation of the log speed of one stretch about that of the one before: what is
        usual where there were few.
        """
        levels = np.array([each.level for each in self.over])
        steps = np.diff(levels)
        sure = USUAL_STRETCHES * USUAL_APART**2 + float(steps @ steps)
        return math.sqrt(sure / (USUAL_STRETCHES + steps.size))

    def _close(self) -> None:
        found = SpeedStretch.of(self.open)
        if found is not None:
            self.over.append(found)
        self.open, self._now = [], None
