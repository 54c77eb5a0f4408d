"""Figure: where observed and predicted part, a stacked bar per cell; the parts add up to the deviation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadgen.cells import ReportCell
from loadgen.html_report.numbers import label, load_text, ms, percent
from loadgen.html_report.style import PART_COLOURS, PART_NAMES, Figure, Trace, axis, axis_title, figure, legend_at_top
from loadgen.residual import PARTS

ROW, HEAD = 26, 120  # pixels
FARTHEST, LEAST = 4.0, 20.0  # times the median reach; percent


def parts_figure(cells: Sequence[ReportCell]) -> Figure | None:
    """None where no cell has parts."""
    split = [cell for cell in cells if cell.comparison.split is not None]
    if not split:
        return None
    names = [f"{label(cell)}  ·  {load_text(cell.load)}" for cell in split]
    traces = [_bars(name, split, names) for name in PARTS]
    low, high = _range(split)
    title = axis_title("observed − predicted a priori, share of the prediction")
    layout = {
        "barmode": "relative",
        "bargap": 0.35,
        "xaxis": axis(ticksuffix=" %", title=title, range=[low, high]) | {"zeroline": True, "zerolinecolor": "$muted"},
        "yaxis": {
            "type": "category",
            "autorange": "reversed",
            "automargin": True,
            "ticklen": 6,
            "tickcolor": "$none",
            "tickfont": {"size": 12},
        },
        "legend": legend_at_top(traceorder="normal"),
        "annotations": [_beyond(cell, name, low, high) for cell, name in zip(split, names, strict=True) if not low <= _total(cell) <= high],
        "margin": {"l": 8, "r": 16, "t": 76, "b": 48},
    }
    return figure("parts", [*traces, _totals(split, names)], layout, height=HEAD + ROW * len(split), min_width=620)


def _total(cell: ReportCell) -> float:
    split = cell.comparison.split
    return 0.0 if split is None else 100 * split.total / split.predicted


def _range(cells: Sequence[ReportCell]) -> tuple[float, float]:
    """Of the axis, in percent: all cells, but an outlier is cut at `FARTHEST` times the median reach."""
    ends = [_ends(cell) for cell in cells]
    reach = sorted(max(-low, high) for low, high in ends)
    most = max(FARTHEST * reach[len(reach) // 2], LEAST)
    return 1.08 * max(min(low for low, _ in ends), -most), 1.08 * min(max(high for _, high in ends), most)


def _ends(cell: ReportCell) -> tuple[float, float]:
    """Where a cell's bars end, or its interval."""
    split = cell.comparison.split
    assert split is not None
    shares = [100 * split.share(name) for name in PARTS]
    half = 100 * min(cell.comparison.quantity.observed.half_width / split.predicted, 10.0)
    low, high = sum(share for share in shares if share < 0), sum(share for share in shares if share > 0)
    return min(low, _total(cell) - half, -LEAST / 4), max(high, _total(cell) + half, LEAST / 4)


def _beyond(cell: ReportCell, name: str, low: float, high: float) -> dict[str, Any]:
    """How far a cell goes that the axis cuts."""
    right = _total(cell) > high
    said = percent(_total(cell) / 100)
    place = {"x": high, "xanchor": "right"} if right else {"x": low, "xanchor": "left"}
    return {"y": name, "text": f"{said} →" if right else f"← {said}", "showarrow": False, "font": {"size": 11, "color": "$ink"}, **place}


def _bars(part: str, cells: Sequence[ReportCell], names: Sequence[str]) -> Trace:
    found = [(cell.comparison.split, name) for cell, name in zip(cells, names, strict=True) if cell.comparison.split is not None]
    texts = [
        f"<b>{PART_NAMES[part]}</b><br>{name}<br>{ms(split.part(part).seconds)} ± {ms(split.part(part).half_width)} ms"
        f" = {percent(split.share(part))} of the prediction<br>"
        + ("beyond chance" if split.part(part).significant else "within chance")
        + (f"<br>{split.part(part).note}" if split.part(part).note else "")
        for split, name in found
    ]
    return {
        "type": "bar",
        "orientation": "h",
        "name": PART_NAMES[part],
        "x": [100 * split.share(part) for split, _ in found],
        "y": [name for _, name in found],
        "marker": {"color": PART_COLOURS[part], "opacity": [1.0 if split.part(part).significant else 0.38 for split, _ in found]},
        "text": texts,
        "textposition": "none",
        "hoverinfo": "text",
    }


def _totals(cells: Sequence[ReportCell], names: Sequence[str]) -> Trace:
    splits = [cell.comparison.split for cell in cells if cell.comparison.split is not None]
    half = [cell.comparison.quantity.observed.half_width for cell in cells]
    widths = [100 * h / split.predicted for h, split in zip(half, splits, strict=True)]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "sum: observed, 95 % interval",
        "x": [100 * split.total / split.predicted for split in splits],
        "y": list(names),
        "error_x": {"type": "data", "array": widths, "color": "$ink", "thickness": 1.2, "width": 3},
        "marker": {"symbol": "diamond", "color": "$ink", "size": 8},
        "text": [
            f"{name}<br>observed {percent(s.total / s.predicted)}, ± {w:.0f} %" for name, s, w in zip(names, splits, widths, strict=True)
        ],
        "hoverinfo": "text",
    }
