"""Figure: where observed and predicted part, a stacked bar per cell; the parts add up to the
deviation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadgen.compare.cells import ReportCell
from loadgen.compare.residual import PARTS, parts_of
from loadgen.report.html.marks import JUDGED, NOT_JUDGED, Look, look_of
from loadgen.report.html.numbers import label, load_text, ms, percent
from loadgen.report.html.style import (
    PART_COLOURS,
    PART_NAMES,
    Figure,
    Trace,
    axis,
    axis_title,
    figure,
    legend_at_top,
)

ROW, HEAD = 26, 120  # pixels
PALE = 0.38  # opacity of a bar that names no cause: within chance, or in a cell that is not judged
FARTHEST, LEAST = 4.0, 20.0  # times the median reach; percent


def parts_figure(cells: Sequence[ReportCell]) -> Figure | None:
    """None where no cell has parts."""
    split = [cell for cell in cells if cell.comparison.split is not None]
    if not split:
        return None
    names = [f"{label(cell)}  ·  {load_text(cell.load)}" for cell in split]
    traces = [_bars(part, split, names) for part in parts_of([cell.comparison for cell in split])]
    low, high = _range(split)
    title = axis_title("observed − predicted a priori, share of the prediction")
    layout = {
        "barmode": "relative",
        "bargap": 0.35,
        "xaxis": axis(ticksuffix=" %", title=title, range=[low, high])
        | {"zeroline": True, "zerolinecolor": "$muted"},
        "yaxis": {
            "type": "category",
            "autorange": "reversed",
            "automargin": True,
            "ticklen": 6,
            "tickcolor": "$none",
            "tickfont": {"size": 12},
        },
        "legend": legend_at_top(traceorder="normal"),
        "annotations": [
            _beyond(cell, name, low, high)
            for cell, name in zip(split, names, strict=True)
            if not low <= _total(cell) <= high
        ],
        "margin": {"l": 8, "r": 16, "t": 76, "b": 48},
    }
    return figure(
        "parts",
        [*traces, *_totals(split, names)],
        layout,
        height=HEAD + ROW * len(split),
        min_width=620,
    )


def _total(cell: ReportCell) -> float:
    split = cell.comparison.split
    return 0.0 if split is None else 100 * split.total / split.predicted


def _range(cells: Sequence[ReportCell]) -> tuple[float, float]:
    """Of the axis, in percent: all cells, but an outlier is cut at `FARTHEST` times the median
    reach.
    """
    ends = [_ends(cell) for cell in cells]
    reach = sorted(max(-low, high) for low, high in ends)
    most = max(FARTHEST * reach[len(reach) // 2], LEAST)
    return 1.08 * max(min(low for low, _ in ends), -most), 1.08 * min(
        max(high for _, high in ends), most
    )


def _ends(cell: ReportCell) -> tuple[float, float]:
    """Where a cell's bars end, or its interval."""
    split = cell.comparison.split
    assert split is not None
    shares = [100 * split.share(name) for name in PARTS]
    half = 100 * min(cell.comparison.quantity.observed.half_width / split.predicted, 10.0)
    low, high = (
        sum(share for share in shares if share < 0),
        sum(share for share in shares if share > 0),
    )
    return min(low, _total(cell) - half, -LEAST / 4), max(high, _total(cell) + half, LEAST / 4)


def _beyond(cell: ReportCell, name: str, low: float, high: float) -> dict[str, Any]:
    """How far a cell goes that the axis cuts."""
    right = _total(cell) > high
    said = percent(_total(cell) / 100)
    place = {"x": high, "xanchor": "right"} if right else {"x": low, "xanchor": "left"}
    return {
        "y": name,
        "text": f"{said} →" if right else f"← {said}",
        "showarrow": False,
        "font": {"size": 11, "color": "$ink"},
        **place,
    }


def _bars(part: str, cells: Sequence[ReportCell], names: Sequence[str]) -> Trace:
    found = [
        (cell, split, name)
        for cell, name in zip(cells, names, strict=True)
        if (split := cell.comparison.split) is not None
    ]
    texts = [
        f"<b>{PART_NAMES[part]}</b><br>{name}<br>{ms(split.part(part).seconds)} ± "
        f"{ms(split.part(part).half_width)} ms = {percent(split.share(part))} of the "
        "prediction<br>"
        + ("beyond chance" if split.part(part).significant else "within chance")
        + ("" if cell.counts else "<br>not judged: the run is disturbed or invalid")
        + (f"<br>{split.part(part).note}" if split.part(part).note else "")
        for cell, split, name in found
    ]
    opacity = [
        1.0 if cell.counts and split.part(part).significant else PALE for cell, split, _ in found
    ]
    return {
        "type": "bar",
        "orientation": "h",
        "name": PART_NAMES[part],
        "x": [100 * split.share(part) for _, split, _ in found],
        "y": [name for _, _, name in found],
        "marker": {"color": PART_COLOURS[part], "opacity": opacity},
        "text": texts,
        "textposition": "none",
        "hoverinfo": "text",
    }


def _totals(cells: Sequence[ReportCell], names: Sequence[str]) -> list[Trace]:
    """One trace for the cells that can be judged, one for the others, where there are any."""
    placed = list(zip(cells, names, strict=True))
    alike = [
        (look, [(cell, name) for cell, name in placed if look_of(cell) is look])
        for look in (JUDGED, NOT_JUDGED)
    ]
    return [_total_marks(look, group) for look, group in alike if group]


def _total_marks(look: Look, cells: Sequence[tuple[ReportCell, str]]) -> Trace:
    found = [
        (cell, split, name) for cell, name in cells if (split := cell.comparison.split) is not None
    ]
    widths = [
        100 * cell.comparison.quantity.observed.half_width / split.predicted
        for cell, split, _ in found
    ]
    colour = "$ink" if look is JUDGED else look.colour
    return {
        "type": "scatter",
        "mode": "markers",
        # short: the widest name of a legend gives all its columns their width
        "name": f"sum: {look.name if look is JUDGED else 'not judged'}",
        "legendgroup": look.group,
        "x": [_total(cell) for cell, _, _ in found],
        "y": [name for _, _, name in found],
        "error_x": {"type": "data", "array": widths, "color": colour, "thickness": 1.2, "width": 3},
        "marker": {"symbol": "diamond", "color": colour, "size": 8},
        "text": [
            f"{name}<br>observed {percent(_total(cell) / 100)}, ± {w:.0f} %"
            for (cell, _, name), w in zip(found, widths, strict=True)
        ],
        "hoverinfo": "text",
    }
