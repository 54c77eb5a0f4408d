"""What one sender is given: its rows of the timetable, and how they are sent. Data only; it
travels to other processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from kendall.loadgen.datasets import Prompt, Prompts
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
    cancelled: int = 0  # their clients hung up
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

    def exchange(
        self, index: int, instant: float, address: Address, prompt: Prompt | None = None
    ) -> LoadExchange:
        """The request of one row, ready to be sent; with its own prompt, or another."""
        output_tokens = int(self.timetable.output_tokens[index])
        limit = self.target.limit(output_tokens, self.largest)
        predictions = self.timetable.predicted_output_tokens
        predicted = None if predictions is None else float(predictions[index]) or None
        flow, model = _at(self.timetable.flow, index), _at(self.timetable.model, index)
        request_id = f"{self.prefix}-{self.rows[index]}"
        body = self.target.body(
            self.prompts[index] if prompt is None else prompt,
            output_tokens,
            limit,
            self.seed,
            predicted,
            model=model,
        )
        return LoadExchange(
            request_id=request_id,
            intended_at=instant,
            message=address.message(body, request_id, flow),
            prompt_tokens=int(self.timetable.prompt_tokens[index]),
            max_output_tokens=limit,
            predicted_output_tokens=predicted,
            flow=flow,
            model=model,
            sender_id=self.sender_id,
            token_times=self.options.token_times,
            turn=_at(self.timetable.turn, index),
            hang_up_after=_at(self.timetable.hang_up_after, index),
            hang_up_tokens=_at(self.timetable.hang_up_tokens, index),
        )


def _at(column: NDArray[Any] | None, index: int) -> Any:
    """What one row has in a column; None without the column, and for 0."""
    return None if column is None else column[index].item() or None


def order_of(record: Record) -> tuple[float, int]:
    """Sorts records as they were sent: by row, but turns of conversations by instant."""
    at = record.intended_at if record.turn is not None else None
    return at or 0.0, row_of(record)


def row_of(record: Record) -> int:
    """The number of a record's row in the run's timetable: the end of its id."""
    return int(record.request_id.rpartition("-")[2])
