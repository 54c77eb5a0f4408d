"""The gateway's end of the window: rows of numbers, collected as things happen, handed over whole
to the predicting process.

The producer computes nothing and keeps nothing: one append a request, and `take` gives away what
came since the last one, by exchanging arrays for empty ones. So its part in the event loop does not
grow with the window. The other end is `queueing.estimation.window.replica`. A `WindowDelta` is what
travels: pickled, 104 bytes a request that was dispatched and 16 an arrival.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from kendall.queueing.estimation.window.snapshot import CENSORED, ENDED, WIDTH, WITHOUT_LENGTH
from kendall.queueing.measurement.record import Record

MOST = 20_000  # rows kept: more say little more, and are slow to read


def _numbers() -> array[float]:
    return array("d")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowDelta:
    """What happened between two takes, on the producer's clock; `rows` are `WIDTH` numbers each
    (queueing.estimation.window.snapshot).
    """

    epoch: int
    epoch_at: float
    carried_from: float
    begun: bool  # an epoch began: arrivals, retries and lost ones of before are no more of it
    forgets_lengths: bool  # and so are the rows
    arrivals: array[float]  # of calls
    sequences: array[float]  # of each of them
    retries: array[float]
    lost: array[float]
    rows: array[float]
    refused: Mapping[str, array[float]] = field(default_factory=dict)  # calls, by the limit


class CallGroups:
    """Tells the sequences of one call, which arrive one after the other at one instant, from a
    call that begins.
    """

    __slots__ = ("_at", "_call")

    def __init__(self) -> None:
        self._call: str | None = None  # the last that arrived
        self._at = -math.inf

    def begins(self, at: float, call: str | None) -> bool:
        """Whether a sequence that arrives now is the first of its call; each without a call is."""
        first = call is None or (at, call) != (self._at, self._call)
        self._at, self._call = at, call
        return first


@dataclass(slots=True, kw_only=True)
class WindowProducer:
    """The gateway's side. Not for several threads. What nobody takes is bounded by `most`
    requests, the oldest forgotten first.
    """

    most: int = MOST
    epoch: int = 0
    epoch_at: float = -math.inf
    _arrivals: array[float] = field(default_factory=_numbers)
    _sequences: array[float] = field(default_factory=_numbers)
    _retries: array[float] = field(default_factory=_numbers)
    _lost: array[float] = field(default_factory=_numbers)
    _rows: array[float] = field(default_factory=_numbers)
    _refused: dict[str, array[float]] = field(default_factory=dict)
    _carried_from: float = -math.inf
    _calls: CallGroups = field(default_factory=CallGroups)
    _begun: bool = False
    _forgets_lengths: bool = False

    def begin_epoch(self, epoch: int, at: float, *, carry_lengths: bool = True) -> None:
        """From here on another policy, limit, patience or number of servers holds."""
        self.epoch, self.epoch_at, self._begun = epoch, at, True
        self._arrivals, self._sequences, self._retries, self._lost = (
            _numbers(),
            _numbers(),
            _numbers(),
            _numbers(),
        )
        self._refused = {}
        self._calls = CallGroups()
        if not carry_lengths:
            self._rows = _numbers()
            self._carried_from, self._forgets_lengths = at, True

    def on_arrival(self, at: float, *, retry: bool = False, call: str | None = None) -> bool:
        """A sequence arrived, whatever becomes of it. Those of one `call`, one after the other at
        one instant, are one arrival.

        Returns whether its call begins with it.
        """
        if not self._calls.begins(at, call) and self._sequences:
            self._sequences[-1] += 1
            return False
        _append(self._arrivals, at, self.most)
        _append(self._sequences, 1.0, self.most)
        if retry:
            _append(self._retries, at, self.most)
        return True

    def on_refused(self, at: float, limit: str) -> None:
        """A call came that this limit kept out of the queue: it is none of the arrivals."""
        _append(self._refused.setdefault(limit, _numbers()), at, self.most)

    def on_record(self, record: Record) -> None:
        """A request met its end. One that was never dispatched only counts as lost."""
        arrived_at, dispatched_at = record.arrived_at, record.dispatched_at
        if arrived_at is None:
            return
        if dispatched_at is None:
            if record.epoch in (None, self.epoch):
                _append(
                    self._lost,
                    arrived_at if record.released_at is None else record.released_at,
                    self.most,
                )
            return
        rows = self._rows
        rows.extend(row(record, arrived_at, dispatched_at))
        if len(rows) > 2 * self.most * WIDTH:
            del rows[: self.most * WIDTH]

    def take(self) -> WindowDelta:
        """What came since the last take; it is forgotten here."""
        delta = WindowDelta(
            epoch=self.epoch,
            epoch_at=self.epoch_at,
            carried_from=self._carried_from,
            begun=self._begun,
            forgets_lengths=self._forgets_lengths,
            arrivals=self._arrivals,
            sequences=self._sequences,
            retries=self._retries,
            lost=self._lost,
            rows=self._rows,
            refused=self._refused,
        )
        self._refused = {}
        self._arrivals, self._sequences, self._retries = _numbers(), _numbers(), _numbers()
        self._lost, self._rows = _numbers(), _numbers()
        self._begun = self._forgets_lengths = False
        return delta


def _append(instants: array[float], at: float, most: int) -> None:
    instants.append(at)
    if len(instants) > 2 * most:
        del instants[:most]


def row(record: Record, arrived_at: float, dispatched_at: float) -> tuple[float, ...]:
    """The numbers of a dispatched request."""
    produced, predicted = record.output_tokens or 0, record.predicted_output_tokens
    if record.preemptions and record.queueing_delay is not None:
        dispatched_at = arrived_at + record.queueing_delay  # as if all its waits came first
    free_at = record.released_at if record.server_free_at is None else record.server_free_at
    completed = record.outcome == "completed"
    ending = CENSORED if record.clipped or not completed else ENDED
    if produced < 1 or record.outcome in ("failed", "rejected"):
        ending = WITHOUT_LENGTH
    return (
        arrived_at,
        dispatched_at,
        math.nan if free_at is None else free_at,
        math.nan if record.released_at is None or not completed else record.released_at,
        -1.0 if record.batch_id is None else record.batch_id,
        record.batch_size or 1,
        record.server_id or 0,
        record.computed_tokens,
        produced,
        ending,
        record.epoch or 0,
        math.nan if predicted is None else predicted,
        record.preemptions or 0,
        math.nan if record.max_output_tokens is None else record.max_output_tokens,
        record.cached_tokens or 0,
        math.nan if record.first_token_at is None else record.first_token_at,
    )
