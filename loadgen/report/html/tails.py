"""Figure: the distribution of the delay, a panel per cell: share of requests that waited longer,
predicted quantiles on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from loadgen.compare.cells import ReportCell
from loadgen.compare.comparison import DISTRIBUTION_LEVELS
from loadgen.report.html.marks import (
    A_PRIORI,
    PREDICTED,
    SAME_ARRIVALS,
    Mark,
    Panel,
    look_of,
    one_legend,
    scatter,
)
from loadgen.report.html.numbers import MS, label, load_text, ms
from loadgen.report.html.style import (
    Figure,
    Trace,
    axis,
    axis_title,
    columns,
    figure,
    legend_at_top,
    rows,
    title_over,
)
from queueing.result import LEVELS

ACROSS = 4
ROW, HEAD = 190, 110  # pixels
LEAST = 0.004  # share shown at the bottom
SHARES = {1.0: "100 %", 0.1: "10 %", 0.01: "1 %"}


def tails_figure(cells: Sequence[ReportCell]) -> Figure | None:
    """None where no cell has a distribution."""
    shown = [
        cell for cell in cells if len(cell.comparison.distribution) == len(DISTRIBUTION_LEVELS)
    ]
    if not shown:
        return None
    down = math.ceil(len(shown) / ACROSS)
    height = HEAD + ROW * down
    wide, high = columns(ACROSS, 0.04), rows(down, 56 / (ROW * down) if down > 1 else 0)
    layout: dict[str, Any] = {
        "annotations": [],
        "margin": {"l": 8, "r": 8, "t": 76, "b": 44},
        "legend": legend_at_top(),
    }
    traces: list[Trace] = []
    for index, cell in enumerate(shown):
        panel, (row, column) = Panel.at(index), divmod(index, ACROSS)
        unit = axis_title("ms" if index + ACROSS >= len(shown) else "")
        layout[f"xaxis{panel.key}"] = axis(
            domain=wide[column], anchor=f"y{panel.key}", rangemode="tozero", nticks=5, title=unit
        )
        layout[f"yaxis{panel.key}"] = _shares(high[row], f"x{panel.key}", labelled=column == 0)
        layout["annotations"].append(
            title_over(f"{label(cell)} · {load_text(cell.load)}", f"x{panel.key}", f"y{panel.key}")
        )
        traces += [
            _curve(cell, panel),
            *(_quantiles(cell, mark, panel) for mark in (A_PRIORI, PREDICTED, SAME_ARRIVALS)),
        ]
    return figure("tails", one_legend(traces), layout, height=height, min_width=760)


def _shares(domain: list[float], anchor: str, *, labelled: bool) -> dict[str, Any]:
    span = [math.log10(LEAST), 0.03]
    ticks = {
        "tickmode": "array",
        "tickvals": list(SHARES),
        "ticktext": list(SHARES.values()),
        "showticklabels": labelled,
    }
    return axis(domain=domain, anchor=anchor, type="log", range=span, **ticks)


def _curve(cell: ReportCell, panel: Panel) -> Trace:
    look = look_of(cell)
    waits = [
        (value * MS, 1 - level)
        for value, level in zip(cell.comparison.distribution, DISTRIBUTION_LEVELS, strict=True)
        if level < 1
    ]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": look.curve,
        "legendgroup": look.group,
        "legendrank": look.rank,
        "showlegend": panel.first,
        "x": [x for x, _ in waits],
        "y": [y for _, y in waits],
        "line": {"color": look.colour, "width": 2},
        "hovertemplate": "%{y:.1%} took longer than %{x:.1f} ms<extra></extra>",
        **panel.axes,
    }


def _quantiles(cell: ReportCell, mark: Mark, panel: Panel) -> Trace:
    quantity = cell.comparison.quantity
    found = quantity.theory_quantiles.get(mark.key, {})
    points = [(value * MS, 1 - LEVELS[level]) for level, value in found.items()]
    texts = [
        f"{level} {mark.name}: {ms(value)} ms<br>observed: {ms(quantity.quantiles.get(level))} ms"
        for level, value in found.items()
    ]
    return scatter(mark._replace(size=8), panel, points, texts)
