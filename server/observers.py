"""An observer whose faults (a full disk, a bug) harm neither the other observers nor the queue."""

from __future__ import annotations

import logging

from queueing.record import Record
from server.batch import Batch, Observer
from server.ticket import Ticket

log = logging.getLogger("kendall")


class Guarded:
    """Passes every event on. A fault is counted, and logged once for each kind."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._told: set[str] = set()
        self.faults = 0

    def on_arrival(self, ticket: Ticket) -> None:
        """See `Observer`."""
        try:
            self._observer.on_arrival(ticket)
        except Exception as error:  # noqa: BLE001
            self._fault(error)

    def on_dispatch(self, batch: Batch) -> None:
        """See `Observer`."""
        try:
            self._observer.on_dispatch(batch)
        except Exception as error:  # noqa: BLE001
            self._fault(error)

    def on_idle(self, server_id: int, at: float) -> None:
        """See `Observer`."""
        try:
            self._observer.on_idle(server_id, at)
        except Exception as error:  # noqa: BLE001
            self._fault(error)

    def on_settle(self, ticket: Ticket) -> None:
        """See `Observer`."""
        try:
            self._observer.on_settle(ticket)
        except Exception as error:  # noqa: BLE001
            self._fault(error)

    def on_record(self, record: Record) -> None:
        """See `Observer`."""
        try:
            self._observer.on_record(record)
        except Exception as error:  # noqa: BLE001
            self._fault(error)

    def _fault(self, error: Exception) -> None:
        self.faults += 1
        kind = type(error).__name__
        if kind not in self._told:
            self._told.add(kind)
            name = type(self._observer).__name__
            log.error("%s failed; it stays active, and further failures of it are not logged", name, exc_info=error)
