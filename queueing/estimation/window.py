"""What the last minutes showed, one row a request: fed as things happen, read as arrays.

The feeding side is cheap (one append of numbers) and never computes; `snapshot` copies at most `most` rows into arrays that
can be handed to another process. An epoch ends the window: after a switch of policy, limit, patience or servers nothing measured
before it is averaged with what follows, EXCEPT token counts: how long prompts and answers are is the clients' matter. Those of
earlier epochs are kept for the length estimate only, where limits that differ are what its censoring is for; an epoch begun
with `carry_lengths=False` (another model, another system prompt) drops them too.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from queueing.estimation.change import Vector
from queueing.record import Record

SECONDS = 300.0
MOST = 20_000  # rows kept: more say little more, and are slow to hand over
FIELDS = (
    "arrived_at",
    "dispatched_at",
    "server_free_at",
    "released_at",
    "batch_id",
    "batch_size",
    "server_id",
    "prompt_tokens",
    "output_tokens",
    "ending",
    "epoch",
)
ENDED, CENSORED, WITHOUT_LENGTH = 0.0, 1.0, 2.0  # values of `ending`: by itself or its client's limit; cut by the gateway or left; failed
WIDTH = len(FIELDS)
COLUMN = {name: index for index, name in enumerate(FIELDS)}


@dataclass(frozen=True, eq=False, kw_only=True)
class Snapshot:
    """The window at one instant. Instants and durations in seconds on the feeder's clock; nan where a row does not know.

    `rows` are dispatched requests that met their end, in the order of their ends, those of earlier epochs included (`mine`
    says which are of this one); `arrivals` all arrivals of this epoch in the window, refused and lost ones too.
    """

    policy: str
    epoch: int
    epoch_at: float
    start: float  # of the window: the epoch's start, or later
    now: float
    arrivals: Vector
    rows: npt.NDArray[np.float64]
    in_service: tuple[tuple[float, int], ...] = ()  # dispatched_at, output tokens so far
    waiting: int = 0
    retries: int = 0  # arrivals that said they are a client library's second try (`x-stainless-retry-count`)
    lost_at: Vector = field(default_factory=lambda: np.empty(0))  # ends of those that were never dispatched
    servers: int = 1
    carried_from: float = -math.inf  # instant from which on lengths may be used

    def column(self, name: str) -> Vector:
        """One field of every row."""
        values: Vector = self.rows[:, COLUMN[name]]
        return values

    @property
    def mine(self) -> Snapshot:
        """The rows of this epoch that arrived and were dispatched in the window."""
        kept = (self.column("epoch") == self.epoch) & (self.column("arrived_at") >= self.start)
        return self.having(self.rows[kept])

    def having(self, rows: npt.NDArray[np.float64]) -> Snapshot:
        """With other rows."""
        return Snapshot(**{name: getattr(self, name) for name in self.__dataclass_fields__ if name != "rows"}, rows=rows)

    def since(self, start: float) -> Snapshot:
        """The later part of the window."""
        names = [name for name in self.__dataclass_fields__ if name not in ("start", "arrivals")]
        return Snapshot(**{name: getattr(self, name) for name in names}, start=start, arrivals=self.arrivals[self.arrivals > start])

    @property
    def queueing_delay(self) -> Vector:
        """Of the rows, in order of arrival."""
        order = np.argsort(self.column("arrived_at"), kind="stable")
        delays: Vector = (self.column("dispatched_at") - self.column("arrived_at"))[order]
        return delays

    @property
    def sojourn_time(self) -> Vector:
        """Of the rows that were released, in order of arrival."""
        order = np.argsort(self.column("arrived_at"), kind="stable")
        sojourns = (self.column("released_at") - self.column("arrived_at"))[order]
        kept: Vector = sojourns[np.isfinite(sojourns)]
        return kept


@dataclass(slots=True)
class Window:
    """The feeding side. Not for several threads."""

    seconds: float = SECONDS
    most: int = MOST
    epoch: int = 0
    epoch_at: float = -math.inf
    _arrivals: array[float] = field(default_factory=lambda: array("d"))
    _retries: array[float] = field(default_factory=lambda: array("d"))
    _lost: array[float] = field(default_factory=lambda: array("d"))
    _rows: array[float] = field(default_factory=lambda: array("d"))
    _carried_from: float = -math.inf

    def begin_epoch(self, epoch: int, at: float, *, carry_lengths: bool = True) -> None:
        """From here on another policy, limit, patience or number of servers holds."""
        self.epoch, self.epoch_at = epoch, at
        for instants in (self._arrivals, self._retries, self._lost):
            del instants[:]
        if not carry_lengths:
            del self._rows[:]
            self._carried_from = at

    def on_arrival(self, at: float, *, retry: bool = False) -> None:
        """A request arrived, whatever becomes of it."""
        self._arrivals.append(at)
        if retry:
            self._retries.append(at)
        if len(self._arrivals) > 2 * self.most:
            del self._arrivals[: self.most]

    def on_record(self, record: Record) -> None:
        """A request met its end. One that was never dispatched only counts as lost."""
        arrived_at, dispatched_at = record.arrived_at, record.dispatched_at
        if arrived_at is None:
            return
        if dispatched_at is None:
            if record.epoch in (None, self.epoch):
                self._lost.append(arrived_at if record.released_at is None else record.released_at)
            return
        self._rows.extend(row(record, arrived_at, dispatched_at))
        if len(self._rows) > 2 * self.most * WIDTH:
            del self._rows[: self.most * WIDTH]

    def snapshot(
        self, policy: str, now: float, *, in_service: tuple[tuple[float, int], ...] = (), waiting: int = 0, servers: int = 1
    ) -> Snapshot:
        """Arrays of what lies in the window; does not modify it."""
        rows = np.frombuffer(self._rows, dtype=np.float64).reshape(-1, WIDTH)[-self.most :].copy()
        arrivals = np.array(self._arrivals[-self.most :])
        start = max(self.epoch_at, now - self.seconds)
        if len(self._arrivals) > self.most:
            start = max(start, float(arrivals[0]))
        return Snapshot(
            policy=policy,
            epoch=self.epoch,
            epoch_at=self.epoch_at,
            start=start,
            now=now,
            arrivals=arrivals[arrivals > start],
            rows=rows[rows[:, COLUMN["dispatched_at"]] >= now - self.seconds],
            in_service=in_service,
            waiting=waiting,
            retries=_after(self._retries, start).size,
            lost_at=_after(self._lost, start),
            servers=servers,
            carried_from=max(self._carried_from, now - self.seconds),
        )


def row(record: Record, arrived_at: float, dispatched_at: float) -> tuple[float, ...]:
    """The numbers of a dispatched request."""
    produced = record.output_tokens or 0
    free_at = record.released_at if record.server_free_at is None else record.server_free_at
    return (
        arrived_at,
        dispatched_at,
        math.nan if free_at is None else free_at,
        math.nan if record.released_at is None or record.outcome != "completed" else record.released_at,
        -1.0 if record.batch_id is None else record.batch_id,
        record.batch_size or 1,
        record.server_id or 0,
        record.prompt_tokens or 0,
        produced,
        _ending(record, produced),
        record.epoch or 0,
    )


def _ending(record: Record, produced: int) -> float:
    if produced < 1 or record.outcome in ("failed", "rejected"):
        return WITHOUT_LENGTH
    return CENSORED if record.clipped or record.outcome != "completed" else ENDED


def _after(instants: array[float], start: float) -> Vector:
    found = np.array(instants)
    return found[found > start]


def snapshot_of(records: list[Record], policy: str, start: float, now: float, *, epoch: int = 0, servers: int = 1) -> Snapshot:
    """The same from a finished run: requests that arrived in (start, now]."""
    window = Window(seconds=math.inf, most=max(1, len(records)), epoch=epoch, epoch_at=start)
    for record in records:
        if record.arrived_at is not None and start < record.arrived_at <= now:
            window.on_arrival(record.arrived_at)
            window.on_record(record)
    found = window.snapshot(policy, now, servers=servers)
    return Snapshot(
        **{name: getattr(found, name) for name in found.__dataclass_fields__ if name != "arrivals"}, arrivals=np.sort(found.arrivals)
    )
