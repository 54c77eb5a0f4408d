"""What one sender is given: its rows of the timetable, and how they are sent. Data only; it
travels to other processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kendall.loadgen.datasets import Prompts
from kendall.loadgen.sending.client.client import LoadExchange
from kendall.loadgen.sending.client.target import Target
from kendall.loadgen.sending.client.wire import Address
from kendall.policies.text import counted
from kendall.queueing.arrivals.timetable import FloatArray, IntArray, Timetable
from kendall.queueing.measurement.record import Record


@dataclass(slots=True)
class Counters:
    """How far a run has come."""

    asked: int
    sent: int = 0
    completed: int = 0
    other: int = 0  # answered, but not completed
    refused: int = 0  # of these: rejected or abandoned by a server that is not unavailable
    held: int = 0  # had to wait for a place among `max_concurrency`
    uncounted: int = 0  # completed without usage: their tokens are the events of their streams
    # why nothing more was sent: too many failures in a row, or a run file that cannot be written
    stopped: str | None = None

    def missing(self) -> str | None:
        """The requests that a run that stopped has not sent, and why."""
        if self.stopped is None:
            return None
        unsent = f"{self.asked - self.sent} of {counted(self.asked, 'request')}"
        return f"{self.stopped}; {unsent} not sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoopUsers:
    """Users who each send their next request when the answer to their last one has come."""

    users: int
    think_times: FloatArray | None = None  # seconds before each request, by row
    duration: float | None = None  # seconds after which nobody sends any more


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    """How the requests of a timetable are sent."""

    processes: int = 1  # senders
    max_concurrency: int | None = None  # in flight at once; makes an open loop partly closed
    closed_loop: ClosedLoopUsers | None = None  # leaves the instants of the timetable aside
    drain_limit: float = 600.0  # seconds for the answers after the last request was sent
    max_errors: int = 0  # failures in a row that end the run; 0: none do
    token_times: bool = False

    @property
    def most_at_once(self) -> int | None:
        """Requests in flight, at most; None: no bound is known."""
        return self.closed_loop.users if self.closed_loop else self.max_concurrency


OPEN_LOOP = SendOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class SendingJob:
    """The rows of one sender and how they are sent."""

    target: Target
    timetable: Timetable
    prompts: Prompts
    rows: IntArray  # the number of each row in the whole run's timetable
    largest: int  # output tokens, over the whole run
    seed: int
    prefix: str  # of request ids: the run's name
    sender_id: int = 0
    options: SendOptions = OPEN_LOOP

    def __len__(self) -> int:
        return len(self.timetable)

    def exchange(self, index: int, instant: float, address: Address) -> LoadExchange:
        """The request of one row, ready to be sent."""
        output_tokens = int(self.timetable.output_tokens[index])
        limit = self.target.limit(output_tokens, self.largest)
        predictions = self.timetable.predicted_output_tokens
        predicted = None if predictions is None else float(predictions[index]) or None
        flow = None if self.timetable.flow is None else str(self.timetable.flow[index])
        request_id = f"{self.prefix}-{self.rows[index]}"
        body = self.target.body(self.prompts[index], output_tokens, limit, self.seed, predicted)
        return LoadExchange(
            request_id=request_id,
            intended_at=instant,
            message=address.message(body, request_id, flow),
            prompt_tokens=int(self.timetable.prompt_tokens[index]),
            max_output_tokens=limit,
            predicted_output_tokens=predicted,
            flow=flow,
            sender_id=self.sender_id,
            token_times=self.options.token_times,
        )


def row_of(record: Record) -> int:
    """The number of a record's row in the run's timetable: the end of its id."""
    return int(record.request_id.rpartition("-")[2])
