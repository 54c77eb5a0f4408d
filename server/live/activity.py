"""The last minute, whatever the epoch: when requests arrived, when servers were busy."""

from __future__ import annotations

from collections.abc import Callable

from server.live.numbers import Numbers

SHOWN = 60.0  # seconds over which rates and utilisation average
_FEW = 1024


class RecentArrivals:
    """Rates over the last `seconds`, or since `started_at` while that is less. One call is one
    arrival, however many sequences it asks for.

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


class BusyTime:
    """Closed busy intervals of the last `seconds`, and the open ones."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._begins, self._ends = Numbers(), Numbers()  # of the closed ones
        self._since: dict[int, float] = {}

    def begin(self, server_id: int, at: float) -> None:
        """A dispatch: the server is busy from here on, if it was not."""
        self._since.setdefault(server_id, at)

    def end(self, server_id: int, at: float) -> None:
        """The server holds nothing any more."""
        since = self._since.pop(server_id, None)
        if since is not None:
            self._begins.append(since)
            self._ends.append(at)
        while self._ends and self._ends.first() < at - self._seconds:
            self._begins.drop_first()
            self._ends.drop_first()

    def fraction(self, start: float, now: float, servers: int) -> float:
        """Share of [start, now] in which a server was busy, averaged over servers."""
        closed = sum(
            max(0.0, min(end, now) - max(begin, start))
            for begin, end in zip(self._begins, self._ends, strict=True)
        )
        going = sum(now - max(begin, start) for begin in self._since.values())
        return (closed + going) / max(1e-9, now - start) / servers


class Activity:
    """What arrives and how busy the servers are, over the last minute. A new epoch does not cut
    it: a change of the policy does not change what arrives.
    """

    def __init__(self, now: Callable[[], float], servers: Callable[[], int], kept: float) -> None:
        self._now, self._servers = now, servers
        self._started_at = now()
        self.recent = RecentArrivals(self._started_at, SHOWN)
        self.busy = BusyTime(max(SHOWN, kept))

    def arrival_rate(self) -> float:
        """Calls per second."""
        return self.recent.call_rate(self._now())

    def sequence_rate(self) -> float:
        """Sequences per second: a call may ask for several."""
        return self.recent.sequence_rate(self._now())

    def utilisation(self) -> float:
        """Fraction of the time in which a server was busy, averaged over servers."""
        now = self._now()
        return self.busy.fraction(max(self._started_at, now - SHOWN), now, self._servers())
