"""Who observes a batcher, and all of them as one: a fault of one (a full disk, a bug) harms neither
the others nor the queue.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from queueing.measurement.record import Record
from server.queue.sequence import Batch, SequenceState

log = logging.getLogger("kendall")


class Observer(Protocol):
    """Who is told what happens: metrics, the run file, the live model. Must not wait."""

    def on_arrival(self, sequence: SequenceState) -> None:
        """A request joined the queue."""

    def on_dispatch(self, batch: Batch) -> None:
        """A batch (or one request of a continuous engine) began."""

    def on_idle(self, server_id: int, at: float) -> None:
        """A server holds nothing any more."""

    def on_settle(self, sequence: SequenceState) -> None:
        """A request met its one outcome: it has left the system."""

    def on_record(self, record: Record) -> None:
        """A request met its one outcome and everything about it is known."""


class Observers:
    """Passes every event on to each, in order. A fault is counted, and logged once for each
    observer and kind.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)
        self._logged: set[tuple[str, str]] = set()
        self.faults = 0

    def add(self, observer: Observer, *, first: bool = False) -> None:
        """One more, which sees every event after the others, or before them."""
        own = self._observers
        self._observers = (observer, *own) if first else (*own, observer)

    def on_arrival(self, sequence: SequenceState) -> None:
        """See `Observer`."""
        for observer in self._observers:
            try:
                observer.on_arrival(sequence)
            except Exception as error:  # noqa: BLE001
                self._fault(observer, error)

    def on_dispatch(self, batch: Batch) -> None:
        """See `Observer`."""
        for observer in self._observers:
            try:
                observer.on_dispatch(batch)
            except Exception as error:  # noqa: BLE001
                self._fault(observer, error)

    def on_idle(self, server_id: int, at: float) -> None:
        """See `Observer`."""
        for observer in self._observers:
            try:
                observer.on_idle(server_id, at)
            except Exception as error:  # noqa: BLE001
                self._fault(observer, error)

    def on_settle(self, sequence: SequenceState) -> None:
        """See `Observer`."""
        for observer in self._observers:
            try:
                observer.on_settle(sequence)
            except Exception as error:  # noqa: BLE001
                self._fault(observer, error)

    def on_record(self, record: Record) -> None:
        """See `Observer`."""
        for observer in self._observers:
            try:
                observer.on_record(record)
            except Exception as error:  # noqa: BLE001
                self._fault(observer, error)

    def _fault(self, observer: Observer, error: Exception) -> None:
        self.faults += 1
        name, kind = type(observer).__name__, type(error).__name__
        if (name, kind) not in self._logged:
            self._logged.add((name, kind))
            log.error(
                "%s failed; it stays active, and further failures of it are not logged",
                name,
                exc_info=error,
            )
