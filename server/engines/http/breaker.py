"""Whether a server is given work: a circuit breaker.

    closed     it gets work. After FAILURES in a row, or at once where it says that it is busy or is
               put aside: open
    open       it gets none. After a pause it is half-open
    half-open  it is probed: closed if it answers, else open again for twice as long

A failure is a probe without a good answer, or a connection that fails; any good answer ends the
row. Who is put aside, and for how long, is `standing`'s.
"""

from __future__ import annotations

import math
from typing import Literal

State = Literal["closed", "open", "half-open"]
FAILURES = 2
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0  # seconds


class Breaker:
    """The breaker of one server. Instants are those of the caller's clock."""

    def __init__(self) -> None:
        self.state: State = "closed"
        self.failures = 0  # in a row
        self.busy = False  # open because it said so: it is there
        self.aside = False  # open because its calls fail: it is there
        self._pause = FIRST_PAUSE
        self._due = -math.inf

    @property
    def closed(self) -> bool:
        """Whether it gets work."""
        return self.state == "closed"

    @property
    def lost(self) -> bool:
        """Whether it does not answer."""
        return self.state != "closed" and not (self.busy or self.aside)

    @property
    def due(self) -> float:
        """Instant of the next probe, where it is open."""
        return self._due

    def probe(self) -> None:
        """It is probed now."""
        if self.state == "open":
            self.state = "half-open"

    def succeed(self, *, probed: bool) -> None:
        """A good answer; only one to a probe closes it."""
        self.failures = 0
        if self.state == "half-open" and probed:
            self.state, self._pause = "closed", FIRST_PAUSE
            self.busy = self.aside = False

    def fail(self, now: float) -> None:
        """A probe or a connection failed."""
        self.failures += 1
        if self.state == "half-open":
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self.busy = self.aside = False
            self._open(now)
        elif self.state == "closed" and self.failures >= FAILURES:
            self._open(now)

    def trip(self, now: float, pause: float) -> None:
        """It is busy, and wants to be left alone for so many seconds."""
        if self.state == "closed":
            self.busy = True
            self._open(now)
            self._due = now + min(max(pause, FIRST_PAUSE), LONGEST_PAUSE)

    def put_aside(self, now: float, pause: float) -> None:
        """Its calls fail where other servers answer: it gets no work for so many seconds."""
        if self.state == "closed":
            self.aside = True
            self._open(now)
            self._due = now + pause

    def give_up(self, now: float) -> None:
        """It is not there, or not what it was: no more than a probe at once."""
        self.failures = max(self.failures, FAILURES)
        if not self.lost:
            self.busy = self.aside = False
            self._open(now)

    def recall(self, now: float) -> None:
        """It is needed: it is probed now."""
        if self.state == "open" and self.aside:
            self._due = now

    def _open(self, now: float) -> None:
        self.state, self._due = "open", now + self._pause
