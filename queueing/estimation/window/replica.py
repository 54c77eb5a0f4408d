"""The predicting process's copy of the window: extended by deltas, read as arrays.

An epoch ends the window: after a switch of policy, limit, patience or servers nothing measured
before it is averaged with what follows, EXCEPT token counts: how long prompts and answers are is
the clients' matter. Those of earlier epochs are kept for the length estimate only, where limits
that differ are what its censoring is for; an epoch begun with `carry_lengths=False` (another model,
another system prompt) drops them too.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kendall.queueing.estimation.change import Vector
from kendall.queueing.estimation.window.producer import MOST, WindowDelta
from kendall.queueing.estimation.window.snapshot import COLUMN, WIDTH, Snapshot, picked

SECONDS = 300.0


class StreamTail:
    """The last `most` rows of a stream (at least), column after column in memory, so that
    reading one does not read all.
    """

    def __init__(self, most: int, width: int) -> None:
        self._most = most
        self._kept: npt.NDArray[np.float64] = np.empty((width, 0))
        self._end = 0
        self._forgot = False

    def extend(self, numbers: array[float]) -> None:
        """With whole rows; copies them."""
        width, room = self._kept.shape
        new = (
            np.frombuffer(numbers, dtype=np.float64).reshape(-1, width)
            if numbers
            else np.empty((0, width))
        )
        self._forgot = self.full or len(new) > self._most
        new = new[-self._most :]
        if self._end + len(new) > room:
            self._make_room(len(new))
        self._kept[:, self._end : self._end + len(new)] = new.T
        self._end += len(new)

    def _make_room(self, count: int) -> None:
        old = self.rows
        kept = np.empty((self._kept.shape[0], min(2 * self._most, 2 * (len(old) + count)) + count))
        kept[:, : len(old)] = old.T
        self._kept, self._end = kept, len(old)

    @property
    def rows(self) -> npt.NDArray[np.float64]:
        """The last `most`: a view, which holds until the next `extend`."""
        return self._kept[:, max(0, self._end - self._most) : self._end].T

    @property
    def full(self) -> bool:
        """Whether older rows were forgotten."""
        return self._forgot or self._end > self._most

    def after(self, start: float) -> Vector:
        """The first column's values beyond that."""
        values = self.rows[:, 0]
        return values[values > start]

    def clear(self) -> None:
        """Forget all."""
        self._end, self._forgot = 0, False


@dataclass(slots=True, kw_only=True)
class WindowReplica:
    """A window of `seconds`, at most `most` arrivals and `most` ended requests."""

    seconds: float = SECONDS
    most: int = MOST
    _delta: WindowDelta | None = None  # the last
    _tails: dict[str, StreamTail] = field(default_factory=dict)
    _refused: dict[str, StreamTail] = field(default_factory=dict)  # by the limit
    _shortest: float = math.inf  # queueing delay so far, seconds

    def __post_init__(self) -> None:
        names = ("arrivals", "sequences", "retries", "lost", "rows")
        self._tails = {
            name: StreamTail(self.most, WIDTH if name == "rows" else 1) for name in names
        }

    def add(self, delta: WindowDelta) -> None:
        """The next delta of the producer; none may be left out."""
        for name, tail in self._tails.items():
            if delta.forgets_lengths if name == "rows" else delta.begun:
                tail.clear()
            tail.extend(getattr(delta, name))
        if delta.begun:
            self._refused = {}
        for limit, instants in delta.refused.items():
            self._refused.setdefault(limit, StreamTail(self.most, 1)).extend(instants)
        self._delta = delta
        if delta.rows:
            rows = np.frombuffer(delta.rows, dtype=np.float64).reshape(-1, WIDTH)
            delays = rows[:, COLUMN["dispatched_at"]] - rows[:, COLUMN["arrived_at"]]
            known = np.isfinite(delays)
            self._shortest = float(np.min(delays, initial=self._shortest, where=known))

    def snapshot(
        self,
        policy: str,
        now: float,
        *,
        in_service: tuple[tuple[float, int], ...] = (),
        ended: tuple[tuple[float, int], ...] = (),
        waiting: int = 0,
        servers: int = 1,
    ) -> Snapshot:
        """Arrays of what lies in the window; does not modify it. Raises ValueError before
        anything was added.
        """
        if self._delta is None:
            raise ValueError(
                "got a replica without a delta; expected at least one `add` before a snapshot"
            )
        start = self._start(self._delta.epoch_at, now)
        rows = self._tails["rows"].rows
        arrivals, sequences = self._arrived_after(start)
        # dispatched in the window, or in service as it began
        dispatched, freed = rows[:, COLUMN["dispatched_at"]], rows[:, COLUMN["server_free_at"]]
        kept = (dispatched >= now - self.seconds) | (freed > start)
        return Snapshot(
            policy=policy,
            epoch=self._delta.epoch,
            epoch_at=self._delta.epoch_at,
            start=start,
            now=now,
            arrivals=arrivals,
            sequences=sequences if (sequences > 1).any() else None,
            rows=picked(rows, kept),
            in_service=in_service,
            ended=ended,
            waiting=waiting,
            retries=self._tails["retries"].after(start).size,
            lost_at=self._tails["lost"].after(start),
            refused={limit: tail.after(start).size for limit, tail in self._refused.items()},
            servers=servers,
            carried_from=max(self._delta.carried_from, now - self.seconds),
            shortest_delay=self._shortest,
        )

    def _start(self, epoch_at: float, now: float) -> float:
        full = [
            float(tail.rows[0, 0])
            for tail in (self._tails["arrivals"], *self._refused.values())
            if tail.full
        ]
        return max(epoch_at, now - self.seconds, *full)

    def _arrived_after(self, start: float) -> tuple[Vector, Vector]:
        """Instants of the kernel in their order, not in that of reading, and the sequences of each
        call.
        """
        instants = self._tails["arrivals"].rows[:, 0]
        order = np.argsort(instants, kind="stable")
        within = order[instants[order] > start]
        return instants[within], self._tails["sequences"].rows[:, 0][within]
