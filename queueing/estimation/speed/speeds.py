"""What the batch times of one window say of the speed, each thing found once and shared by
estimates and assumptions.

Steps and wander are judged without outliers, which are neither, and the residual without stalls;
the speed itself, the mean factor on the time that the batches take, includes all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kendall.policies import Policy
from kendall.queueing.estimation.speed.batch_times import (
    FEWEST,
    BatchTimes,
    batch_times,
    joined,
    slot_times,
    times_by_server,
)
from kendall.queueing.estimation.speed.drift import wander
from kendall.queueing.estimation.speed.server_speeds import LEAST, ServerSpeed, factors, speeds_of
from kendall.queueing.estimation.speed.slot_stalls import slot_stalls
from kendall.queueing.estimation.speed.speed_change import SpeedChange, speed_change
from kendall.queueing.estimation.speed.speed_process import stalled, stalls, without_outliers
from kendall.queueing.estimation.summaries import SpeedDrift, Stalls
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.latency.law import LatencyModel


@dataclass(frozen=True, eq=False)
class Speeds:
    """Computed when first asked for."""

    times: BatchTimes
    slots: tuple[BatchTimes, ...] = ()  # of continuous servers, request by request
    # of several servers; and of each its speed over that of all, empty where they are equally fast:
    # then the fitted times of both fields above are those of its own speed
    servers: Sequence[ServerSpeed] = ()
    factors: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, policy: Policy, seen: Snapshot, shape: LatencyModel, step_tokens: int | None = None
    ) -> Speeds:
        """Of the snapshot's own rows; `step_tokens` as for `slot_times`."""
        slots = slot_times(seen.mine, shape, step_tokens) if policy.joins_running else []
        if seen.servers == 1:
            return cls(batch_times(policy, seen.mine, shape, slots), tuple(slots))
        by_server = times_by_server(policy, seen.mine, shape, slots)
        groups = (each.finely_grouped(LEAST) for each in slots)
        servers = speeds_of(dict(zip(by_server, groups, strict=True)) if slots else by_server)
        own = factors(servers, by_server)
        given = [own.get(server, 1.0) for server in by_server]  # in the order of the slots
        times = joined(list(map(BatchTimes.at_factor, by_server.values(), given)))
        return cls(times, tuple(map(BatchTimes.at_factor, slots, given)), servers, own)

    @cached_property
    def stalls(self) -> Stalls:
        """Far beyond the law, since the speed changed."""
        if not self.slots:
            return stalls(self.recent)
        return slot_stalls(
            self.slots
            if self.step is None
            else [each.part(each.at >= self.step.at) for each in self.slots]
        )

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
    def telling(self) -> BatchTimes:
        """What the speed is taken from: all batches since then; of slots smaller groups, where
        there are too few.
        """
        if self.recent.count >= FEWEST or not self.slots:
            return self.recent
        since = -math.inf if self.step is None else self.step.at
        return joined([each.part(each.at >= since).finely_grouped() for each in self.slots])

    @cached_property
    def last_at(self) -> float:
        """Dispatch of the last batch, or of the last slot that is in a group."""
        if self.slots:
            return max(each.last_grouped_at for each in self.slots)
        return float(self.times.at[-1]) if self.times.count else -math.inf

    @cached_property
    def without_stalls(self) -> BatchTimes:
        """Of those the batches that met no stall."""
        return self.recent.part(~stalled(self.recent))

    @cached_property
    def slow(self) -> SpeedDrift:
        """The slow part of the speed since then."""
        return wander(
            self.steady if self.step is None else self.steady.part(self.steady.at >= self.step.at)
        )
