"""Figure: delay against load, a panel per policy: the formula's curve, a band for the machine's
speeds, what was observed.

If every duration is s times as long, the mean delay at rate r is s times what it was at rate s r:

    W(s, x) = s W(1, s x),    x = load by the calibrated law

so one curve, evaluated on `LOADS`, gives those of all speeds; the band lies between the slowest and
the fastest speed that the policy's cells showed. Fixed batching with a max_wait has a duration that
does not scale, and no band.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.interpolate import PchipInterpolator

from loadgen.compare.cells import ReportCell
from loadgen.report.html.marks import Panel, observed_marks, one_legend
from loadgen.report.html.numbers import MS, label
from loadgen.report.html.style import (
    Figure,
    Trace,
    axis,
    axis_title,
    columns,
    figure,
    legend_at_top,
    log_axis,
    rows,
    title_over,
)
from policies import Fixed, is_first_come
from queueing.errors import PredictionError
from queueing.model import Model
from queueing.prediction import best_method, predict_model
from queueing.simulation.experiment import simulate_model
from queueing.simulation.fast import is_compiled

ACROSS = 3
ROW, HEAD = 230, 110  # pixels
LOADS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.94, 0.97)
FINE = np.linspace(LOADS[0], LOADS[-1], 120)
SIMULATED_REQUESTS = 40_000
GENERIC_REQUESTS = 2_000  # where the simulator drives policy objects, a hundred times slower
BEYOND = 1e9  # ms: off every axis
LARGEST = 8.0  # times the largest observation: the curve's end that is shown

Curve = Callable[[float], float]  # load -> seconds


def over_load_figure(cells: Sequence[ReportCell]) -> Figure | None:
    """None where no cell has a load and a model."""
    by_label: dict[str, list[ReportCell]] = {}
    for cell in cells:
        if cell.load is not None and cell.model is not None:
            by_label.setdefault(label(cell), []).append(cell)
    if not by_label:
        return None
    down = math.ceil(len(by_label) / ACROSS)
    height = HEAD + ROW * down
    wide, high = columns(ACROSS, 0.06), rows(down, 62 / (ROW * down) if down > 1 else 0)
    layout: dict[str, Any] = {
        "annotations": [],
        "margin": {"l": 8, "r": 8, "t": 76, "b": 44},
        "legend": legend_at_top(),
    }
    traces: list[Trace] = []
    for index, (name, group) in enumerate(by_label.items()):
        panel, (row, column) = Panel.at(index), divmod(index, ACROSS)
        found = _panel(group, panel)
        unit = axis_title("load" if index + ACROSS >= len(by_label) else "")
        layout[f"xaxis{panel.key}"] = axis(
            domain=wide[column], anchor=f"y{panel.key}", range=[0, 1], nticks=6, title=unit
        )
        values = _extent(found, group)
        layout[f"yaxis{panel.key}"] = log_axis(
            values,
            domain=high[row],
            anchor=f"x{panel.key}",
            title=axis_title("ms" if column == 0 else ""),
        )
        layout["annotations"].append(title_over(f"<b>{name}</b>", f"x{panel.key}", f"y{panel.key}"))
        traces += found
    return figure("over-load", one_legend(traces), layout, height=height, min_width=720)


def _panel(cells: Sequence[ReportCell], panel: Panel) -> list[Trace]:
    model, compared = cells[0].model, cells[0].comparison.compared
    assert model is not None
    curve, traces = curve_of(model, compared), []
    if curve is not None:
        speeds = [
            1.0,
            *(
                c.comparison.speed.factor / model.law.speed
                for c in cells
                if c.comparison.speed is not None
            ),
        ]
        timed = isinstance(model.policy, Fixed) and math.isfinite(model.policy.max_wait)
        if is_first_come(model.policy) and not timed:
            traces.append(_band(curve, min(speeds), max(speeds), panel))
        traces.append(_line(curve, panel))
    return [*traces, *observed_marks(panel, cells, [cell.load or 0.0 for cell in cells], along="y")]


def curve_of(model: Model, compared: str) -> Curve | None:
    """Mean against load by interpolation of the logarithm; not a number beyond the loads that
    could be solved.
    """
    simulated = best_method(model) == "simulation"
    requests = SIMULATED_REQUESTS if is_compiled(model) else GENERIC_REQUESTS
    found: list[tuple[float, float]] = []
    for load in LOADS:
        rate = load * model.largest_stable_rate
        try:
            answer = (
                simulate_model(model, rate, num_requests=requests)
                if simulated
                else predict_model(model, rate)
            )
        except PredictionError:
            break
        mean = getattr(answer, compared).mean
        if mean is None or not mean > 0:
            break
        found.append((load, math.log(mean)))
    if len(found) < 3:
        return None
    loads, logs = np.array(found).T
    between = PchipInterpolator(loads, logs, extrapolate=False)
    return lambda load: (
        math.exp(float(between(load))) if loads[0] <= load <= loads[-1] else math.nan
    )


def _line(curve: Curve, panel: Panel) -> Trace:
    points = [(x, y * MS) for x in FINE.tolist() if math.isfinite(y := curve(x))]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "theory, law as calibrated",
        "legendgroup": "line",
        "showlegend": panel.first,
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": {"color": "$ink", "width": 1.6},
        "hovertemplate": "load %{x:.2f}: theory %{y:.3g} ms<extra></extra>",
        **panel.axes,
    }


def _band(curve: Curve, fastest: float, slowest: float, panel: Panel) -> Trace:
    def at(speed: float) -> list[tuple[float, float]]:
        return [(x, y * MS) for x in FINE.tolist() if math.isfinite(y := speed * curve(speed * x))]

    low, high = at(fastest), at(slowest)
    if high and low and high[-1][0] < low[-1][0]:  # beyond, the slowest machine has no steady state
        high += [(high[-1][0], BEYOND), (low[-1][0], BEYOND)]
    outline = [*high, *reversed(low)]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "theory, slowest to fastest measured speed",
        "legendgroup": "band",
        "showlegend": panel.first,
        "x": [x for x, _ in outline],
        "y": [y for _, y in outline],
        "fill": "toself",
        "fillcolor": "$band",
        "line": {"width": 0},
        "hoverinfo": "skip",
        **panel.axes,
    }


def _extent(traces: Sequence[Trace], cells: Sequence[ReportCell]) -> list[float]:
    observed = [cell.comparison.quantity.observed for cell in cells]
    most = LARGEST * max(mean.mean for mean in observed) * MS
    ends = [
        value
        for mean in observed
        for value in (
            mean.mean * MS,
            min(mean.high * MS, most),
            max(mean.low, 0.2 * mean.mean) * MS,
        )
    ]
    return ends + [
        y
        for trace in traces
        for y in trace["y"]
        if y is not None and min(ends) / LARGEST < y < most
    ]
