"""Orders of service: their delays beside those in the order of arrival as a table, and a figure of
the slowdown by output length, a panel per policy and load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from loadgen.compare.cells import ReportCell
from loadgen.compare.comparison import LengthGroup, OrderResult
from loadgen.report.html.marks import Panel, one_legend
from loadgen.report.html.numbers import load_text, mean_and_half, ms
from loadgen.report.html.style import (
    Figure,
    Trace,
    axis_title,
    columns,
    figure,
    legend_at_top,
    log_axis,
    rows,
    title_over,
)
from loadgen.report.html.tables import simple_table
from loadgen.report.orders import number_text, range_text, ratio_text
from policies.orders import FIRST_COME
from policies.text import short_form

ACROSS = 2
ROW, HEAD = 300, 110  # pixels
PALE = 0.38  # opacity of a cell that is not judged
COLOURS = ("$speed", "$gateway", "$arrivals", "$sender", "$theory", "$predictor", "$muted")
SYMBOLS = ("square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")
APART = 1.03  # factor between the places of two orders' points, which would hide one another
Ordered = tuple[ReportCell, OrderResult]


class Look(NamedTuple):
    """How an order is drawn in all panels."""

    colour: str
    symbol: str
    moved: float  # factor of its points' lengths


HEADINGS = (
    "policy",
    "load",
    "mean delay<br>ms",
    "of fcfs<br>predicted",
    "p99<br>ms",
    "<br>of fcfs",
    "longest tenth<br>ms",
    "of fcfs<br>predicted",
)


def ordered(cells: Sequence[ReportCell]) -> list[Ordered]:
    """Those of policies that were measured under several orders."""
    return [(cell, order) for cell in cells if (order := cell.comparison.order) is not None]


def order_table(cells: Sequence[ReportCell]) -> str:
    """A row per cell."""
    return simple_table(HEADINGS, [_row(*each) for each in ordered(cells)])


def _name(cell: ReportCell, policy: str) -> str:
    limit = "" if cell.max_output_tokens is None else f", limit {cell.max_output_tokens}"
    return f"{short_form(policy)}{limit}"


def _row(cell: ReportCell, order: OrderResult) -> list[str]:
    delays, versus = cell.comparison.queueing_delay, order.versus
    observed, longest = delays.observed, order.longest.delay
    ratio, far, tail = (
        (None, None, None) if versus is None else (versus.delay, versus.longest, versus.p99)
    )
    predicted, far_predicted = (
        (None, None) if versus is None else (versus.predicted, versus.longest_predicted)
    )
    return [
        escape(_name(cell, cell.comparison.policy)),
        load_text(cell.load).removeprefix("load "),
        _with_half(observed.mean, observed.half_width),
        _under(ratio_text(ratio), number_text(predicted)),
        ms(delays.quantiles.get("p99")),
        number_text(tail),
        _with_half(longest.value, longest.half_width),
        _under(ratio_text(far), number_text(far_predicted)),
    ]


def _with_half(mean: float, half_width: float) -> str:
    return " ± ".join(mean_and_half(mean, half_width))


def _under(observed: str, predicted: str) -> str:
    return observed if predicted == "-" else f"{observed}<br><small>{predicted}</small>"


def orders_figure(cells: Sequence[ReportCell]) -> Figure | None:
    """None where no policy was measured under several orders."""
    panels: dict[str, list[Ordered]] = {}
    for cell, order in ordered(cells):
        name = f"{_name(cell, order.policy)} · {load_text(cell.load)}"
        panels.setdefault(name, []).append((cell, order))
    if not panels:
        return None
    looks = _looks([order for group in panels.values() for _, order in group])
    down = math.ceil(len(panels) / ACROSS)
    height = HEAD + ROW * down
    wide, high = columns(ACROSS, 0.09), rows(down, 74 / (ROW * down) if down > 1 else 0)
    layout: dict[str, Any] = {
        "annotations": [],
        "margin": {"l": 8, "r": 8, "t": 84, "b": 44},
        "legend": legend_at_top(),
    }
    traces: list[Trace] = []
    for index, (name, group) in enumerate(panels.items()):
        panel, (row, column) = Panel.at(index), divmod(index, ACROSS)
        lengths, values = _extent(group)
        last = index + ACROSS >= len(panels)
        layout[f"xaxis{panel.key}"] = log_axis(
            lengths,
            domain=wide[column],
            anchor=f"y{panel.key}",
            title=axis_title("output tokens" if last else ""),
        )
        layout[f"yaxis{panel.key}"] = log_axis(
            values,
            domain=high[row],
            anchor=f"x{panel.key}",
            title=axis_title("slowdown" if column == 0 else ""),
        )
        layout["annotations"].append(title_over(f"<b>{name}</b>", f"x{panel.key}", f"y{panel.key}"))
        for cell, order in group:
            traces += _traces(cell, order, panel, looks[order.order])
    return figure("orders", one_legend(traces), layout, height=height, min_width=640)


def _looks(orders: Sequence[OrderResult]) -> dict[str, Look]:
    """By order; the order of arrival in ink."""
    names = dict.fromkeys(order.order for order in orders if order.order != FIRST_COME.name)
    looks = {FIRST_COME.name: Look("$ink", "circle", 1.0)}
    for place, name in enumerate(names):
        side = (place // 2 + 1) * (1 if place % 2 else -1)
        colour, symbol = COLOURS[place % len(COLOURS)], SYMBOLS[place % len(SYMBOLS)]
        looks[name] = Look(colour, symbol, APART**side)
    return looks


def _traces(cell: ReportCell, order: OrderResult, panel: Panel, look: Look) -> list[Trace]:
    """What was observed, and the line of the theory, or of the simulation where theory has none."""
    common: Trace = {
        "type": "scatter",
        "name": short_form(order.order),
        "legendgroup": order.order,
        "opacity": 1.0 if cell.counts else PALE,
        **panel.axes,
    }
    return [_observed(cell, order, look, common), _line(order.groups, look, common)]


def _observed(cell: ReportCell, order: OrderResult, look: Look, common: Trace) -> Trace:
    groups = order.groups
    halves = [min(group.slowdown.half_width, 1e3 * group.slowdown.value) for group in groups]
    return common | {
        "mode": "markers",
        "x": [group.mean_tokens * look.moved for group in groups],
        "y": [group.slowdown.value for group in groups],
        "error_y": {
            "type": "data",
            "array": halves,
            "arrayminus": [
                min(half, 0.9 * group.slowdown.value)
                for half, group in zip(halves, groups, strict=True)
            ],
            "color": look.colour,
            "thickness": 1.2,
            "width": 3,
        },
        "marker": {"symbol": look.symbol, "color": look.colour, "size": 8},
        "text": [_hover(cell, order, group) for group in groups],
        "hoverinfo": "text",
    }


def _line(groups: Sequence[LengthGroup], look: Look, common: Trace) -> Trace:
    by_theory = all(group.predicted is not None for group in groups)
    values = [group.predicted if by_theory else group.same_arrivals for group in groups]
    known = [
        (group.mean_tokens, value)
        for group, value in zip(groups, values, strict=True)
        if value is not None
    ]
    return common | {
        "mode": "lines",
        "x": [tokens for tokens, _ in known],
        "y": [value for _, value in known],
        "line": {"color": look.colour, "width": 1.5, "dash": "solid" if by_theory else "dot"},
        "hoverinfo": "skip",
    }


def _hover(cell: ReportCell, order: OrderResult, group: LengthGroup) -> str:
    lines = [
        f"<b>{order.order}</b>, {range_text(group.shortest, group.longest)} tokens",
        f"slowdown {ratio_text(group.slowdown)} (n = {group.n:,})",
        f"theory {number_text(group.predicted)}",
        f"simulated, same arrivals {number_text(group.same_arrivals)}",
    ]
    return "<br>".join(lines if cell.counts else [*lines, "not judged"])


def _extent(group: Sequence[Ordered]) -> tuple[list[float], list[float]]:
    """Lengths and slowdowns of a panel; intervals are cut, so that none hides the means."""
    groups = [each for _, order in group for each in order.groups]
    means = [each.slowdown.value for each in groups]
    means += [
        value
        for each in groups
        for value in (each.predicted, each.same_arrivals)
        if value is not None
    ]
    ends = [
        end
        for each in groups
        for end in (
            min(each.slowdown.value + each.slowdown.half_width, 1.5 * max(means)),
            max(each.slowdown.value - each.slowdown.half_width, min(means) / 1.2),
        )
    ]
    return [each.mean_tokens for each in groups], [*means, *ends]
