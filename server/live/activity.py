"""The last minute, whatever the epoch: when requests arrived, when servers were busy."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kendall.server.live.number_queue import NumberQueue

SHOWN = 60.0  # seconds over which rates and utilisation average
_FEW = 1024


class ArrivalActivity:
    """Rates over the last `seconds`, or since `started_at` while that is less. One call is one
    arrival, however many sequences it asks for.

    Arrivals come nearly in the order of their instants: one out of order counts a little longer or
    shorter than `seconds`.
    """

    def __init__(self, started_at: float, seconds: float) -> None:
        self._started_at, self._seconds = started_at, seconds
        self._calls, self._sequences = NumberQueue(), NumberQueue()  # instants
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

    def calls_since(self, at: float) -> int:
        """How many came after that instant, of the last `seconds`."""
        return len(self._calls) - self._calls.below(at)

    def _span(self, now: float) -> float:
        start = max(self._started_at, now - self._seconds)
        self._forget_before(start)
        return max(1e-9, now - start)

    def _forget_before(self, start: float) -> None:
        self._calls.drop_below(start)
        self._sequences.drop_below(start)


class BusyTime:
    """When each server was busy in the last `seconds`.

    Every dispatch to an idle server begins an interval, thousands a second where the engine is
    fast: a share is the difference of two running sums, not a sum over them.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._servers: dict[int, _ServerActivity] = {}

    def begin(self, server_id: int, at: float) -> None:
        """A dispatch: the server is busy from here on, if it was not."""
        server = self._servers.get(server_id)
        if server is None:
            server = self._servers[server_id] = _ServerActivity()
        server.begin(at)

    def end(self, server_id: int, at: float) -> None:
        """The server holds nothing any more."""
        server = self._servers.get(server_id)
        if server is not None:
            server.end(at)
            server.forget_before(at - self._seconds)

    def fraction(self, start: float, now: float, servers: int) -> float:
        """Share of [start, now] in which a server was busy, averaged over servers; nothing is known
        of what was more than `seconds` ago.
        """
        for server_id, server in list(self._servers.items()):
            server.forget_before(now - self._seconds)
            if not server.known:
                del self._servers[server_id]
        busy = sum(server.busy(start, now) for server in self._servers.values())
        return busy / max(1e-9, now - start) / servers

    def of(self, server_id: int, start: float, now: float) -> float:
        """The same of one server."""
        server = self._servers.get(server_id)
        return 0.0 if server is None else server.busy(start, now) / max(1e-9, now - start)


class _ServerActivity:
    """Its busy intervals, one after the other: begins, ends, and busy seconds before each."""

    __slots__ = ("_before", "_begins", "_ends", "_since", "_total")

    def __init__(self) -> None:
        self._begins, self._ends, self._before = NumberQueue(), NumberQueue(), NumberQueue()
        self._total = 0.0  # seconds of the closed ones
        self._since: float | None = None  # of the open one

    @property
    def known(self) -> bool:
        """Whether there is one."""
        return self._since is not None or len(self._ends) > 0

    def begin(self, at: float) -> None:
        """The next one, unless one is open."""
        if self._since is None:
            self._since = at

    def end(self, at: float) -> None:
        """The open one, if there is one."""
        if self._since is None:
            return
        self._begins.append(self._since)
        self._ends.append(at)
        self._before.append(self._total)
        self._total += at - self._since
        self._since = None

    def forget_before(self, least: float) -> None:
        """Those that ended before it."""
        past = self._ends.below(least)
        for numbers in (self._begins, self._ends, self._before):
            numbers.drop(past)

    def busy(self, start: float, now: float) -> float:
        """Seconds of [start, now]."""
        seconds = self._until(now) - self._until(start)
        return seconds if self._since is None else seconds + max(0.0, now - max(self._since, start))

    def _until(self, at: float) -> float:
        """Seconds of the closed ones before `at`, since the server was first seen."""
        past = self._ends.below(at)
        if past == len(self._ends):
            return self._total
        return self._before[past] + max(0.0, at - self._begins[past])


class Activity:
    """What arrives and how busy the servers are, over the last minute. A new epoch does not cut
    it: a change of the policy does not change what arrives.
    """

    def __init__(
        self, now: Callable[[], float], servers: Callable[[], Collection[int]], kept: float
    ) -> None:
        self._now, self._servers = now, servers
        self._started_at = now()
        self.recent = ArrivalActivity(self._started_at, SHOWN)
        self.busy = BusyTime(max(SHOWN, kept))

    def arrival_rate(self) -> float:
        """Calls per second."""
        return self.recent.call_rate(self._now())

    def since(self, at: float) -> tuple[int, float]:
        """Calls that came after that instant, and the seconds since; of the last minute at most."""
        now = self._now()
        start = max(self._started_at, now - SHOWN, at)
        return self.recent.calls_since(start), max(0.0, now - start)

    def sequence_rate(self) -> float:
        """Sequences per second: a call may ask for several."""
        return self.recent.sequence_rate(self._now())

    def utilisation(self) -> float:
        """Fraction of the time in which a server was busy, averaged over those that take work."""
        servers = self._servers()
        return sum(map(self.utilisation_of, servers)) / max(1, len(servers))

    def utilisation_of(self, server_id: int) -> float:
        """Fraction of the time in which this server was busy."""
        now = self._now()
        return self.busy.of(server_id, max(self._started_at, now - SHOWN), now)
