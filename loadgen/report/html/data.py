"""The data of a report, gathered from a sweep's folder, a folder of runs, or cells that are
at hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kendall.loadgen.compare.cells import (
    MissingCell,
    ReportCell,
    RunFile,
    TheoryInputs,
    cells_of_files,
)
from kendall.policies.registry import policy_names
from kendall.policies.text import SpecError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import Profile, load_profile
from kendall.queueing.measurement.record import Header


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Cells in the order of their files; a page sorts them."""

    cells: Sequence[ReportCell]
    missing: Sequence[MissingCell] = ()
    headers: Sequence[Header] = ()
    law: LatencyModel | None = None
    profile: Profile | None = None
    configuration: dict[str, Any] = field(
        default_factory=dict
    )  # of the whole: engine, model, lengths, ...
    date: str | None = None  # of the run, ISO
    events: Sequence[str] = ()  # restarts, interruptions, files with records missing


def of_folder(folder: Path) -> ReportData:
    """A folder with gateways' run files and perhaps a profile.json. Raises SpecError."""
    paths = [
        path for path in sorted(folder.glob("*.jsonl")) if path.name != "gateway.jsonl"
    ]  # the demo's whole log, cut into its cells
    if not paths:
        raise SpecError(
            f"got {folder}; expected a sweep's folder (plan.json) or one with run files (*.jsonl)"
        )
    profile = profile_of(folder)
    asked = TheoryInputs(law=profile.law if profile else None)
    data = of_files([RunFile.read(path) for path in paths], asked, profile)
    return dataclasses.replace(data, cells=in_order(data.cells))


def of_files(
    files: Sequence[RunFile], asked: TheoryInputs, profile: Profile | None = None
) -> ReportData:
    """The report's data from the files of single runs, each compared with theory."""
    data = of_cells(
        cells_of_files(files, asked),
        [file.header for file in files if file.header.writer != "load"]
        or [file.header for file in files],
        asked.law,
        profile,
    )
    return dataclasses.replace(
        data,
        events=[f"{file.path.name}: {sentence}" for file in files for sentence in file.incomplete],
    )


def of_cells(
    cells: Sequence[ReportCell],
    headers: Sequence[Header] = (),
    law: LatencyModel | None = None,
    profile: Profile | None = None,
) -> ReportData:
    """Cells that are at hand."""
    return ReportData(
        cells=cells,
        headers=headers,
        law=law,
        profile=profile,
        configuration=common([header.configuration for header in headers]),
        date=profile.date if profile else None,
    )


def in_order(cells: Sequence[ReportCell]) -> list[ReportCell]:
    """Sort by load; policies as in the documents, those of one name as they first appear."""
    known = policy_names()
    texts = list(dict.fromkeys(cell.comparison.policy for cell in cells))

    def rank(cell: ReportCell) -> tuple[float, int, int, int]:
        text = cell.comparison.policy
        return (
            round(cell.load or 0.0, 4),
            known.index(text.partition(":")[0]),
            texts.index(text),
            cell.max_output_tokens or 0,
        )

    return sorted(cells, key=rank)


def profile_of(folder: Path) -> Profile | None:
    file = folder / "profile.json"
    return load_profile(str(file)) if file.is_file() else None


def common(configurations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fields that are the same in all of them."""
    if not configurations:
        return {}
    first, *others = configurations
    return {
        key: value
        for key, value in first.items()
        if all(other.get(key) == value for other in others)
    }


def today() -> str:
    """The date of making the report."""
    return datetime.now(UTC).date().isoformat()
