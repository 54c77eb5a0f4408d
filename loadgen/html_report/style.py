"""What all figures share: names of colours, axes, sizes. A figure is a plain dict as plotly.js takes it.

Colours are names ("$observed") which the page replaces by those of its theme, so that one figure serves light, dark and
paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from loadgen.cells import ReportCell

Trace = dict[str, Any]
Figure = dict[str, Any]

PART_COLOURS = {
    "theory": "$theory",
    "arrivals": "$arrivals",
    "sender": "$sender",
    "speed": "$speed",
    "scatter": "$scatter",
    "shape": "$shape",
    "gateway": "$gateway",
}
PART_NAMES = {
    "theory": "theory (formula)",
    "arrivals": "arrivals (sampling)",
    "sender": "sender",
    "speed": "service law: speed",
    "scatter": "service law: scatter",
    "shape": "service law: shape",
    "gateway": "gateway",
}
MS = 1e3


class Mark(NamedTuple):
    """How one theory is drawn; `key` is its field of a Quantity."""

    key: str
    name: str
    symbol: str
    colour: str
    size: int
    above: float = 0.0  # of its row, in rows


A_PRIORI = Mark("a_priori", "predicted a priori", "diamond-open", "$ink", 10, 0.26)
PREDICTED = Mark("predicted", "predicted at the run’s speed", "diamond", "$ink", 8, 0.13)
SAME_ARRIVALS = Mark("same_arrivals", "simulated, same arrivals", "square-open", "$muted", 7, -0.13)
RECURSION = Mark("measured_service", "recursion on measured services", "line-ns-open", "$muted", 9, -0.26)
PAPER = Mark("paper", "as printed", "triangle-down-open", "$muted", 8, -0.39)
MARKS = (A_PRIORI, PREDICTED, SAME_ARRIVALS, RECURSION, PAPER)


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


def legend_at_top(**more: Any) -> dict[str, Any]:
    """Above all panels, whatever their height."""
    return {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top", "font": {"size": 12}, **more}


def axis_title(text: str) -> dict[str, Any]:
    """Small, beside its axis."""
    return {"text": text, "font": {"size": 11, "color": "$muted"}}


def scatter(mark: Mark, panel: Panel, points: Sequence[tuple[float, float]], texts: Sequence[str]) -> Trace:
    """One theory's marks in one panel."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": mark.name,
        "legendgroup": mark.key,
        "showlegend": panel.first,
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "marker": {"symbol": mark.symbol, "color": mark.colour, "size": mark.size, "line": {"width": 1.5, "color": mark.colour}},
        "text": list(texts),
        "hoverinfo": "text",
        **panel.axes,
    }


def observed_marks(panel: Panel, cells: Sequence[ReportCell], others: Sequence[float], *, along: str) -> list[Trace]:
    """Observed means with their intervals, in milliseconds along one axis; `others` are the places along the other.

    Two traces: those that can be judged, and, pale, those of runs too short. On a logarithmic axis an interval does not reach 0.
    """
    judged = [(cell, other) for cell, other in zip(cells, others, strict=True) if not cell.comparison.too_short]
    short = [(cell, other) for cell, other in zip(cells, others, strict=True) if cell.comparison.too_short]
    return [
        _observed(panel, judged, along, ("observed, 95 % interval", "observed", "$observed", 1)),
        _observed(panel, short, along, ("observed, run too short to judge", "short", "$pale", 2)),
    ]


def _observed(panel: Panel, cells: Sequence[tuple[ReportCell, float]], along: str, look: tuple[str, str, str, int]) -> Trace:
    name, group, colour, rank = look
    means = [cell.comparison.quantity.observed for cell, _ in cells]
    bars = {
        "type": "data",
        "array": [mean.half_width * MS for mean in means],
        "arrayminus": [min(mean.half_width, 0.9 * mean.mean) * MS for mean in means],
        "color": colour,
        "thickness": 1.8,
        "width": 4,
    }
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "legendgroup": group,
        "legendrank": rank,
        "showlegend": bool(cells),
        along: [mean.mean * MS for mean in means],
        "y" if along == "x" else "x": [other for _, other in cells],
        f"error_{along}": bars,
        "marker": {"color": colour, "size": 9},
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
        f"{what}: {' ± '.join(mean_and_half(quantity.observed.mean, quantity.observed.half_width))} ms (n = {comparison.n:,})",
    ]
    for mark in MARKS:
        estimate = getattr(quantity, mark.key)
        if estimate is not None:
            lines.append(f"{mark.name}: {ms(estimate.mean)} ms ({percent(estimate.deviation)})")
    return "<br>".join([*lines, f"verdict: {cell.verdict.text}"])


