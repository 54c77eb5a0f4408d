"""What a report is made of, gathered from a sweep's folder, a folder of runs, or cells that are
at hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.compare.cells import (
    Asked,
    MissingCell,
    ReportCell,
    RunFile,
    audit_of,
    cells_of_files,
    lateness_of,
)
from policies.text import POLICIES, SpecError
from queueing.latency.law import LatencyModel
from queueing.latency.profile import Profile, load_profile
from queueing.measurement.record import Header
from queueing.model import Model

if TYPE_CHECKING:
    from loadgen.sweep.results import CellResult, Results


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
    searches: Sequence[dict[str, Any]] = ()
    events: Sequence[str] = ()  # restarts, interruptions, files with records missing


def of_folder(folder: Path, results: Results | None = None) -> ReportData:
    """A sweep's folder (plan.json), or any folder with gateways' run files and perhaps a
    profile.json. Raises SpecError.
    """
    if (folder / "plan.json").is_file():
        from loadgen.sweep.results import results_of  # noqa: PLC0415 - a sweep writes reports and a report reads sweeps

        return _of_sweep(folder, results or results_of(folder))
    paths = [
        path for path in sorted(folder.glob("*.jsonl")) if path.name != "gateway.jsonl"
    ]  # the demo's whole log, cut into its cells
    if not paths:
        raise SpecError(
            f"got {folder}; expected a sweep's folder (plan.json) or one with run files (*.jsonl)"
        )
    profile = _profile(folder)
    asked = Asked(law=profile.law if profile else None)
    found = of_files([RunFile.read(path) for path in paths], asked, profile)
    return dataclasses.replace(found, cells=in_order(found.cells))


def of_files(files: Sequence[RunFile], asked: Asked, profile: Profile | None = None) -> ReportData:
    """Single runs."""
    found = of_cells(
        cells_of_files(files, asked),
        [file.header for file in files if file.header.writer != "load"],
        asked.law,
        profile,
    )
    return dataclasses.replace(
        found,
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
        configuration=_common([header.configuration for header in headers]),
        date=profile.date if profile else None,
    )


def in_order(cells: Sequence[ReportCell]) -> list[ReportCell]:
    """By load; policies in the order of the documents, those of one name as they first appear."""
    known = list(POLICIES)
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


def _profile(folder: Path) -> Profile | None:
    file = folder / "profile.json"
    return load_profile(str(file)) if file.is_file() else None


def _of_sweep(folder: Path, results: Results) -> ReportData:
    headers, cells = [], []
    for result in results.cells:
        if result.comparison is not None and result.done is not None:
            sides = {
                name.rsplit(".", 2)[-2]: RunFile.read(folder / name)
                for name in result.done["files"]
            }
            headers.append(sides["gateway"].header)
            cells.append(_swept(result, sides, results))
    plan = msgspec.to_builtins(results.plan)
    profile = _profile(folder)
    return dataclasses.replace(
        of_cells(cells, headers, results.law, profile),
        missing=[_missing(result) for result in results.cells if result.comparison is None],
        configuration=_common([header.configuration for header in headers])
        | {key: plan[key] for key in ("model", "output_tokens", "prompt_tokens")},
        searches=results.searches,
        events=[f"gateway started again: {event['reason']}" for event in results.restarts]
        + [f"interrupted in {event['cell']}: {event['reason']}" for event in results.cuts],
    )


def _swept(result: CellResult, sides: dict[str, RunFile], results: Results) -> ReportCell:
    assert result.comparison is not None
    sent = sides["load"].records if "load" in sides else []
    return ReportCell(
        name=result.cell.name,
        comparison=result.comparison,
        load=result.cell.load,
        max_output_tokens=result.cell.max_output_tokens,
        lateness=lateness_of(sent),
        audit=audit_of(sides["gateway"], result.comparison, sent),
        notes=("shorter than asked (--cell-limit)",) if result.cell.cut else (),
        model=_model(result, results),
    )


def _model(result: CellResult, results: Results) -> Model | None:
    return (
        None
        if results.basis is None
        else results.basis.model(result.cell.policy, result.cell.max_output_tokens)
    )


def _missing(result: CellResult) -> MissingCell:
    reason = result.reason or ("nothing was dispatched" if result.state == "done" else result.state)
    return MissingCell(
        name=result.cell.name,
        policy=result.cell.policy,
        load=result.cell.load,
        state=result.state,
        reason=reason,
    )


def _common(configurations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all agree on."""
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
