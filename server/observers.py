"""Everyone who is told what happens, as one: a fault of one of them (a full disk, a bug) harms neither the others nor the queue."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from queueing.record import Record
from server.batch import Batch, Observer
from server.ticket import Ticket

log = logging.getLogger("kendall")


class Observers:
    """Passes every event on. A fault is logged once for each observer and kind of fault, and counted."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._all = tuple(observers)
        self._told: set[tuple[str, str]] = set()
        self.faults = 0

    def on_arrival(self, ticket: Ticket) -> None:
        """See `Observer`."""
        for observer in self._all:
            try:
                observer.on_arrival(ticket)
            except Exception as error:  # noqa: BLE001
                self._fault(observer, error)

    def on_dispatch(self, batch: Batch) -> None:
        """See `Observer`."""
        for observer in self._all:
            try:
                observer.on_dispatch(batch)
            except Exception as error:  # noqa: BLE001
                self._fault(observer, error)

    def on_idle(self, server_id: int, at: float) -> None:
        """See `Observer`."""
        for observer in self._all:
            try:
                observer.on_idle(server_id, at)
            except Exception as error:  # noqa: BLE001
                self._fault(observer, error)

    def on_settle(self, ticket: Ticket) -> None:
        """See `Observer`."""
        for observer in self._all:
            try:
                observer.on_settle(ticket)
            except Exception as error:  # noqa: BLE001
                self._fault(observer, error)

    def on_record(self, record: Record) -> None:
        """See `Observer`."""
        for observer in self._all:
            try:
                observer.on_record(record)
            except Exception as error:  # noqa: BLE001
                self._fault(observer, error)

    def _fault(self, observer: Observer, error: Exception) -> None:
        self.faults += 1
        kind = type(observer).__name__, type(error).__name__
        if kind not in self._told:
            self._told.add(kind)
            log.error("%s failed, and goes on being told; later faults of this kind are not logged", kind[0], exc_info=error)
