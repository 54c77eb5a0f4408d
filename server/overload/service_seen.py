"""Service as it was seen under the policy in force: what waits are computed from where there is no calibrated law, or not yet.

Batches: mean and variance of the service time for each size, recent ones counting more. Slots: gaps between departures while somebody
waited, so that every slot was taken; before there were any, slots / mean service time, which is more than a full engine does.
"""

from __future__ import annotations

from dataclasses import dataclass

from queueing.record import Record
from queueing.wait_ahead import BatchService, InService, SlotService
from server.batch import Batch

OLDER = 0.95  # weight that an observation loses with each newer one of its kind
OLDER_GAP = 0.99


@dataclass(slots=True)
class RecentMoments:
    """Exponentially weighted mean and variance."""

    older: float
    weight: float = 0.0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, value: float) -> None:
        """One more observation."""
        self.weight = self.older * self.weight + 1.0
        share = 1.0 / self.weight
        off = value - self.mean
        self.mean += share * off
        self.variance = (1.0 - share) * (self.variance + share * off * off)


class ServiceSeen:
    """Fed like an observer; forgets when the policy changes."""

    def __init__(self) -> None:
        self._policy_text = ""
        self._serving: dict[int, tuple[float, int]] = {}  # server: dispatched at, size
        self._forget()

    def _forget(self) -> None:
        self._by_size: dict[int, RecentMoments] = {}
        self._slot = RecentMoments(OLDER_GAP)
        self._gap = RecentMoments(OLDER_GAP)
        self._first_token = RecentMoments(OLDER)
        self._departed_at: float | None = None  # the last departure, if somebody waited then
        self._batches: BatchService | None = None  # as asked for last, until the next batch is over

    def on_dispatch(self, batch: Batch) -> None:
        """A batch begins."""
        if batch.policy_text != self._policy_text:
            self._policy_text = batch.policy_text
            self._forget()
        if not batch.policy.joins_running:
            self._serving[batch.server_id] = batch.dispatched_at, len(batch.tickets)

    def on_idle(self, server_id: int, at: float) -> None:
        """A batch is over."""
        served = self._serving.pop(server_id, None)
        if served is not None:
            began, size = served
            self._by_size.setdefault(size, RecentMoments(OLDER)).add(at - began)
            self._batches = None

    def on_record(self, record: Record, now: float, *, somebody_waits: bool) -> None:
        """A request was served."""
        if record.service_time is None or record.dispatched_at is None or record.policy != self._policy_text:
            return
        if record.first_token_at is not None:
            self._first_token.add(record.first_token_at - record.dispatched_at)
        self._slot.add(record.service_time)
        if self._departed_at is not None:
            self._gap.add(now - self._departed_at)
        self._departed_at = now if somebody_waits else None

    @property
    def any(self) -> bool:
        """Whether a request was served."""
        return self._slot.mean > 0

    def in_service(self, now: float) -> list[InService]:
        """The batches that are being served."""
        return [InService(size, now - began) for began, size in self._serving.values()]

    def batches(self, largest: int, servers: int) -> BatchService | None:
        """None before a batch was over."""
        if not self._by_size:
            return None
        known = self._batches
        if known is not None and known.largest == largest and known.servers == servers:
            return known
        sizes = sorted(self._by_size)
        self._batches = BatchService(
            largest=largest,
            servers=servers,
            sizes=tuple(sizes),
            means=tuple(self._by_size[size].mean for size in sizes),
            variances=tuple(self._by_size[size].variance for size in sizes),
            first_token=self._first_token.mean,
        )
        return self._batches

    def slots(self, count: int) -> SlotService | None:
        """None before a request was served."""
        mean = self._slot.mean
        if not mean > 0:
            return None
        least = mean / count  # full slots do not do more; the gaps of answers that end together are no gaps at all
        gap = max(self._gap.mean, least) if self._gap.weight > 1 else least
        return SlotService(slots=count, throughput=1 / gap, scv=self._slot.variance / mean**2, first_token=self._first_token.mean)
