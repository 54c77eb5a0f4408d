"""A sweep's folder as what its report shows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from kendall.loadgen.compare.cells import ReportCell, RunFile, lateness_of
from kendall.loadgen.report.html.data import ReportData, common, of_cells, profile_of
from kendall.loadgen.sweep.report.results import Results, results_of


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
            sent = sides["load"].records if "load" in sides else []
            swept, basis = result.cell, results.basis
            model = None if basis is None else basis.model(swept.policy, swept.max_output_tokens)
            cell = ReportCell(
                name=swept.name,
                comparison=result.comparison,
                load=swept.load,
                max_output_tokens=swept.max_output_tokens,
                lateness=lateness_of(sent),
                audit=sides["gateway"].audit(result.comparison, sent),
                model=model,
            )
            if results.plan.plain_server and "load" in sides:
                file = sides["load"].with_dispatches(results.plan.max_num_seqs)
                kept = [record.request_id for record in file.records[-result.comparison.n :]]
                cell = dataclasses.replace(cell, client=file.client_side(cell, kept))
            cells.append(cell)
    plan = msgspec.to_builtins(results.plan)
    profile = profile_of(folder)
    return dataclasses.replace(
        of_cells(cells, headers, results.law, profile),
        missing=[result.missing for result in results.cells if result.comparison is None],
        configuration=common([header.configuration for header in headers])
        | {key: plan[key] for key in ("model", "output_tokens", "prompt_tokens")},
        events=[f"gateway started again: {event['reason']}" for event in results.restarts]
        + [f"interrupted in {event['cell']}: {event['reason']}" for event in results.cuts],
    )
