"""When a lost engine is started again, and when no more: at once the first time, later the more often it fails.

Two rules. The wait before a start doubles with every life in a row that was shorter than `SOUND_LIFE`. And at most
`most` starts are made within any `window` seconds, so that giving up is certain and comes within a known time:
most * (longest start + LONGEST_WAIT).
"""

from __future__ import annotations

from collections import deque

SOUND_LIFE = 10.0  # seconds after which an engine had come up properly
FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0


class RestartBudget:
    """Told of every loss, a start that failed included; knows no clock."""

    def __init__(self, most: int, window: float) -> None:
        self._most = most
        self._window = window
        self._tries: deque[float] = deque()
        self._short_lives = 0

    def next_wait(self, lost_at: float, served_from: float | None) -> float | None:
        """Seconds until the next start; None: give up. `served_from`: since when it had served, None if it never came up."""
        sound = served_from is not None and lost_at - served_from >= SOUND_LIFE
        while self._tries and self._tries[0] <= lost_at - self._window:
            self._tries.popleft()
        if len(self._tries) >= self._most:
            return None
        self._short_lives = 0 if sound or not self._tries else self._short_lives + 1
        self._tries.append(lost_at)
        return 0.0 if not self._short_lives else min(LONGEST_WAIT, FIRST_WAIT * 2 ** (self._short_lives - 1))
