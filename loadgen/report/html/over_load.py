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

import numpy as np
from scipy.interpolate import PchipInterpolator

from kendall.loadgen.compare.cells import ReportCell
from kendall.loadgen.report.html.marks import Panel, PanelGrid, observed_marks, one_legend
from kendall.loadgen.report.html.style import (
    Figure,
    Trace,
    axis,
    figure,
    log_axis,
)
from kendall.loadgen.report.numbers import MS, label
from kendall.policies import Fixed, is_first_come
from kendall.queueing.errors import PredictionError
from kendall.queueing.prediction import best_method, predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_model
from kendall.queueing.simulation.fast import is_compiled

ACROSS = 3
ROW = 230  # pixels
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
    grid = PanelGrid(len(by_label), across=ACROSS, row=ROW, gaps=(0.06, 62))
    traces: list[Trace] = []
    for index, (name, group) in enumerate(by_label.items()):
        panel, across, down = grid.place(index, f"<b>{name}</b>")
        below, beside = grid.titles(index, "load", "ms")
        drawn = _theory(group, panel)
        drawn += observed_marks(panel, group, [cell.load or 0.0 for cell in group], along="y")
        grid.layout[f"xaxis{panel.key}"] = axis(**across, range=[0, 1], nticks=6, title=below)
        # intervals are cut, so that none hides the means
        means = [cell.comparison.quantity.observed for cell in group]
        most = LARGEST * max(mean.mean for mean in means) * MS
        values = [
            value
            for mean in means
            for value in (
                mean.mean * MS,
                min(mean.high * MS, most),
                max(mean.low, 0.2 * mean.mean) * MS,
            )
        ]
        least = min(values) / LARGEST
        values += [y for trace in drawn for y in trace["y"] if y is not None and least < y < most]
        grid.layout[f"yaxis{panel.key}"] = log_axis(values, **down, title=beside)
        traces += drawn
    return figure("over-load", one_legend(traces), grid.layout, height=grid.height, min_width=720)


def _theory(cells: Sequence[ReportCell], panel: Panel) -> list[Trace]:
    """The curve by the law as calibrated, and in front of it the band of the speeds."""
    model, compared = cells[0].model, cells[0].comparison.compared
    assert model is not None
    curve = curve_of(model, compared)
    if curve is None:
        return []

    def at(speed: float) -> list[tuple[float, float]]:
        return [(x, y * MS) for x in FINE.tolist() if math.isfinite(y := speed * curve(speed * x))]

    points = at(1.0)
    line = {
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
    timed = isinstance(model.policy, Fixed) and math.isfinite(model.policy.max_wait)
    if timed or not is_first_come(model.policy):
        return [line]
    measured = [cell.comparison.speed for cell in cells]
    speeds = [
        1.0,
        *(speed.factor / model.engine.law.speed for speed in measured if speed is not None),
    ]
    low, high = at(min(speeds)), at(max(speeds))
    if high and low and high[-1][0] < low[-1][0]:  # beyond, the slowest machine has no steady state
        high += [(high[-1][0], BEYOND), (low[-1][0], BEYOND)]
    outline = [*high, *reversed(low)]
    band = {
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
    return [band, line]


def curve_of(model: Queue, compared: str) -> Curve | None:
    """Mean against load by interpolation of the logarithm; not a number beyond the loads that
    could be solved.
    """
    simulated = best_method(model) == "simulation"
    requests = SIMULATED_REQUESTS if is_compiled(model) else GENERIC_REQUESTS
    points: list[tuple[float, float]] = []
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
        points.append((load, math.log(mean)))
    if len(points) < 3:
        return None
    loads, logs = np.array(points).T
    between = PchipInterpolator(loads, logs, extrapolate=False)
    return lambda load: (
        math.exp(float(between(load))) if loads[0] <= load <= loads[-1] else math.nan
    )
