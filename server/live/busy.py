"""When servers were busy, by the dispatches and the idle moments that the batcher tells: for the
utilisation.
"""

from __future__ import annotations

from server.live.numbers import Numbers


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
