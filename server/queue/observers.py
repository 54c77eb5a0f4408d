"""Who observes a batcher, and all of them as one: a fault of one (a full disk, a bug) harms neither
the others nor the queue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kendall.queueing.measurement.record import Record
from kendall.server.queue.sequence import Batch, SequenceState

log = logging.getLogger("kendall")


class Observer:
    """Receives the batcher's events: metrics, the run file, the live model. A subclass overrides
    the methods of the events that it needs; they must not block.
    """

    def on_arrival(self, sequence: SequenceState) -> None:
        """A request joined the queue."""

    def on_dispatch(self, batch: Batch) -> None:
        """A batch (or one request of a continuous engine) began."""

    def on_preempt(self, sequence: SequenceState) -> None:
        """A request leaves its batch, and the server, for the queue; `batch` is still that one."""

    def on_idle(self, server_id: int, at: float) -> None:
        """A server holds nothing any more."""

    def on_settle(self, sequence: SequenceState) -> None:
        """A request met its one outcome: it has left the system."""

    def on_record(self, record: Record) -> None:
        """A request met its one outcome and everything about it is known."""


class Observers:
    """Passes every event on to each that hears it, in order. A fault is counted, and logged once
    for each observer and kind.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._logged: set[tuple[str, str]] = set()
        self.faults = 0
        self._set(tuple(observers))

    def add(self, observer: Observer, *, first: bool = False) -> None:
        """One more, which sees every event after the others, or before them."""
        own = self._observers
        self._set((observer, *own) if first else (*own, observer))

    def _set(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self._on_arrival = self._hearing("on_arrival")
        self._on_dispatch = self._hearing("on_dispatch")
        self._on_preempt = self._hearing("on_preempt")
        self._on_idle = self._hearing("on_idle")
        self._on_settle = self._hearing("on_settle")
        self._on_record = self._hearing("on_record")

    def _hearing(self, event: str) -> Sequence[tuple[Observer, Callable[..., Any]]]:
        silent = getattr(Observer, event)
        return tuple(
            (observer, getattr(observer, event))
            for observer in self._observers
            if getattr(type(observer), event, None) is not silent
        )

    def on_arrival(self, sequence: SequenceState) -> None:
        """See `Observer`."""
        for observer, hear in self._on_arrival:
            try:
                hear(sequence)
            except Exception as error:  # noqa: BLE001
                self._fault(observer, error)

    def on_dispatch(self, batch: Batch) -> None:
        """See `Observer`."""
        for observer, hear in self._on_dispatch:
            try:
                hear(batch)
            except Exception as error:  # noqa: BLE001
                self._fault(observer, error)

    def on_preempt(self, sequence: SequenceState) -> None:
        """See `Observer`."""
        for observer, hear in self._on_preempt:
            try:
                hear(sequence)
            except Exception as error:  # noqa: BLE001
                self._fault(observer, error)

    def on_idle(self, server_id: int, at: float) -> None:
        """See `Observer`."""
        for observer, hear in self._on_idle:
            try:
                hear(server_id, at)
            except Exception as error:  # noqa: BLE001
                self._fault(observer, error)

    def on_settle(self, sequence: SequenceState) -> None:
        """See `Observer`."""
        for observer, hear in self._on_settle:
            try:
                hear(sequence)
            except Exception as error:  # noqa: BLE001
                self._fault(observer, error)

    def on_record(self, record: Record) -> None:
        """See `Observer`."""
        for observer, hear in self._on_record:
            try:
                hear(record)
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
