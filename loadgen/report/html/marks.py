"""The content of the panels: the marks of every theory, the observed means with their intervals,
the texts that are shown on hovering.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from kendall.loadgen.compare.cells import ReportCell
from kendall.loadgen.report.html.style import (
    Trace,
    axis_title,
    columns,
    legend_at_top,
    rows,
    title_over,
)
from kendall.loadgen.report.numbers import MS, load_text, mean_and_half, ms, percent

HEAD = 110  # pixels above the panels of a grid


class Mark(NamedTuple):
    """The drawing of one theory; `key` is its field of a Quantity."""

    key: str
    name: str
    symbol: str
    colour: str
    size: int
    above: float = 0.0  # of its row, in rows


SAME_ARRIVALS = Mark("same_arrivals", "model, same requests", "diamond", "$ink", 9, 0.13)
A_PRIORI = Mark("a_priori", "steady state a priori", "diamond-open", "$muted", 9, 0.26)
PREDICTED = Mark("predicted", "steady state at the run’s speed", "square-open", "$muted", 7, -0.13)
RECURSION = Mark(
    "measured_service", "recursion on measured services", "line-ns-open", "$muted", 9, -0.26
)
PAPER = Mark("paper", "as printed", "triangle-down-open", "$muted", 8, -0.39)
MARKS = (SAME_ARRIVALS, A_PRIORI, PREDICTED, RECURSION, PAPER)


class ObservedStyle(NamedTuple):
    """The drawing of what was observed, alike in every figure."""

    name: str
    group: str
    colour: str
    rank: int  # in the legend
    curve: str  # the name of one without intervals


JUDGED = ObservedStyle("observed, 95 % interval", "observed", "$observed", 1, "observed")
_PALE = "observed, disturbed or invalid: not judged"
NOT_JUDGED = ObservedStyle(_PALE, "short", "$pale", 2, _PALE)


def style_of(cell: ReportCell) -> ObservedStyle:
    """The style of a cell: pale where it is disturbed or invalid."""
    return JUDGED if cell.counts else NOT_JUDGED


class Panel(NamedTuple):
    """One set of axes, and whether the legend takes its names from it."""

    key: str  # "" for the first, then 2, 3, ...
    first: bool
    shared_y: bool = False

    @property
    def axes(self) -> dict[str, str]:
        """The axes as a trace names them."""
        return {"xaxis": f"x{self.key}", "yaxis": "y" if self.shared_y else f"y{self.key}"}

    @classmethod
    def at(cls, index: int, *, shared_y: bool = False) -> Panel:
        """The panel of that number, from 0."""
        return cls("" if index == 0 else str(index + 1), index == 0, shared_y)


class PanelGrid:
    """Panels side by side in rows, each with a title and axes of its own."""

    def __init__(
        self, count: int, *, across: int, row: int, gaps: tuple[float, int], top: int = 76
    ) -> None:
        """`row`: the height of one, pixels; `gaps`: between columns, a share of the width, and
        between rows, pixels; `top`: what the legend takes, pixels.
        """
        down = math.ceil(count / across)
        self._across, self._count = across, count
        self._columns = columns(across, gaps[0])
        self._rows = rows(down, gaps[1] / (row * down) if down > 1 else 0)
        self.height = HEAD + row * down
        self.layout: dict[str, Any] = {
            "annotations": [],
            "margin": {"l": 8, "r": 8, "t": top, "b": 44},
            "legend": legend_at_top(),
        }

    def place(self, index: int, title: str) -> tuple[Panel, dict[str, Any], dict[str, Any]]:
        """The panel of that number, from 0, and where its axes are."""
        panel, (row, column) = Panel.at(index), divmod(index, self._across)
        x, y = f"x{panel.key}", f"y{panel.key}"
        self.layout["annotations"].append(title_over(title, x, y))
        across = {"domain": self._columns[column], "anchor": y}
        return panel, across, {"domain": self._rows[row], "anchor": x}

    def titles(self, index: int, x: str, y: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The titles of its axes: below the last row only, and beside the first column."""
        last, first = index + self._across >= self._count, index % self._across == 0
        return axis_title(x if last else ""), axis_title(y if first else "")


def scatter(
    mark: Mark, panel: Panel, points: Sequence[tuple[float, float]], texts: Sequence[str]
) -> Trace:
    """One theory's marks in one panel."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": mark.name,
        "legendgroup": mark.key,
        "showlegend": panel.first,
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "marker": {
            "symbol": mark.symbol,
            "color": mark.colour,
            "size": mark.size,
            "line": {"width": 1.5, "color": mark.colour},
        },
        "text": list(texts),
        "hoverinfo": "text",
        **panel.axes,
    }


def observed_marks(
    panel: Panel, cells: Sequence[ReportCell], others: Sequence[float], *, along: str
) -> list[Trace]:
    """Observed means with their intervals, in milliseconds along one axis; `others` are the places
    along the other.

    Two traces: those that can be judged, and, pale, those of runs disturbed or invalid. On a
    logarithmic axis an interval does not reach 0.
    """
    traces = []
    for style in (JUDGED, NOT_JUDGED):
        placed = [
            (cell, other)
            for cell, other in zip(cells, others, strict=True)
            if style_of(cell) is style
        ]
        means = [cell.comparison.quantity.observed for cell, _ in placed]
        bars = {
            "type": "data",
            "array": [mean.half_width * MS for mean in means],
            "arrayminus": [min(mean.half_width, 0.9 * mean.mean) * MS for mean in means],
            "color": style.colour,
            "thickness": 1.8,
            "width": 4,
        }
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": style.name,
                "legendgroup": style.group,
                "legendrank": style.rank,
                "showlegend": bool(placed),
                along: [mean.mean * MS for mean in means],
                "y" if along == "x" else "x": [other for _, other in placed],
                f"error_{along}": bars,
                "marker": {"color": style.colour, "size": 9},
                "text": [hover(cell) for cell, _ in placed],
                "hoverinfo": "text",
                **panel.axes,
            }
        )
    return traces


def one_legend(traces: list[Trace]) -> list[Trace]:
    """Name each group once, by its first trace that has points."""
    named: set[str] = set()
    for trace in traces:
        trace["showlegend"] = bool(trace["x"]) and trace["legendgroup"] not in named
        named |= {trace["legendgroup"]} if trace["x"] else set()
    return traces


def hover(cell: ReportCell) -> str:
    """The text of a cell on hovering: its observed mean, every theory's, the verdict."""
    comparison = cell.comparison
    quantity = comparison.quantity
    what = "mean sojourn" if comparison.compared == "sojourn_time" else "mean queueing delay"
    lines = [
        f"<b>{comparison.policy}</b>, {load_text(cell.load)}",
        (
            f"{what}: "
            f"{' ± '.join(mean_and_half(quantity.observed.mean, quantity.observed.half_width))} ms "
            f"(n = {comparison.n:,})"
        ),
    ]
    for mark in MARKS:
        estimate = getattr(quantity, mark.key)
        if estimate is not None:
            lines.append(f"{mark.name}: {ms(estimate.mean)} ms ({percent(estimate.deviation)})")
    return "<br>".join(
        [*lines, f"verdict: {'INVALID, not judged' if cell.invalid else cell.verdict.text}"]
    )
