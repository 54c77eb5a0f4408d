"""The window at one instant, as arrays: what every estimator reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kendall.queueing.estimation.change import Vector
from kendall.queueing.measurement.warm_up import find_warm_up

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
    "predicted_tokens",
    "preemptions",
    "max_output_tokens",
    "cached_tokens",
    "first_token_at",
)
ENDED, CENSORED, WITHOUT_LENGTH = (
    0.0,
    1.0,
    2.0,
)  # values of `ending`: by itself or its client's limit; cut by the gateway or left; failed
WIDTH = len(FIELDS)
COLUMN = {name: index for index, name in enumerate(FIELDS)}


@dataclass(frozen=True, eq=False, kw_only=True)
class Snapshot:
    """The window at one instant. Instants and durations in seconds on the producer's clock; nan
    where a row does not know.

    A request that was preempted counts as dispatched when it would have been after all its waits.

    `rows` are dispatched requests that met their end, in the order of their ends, those of earlier
    epochs included (`mine` says which are of this one), one for each sequence; `arrivals` all calls
    of this epoch that arrived in the window, lost ones too.
    """

    policy: str
    epoch: int
    epoch_at: float
    start: float  # of the window: the epoch's start, or later
    now: float
    arrivals: Vector
    rows: npt.NDArray[np.float64]
    in_service: tuple[tuple[float, int], ...] = ()  # dispatched_at, output tokens so far
    ended: tuple[
        tuple[float, int], ...
    ] = ()  # the same of those whose own end has come in a padded batch that goes on
    waiting: int = 0
    # arrivals that said they are a client library's second try (`x-stainless-retry-count`)
    retries: int = 0
    lost_at: Vector = field(
        default_factory=lambda: np.empty(0)
    )  # ends of those that were never dispatched
    # calls that a limit of the gateway kept out, by its name: none of the arrivals
    refused: Mapping[str, int] = field(default_factory=dict)
    servers: int = 1
    sequences: Vector | None = None  # of each of the arrivals; None: one each
    carried_from: float = -math.inf  # instant from which on lengths may be used
    # of all requests since the gateway started, in seconds; infinite before the first
    shortest_delay: float = math.inf

    def column(self, name: str) -> Vector:
        """One field of every row."""
        values: Vector = self.rows[:, COLUMN[name]]
        return values

    @cached_property
    def mine(self) -> Snapshot:
        """The rows of this epoch that arrived and were dispatched in the window."""
        kept = (self.column("epoch") == self.epoch) & (self.column("arrived_at") >= self.start)
        return self if kept.all() else self.having(picked(self.rows, kept))

    def having(self, rows: npt.NDArray[np.float64]) -> Snapshot:
        """With other rows."""
        return self._but(rows=rows)

    def of_servers(self) -> list[Snapshot]:
        """The rows of each server apart, as if it were the only one."""
        server = self.column("server_id")
        return [
            self._but(rows=picked(self.rows, server == each), servers=1)
            for each in np.unique(server)
        ]

    def telling(self, carried_from: float) -> Snapshot:
        """With the lengths of what was dispatched since then only."""
        return self._but(carried_from=carried_from)

    def ending(self, now: float) -> Snapshot:
        """As of another instant; the ends that came after it stay known."""
        return self._but(now=now)

    def since(self, start: float) -> Snapshot:
        """The later part of the window."""
        later = self.arrivals > start
        return self._but(
            start=start,
            arrivals=self.arrivals[later],
            sequences=None if self.sequences is None else self.sequences[later],
        )

    @property
    def call_sizes(self) -> Vector:
        """Sequences of each of the arrivals."""
        return np.ones(self.arrivals.size) if self.sequences is None else self.sequences

    def _but(self, **changed: Any) -> Snapshot:
        return Snapshot(
            **{
                name: getattr(self, name)
                for name in self.__dataclass_fields__
                if name not in changed
            },
            **changed,
        )

    @cached_property
    def _order(self) -> npt.NDArray[np.intp]:
        return np.argsort(self.column("arrived_at"), kind="stable")

    def served_in_order(self) -> tuple[Vector, Vector, Vector]:
        """Arrivals, delays and times in service of the rows, in order of arrival."""
        arrived_at, dispatched_at, free_at = (
            self.column(name)[self._order]
            for name in ("arrived_at", "dispatched_at", "server_free_at")
        )
        return arrived_at, dispatched_at - arrived_at, free_at - dispatched_at

    def judged_rows(self, *, sojourn: bool = False) -> npt.NDArray[np.bool_]:
        """Of this epoch, arrived in the window, without the warm-up where the queue began empty
        (queueing.measurement.warm_up), which is that of the delays or of the sojourns.
        """
        arrived = self.column("arrived_at")
        kept: npt.NDArray[np.bool_] = self.column("epoch") == self.epoch
        kept &= arrived >= self.start
        if self.start <= self.epoch_at:
            own = np.flatnonzero(kept)
            own = own[np.argsort(arrived[own], kind="stable")]
            ended = self.column("server_free_at" if sojourn else "dispatched_at")
            delays = (ended - arrived)[own]
            kept[own[: find_warm_up(delays[np.isfinite(delays)]).dropped]] = False
        return kept

    def judged(self, *, sojourn: bool = False) -> Vector:
        """Delays of these, or sojourns where they were released, in order of arrival; seconds."""
        kept = self._order[self.judged_rows(sojourn=sojourn)[self._order]]
        ended = self.column("released_at" if sojourn else "dispatched_at")
        values = (ended - self.column("arrived_at"))[kept]
        known: Vector = values[np.isfinite(values)]
        return known


def picked(rows: npt.NDArray[np.float64], kept: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """A copy of some rows, column after column in memory."""
    return np.compress(kept, rows.T, axis=1).T
