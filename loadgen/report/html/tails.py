"""Figure: the distribution of the delay, a panel per cell: share of requests that waited longer,
predicted quantiles on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kendall.loadgen.compare.cells import ReportCell
from kendall.loadgen.compare.comparison import DISTRIBUTION_LEVELS
from kendall.loadgen.report.html.marks import (
    A_PRIORI,
    PREDICTED,
    SAME_ARRIVALS,
    PanelGrid,
    one_legend,
    scatter,
    style_of,
)
from kendall.loadgen.report.html.style import (
    Figure,
    Trace,
    axis,
    figure,
)
from kendall.loadgen.report.numbers import MS, label, load_text, ms
from kendall.queueing.result import LEVELS

ACROSS = 4
ROW = 190  # pixels
LEAST = 0.004  # share shown at the bottom
SHARES = {1.0: "100 %", 0.1: "10 %", 0.01: "1 %"}


def tails_figure(cells: Sequence[ReportCell]) -> Figure | None:
    """None where no cell has a distribution."""
    shown = [
        cell for cell in cells if len(cell.comparison.distribution) == len(DISTRIBUTION_LEVELS)
    ]
    if not shown:
        return None
    grid = PanelGrid(len(shown), across=ACROSS, row=ROW, gaps=(0.04, 56))
    traces: list[Trace] = []
    for index, cell in enumerate(shown):
        panel, across, down = grid.place(index, f"{label(cell)} · {load_text(cell.load)}")
        title, _ = grid.titles(index, "ms", "")
        grid.layout[f"xaxis{panel.key}"] = axis(**across, rangemode="tozero", nticks=5, title=title)
        grid.layout[f"yaxis{panel.key}"] = axis(
            **down,
            type="log",
            range=[math.log10(LEAST), 0.03],
            tickmode="array",
            tickvals=list(SHARES),
            ticktext=list(SHARES.values()),
            showticklabels=index % ACROSS == 0,
        )
        style = style_of(cell)
        waits = [
            (value * MS, 1 - level)
            for value, level in zip(cell.comparison.distribution, DISTRIBUTION_LEVELS, strict=True)
            if level < 1
        ]
        curve = {
            "type": "scatter",
            "mode": "lines",
            "name": style.curve,
            "legendgroup": style.group,
            "legendrank": style.rank,
            "showlegend": panel.first,
            "x": [x for x, _ in waits],
            "y": [y for _, y in waits],
            "line": {"color": style.colour, "width": 2},
            "hovertemplate": "%{y:.1%} took longer than %{x:.1f} ms<extra></extra>",
            **panel.axes,
        }
        traces.append(curve)
        quantity = cell.comparison.quantity
        for mark in (A_PRIORI, PREDICTED, SAME_ARRIVALS):
            quantiles = quantity.theory_quantiles.get(mark.key, {})
            points = [(value * MS, 1 - LEVELS[level]) for level, value in quantiles.items()]
            texts = [
                f"{level} {mark.name}: {ms(value)} ms<br>"
                f"observed: {ms(quantity.quantiles.get(level))} ms"
                for level, value in quantiles.items()
            ]
            traces.append(scatter(mark._replace(size=8), panel, points, texts))
    return figure("tails", one_legend(traces), grid.layout, height=grid.height, min_width=760)
