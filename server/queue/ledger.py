"""The sequences that a batcher answers for: those without an outcome, and those whose record waits
for the end of their service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kendall.queueing.measurement.record import Outcome
from kendall.server.queue.observers import Observers
from kendall.server.queue.sequence import SequenceState


class Ledger:
    """Gives each sequence one outcome and hands out its record once all of it is known."""

    def __init__(self, now: Callable[[], float], observers: Observers) -> None:
        self.now = now
        self.observers = observers
        self.unsettled: dict[str, SequenceState] = {}  # without an outcome, waiting or in service
        self.moved_at = now()  # last arrival, outcome or pause
        self._in_service = 0  # with an outcome, in service still: its record is not complete
        self._changed = asyncio.Event()

    @property
    def unrecorded(self) -> int:
        """Sequences that have arrived and whose record has not been handed out."""
        return len(self.unsettled) + self._in_service

    def add(self, sequences: Sequence[SequenceState]) -> None:
        """They have arrived. Raises ValueError where an id is in use."""
        for sequence in sequences:
            if sequence.id in self.unsettled:
                raise ValueError(f"request id {sequence.id!r} is in use")
            self.unsettled[sequence.id] = sequence
        self.moved_at = self.now()

    def settle(self, sequence: SequenceState, outcome: Outcome) -> None:
        """The sequence has its outcome; its record follows with the end of its service."""
        sequence.outcome, sequence.stream = outcome, None
        self.unsettled.pop(sequence.id, None)
        self.moved_at = self.now()
        self.observers.on_settle(sequence)
        if sequence.at.server_free is not None or sequence.batch is None:
            self.observers.on_record(sequence.record())
        else:
            self._in_service += 1
        self.notify()

    def freed(self, sequence: SequenceState, at: float) -> None:
        """Its service ended: the instant that `on_idle` reports, too. The process may lose the
        CPU between two readings of the clock.
        """
        sequence.at.server_free = at
        if sequence.outcome is not None:
            self._in_service -= 1
            self.observers.on_record(sequence.record())

    def notify(self) -> None:
        """Wake the tasks that wait for a change."""
        self._changed.set()

    async def change(self) -> None:
        """Return after the next outcome, idle server or reopening."""
        self._changed.clear()
        await self._changed.wait()
