"""What stands in the panels: the marks of every theory, the observed means with their intervals,
what hovering tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from loadgen.compare.cells import ReportCell
from loadgen.report.html.numbers import MS, load_text, mean_and_half, ms, percent
from loadgen.report.html.style import Trace


class Mark(NamedTuple):
    """How one theory is drawn; `key` is its field of a Quantity."""

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


class Look(NamedTuple):
    """How what was observed is drawn, in every figure alike."""

    name: str
    group: str
    colour: str
    rank: int  # in the legend
    curve: str  # the name of one without intervals


JUDGED = Look("observed, 95 % interval", "observed", "$observed", 1, "observed")
_PALE = "observed, disturbed or invalid: not judged"
NOT_JUDGED = Look(_PALE, "short", "$pale", 2, _PALE)


def look_of(cell: ReportCell) -> Look:
    """Pale where the cell is disturbed or invalid."""
    return JUDGED if cell.counts else NOT_JUDGED


class Panel(NamedTuple):
    """Where a trace goes, and whether the legend takes its name from it."""

    key: str  # "" for the first, then 2, 3, ...
    first: bool
    shared_y: bool = False

    @property
    def axes(self) -> dict[str, str]:
        """As traces name them."""
        return {"xaxis": f"x{self.key}", "yaxis": "y" if self.shared_y else f"y{self.key}"}

    @classmethod
    def at(cls, index: int, *, shared_y: bool = False) -> Panel:
        """The panel of that number, from 0."""
        return cls("" if index == 0 else str(index + 1), index == 0, shared_y)


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
    placed = list(zip(cells, others, strict=True))
    return [
        _observed(panel, [(cell, at) for cell, at in placed if look_of(cell) is look], along, look)
        for look in (JUDGED, NOT_JUDGED)
    ]


def _observed(
    panel: Panel, cells: Sequence[tuple[ReportCell, float]], along: str, look: Look
) -> Trace:
    means = [cell.comparison.quantity.observed for cell, _ in cells]
    bars = {
        "type": "data",
        "array": [mean.half_width * MS for mean in means],
        "arrayminus": [min(mean.half_width, 0.9 * mean.mean) * MS for mean in means],
        "color": look.colour,
        "thickness": 1.8,
        "width": 4,
    }
    return {
        "type": "scatter",
        "mode": "markers",
        "name": look.name,
        "legendgroup": look.group,
        "legendrank": look.rank,
        "showlegend": bool(cells),
        along: [mean.mean * MS for mean in means],
        "y" if along == "x" else "x": [other for _, other in cells],
        f"error_{along}": bars,
        "marker": {"color": look.colour, "size": 9},
        "text": [hover(cell) for cell, _ in cells],
        "hoverinfo": "text",
        **panel.axes,
    }


def one_legend(traces: list[Trace]) -> list[Trace]:
    """Each group named once, by its first trace that has points."""
    named: set[str] = set()
    for trace in traces:
        trace["showlegend"] = bool(trace["x"]) and trace["legendgroup"] not in named
        named |= {trace["legendgroup"]} if trace["x"] else set()
    return traces


def hover(cell: ReportCell) -> str:
    """Everything about a cell's means."""
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
