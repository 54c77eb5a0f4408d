"""What became of a server's calls, against those of the other servers: one whose calls fail where
the others answer is put aside, though it answers its probes (Envoy's outlier detection).

A failure of a server is a call that another server answered after it, or an answer that began and
broke off. A call that fails everywhere says nothing of any server.

    put aside  at FEW failures in a row, or as many lately and SHARE of all calls, where the other
               servers' share is less than half as large; for FIRST_ASIDE seconds, each time that
               it happens again twice as long, at most LONGEST_ASIDE
    held       from ROW failures in a row on, or as many lately and half of SHARE, and on trial, its
               answers reach clients when they are whole: until then another server can answer
    on trial   back again, with one call at once, then with twice as many after each good answer,
               until it has as many as before; one failure puts it aside
    exonerated recalled at once where the others' calls fail as often, or no other server is left
"""

from __future__ import annotations

import math
from collections.abc import Iterable

FEW, ROW = 3, 2
SHARE = 0.1  # of all calls
LATELY = 50.0  # calls: how far back the shares go
FIRST_ASIDE, LONGEST_ASIDE = 5.0, 300.0  # seconds
FORGOTTEN = 4  # pauses without a failure after which the next one begins as the first


class ServerStanding:
    """The standing of one server. Instants are those of the caller's clock."""

    row: int  # failures since the last good answer
    room: int | None  # calls at once, on trial; None: as many as it serves
    _good: float  # lately
    _bad: float
    _pause: float  # the last one

    def __init__(self) -> None:
        self.refusals = 0  # answers with a status of 400 to 499 since the last good one
        self._trusted_at = -math.inf  # since when it has been off trial
        self.exonerate()

    @property
    def share(self) -> float:
        """Failures among its calls lately."""
        return share_of([self])

    @property
    def fails(self) -> bool:
        """Whether it is to be put aside, if the other servers are better."""
        return self.row > 0 if self.room is not None else self._failed(FEW, SHARE)

    @property
    def breaks_off(self) -> bool:
        """Whether none of an answer is to reach its client before all of it has come: another
        server could not answer then.
        """
        return self.room is not None or self._failed(ROW, SHARE / 2)

    def succeed(self) -> None:
        """It answered a call."""
        self._count(good=1.0)
        self.row = self.refusals = 0

    def widen(self, now: float, most: int) -> None:
        """On trial, after a good answer: `most` calls at once are all that it gets."""
        self.room = 2 * (self.room or most)
        if self.room >= most:
            self.room, self._trusted_at = None, now

    def fail(self) -> None:
        """It failed a call."""
        self._count(bad=1.0)
        self.row += 1

    def put_aside(self, now: float) -> float:
        """Seconds for which it gets no work; then it is on trial."""
        if now - self._trusted_at > FORGOTTEN * self._pause and self.room is None:
            self._pause = 0.0
        self._pause = min(max(FIRST_ASIDE, 2 * self._pause), LONGEST_ASIDE)
        self.row, self.room = 0, 1
        return self._pause

    def exonerate(self) -> None:
        """The others are no better: its failures were not its own."""
        self.row, self.room = 0, None
        self._good = self._bad = self._pause = 0.0

    def _failed(self, often: int, share: float) -> bool:
        """Whether that many calls, in a row, or lately and that share."""
        return self.row >= often or (self._bad >= often - 0.5 and self.share >= share)

    def _count(self, *, good: float = 0.0, bad: float = 0.0) -> None:
        kept = 1 - 1 / LATELY
        self._good, self._bad = self._good * kept + good, self._bad * kept + bad


def share_of(standings: Iterable[ServerStanding]) -> float:
    """Failures among the calls of these lately; 0 where there were none."""
    every = list(standings)
    bad = sum(each._bad for each in every)
    total = bad + sum(each._good for each in every)
    return bad / total if total else 0.0
