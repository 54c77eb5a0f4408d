"""A sweep's folder as what its report shows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from loadgen.compare.cells import MissingCell, ReportCell, RunFile, lateness_of
from loadgen.report.html.data import ReportData, common, of_cells, profile_of
from loadgen.sweep.report.results import CellResult, Results, results_of
from queueing.model import Model


def of_sweep(folder: Path, results: Results | None = None) -> ReportData:
    """`results` spares reading the folder. Raises SpecError."""
    results = results or results_of(folder)
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
    profile = profile_of(folder)
    return dataclasses.replace(
        of_cells(cells, headers, results.law, profile),
        missing=[missing_cell(result) for result in results.cells if result.comparison is None],
        configuration=common([header.configuration for header in headers])
        | {key: plan[key] for key in ("model", "output_tokens", "prompt_tokens")},
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
        audit=sides["gateway"].audit(result.comparison, sent),
        model=_model(result, results),
    )


def _model(result: CellResult, results: Results) -> Model | None:
    return (
        None
        if results.basis is None
        else results.basis.model(result.cell.policy, result.cell.max_output_tokens)
    )


def missing_cell(result: CellResult) -> MissingCell:
    """A cell without a result, and why."""
    reason = result.reason or ("nothing was dispatched" if result.state == "done" else result.state)
    return MissingCell(
        name=result.cell.name,
        policy=result.cell.policy,
        load=result.cell.load,
        state=result.state,
        reason=reason,
    )
