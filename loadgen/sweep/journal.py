"""The journal of a sweep: one JSON line per event, in the file before the sweep goes on.

An event is an object with `event`, `at` and fields of its own; `cell` names the cell that it is
about. A line that a kill cut short is not an event: it is dropped, and overwritten by the next.
What the events say about every cell is `SweepProgress`, folded from the whole file at a start.

    sweep       a session begins                    calibrated  the law and the engine's bounds
    planned     all cells with their lengths        refused     the law says load >= 1: not run
    started     attempt, epoch, where the gateway writes
    done        files with their digests, summary; `ended` = complete or unstable
    noisy       done, but the engine's speed changed too much around it: set aside, to be repeated
    cut         an attempt was interrupted: why, and the partial files
    failed      given up after several attempts     restarted   the gateway
    finished    the session ended
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
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
    """Appends events; each is on the disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.events, whole = read_journal(path)
            # nothing is left to fail again at the end
            self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
            self._file.truncate(whole)
            self._file.seek(whole)

    def append(self, event: str, **fields: Any) -> Event:
        """Write one event. Raises CommandError."""
        line = {
            "event": event,
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            **fields,
        }
        with writing(self._path):
            write_whole(self._file, msgspec.json.encode(line) + b"\n")
            os.fsync(self._file.fileno())
        self.events.append(msgspec.json.decode(msgspec.json.encode(line)))
        return self.events[-1]

    def last(self, event: str) -> Event | None:
        """The latest of a kind."""
        return next((found for found in reversed(self.events) if found["event"] == event), None)

    def close(self) -> None:
        """Nothing more will be written."""
        self._file.close()


def read_journal(path: Path) -> tuple[list[Event], int]:
    """The events, and how many bytes of the file they fill. Raises ValueError where a line but
    the last is broken.
    """
    events: list[Event] = []
    whole = 0
    if not path.exists():
        return events, whole
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        try:
            events.append(msgspec.json.decode(line, type=dict))
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"{path}, line {number}: got {shown(line)}; expected an event ({error})"
            ) from None
        whole += len(line)
    return events, whole


@dataclass(slots=True)
class CellProgress:
    """The state of one cell."""

    attempts: int = 0
    disturbed: int = 0  # of them set aside
    open: Event | None = None  # started, and nothing said since
    done: Event | None = None
    reason: str | None = None  # why it is not done


@dataclass(slots=True)
class SweepProgress:
    """The state of every cell that the journal names."""

    cells: dict[str, CellProgress] = field(default_factory=dict)

    def of(self, name: str) -> CellProgress:
        """A cell's own; an empty one where nothing is known."""
        return self.cells.setdefault(name, CellProgress())

    @classmethod
    def fold(cls, events: Iterable[Event]) -> SweepProgress:
        """From the events in their order."""
        progress = cls()
        for event in events:
            if "cell" in event:
                progress.take(event)
        return progress

    def take(self, event: Event) -> None:
        """Apply one more event."""
        cell = self.of(event["cell"])
        match event["event"]:
            case "started":
                cell.attempts = event["attempt"]
                cell.open, cell.done, cell.reason = event, None, None
            case "done":
                cell.open, cell.done, cell.reason = None, event, None
            case "noisy":
                cell.disturbed += 1
                cell.open, cell.done, cell.reason = None, None, event["reason"]
            case "cut" | "failed" | "refused" | "damaged":
                cell.open, cell.done, cell.reason = None, None, event["reason"]
            case _:
                pass


def digest(path: Path) -> str:
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
