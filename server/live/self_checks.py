"""Laws that hold whatever the queue, evaluated on one stretch of time after another: the gateway's
counters against its records.

The counters are moved by events as they happen; the records are what sequences say of themselves
afterwards. Conservation, Little's law and the utilisation law tie the two
(`queueing.estimation.assumptions.checks`). Where one breaks, the measurement is wrong, not the
theory.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kendall.queueing.measurement.record import Record
from kendall.server.live.activity import BusyTime

if TYPE_CHECKING:
    from kendall.queueing.estimation.assumptions.checks import SelfCheck
    from kendall.server.queue.sequence import SequenceState

log = logging.getLogger("kendall.live")
NEVER = float("inf")
# records of one stretch; where nobody looks (`--prediction-interval 0`) a new stretch begins
# unjudged
MOST = 50_000
WIDTH = 5
Stay = tuple[float, float, float, float, int]  # arrived, left, dispatched, server free, server


class SelfChecks:
    """Fed like an observer; `judge` judges the stretch since the last call."""

    def __init__(self, now: float, busy: BusyTime) -> None:
        self._busy = busy
        self._since = self._last = now
        self._area = 0.0  # request seconds of the stretch, by the counter
        self._number = 0  # in the system, by the counter
        self._arrived = 0
        self._ended: Counter[str] = Counter()  # outcomes of records
        self._stays = array("d")  # of records since the last call, a Stay after the other
        self._unrecorded: dict[
            str, tuple[SequenceState, float]
        ] = {}  # with an outcome; padded ones until their server is free
        self._broken: frozenset[str] = frozenset()

    def on_arrival(self, arrived_at: float, now: float) -> None:
        """In the system since `arrived_at`, which lies a little before now."""
        since = arrived_at if arrived_at > self._since else self._since
        self._area += self._number * (now - self._last) + now - since
        self._last = now
        self._number += 1
        self._arrived += 1

    def on_settle(self, sequence: SequenceState, now: float) -> None:
        """It has its outcome: out of the system since its last byte left, which may be a little
        before now.
        """
        left = now if sequence.at.released is None else sequence.at.released
        since = left if left > self._since else self._since
        self._area += self._number * (now - self._last) - (now - since)
        self._last = now
        self._number -= 1
        self._unrecorded[sequence.id] = sequence, left

    def on_record(self, record: Record, now: float) -> None:
        """The record of one that has left."""
        sequence, left = self._unrecorded.pop(record.request_id, (None, now))
        self._ended[record.outcome] += 1
        arrived = now if record.arrived_at is None else record.arrived_at
        begun = NEVER if record.dispatched_at is None else record.dispatched_at
        free = now if record.server_free_at is None else record.server_free_at
        released = left if record.released_at is None else record.released_at
        if len(self._stays) >= MOST * WIDTH:
            self._begin(now)
        self._stays.extend((arrived, released, begun, free, record.server_id or 0))
        if sequence is not None and sequence.stints:
            for stint in _stints(sequence):
                self._stays.extend(stint)

    def judge(
        self, now: float, unanswered: Iterable[SequenceState], waiting: int, servers: int
    ) -> list[SelfCheck]:
        """Judge the stretch that ends now and begin the next; a law that breaks is logged once."""
        import numpy as np  # noqa: PLC0415 - the gateway answers `--help` without numerics

        from kendall.queueing.estimation.assumptions.checks import (  # noqa: PLC0415
            conservation,
            little_law,
            utilisation_law,
        )

        self._count(now)
        here = list(unanswered)
        leaving = [
            each
            for each in self._unrecorded.values()
            if each[0].batch is not None and each[0].at.server_free is None
        ]
        in_service = sum(sequence.batch is not None for sequence in here) + len(leaving)
        going = [_stay(sequence, NEVER) for sequence in here] + [_stay(*each) for each in leaving]
        going += [
            stint
            for sequence in (*here, *(each for each, _ in leaving))
            for stint in _stints(sequence)
        ]
        stays = np.concatenate(
            (self._stays, np.array(going, dtype=np.float64).reshape(-1))
        ).reshape(-1, WIDTH)
        start, span = self._since, max(1e-9, now - self._since)
        found = [
            conservation(self._arrived, self._ended, waiting, in_service),
            little_law(self._area / span, stays[:, 0], stays[:, 1], start, now),
            utilisation_law(
                self._busy.fraction(start, now, servers),
                (stays[:, 2], stays[:, 3], stays[:, 4]),
                start,
                now,
                servers=servers,
            ),
        ]
        self._begin(now)
        self._tell(found)
        return found

    def _begin(self, now: float) -> None:
        self._count(now)
        self._since, self._area = now, 0.0
        self._stays = array("d")

    def _count(self, now: float) -> None:
        self._area += self._number * (now - self._last)
        self._last = now

    def _tell(self, found: list[SelfCheck]) -> None:
        broken = frozenset(check.name for check in found if not check.holds)
        for check in found:
            if check.name in broken - self._broken:
                values = check.name, check.measured, check.expected
                log.error(
                    "self-check %s fails: %.6g by counters, %.6g by records; do not trust the "
                    "measured delays until it holds",
                    *values,
                )
        self._broken = broken


def _stints(sequence: SequenceState) -> Iterator[Stay]:
    """The earlier ones of a preempted sequence, which stays in the system once."""
    for begun, ended, server in sequence.stints:
        yield ended, ended, begun, ended, server


def _stay(sequence: SequenceState, left: float) -> Stay:
    """Of one whose record is still to come."""
    batch, at = sequence.batch, sequence.at
    begun = NEVER if batch is None or at.dispatched is None else at.dispatched
    free = NEVER if at.server_free is None else at.server_free
    return (
        sequence.engine_request.request.arrived_at,
        left,
        begun,
        free,
        0 if batch is None else batch.server_id,
    )
