"""When a lost engine is started again, how long that start may take, and when no start follows any
more.

Four rules, by which giving up is certain and comes within a known time, most * (4 * start limit +
LONGEST_WAIT):

- The wait before a start doubles with every life in a row that was shorter than `SOUND_LIFE`, up to
  `longest_wait`.
- At most `most` starts are made within any `window` seconds, and at most `most` since the last
  sound life, however long they took.
- A start may take `start_timeout` seconds, or as long as the longest start that succeeded if that
  is more; twice as long after one that ran out of time, and four times as long after two: a model
  that comes from a cold disk is not thrown away for ever.
- No start follows the third one that ran out of time since the last sound life: it hangs.
"""

from __future__ import annotations

from collections import deque

SOUND_LIFE = 10.0  # seconds after which an engine had come up properly
FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0
MOST_OVERDUE = 3
MOST_DOUBLINGS = 10  # of the wait: by then it is as long as it gets


class RestartBudget:
    """Told of every loss, a start that failed included; knows no clock."""

    def __init__(
        self, most: int, window: float, start_timeout: float, longest_wait: float | None = None
    ) -> None:
        self._most = most
        self._longest_wait = LONGEST_WAIT if longest_wait is None else longest_wait
        self._window = window
        self._start_timeout = start_timeout
        self._longest_start = 0.0  # of those that succeeded
        self._tries: deque[float] = deque()
        self._in_row = 0  # starts since the last sound life
        self._overdue = 0  # of them, those that ran out of time

    def forgive(self, losses: int) -> None:
        """So many losses were no fault of the engine: a request caused them that is refused from
        now on.
        """
        for _ in range(min(losses, len(self._tries))):
            self._tries.pop()
        self._in_row = max(0, self._in_row - losses)

    def next_wait(
        self, lost_at: float, served_from: float | None, *, overdue: bool = False
    ) -> float | None:
        """Seconds until the next start; None: give up. `served_from`: since when it had served,
        None if it never came up.
        """
        if served_from is not None and lost_at - served_from >= SOUND_LIFE:
            self._in_row = self._overdue = 0
        self._overdue += overdue
        while self._tries and self._tries[0] <= lost_at - self._window:
            self._tries.popleft()
        if max(len(self._tries), self._in_row) >= self._most or self._overdue >= MOST_OVERDUE:
            return None
        short_lives, self._in_row = self._in_row, self._in_row + 1
        self._tries.append(lost_at)
        return (
            0.0
            if not short_lives
            else min(self._longest_wait, FIRST_WAIT * 2 ** min(short_lives - 1, MOST_DOUBLINGS))
        )

    def start_limit(self) -> float:
        """Seconds that the next start may take."""
        return max(self._start_timeout, self._longest_start) * 2.0**self._overdue

    def came_up(self, took: float) -> None:
        """A start succeeded, the first one too."""
        self._longest_start = max(self._longest_start, took)