def figure(name: str, traces: Sequence[Trace], layout: Mapping[str, Any], *, height: int, min_width: int = 0) -> Figure:
    """One figure of the page; `min_width` in pixels, below which it scrolls sideways."""
    base = {
        "height": height,
        "margin": {"l": 8, "r": 8, "t": 40, "b": 44},
        "paper_bgcolor": "$none",
        "plot_bgcolor": "$none",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', sans-serif", "size": 12, "color": "$ink"},
        "hoverlabel": {"align": "left", "bgcolor": "$surface", "bordercolor": "$rule", "font": {"color": "$ink"}},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "font": {"size": 12}},
        "showlegend": True,
    }
    return {"name": name, "data": list(traces), "layout": {**base, **layout}, "minWidth": min_width}


def axis(**settings: Any) -> dict[str, Any]:
    """Light grid, no zero line, grows with its labels."""
    return {
        "gridcolor": "$grid",
        "zeroline": False,
        "linecolor": "$rule",
        "tickcolor": "$rule",
        "ticks": "outside",
        "ticklen": 4,
        "automargin": True,
        "tickfont": {"size": 11, "color": "$muted"},
        **settings,
    }


def log_axis(values: Iterable[float], **settings: Any) -> dict[str, Any]:
    """A logarithmic axis over the positive values, labelled at 1, 2, 5 of each decade where they are few."""
    positive = [value for value in values if value > 0 and math.isfinite(value)]
    low, high = (min(positive), max(positive)) if positive else (1.0, 10.0)
    span = [math.log10(low) - 0.08, math.log10(high) + 0.08]
    digits = (1, 2, 5) if span[1] - span[0] < 2.2 else (1,)
    exponents = range(math.floor(span[0]), math.ceil(span[1]) + 1)
    ticks = [digit * 10.0**exponent for exponent in exponents for digit in digits]
    shown = [tick for tick in ticks if span[0] <= math.log10(tick) <= span[1]]
    return axis(type="log", range=span, tickmode="array", tickvals=shown, ticktext=[f"{tick:g}" for tick in shown], **settings)


def title_over(text: str, x: str, y: str, *, at: float = 0.0) -> dict[str, Any]:
    """A panel's title; `x` and `y` name its axes."""
    return {
        "text": text,
        "xref": f"{x} domain",
        "yref": f"{y} domain",
        "x": at,
        "y": 1,
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 12, "color": "$ink"},
    }


def columns(count: int, gap: float) -> list[list[float]]:
    """Domains of `count` panels side by side."""
    width = (1 - gap * (count - 1)) / count
    return [[index * (width + gap), index * (width + gap) + width] for index in range(count)]


def rows(count: int, gap: float) -> list[list[float]]:
    """Domains of `count` panels, the first on top."""
    return [[1 - high, 1 - low] for low, high in columns(count, gap)]


def label(cell: ReportCell) -> str:
    """A cell's policy, short; with its token limit where there is one, a star where the sojourn is compared."""
    name, _, parameters = cell.comparison.policy.partition(":")
    values = [pair.partition("=")[2] for pair in parameters.split(",") if pair]
    text = f"{name} {' '.join(values)}".strip()
    text += "*" if cell.comparison.compared == "sojourn_time" else ""
    return text if cell.max_output_tokens is None else f"{text}, limit {cell.max_output_tokens}"


def load_text(load: float | None) -> str:
    """As a reader says it."""
    return "load not known" if load is None else f"load {load:.2f}".rstrip("0").rstrip(".")


def ms(seconds: float | None) -> str:
    """Milliseconds: one decimal, more only below 1 ms, so that columns align."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    return f"{seconds * MS:,.{decimals(seconds)}f}"


def decimals(seconds: float) -> int:
    """Of a time in milliseconds."""
    size = abs(seconds) * MS
    return 1 if size >= 1 or not size else 2 if size >= 0.1 else 3


def mean_and_half(mean: float, half_width: float) -> tuple[str, str]:
    """Both in milliseconds with the mean's decimals."""
    digits = decimals(mean)
    return f"{mean * MS:,.{digits}f}", f"{half_width * MS:,.{digits}f}" if math.isfinite(half_width) else "∞"


def percent(share: float | None) -> str:
    """With its sign."""
    return "–" if share is None or not math.isfinite(share) else f"{share * 100:+.1f} %".replace("-", "−")
