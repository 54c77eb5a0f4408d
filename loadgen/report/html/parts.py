"""Figure: where observed and predicted part, a stacked bar per cell; the parts add up to the
deviation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kendall.loadgen.compare.cells import ReportCell
from kendall.loadgen.compare.comparison import Split
from kendall.loadgen.compare.residual import PARTS, parts_of
from kendall.loadgen.report.html.marks import JUDGED, NOT_JUDGED, ObservedStyle, style_of
from kendall.loadgen.report.html.style import (
    PART_COLOURS,
    PART_NAMES,
    Figure,
    Trace,
    axis,
    axis_title,
    figure,
    legend_at_top,
)
from kendall.loadgen.report.numbers import label, load_text, ms, percent

ROW, HEAD = 26, 120  # pixels
PALE = 0.38  # opacity of a bar that names no cause: within chance, or in a cell that is not judged
FARTHEST, LEAST = 4.0, 20.0  # times the median reach; percent


class SplitCell(NamedTuple):
    """A cell whose difference is split, and what the figure calls it."""

    cell: ReportCell
    split: Split
    name: str

    @property
    def total(self) -> float:
        """observed - predicted, percent of the prediction."""
        return 100 * self.split.total / self.split.predicted

    @property
    def ends(self) -> tuple[float, float]:
        """Its bars end here, or its interval."""
        shares = [100 * self.split.share(name) for name in PARTS]
        half_width = self.cell.comparison.quantity.observed.half_width
        half = 100 * min(half_width / self.split.predicted, 10.0)
        low = sum(share for share in shares if share < 0)
        high = sum(share for share in shares if share > 0)
        return min(low, self.total - half, -LEAST / 4), max(high, self.total + half, LEAST / 4)


def parts_figure(cells: Sequence[ReportCell]) -> Figure | None:
    """None where no cell has parts."""
    bars = [
        SplitCell(cell, split, f"{label(cell)}  ·  {load_text(cell.load)}")
        for cell in cells
        if (split := cell.comparison.split) is not None
    ]
    if not bars:
        return None
    # an outlier is cut at `FARTHEST` times the median reach
    reach = sorted(max(-low, high) for low, high in (bar.ends for bar in bars))
    most = max(FARTHEST * reach[len(reach) // 2], LEAST)
    low = 1.08 * max(min(bar.ends[0] for bar in bars), -most)
    high = 1.08 * min(max(bar.ends[1] for bar in bars), most)
    beyond = []
    for bar in bars:
        if not low <= bar.total <= high:  # how far a cell goes that the axis cuts
            right, share = bar.total > high, percent(bar.total / 100)
            place = {"x": high, "xanchor": "right"} if right else {"x": low, "xanchor": "left"}
            beyond.append(
                {
                    "y": bar.name,
                    "text": f"{share} →" if right else f"← {share}",
                    "showarrow": False,
                    "font": {"size": 11, "color": "$ink"},
                    **place,
                }
            )
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
        "annotations": beyond,
        "margin": {"l": 8, "r": 16, "t": 76, "b": 48},
    }
    # one trace of sums for the cells that can be judged, one for the others, where there are any
    sums = [
        _sums(style, group)
        for style in (JUDGED, NOT_JUDGED)
        if (group := [bar for bar in bars if style_of(bar.cell) is style])
    ]
    parts = [_part_bars(part, bars) for part in parts_of([bar.cell.comparison for bar in bars])]
    height = HEAD + ROW * len(bars)
    return figure("parts", [*parts, *sums], layout, height=height, min_width=620)


def _part_bars(name: str, bars: Sequence[SplitCell]) -> Trace:
    texts, opacity = [], []
    for bar in bars:
        part = bar.split.part(name)
        lines = [
            f"<b>{PART_NAMES[name]}</b>",
            bar.name,
            f"{ms(part.seconds)} ± {ms(part.half_width)} ms = {percent(bar.split.share(name))} "
            "of the prediction",
            "beyond chance" if part.significant else "within chance",
            "" if bar.cell.counts else "not judged: the run is disturbed or invalid",
            part.note,
        ]
        texts.append("<br>".join(filter(None, lines)))
        opacity.append(1.0 if bar.cell.counts and part.significant else PALE)
    return {
        "type": "bar",
        "orientation": "h",
        "name": PART_NAMES[name],
        "x": [100 * bar.split.share(name) for bar in bars],
        "y": [bar.name for bar in bars],
        "marker": {"color": PART_COLOURS[name], "opacity": opacity},
        "text": texts,
        "textposition": "none",
        "hoverinfo": "text",
    }


def _sums(style: ObservedStyle, bars: Sequence[SplitCell]) -> Trace:
    widths = [
        100 * bar.cell.comparison.quantity.observed.half_width / bar.split.predicted for bar in bars
    ]
    colour = "$ink" if style is JUDGED else style.colour
    return {
        "type": "scatter",
        "mode": "markers",
        # short: the widest name of a legend gives all its columns their width
        "name": f"sum: {style.name if style is JUDGED else 'not judged'}",
        "legendgroup": style.group,
        "x": [bar.total for bar in bars],
        "y": [bar.name for bar in bars],
        "error_x": {"type": "data", "array": widths, "color": colour, "thickness": 1.2, "width": 3},
        "marker": {"symbol": "diamond", "color": colour, "size": 8},
        "text": [
            f"{bar.name}<br>observed {percent(bar.total / 100)}, ± {width:.0f} %"
            for bar, width in zip(bars, widths, strict=True)
        ],
        "hoverinfo": "text",
    }
