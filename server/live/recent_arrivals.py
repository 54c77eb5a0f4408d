"""The arrivals of the last minute, for the gauges: one call is one arrival, however many
sequences it asks for.
"""

from __future__ import annotations

from server.live.numbers import Numbers

_FEW = 1024


class RecentArrivals:
    """Rates over the last `seconds`, or since `started_at` while that is less.

    Arrivals come nearly in the order of their instants: one out of order counts a little longer or
    shorter than `seconds`.
    """

    def __init__(self, started_at: float, seconds: float) -> None:
        self._started_at, self._seconds = started_at, seconds
        self._calls, self._sequences = Numbers(), Numbers()  # instants
        self._most = _FEW  # sequences that are kept without a look at their age

    def saw(self, at: float, *, begins_call: bool) -> None:
        """A sequence arrived, the first of its call or another one."""
        self._sequences.append(at)
        if begins_call:
            self._calls.append(at)
        if len(self._sequences) > self._most:
            self._forget_before(at - self._seconds)
            self._most = _FEW + 2 * len(self._sequences)

    def call_rate(self, now: float) -> float:
        """Calls per second."""
        span = self._span(now)
        return len(self._calls) / span

    def sequence_rate(self, now: float) -> float:
        """Sequences per second."""
        span = self._span(now)
        return len(self._sequences) / span

    def _span(self, now: float) -> float:
        start = max(self._started_at, now - self._seconds)
        self._forget_before(start)
        return max(1e-9, now - start)

    def _forget_before(self, start: float) -> None:
        self._calls.drop_below(start)
        self._sequences.drop_below(start)
