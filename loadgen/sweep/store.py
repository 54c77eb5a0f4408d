"""The folder of a sweep: which files there are, and how a cell's are written so that a kill leaves
whole ones or none.

plan.json              what is measured
journal.jsonl          what happened, event by event
profile.json           the law of the first calibration
gateway-N.jsonl, .log  what each start of an own gateway wrote
cells/NAME.load.jsonl, cells/NAME.gateway.jsonl         both sides of a cell
cells/NAME.partial-N.load.jsonl, ....gateway.jsonl      of attempt N, which was cut
comparison.json        one object per cell that is done
sweep.json             plan, what is missing and why, unstable points, searches
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kendall.loadgen.sweep.cell import CellRun
from kendall.loadgen.sweep.journal import Event, Journal, SweepProgress, digest, read_journal
from kendall.loadgen.sweep.plan import SweepPlan, load_plan, save_plan
from kendall.policies.text import SpecError
from kendall.queueing.latency.profile import Profile, poor_fit_of
from kendall.queueing.measurement.paths import writing
from kendall.queueing.measurement.record import Header, Record, write_run


@dataclass(frozen=True, slots=True)
class Store:
    """A folder, its journal, and what the journal says so far."""

    folder: Path
    journal: Journal
    progress: SweepProgress

    @classmethod
    def open(cls, folder: Path, plan: SweepPlan) -> Store:
        """Begin in a folder, or go on where its plan is the same. Raises SpecError where it is
        not and cells were measured.
        """
        if (folder / "plan.json").exists():
            if different := load_plan(folder / "plan.json").differences(plan):
                if _has_begun(read_journal(folder / "journal.jsonl")):
                    raise SpecError(
                        f"got {folder}, which holds another sweep ({'; '.join(different)}); "
                        "expected the same plan: give another folder with --output, or delete "
                        f"{folder}"
                    )
                (folder / "journal.jsonl").unlink(missing_ok=True)
                save_plan(folder / "plan.json", plan)
        elif folder.exists() and any(folder.iterdir()):
            raise SpecError(
                f"got {folder}, which is not empty and holds no sweep; expected an empty folder, "
                "or another --output"
            )
        else:
            save_plan(folder / "plan.json", plan)
        journal = Journal(folder / "journal.jsonl")
        return cls(folder, journal, SweepProgress.fold(journal.events))

    def is_unmeasured(self) -> bool:
        """Whether every cell that was begun has failed."""
        return not _has_begun(self.journal.events)

    def append(self, event: str, **fields: Any) -> Event:
        """Append an event to the journal, and apply it to `progress`."""
        written = self.journal.append(event, **fields)
        if "cell" in written:
            self.progress.apply(written)
        return written

    def growing(self, name: str, attempt: int) -> Path:
        """Where the sender's side of an attempt is written while it runs."""
        return self.folder / f"cells/{name}.partial-{attempt}.load.jsonl"

    def write(self, run: CellRun, attempt: int) -> dict[str, str]:
        """Write the records of both sides of a cell; names and digests of the files. The files of a
        cell that was cut have the attempt in their names.
        """
        whole = run.ended in ("complete", "unstable")
        stem = f"cells/{run.cell.name}" + ("" if whole else f".partial-{attempt}")
        files = {}
        if (grown := self.growing(run.cell.name, attempt)).exists():
            name = f"{stem}.load.jsonl"
            _sync(grown)
            grown.replace(self.folder / name)
            files[name] = digest(self.folder / name)
        name = f"{stem}.gateway.jsonl"
        _write(self.folder / name, run.header, run.records)
        return files | {name: digest(self.folder / name)}

    def set_aside(self, done: Event, attempt: int) -> dict[str, str]:
        """Rename the files of a cell that is to be measured again; their new names and digests."""
        files = {}
        for name, known in done["files"].items():
            head, side, ending = name.rsplit(".", 2)
            files[f"{head}.noisy-{attempt}.{side}.{ending}"] = known
            (self.folder / name).replace(self.folder / f"{head}.noisy-{attempt}.{side}.{ending}")
        return files

    def salvage_load_side(self, name: str, attempt: int) -> dict[str, str]:
        """Keep the records that a killed sender wrote of an attempt, without a last line that the
        kill cut short; names and digests of the files.
        """
        path = self.growing(name, attempt)
        if not path.exists():
            return {}
        content = path.read_bytes()
        with writing(path):
            path.write_bytes(content[: content.rfind(b"\n") + 1])
        return {self.relative(path): digest(path)}

    def write_gateway_side(
        self, name: str, attempt: int, header: Header, records: Iterable[Record]
    ) -> dict[str, str]:
        """Write the records that a gateway kept of an attempt whose sender was killed."""
        file = f"cells/{name}.partial-{attempt}.gateway.jsonl"
        _write(self.folder / file, header, records)
        return {file: digest(self.folder / file)}

    def relative(self, path: Path) -> str:
        """Its name in the folder; a path elsewhere stays whole."""
        return str(path.relative_to(self.folder)) if path.is_relative_to(self.folder) else str(path)

    def write_json(self, name: str, value: Any) -> Path:
        """Write a result for other programs; an infinite number becomes null."""
        with _replacing(self.folder / name) as path:
            path.write_bytes(
                msgspec.json.format(msgspec.json.encode(value, enc_hook=float), indent=1) + b"\n"
            )
        return self.folder / name

    @property
    def poor_fit(self) -> str | None:
        """The warning of the calibration about the law; None where it fits, or its file is gone."""
        path = self.folder / "profile.json"
        return poor_fit_of(str(path)) if path.is_file() else None

    def write_profile(self, profile: Profile) -> None:
        """Write the law that the sweep was planned by."""
        with _replacing(self.folder / "profile.json") as path:
            profile.save(path)


def _has_begun(events: Sequence[Event]) -> bool:
    begun, failed = (
        {event["cell"] for event in events if event["event"] == name}
        for name in ("started", "failed")
    )
    return bool(begun - failed)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A context in which a new file is written beside `path`, which replaces it once it is on the
    disk. Raises CommandError.
    """
    beside = path.with_name(path.name + ".new")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        _sync(beside)
        beside.replace(path)


def _sync(path: Path) -> None:
    """Return when the file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write(path: Path, header: Header, records: Iterable[Record]) -> None:
    with _replacing(path) as beside:
        write_run(beside, header, records)
