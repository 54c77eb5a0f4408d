"""Orders of service: their delays beside those in the order of arrival as a table, and a figure of
the slowdown by output length, a panel per policy and load.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from kendall.loadgen.compare.cells import ReportCell
from kendall.loadgen.compare.comparison import LengthGroup, OrderResult
from kendall.loadgen.report.html.marks import Panel, PanelGrid, one_legend
from kendall.loadgen.report.html.style import (
    Figure,
    Trace,
    figure,
    log_axis,
)
from kendall.loadgen.report.html.tables import simple_table
from kendall.loadgen.report.numbers import load_text, with_small
from kendall.loadgen.report.orders import ORDER_COLUMNS, range_text, ratio_text
from kendall.policies.orders import FIRST_COME
from kendall.policies.text import short_form

ACROSS = 2
ROW = 300  # pixels
PALE = 0.38  # opacity of a cell that is not judged
COLOURS = ("$speed", "$gateway", "$arrivals", "$sender", "$theory", "$predictor", "$muted")
SYMBOLS = ("square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star")
APART = 1.03  # factor between the places of two orders' points, which would hide one another
Ordered = tuple[ReportCell, OrderResult]


class OrderStyle(NamedTuple):
    """The drawing of an order of service, alike in all panels."""

    colour: str
    symbol: str
    moved: float  # factor of its points' lengths


def ordered(cells: Sequence[ReportCell]) -> list[Ordered]:
    """Select the cells of policies that were measured under several orders."""
    return [(cell, order) for cell in cells if (order := cell.comparison.order) is not None]


def order_table(cells: Sequence[ReportCell]) -> str:
    """The HTML table of delays by order of service, a row per cell."""
    headings = ["policy", "load", *(column.title for column in ORDER_COLUMNS if column.title)]
    table = []
    for cell, order in ordered(cells):
        load = load_text(cell.load).removeprefix("load ")
        row = [escape(_name(cell, cell.comparison.policy)), load]
        for column in ORDER_COLUMNS:
            text = column.page(cell.comparison, order)
            if column.title:
                row.append(text)
            elif column.heading and text != "-":  # a prediction, below the ratio
                row[-1] = with_small(row[-1], text)
        table.append(row)
    return simple_table(headings, table)


def _name(cell: ReportCell, policy: str) -> str:
    limit = "" if cell.max_output_tokens is None else f", limit {cell.max_output_tokens}"
    return f"{short_form(policy)}{limit}"


def orders_figure(cells: Sequence[ReportCell]) -> Figure | None:
    """None where no policy was measured under several orders."""
    panels: dict[str, list[Ordered]] = {}
    for cell, order in ordered(cells):
        name = f"{_name(cell, order.policy)} · {load_text(cell.load)}"
        panels.setdefault(name, []).append((cell, order))
    if not panels:
        return None
    names = dict.fromkeys(order.order for group in panels.values() for _, order in group)
    names.pop(FIRST_COME.name, None)
    styles = {FIRST_COME.name: OrderStyle("$ink", "circle", 1.0)}
    for place, name in enumerate(names):
        side = (place // 2 + 1) * (1 if place % 2 else -1)
        colour, symbol = COLOURS[place % len(COLOURS)], SYMBOLS[place % len(SYMBOLS)]
        styles[name] = OrderStyle(colour, symbol, APART**side)
    grid = PanelGrid(len(panels), across=ACROSS, row=ROW, gaps=(0.09, 74), top=84)
    traces: list[Trace] = []
    for index, (name, group) in enumerate(panels.items()):
        panel, across, down = grid.place(index, f"<b>{name}</b>")
        below, beside = grid.titles(index, "output tokens", "slowdown")
        groups = [length_group for _, order in group for length_group in order.groups]
        lengths = [length_group.mean_tokens for length_group in groups]
        grid.layout[f"xaxis{panel.key}"] = log_axis(lengths, **across, title=below)
        grid.layout[f"yaxis{panel.key}"] = log_axis(_slowdowns(groups), **down, title=beside)
        for cell, order in group:
            traces += _traces(cell, order, panel, styles[order.order])
    return figure("orders", one_legend(traces), grid.layout, height=grid.height, min_width=640)


def _traces(cell: ReportCell, order: OrderResult, panel: Panel, style: OrderStyle) -> list[Trace]:
    """Draw the observed means, and the line of the theory, or of the simulation without one."""
    groups = order.groups
    common: Trace = {
        "type": "scatter",
        "name": short_form(order.order),
        "legendgroup": order.order,
        "opacity": 1.0 if cell.counts else PALE,
        **panel.axes,
    }
    means = [group.slowdown.value for group in groups]
    halves = [min(group.slowdown.half_width, 1e3 * group.slowdown.value) for group in groups]
    observed = common | {
        "mode": "markers",
        "x": [group.mean_tokens * style.moved for group in groups],
        "y": means,
        "error_y": {
            "type": "data",
            "array": halves,
            "arrayminus": [min(half, 0.9 * mean) for half, mean in zip(halves, means, strict=True)],
            "color": style.colour,
            "thickness": 1.2,
            "width": 3,
        },
        "marker": {"symbol": style.symbol, "color": style.colour, "size": 8},
        "text": [_hover(cell, order, group) for group in groups],
        "hoverinfo": "text",
    }
    by_theory = all(group.predicted is not None for group in groups)
    values = [group.predicted if by_theory else group.same_arrivals for group in groups]
    known = [
        (group.mean_tokens, value)
        for group, value in zip(groups, values, strict=True)
        if value is not None
    ]
    line = common | {
        "mode": "lines",
        "x": [tokens for tokens, _ in known],
        "y": [value for _, value in known],
        "line": {"color": style.colour, "width": 1.5, "dash": "solid" if by_theory else "dot"},
        "hoverinfo": "skip",
    }
    return [observed, line]


def _hover(cell: ReportCell, order: OrderResult, group: LengthGroup) -> str:
    lines = [
        f"<b>{order.order}</b>, {range_text(group.shortest, group.longest)} tokens",
        f"slowdown {ratio_text(group.slowdown)} (n = {group.n:,})",
        f"theory {ratio_text(group.predicted)}",
        f"simulated, same arrivals {ratio_text(group.same_arrivals)}",
    ]
    return "<br>".join(lines if cell.counts else [*lines, "not judged"])


def _slowdowns(groups: Sequence[LengthGroup]) -> list[float]:
    """The values of a panel's axis; intervals are cut, so that none hides the means."""
    means = [group.slowdown.value for group in groups]
    means += [
        value
        for group in groups
        for value in (group.predicted, group.same_arrivals)
        if value is not None
    ]
    ends = [
        end
        for group in groups
        for end in (
            min(group.slowdown.value + group.slowdown.half_width, 1.5 * max(means)),
            max(group.slowdown.value - group.slowdown.half_width, min(means) / 1.2),
        )
    ]
    return [*means, *ends]
