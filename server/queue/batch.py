"""What one dispatch started, and who is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from policies import Policy, Request
from queueing.measurement.record import Record

if TYPE_CHECKING:
    from server.queue.ticket import Ticket


class Observer(Protocol):
    """Who is told what happens: metrics, the run file, the live model. Must not wait."""

    def on_arrival(self, ticket: Ticket) -> None:
        """A request joined the queue."""

    def on_dispatch(self, batch: Batch) -> None:
        """A batch (or one request of a continuous engine) began."""

    def on_idle(self, server_id: int, at: float) -> None:
        """A server holds nothing any more."""

    def on_settle(self, ticket: Ticket) -> None:
        """A request met its one outcome: it has left the system."""

    def on_record(self, record: Record) -> None:
        """A request met its one outcome and everything about it is known."""


@dataclass(slots=True, eq=False)
class Batch:
    """What one Dispatch started, under the policy then in force."""

    id: int
    server_id: int
    policy: Policy
    policy_text: str
    dispatched_at: float
    forming_until: float  # instant its last member arrived, or max_wait passed (fixed)
    tickets: list[Ticket]
    open: set[str]  # ids whose own end has not come

    def forming_delay(self, request: Request) -> float:
        """Seconds this request waited for company."""
        return max(0.0, self.forming_until - request.arrived_at)
