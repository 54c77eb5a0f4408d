"""What the page's charts begin with: the last quarter of an hour by the second, two hours by ten
seconds. Bounded, whatever comes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

Row = Sequence[float | None]  # one number a column, the instant first
FINE = 900  # rows of a second
STEP = 10  # of them to a coarse row
COARSE = 720
CHART = 4  # digits: more than a chart shows


class Rows:
    """The last rows of so many numbers each, in one array: objects made every second among those
    of requests would hold their memory.
    """

    def __init__(self, most: int, width: int) -> None:
        self._most, self._width = most * width, width
        self._values = array("d")  # row after row; NaN where something was not known

    def add(self, row: Row) -> None:
        """The newest one."""
        self._values.extend([math.nan if value is None else value for value in row])
        if len(self._values) >= 2 * self._most:
            del self._values[: -self._most]

    def by_column(self, last: int | None = None) -> list[list[float | None]]:
        """Oldest first; of the `last` rows only, where that is given."""
        kept = self._values[-(self._most if last is None else last * self._width) :]
        return (
            [
                [_known(value) for value in kept[place :: self._width]]
                for place in range(self._width)
            ]
            if kept
            else []
        )


class History:
    """Rows of numbers; None where something was not known."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)
        self._fine, self._coarse = Rows(FINE, len(self._columns)), Rows(COARSE, len(self._columns))
        self._seconds = 0  # rows so far

    def add(self, row: Row) -> None:
        """The newest one."""
        self._fine.add([value if value is None else short(value, CHART) for value in row])
        self._seconds += 1
        if self._seconds % STEP == 0:
            self._coarse.add([_mean(column) for column in self._fine.by_column(STEP)])

    def shown(self) -> dict[str, Any]:
        """By column, which compresses best. The instant of a coarse row is the mean of its rows'
        instants.
        """
        return {
            "columns": self._columns,
            "fine": self._fine.by_column(),
            "coarse": self._coarse.by_column(),
        }


def _known(value: float) -> float | None:
    return None if value != value else value  # noqa: PLR0124 - NaN


def _mean(values: Row) -> float | None:
    known = [value for value in values if value is not None]
    return short(sum(known) / len(known), CHART) if known else None


def short(value: float, digits: int = 6) -> float:
    """Without the digits that nobody reads; an instant keeps its tenths of a second."""
    return round(value, 1) if value > 1e8 else float(f"{value:.{digits}g}")
