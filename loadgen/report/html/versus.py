"""Figure: observed versus predicted, a panel per load, policies on common rows, time on one
logarithmic axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kendall.loadgen.compare.cells import ReportCell
from kendall.loadgen.report.html.marks import MARKS, Panel, observed_marks, one_legend, scatter
from kendall.loadgen.report.html.style import (
    Figure,
    Trace,
    axis_title,
    columns,
    figure,
    legend_at_top,
    log_axis,
    title_over,
)
from kendall.loadgen.report.numbers import MS, label, load_text, ms, percent

PANELS = 6  # most that one row shows
ROW, HEAD = 46, 120  # pixels


def panels_of(cells: Sequence[ReportCell]) -> list[tuple[str, list[ReportCell]]]:
    """Group the cells by load; nothing where there are more loads than panels."""
    by_load: dict[float | None, list[ReportCell]] = {}
    for cell in cells:
        by_load.setdefault(None if cell.load is None else round(cell.load, 2), []).append(cell)
    panels = [
        (load_text(load), by_load[load]) for load in sorted(by_load, key=lambda load: load or 0.0)
    ]
    return panels if len(panels) <= PANELS else []


def versus_figure(cells: Sequence[ReportCell]) -> Figure | None:
    """None where the loads are too many for panels (the figure over load shows them)."""
    panels = panels_of(cells)
    if not panels:
        return None
    names = list(dict.fromkeys(label(cell) for cell in cells))
    layout: dict[str, Any] = {
        "annotations": [],
        "margin": {"l": 8, "r": 8, "t": 76, "b": 48},
        "legend": legend_at_top(),
    }
    layout["yaxis"] = {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": names,
        "range": [len(names) - 0.5, -0.5],
        "automargin": True,
        "gridcolor": "$grid",
        "zeroline": False,
        "ticklen": 6,
        "tickcolor": "$none",
        "tickfont": {"size": 12, "color": "$ink"},
    }
    values = []
    for quantity in (cell.comparison.quantity for cell in cells):
        mean, observed = quantity.observed.mean, quantity.observed
        estimates = [getattr(quantity, mark.key) for mark in MARKS]
        values += [mean * MS, min(observed.high, 3 * mean) * MS, max(observed.low, 0.3 * mean) * MS]
        values += [estimate.mean * MS for estimate in estimates if estimate is not None]
    traces: list[Trace] = []
    for index, ((title, group), domain) in enumerate(
        zip(panels, columns(len(panels), 0.025), strict=True)
    ):
        panel = Panel.at(index, shared_y=True)
        layout[f"xaxis{panel.key}"] = log_axis(
            values, domain=domain, anchor="y", title=axis_title("mean delay (ms)")
        )
        layout["annotations"].append(title_over(f"<b>{title}</b>", f"x{panel.key}", "y"))
        rows = [names.index(label(cell)) for cell in group]
        for mark in MARKS:
            estimates = [
                (estimate, row)
                for cell, row in zip(group, rows, strict=True)
                if (estimate := getattr(cell.comparison.quantity, mark.key)) is not None
            ]
            points = [(estimate.mean * MS, row - mark.above) for estimate, row in estimates]
            texts = [
                f"{mark.name}: {ms(e.mean)} ms<br>observed {percent(e.deviation)}"
                for e, _ in estimates
            ]
            traces.append(scatter(mark, panel, points, texts))
        traces += observed_marks(panel, group, rows, along="x")
    return figure(
        "beside",
        one_legend(traces),
        layout,
        height=HEAD + ROW * len(names),
        min_width=260 + 150 * len(panels),
    )
