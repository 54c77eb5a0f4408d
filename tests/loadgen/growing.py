"""Run files that another process still writes."""

from __future__ import annotations

from pathlib import Path

from kendall.queueing.measurement.record import Record, read_run


def records_in(path: Path) -> list[Record]:
    """Those that are there by now; none where there is no file, or no whole header in it."""
    if not path.exists() or b"\n" not in path.read_bytes():
        return []
    return read_run(path)[1]


def completed_in(path: Path) -> int:
    """How many of them were completed."""
    return sum(record.outcome == "completed" for record in records_in(path))
