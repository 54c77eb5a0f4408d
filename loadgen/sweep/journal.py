"""The journal of a sweep: one JSON line per event, on the disk before the sweep continues.

An event is an object with `event` (its kind), `at` and fields of its own; `cell` names the cell
that it is about. A last line that a kill cut short is not an event: it is dropped, and overwritten
by the next one. `SweepProgress` is what all events together say about every cell.

sweep       a session begins
calibrated  the latency law, and the engine's bounds
planned     all cells with their lengths
refused     a cell is not run, because its load by the law is 1 or more
started     an attempt: its number, its epoch, where the gateway writes
done        the files with their digests, the summary; `ended` = complete or unstable
noisy       a cell that was done is set aside, to be repeated: the engine's speed changed too much
cut         an attempt was interrupted: why, and the partial files
failed      a cell is given up after several attempts
damaged     a file of a cell that was done is missing or altered: the cell is measured again
restarted   the gateway was started again
finished    the session ended
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kendall.loadgen.sending.run_writer import write_whole
from kendall.queueing.measurement.paths import writing
from kendall.queueing.measurement.record import shown

Event = dict[str, Any]


class Journal:
    """The events of a sweep's file, and the file open for more; each event is on the disk when
    `append` returns.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = _whole_lines(path)
            self.events = _events(path, lines)
            # unbuffered: `close` has nothing left to write, so it cannot fail
            self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
            size = sum(map(len, lines))
            self._file.truncate(size)
            self._file.seek(size)

    def append(self, event: str, **fields: Any) -> Event:
        """Write one event, and return it as a later reader of the file gets it. Raises
        CommandError.
        """
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = msgspec.json.encode({"event": event, "at": at, **fields})
        with writing(self._path):
            write_whole(self._file, line + b"\n")
            os.fsync(self._file.fileno())
        written: Event = msgspec.json.decode(line)
        self.events.append(written)
        return written

    def last(self, kind: str) -> Event | None:
        """The latest event of a kind."""
        return next((event for event in reversed(self.events) if event["event"] == kind), None)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_journal(path: Path) -> list[Event]:
    """All events of a file; none where there is no file. Raises ValueError where a line but the
    last is broken.
    """
    return _events(path, _whole_lines(path))


def _whole_lines(path: Path) -> list[bytes]:
    """The lines up to the first without a newline: a kill may have cut the last one short."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return list(itertools.takewhile(lambda line: line.endswith(b"\n"), lines))


def _events(path: Path, lines: Sequence[bytes]) -> list[Event]:
    events: list[Event] = []
    for number, line in enumerate(lines, start=1):
        try:
            events.append(msgspec.json.decode(line, type=dict))
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"{path}, line {number}: got {shown(line)}; expected an event ({error})"
            ) from None
    return events


@dataclass(slots=True)
class CellProgress:
    """The state of one cell: at most one of `open`, `done` and `reason` is set."""

    attempts: int = 0
    disturbed: int = 0  # attempts that were done and set aside
    open: Event | None = None  # the start of an attempt that has not ended
    done: Event | None = None
    reason: str | None = None  # why it is not done


@dataclass(slots=True)
class SweepProgress:
    """The state of every cell that the journal names."""

    cells: dict[str, CellProgress] = field(default_factory=dict)

    @classmethod
    def fold(cls, events: Iterable[Event]) -> SweepProgress:
        """The progress after all these events, in their order."""
        progress = cls()
        for event in events:
            if "cell" in event:
                progress.apply(event)
        return progress

    def of(self, name: str) -> CellProgress:
        """The state of a cell; of one without events, the state before its first attempt."""
        return self.cells.setdefault(name, CellProgress())

    def apply(self, event: Event) -> None:
        """Apply one more event of a cell; kinds that are not its states change nothing."""
        kind, cell = event["event"], self.of(event["cell"])
        if kind not in {"started", "done", "noisy", "cut", "failed", "refused", "damaged"}:
            return
        cell.open = cell.done = cell.reason = None
        if kind == "started":
            cell.open, cell.attempts = event, event["attempt"]
        elif kind == "done":
            cell.done = event
        else:
            cell.reason = event["reason"]
            if kind == "noisy":
                cell.disturbed += 1


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def damage(folder: Path, done: Event) -> str | None:
    """The first file of a finished cell that is missing or altered, in words; None where all are
    intact.
    """
    for name, expected in done["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if digest(path) != expected:
            return f"{name} is not as it was written"
    return None
