"""What the page's charts begin with: the last quarter of an hour by the second, two hours by ten seconds. Bounded, whatever comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

Row = Sequence[float | None]  # one number a column, the instant first
FINE = 900  # rows of a second
STEP = 10  # of them to a coarse row
COARSE = 720
CHART = 4  # digits: more than a chart shows


class History:
    """Rows of numbers; None where something was not known."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)
        self._fine: deque[Row] = deque(maxlen=FINE)
        self._coarse: deque[Row] = deque(maxlen=COARSE)
        self._open: list[Row] = []  # of the coarse row that is not full

    def add(self, row: Row) -> None:
        """The newest one."""
        kept = tuple(value if value is None else short(value, CHART) for value in row)
        self._fine.append(kept)
        self._open.append(kept)
        if len(self._open) == STEP:
            self._coarse.append(tuple(map(_mean, zip(*self._open, strict=True))))
            self._open = []

    def shown(self) -> dict[str, Any]:
        """By column, which compresses best. The instant of a coarse row is the mean of its rows' instants."""
        return {"columns": self._columns, "fine": _by_column(self._fine), "coarse": _by_column(self._coarse)}


def _by_column(rows: Sequence[Row] | deque[Row]) -> list[Row]:
    return list(zip(*rows, strict=True))


def _mean(values: Row) -> float | None:
    known = [value for value in values if value is not None]
    return short(sum(known) / len(known), CHART) if known else None


def short(value: float, digits: int = 6) -> float:
    """Without the digits that nobody reads; an instant keeps its tenths of a second."""
    return round(value, 1) if value > 1e8 else float(f"{value:.{digits}g}")
