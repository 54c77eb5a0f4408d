"""The batches whose energy is metered: an observer's view of when a server was busy, and with what."""

from __future__ import annotations

from server.batch import Batch
from server.energy.meter import EnergyMeter
from server.ticket import Ticket


class MeteredBatches:
    """Tells the meter of every busy stretch of a server: a batch, or for `continuous` all that was served in it."""

    def __init__(self, meter: EnergyMeter) -> None:
        self._meter = meter
        self._going: dict[int, tuple[float, list[Ticket]]] = {}

    def on_dispatch(self, batch: Batch) -> None:
        """Begins a stretch, or joins it."""
        if self._meter.source is None:
            return
        _, tickets = self._going.setdefault(batch.server_id, (batch.dispatched_at, []))
        tickets += batch.tickets

    def on_idle(self, server_id: int, at: float) -> None:
        """Ends it."""
        begun, tickets = self._going.pop(server_id, (at, []))
        if tickets and not any(ticket.interruptions for ticket in tickets):  # a restart draws joules too
            self._meter.on_batch(len(tickets), begun, at, sum(ticket.ending.output_tokens for ticket in tickets))
