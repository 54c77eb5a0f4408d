"""Figure: observed and predicted mean delays, a panel per load. Policies are the rows that all
panels share; time is on a logarithmic axis that all panels share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kendall.loadgen.compare.cells import ReportCell
from kendall.loadgen.report.html.marks import (
    MARKS,
    Mark,
    Panel,
    observed_marks,
    one_legend,
    scatter,
)
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

MOST_PANELS = 6  # side by side
GAP = 0.025  # between two panels, a share of the width
ROW_HEIGHT, HEAD = 46, 120  # pixels
PANEL_WIDTH, NAMES_WIDTH = 150, 260  # pixels, the least of a panel and of the policies' names


def versus_figure(cells: Sequence[ReportCell]) -> Figure | None:
    """The figure; None without cells, and where there are more loads than panels (the figure over
    load shows them).
    """
    by_load = _cells_by_load(cells)
    if not 1 <= len(by_load) <= MOST_PANELS:
        return None
    names = list(dict.fromkeys(label(cell) for cell in cells))
    values = _axis_values(cells)
    layout: dict[str, Any] = {
        "annotations": [],
        "margin": {"l": 8, "r": 8, "t": 76, "b": 48},
        "legend": legend_at_top(),
        "yaxis": _policy_axis(names),
    }
    traces: list[Trace] = []
    domains = columns(len(by_load), GAP)
    for index, (load, group) in enumerate(by_load.items()):
        panel = Panel.at(index, shared_y=True)
        layout[f"xaxis{panel.key}"] = log_axis(
            values, domain=domains[index], anchor="y", title=axis_title("mean delay (ms)")
        )
        title = f"<b>{load_text(load)}</b>"
        layout["annotations"].append(title_over(title, f"x{panel.key}", "y"))
        rows = [names.index(label(cell)) for cell in group]
        traces += [_theory_marks(mark, panel, group, rows) for mark in MARKS]
        traces += observed_marks(panel, group, rows, along="x")
    return figure(
        "beside",
        one_legend(traces),
        layout,
        height=HEAD + ROW_HEIGHT * len(names),
        min_width=NAMES_WIDTH + PANEL_WIDTH * len(by_load),
    )


def _cells_by_load(cells: Sequence[ReportCell]) -> dict[float | None, list[ReportCell]]:
    """Cells grouped by their load in two decimals, ascending; cells without a load (None) count as
    load 0.
    """
    by_load: dict[float | None, list[ReportCell]] = {}
    for cell in cells:
        load = None if cell.load is None else round(cell.load, 2)
        by_load.setdefault(load, []).append(cell)
    return dict(sorted(by_load.items(), key=lambda item: item[0] or 0.0))


def _axis_values(cells: Sequence[ReportCell]) -> list[float]:
    """Milliseconds that the time axis spans: all means, and the observed intervals, cut at 0.3 and
    at 3 times their mean so that a wide one does not press the means together.
    """
    values = []
    for cell in cells:
        quantity = cell.comparison.quantity
        observed = quantity.observed
        low = max(observed.low, 0.3 * observed.mean)
        high = min(observed.high, 3 * observed.mean)
        values += [low * MS, observed.mean * MS, high * MS]
        for mark in MARKS:
            estimate = getattr(quantity, mark.key)
            if estimate is not None:
                values.append(estimate.mean * MS)
    return values


def _policy_axis(names: Sequence[str]) -> dict[str, Any]:
    """The shared axis of rows, the first policy on top."""
    return {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": list(names),
        "range": [len(names) - 0.5, -0.5],
        "automargin": True,
        "gridcolor": "$grid",
        "zeroline": False,
        "ticklen": 6,
        "tickcolor": "$none",
        "tickfont": {"size": 12, "color": "$ink"},
    }


def _theory_marks(
    mark: Mark, panel: Panel, cells: Sequence[ReportCell], rows: Sequence[int]
) -> Trace:
    """One theory's predictions of the cells that it has an answer for, each in its cell's row."""
    points, texts = [], []
    for cell, row in zip(cells, rows, strict=True):
        estimate = getattr(cell.comparison.quantity, mark.key)
        if estimate is not None:
            points.append((estimate.mean * MS, row - mark.above))
            texts.append(
                f"{mark.name}: {ms(estimate.mean)} ms<br>observed {percent(estimate.deviation)}"
            )
    return scatter(mark, panel, points, texts)
