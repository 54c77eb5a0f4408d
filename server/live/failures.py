"""Failures that come again with every assessment: each is logged once with its traceback, and
counted.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from kendall.policies.text import counted

_NUMBERS = re.compile(
    r"[-+]?\d[\d.e+-]*"
)  # in which one failure's messages differ from time to time


class Failures:
    """Of one task. A failure of another kind is logged too, and the first success after
    failures; while `expected`, failures are of the level DEBUG.
    """

    def __init__(
        self, log: logging.Logger, task: str, expected: Callable[[], bool] = lambda: False
    ) -> None:
        self._log, self._task, self._expected = log, task, expected
        self._kinds: set[str] = set()  # logged since the last success
        self.count = 0
        self.in_a_row = 0
        self.last: str | None = None

    def failed(self, said: str, error: BaseException | None = None) -> None:
        """It failed again; `said`: one line, or a traceback whose last line tells the kind."""
        message = said.strip().rpartition("\n")[2]
        self.count += 1
        self.in_a_row += 1
        self.last = message
        kind = _NUMBERS.sub("#", message)
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._log.log(
                logging.DEBUG if self._expected() else logging.ERROR,
                "%s failed and is repeated; the same failure is not logged again: %s",
                self._task,
                said,
                exc_info=error,
            )

    def succeeded(self) -> None:
        """It did what it should."""
        if self.in_a_row:
            self._log.info("%s succeeded after %s", self._task, counted(self.in_a_row, "failure"))
        self._kinds.clear()
        self.in_a_row = 0

    def as_dict(self) -> dict[str, int | str | None]:
        """As JSON."""
        return {"count": self.count, "in_a_row": self.in_a_row, "last": self.last}
