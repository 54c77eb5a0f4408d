"""Service as it was seen under the policy in force: what waits are computed from where there is no
calibrated law, or not yet.

Batches: mean and variance of the service time for each size, recent ones counting more. Slots: gaps
between departures while somebody waited, so that every slot was taken; before there were any, slots
/ mean service time, which is more than a full engine does.

A service that a pause of the engine or a restart lengthened is left out: it does not predict the
next one. Observations also lose weight with time, so that after a silence one new service outweighs
what was seen before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kendall.queueing.control.wait_ahead import (
    BatchInService,
    BatchService,
    Pace,
    SlotService,
    Wait,
)
from kendall.queueing.measurement.record import Record
from kendall.queueing.result import Quantity
from kendall.server.queue.sequence import Batch

if TYPE_CHECKING:
    from kendall.server.queue.sequence import SequenceState

OLDER = 0.95  # weight that an observation loses with each newer one of its kind
OLDER_GAP = 0.99
HALF_LIFE = 120.0  # seconds in which an observation loses half its weight
PAUSE_RATIO, PAUSE_SECONDS = (
    4.0,
    1.0,
)  # a pause makes first token or tokens so many times as slow as usual, and costs so much time
PAUSE_SHARE = 0.1  # of recent services: more than that is no pause, but how fast the engine is
ENOUGH = 2.0  # observations by weight, before which nothing is usual


@dataclass(slots=True)
class RecentMoments:
    """Exponentially weighted mean and variance."""

    older: float
    weight: float = 0.0
    mean: float = 0.0
    variance: float = 0.0
    at: float = 0.0  # of the newest observation, seconds

    def add(self, value: float, at: float) -> None:
        """One more observation, of the instant `at`; those before it age by the clock."""
        self.weight = 1.0 + self.older * self.weight * 0.5 ** ((at - self.at) / HALF_LIFE)
        self.at = at
        share = 1.0 / self.weight
        off = value - self.mean
        self.mean += share * off
        self.variance = (1.0 - share) * (self.variance + share * off * off)

    def exceeded_by(self, value: float, count: int = 1) -> bool:
        """Whether `count` times `value` seconds are far more than usual: a pause lies in them."""
        return (
            self.weight >= ENOUGH
            and value > PAUSE_RATIO * self.mean
            and count * (value - self.mean) > PAUSE_SECONDS
        )


@dataclass(slots=True)
class Pauses:
    """Tells services that a pause lengthened from an engine that has become slower."""

    first_token: RecentMoments = field(
        default_factory=lambda: RecentMoments(OLDER)
    )  # seconds from the dispatch
    token: RecentMoments = field(
        default_factory=lambda: RecentMoments(OLDER)
    )  # seconds between two tokens
    # of recent services, those that a pause lengthened; all services in one pause count as one
    _share: float = 0.0
    _until: float = -math.inf  # when the newest pause had ended

    def lengthened(
        self,
        dispatched_at: float,
        first_token_at: float | None,
        last_token_at: float | None,
        tokens: int,
        now: float,
    ) -> bool:
        """Whether this service is to be left out. Learns from it where not."""
        first = None if first_token_at is None else first_token_at - dispatched_at
        steps = tokens - 1
        token = (
            None
            if first_token_at is None or last_token_at is None or steps < 1
            else (last_token_at - first_token_at) / steps
        )
        odd = (first is not None and self.first_token.exceeded_by(first)) or (
            token is not None and self.token.exceeded_by(token, steps)
        )
        if not odd or dispatched_at >= self._until:
            self._share = OLDER * self._share + (1 - OLDER) * odd
            self._until = now if odd else self._until
        if odd and self._share < PAUSE_SHARE:
            return True
        if first is not None:
            self.first_token.add(first, now)
        if token is not None:
            self.token.add(token, now)
        return False


class ServiceSeen:
    """Fed like an observer; forgets when the policy changes."""

    def __init__(self) -> None:
        self._policy_text = ""
        self._serving: dict[
            int, tuple[float, Sequence[SequenceState]]
        ] = {}  # server: dispatched at, members
        self._forget()

    def _forget(self) -> None:
        self._by_size: dict[int, RecentMoments] = {}
        self._slot = RecentMoments(OLDER_GAP)
        self._stay = RecentMoments(OLDER_GAP)  # from the dispatch to the end of the answer
        self._gap = RecentMoments(OLDER_GAP)
        self._pauses = Pauses()
        self._departed_at: float | None = None  # the last departure, if somebody waited then
        self._batches: BatchService | None = None  # as asked for last, until the next batch is over

    def begin_epoch(self) -> None:
        """The queue may have been held: what passed since the last departure is no gap of the
        engine's.
        """
        self._departed_at = None

    def on_dispatch(self, batch: Batch) -> None:
        """A batch begins."""
        if batch.policy_text != self._policy_text:
            self._policy_text = batch.policy_text
            self._forget()
        if not batch.policy.joins_running:
            self._serving[batch.server_id] = batch.dispatched_at, batch.sequences

    def on_idle(self, server_id: int, at: float) -> None:
        """A batch is over."""
        served = self._serving.pop(server_id, None)
        if served is not None and not self._batch_lengthened(*served, at):
            began, members = served
            self._by_size.setdefault(len(members), RecentMoments(OLDER)).add(at - began, at)
            self._batches = None

    def _batch_lengthened(self, began: float, members: Sequence[SequenceState], at: float) -> bool:
        if any(sequence.interruptions or sequence.preemptions for sequence in members):
            return True
        first = min(
            (
                sequence.at.first_token
                for sequence in members
                if sequence.at.first_token is not None
            ),
            default=None,
        )
        longest = max((sequence.stop_detector.output_tokens for sequence in members), default=0)
        return self._pauses.lengthened(began, first, at, longest, at)

    def on_record(self, record: Record, now: float, *, somebody_waits: bool) -> None:
        """A request was served."""
        if (
            record.service_time is None
            or record.dispatched_at is None
            or record.policy != self._policy_text
        ):
            return
        if record.interruptions or self._lengthened(record, record.dispatched_at, now):
            self._departed_at = None
            return
        self._slot.add(record.service_time, now)
        if record.released_at is not None:
            self._stay.add(record.released_at - record.dispatched_at, now)
        if self._departed_at is not None:
            self._gap.add(
                now - self._departed_at, self._departed_at
            )  # its beginning: a long gap must not age the others by its own length
        self._departed_at = now if somebody_waits else None

    def _lengthened(self, record: Record, dispatched_at: float, now: float) -> bool:
        """The waits of a preempted one lie between its tokens: nothing is seen of pauses."""
        if record.preemptions:
            return False
        tokens = (record.first_token_at, record.last_token_at, record.output_tokens or 0)
        return self._pauses.lengthened(dispatched_at, *tokens, now)

    @property
    def pace(self) -> Pace | None:
        """None before an answer of several tokens."""
        first, token = self._pauses.first_token, self._pauses.token
        return Pace(first.mean - token.mean, token.mean) if token.weight > 0 else None

    def law(self, quantity: Quantity) -> Wait | None:
        """The mean and variance of a request's duration from its dispatch; None before one was
        seen.
        """
        seen = {
            "sojourn_time": self._stay,
            "service_time": self._slot,
            "inter_token_latency": self._pauses.token,
        }[quantity]
        return Wait(seen.mean, seen.variance) if seen.weight > 0 else None

    @property
    def any_slot(self) -> bool:
        """Whether a request was served under the policy in force."""
        return self._slot.mean > 0

    @property
    def first_token(self) -> float | None:
        """Mean seconds from the dispatch to the first token; None before one was seen."""
        seen = self._pauses.first_token
        return seen.mean if seen.weight > 0 else None

    def in_service(self, now: float) -> list[BatchInService]:
        """The batches that are being served."""
        return [
            BatchInService(len(members), now - began) for began, members in self._serving.values()
        ]

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
            first_token=self.first_token or 0.0,
            pace=self.pace if largest == 1 else None,
        )
        return self._batches

    def slots(self, count: int) -> SlotService | None:
        """None before a request was served."""
        if not self.any_slot:
            return None
        mean = self._slot.mean
        # full slots do not do more; the gaps of answers that end together are no gaps at all
        least = mean / count
        gap = max(self._gap.mean, least) if self._gap.weight > 1 else least
        return SlotService(
            slots=count,
            throughput=1 / gap,
            scv=self._slot.variance / mean**2,
            first_token=self.first_token or 0.0,
            pace=self.pace,
        )
