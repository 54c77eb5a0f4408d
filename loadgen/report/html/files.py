"""The report's files: HTML, CSV and JSON of its table, PNG and SVG of its main picture."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kendall.loadgen.compare.cells import ReportCell
from kendall.loadgen.compare.residual import PARTS
from kendall.loadgen.report.columns import IN_CSV
from kendall.loadgen.report.html.data import ReportData, in_order, of_folder
from kendall.loadgen.report.html.page import page
from kendall.loadgen.report.numbers import MS
from kendall.loadgen.report.orders import order_heads, order_values, tenths_of
from kendall.loadgen.report.report import as_object
from kendall.queueing.measurement.paths import writing

NAME = "report.html"


def write_report(
    folder: Path | None,
    data: ReportData | None = None,
    output: Path | None = None,
) -> Path:
    """The HTML report of a folder of runs, or of data that is at hand.

    Without `output` it is `report.html` in the folder, and its table lies beside it as CSV.
    """
    if data is None:
        if folder is None:
            raise ValueError("got neither a folder nor data; expected one of them")
        data = of_folder(folder)
    data = dataclasses.replace(data, cells=in_order(data.cells))
    target = output or (folder or Path()) / NAME
    text = page(data)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    if output is None:
        write_csv(data.cells, target.with_suffix(".csv"))
    return target


def write_csv(cells: Sequence[ReportCell], path: Path) -> Path:
    """A row per cell; durations in milliseconds as their names say, the parts of the difference
    too, and where policies were measured under several orders what these did.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    tenths = tenths_of([cell.comparison for cell in cells])
    heads = [*(key for key, _ in IN_CSV), *(f"part_{part}_ms" for part in PARTS)]
    writer.writerow([*heads, *order_heads(tenths)])
    for cell in cells:
        split = cell.comparison.split
        parts = [None if split is None else split.part(name).seconds * MS for name in PARTS]
        numbers = [value(cell) for _, value in IN_CSV]
        writer.writerow([*numbers, *parts, *order_values(cell.comparison, tenths)])
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.getvalue(), encoding="utf-8")
    return path


def as_json(cells: Sequence[ReportCell]) -> list[dict[str, Any]]:
    """One object per cell: the comparison, its load as asked, verdict and sender."""
    return [
        as_object(cell.comparison)
        | {
            "name": cell.name,
            "asked_load": cell.load,
            "max_output_tokens": cell.max_output_tokens,
            "audit": None if cell.audit is None else msgspec.to_builtins(cell.audit),
        }
        | {"lateness": None if cell.lateness is None else msgspec.to_builtins(cell.lateness)}
        | ({} if cell.client is None else {"client": msgspec.to_builtins(cell.client)})
        for cell in cells
    ]


def write_json(cells: Sequence[ReportCell], path: Path) -> Path:
    """The objects of `as_json`; seconds; what is infinite or unknown is null."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            msgspec.json.format(msgspec.json.encode(as_json(cells), enc_hook=float), indent=1)
            + b"\n"
        )
    return path
