"""The style that all figures share: names of colours, axes, sizes. A figure is a plain dict as
plotly.js takes it.

Colours are names ("$observed") which the page replaces by those of its theme, so that one figure
serves light, dark and paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Trace = dict[str, Any]
Figure = dict[str, Any]

PART_COLOURS = {
    "theory": "$theory",
    "process": "$muted",
    "arrivals": "$arrivals",
    "predictor": "$predictor",
    "sender": "$sender",
    "speed": "$speed",
    "scatter": "$scatter",
    "shape": "$shape",
    "gateway": "$gateway",
}
PART_NAMES = {
    "theory": "theory (formula)",
    "process": "arrival process",
    "arrivals": "arrivals (sampling)",
    "predictor": "predicted lengths",
    "sender": "sender",
    "speed": "service law: speed",
    "scatter": "service law: scatter",
    "shape": "service law: shape",
    "gateway": "gateway",
}


def legend_at_top(**more: Any) -> dict[str, Any]:
    """Above all panels, whatever their height."""
    return {
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "y": 1,
        "yref": "container",
        "yanchor": "top",
        "font": {"size": 12},
        **more,
    }


def axis_title(text: str) -> dict[str, Any]:
    """The title of an axis, in small print beside it."""
    return {"text": text, "font": {"size": 11, "color": "$muted"}}


def figure(
    name: str,
    traces: Sequence[Trace],
    layout: Mapping[str, Any],
    *,
    height: int,
    min_width: int = 0,
) -> Figure:
    """One figure of the page; `min_width` in pixels, below which it scrolls sideways."""
    base = {
        "height": height,
        "margin": {"l": 8, "r": 8, "t": 40, "b": 44},
        "paper_bgcolor": "$none",
        "plot_bgcolor": "$none",
        "font": {
            "family": "system-ui, -apple-system, 'Segoe UI', sans-serif",
            "size": 12,
            "color": "$ink",
        },
        "hoverlabel": {
            "align": "left",
            "bgcolor": "$surface",
            "bordercolor": "$rule",
            "font": {"color": "$ink"},
        },
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1,
            "yanchor": "bottom",
            "font": {"size": 12},
        },
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
    """A logarithmic axis over the positive values, labelled at 1, 2, 5 of each decade where they
    are few.
    """
    positive = [value for value in values if value > 0 and math.isfinite(value)]
    low, high = (min(positive), max(positive)) if positive else (1.0, 10.0)
    span = [math.log10(low) - 0.08, math.log10(high) + 0.08]
    digits = (1, 2, 5) if span[1] - span[0] < 2.2 else (1,)
    exponents = range(math.floor(span[0]), math.ceil(span[1]) + 1)
    ticks = [digit * 10.0**exponent for exponent in exponents for digit in digits]
    shown = [tick for tick in ticks if span[0] <= math.log10(tick) <= span[1]]
    return axis(
        type="log",
        range=span,
        tickmode="array",
        tickvals=shown,
        ticktext=[f"{tick:g}" for tick in shown],
        **settings,
    )


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
