"""Orders of service: delays beside those in the order of arrival, and the slowdown of requests by
output length, as tables for people and as columns of the CSV.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console

from kendall.loadgen.compare.comparison import Comparison, LengthGroup, OrderResult, RatioInterval
from kendall.loadgen.report.numbers import MS, mean_and_half, ms, number, plain_ms
from kendall.policies.text import short_form
from kendall.queueing.commands.terminal import Column, Table, say

CSV = (
    "delay_ms",
    "longest_tenth_delay_ms",
    "predicted_longest_tenth_delay_ms",
    "delay_ratio",
    "delay_ratio_half_width",
    "predicted_delay_ratio",
    "p99_delay_ratio",
    "longest_tenth_ratio",
    "longest_tenth_ratio_half_width",
    "predicted_longest_tenth_ratio",
)
SLOWDOWNS: dict[str, Callable[[LengthGroup], float | None]] = {
    "slowdown": lambda group: group.slowdown.value,
    "predicted_slowdown": lambda group: group.predicted,
    "same_arrivals_slowdown": lambda group: group.same_arrivals,
}
NOTES = (
    (
        "delay: mean time outside of service; of fcfs: its ratio to that in the order of arrival "
        "± 95 % half width; predicted: by theory at the runs' speeds"
    ),
    "longest tenth: mean delay of the tenth of the requests with the longest outputs",
)
SLOWDOWN = (
    "slowdown by output length (tokens): mean sojourn time / mean service time; above observed, "
    "below predicted (~: simulated on the same arrivals, where theory has no answer)"
)


class OrderColumn(NamedTuple):
    """A quantity of a cell whose policy was measured under several orders: a column on a terminal
    where it has a heading, on the page where it has a title. Its half width is KEY_half_width.
    """

    key: str  # of the CSV
    heading: str
    title: str
    value: Callable[[Comparison, OrderResult], RatioInterval | float | None]
    is_time: bool = False  # in seconds; else a ratio

    def text(self, comparison: Comparison, order: OrderResult) -> str:
        """On a terminal: times without their interval."""
        value = self.value(comparison, order)
        if not self.is_time:
            return ratio_text(value)
        mean = value.value if isinstance(value, RatioInterval) else value
        return plain_ms(math.nan if mean is None else mean)

    def page(self, comparison: Comparison, order: OrderResult) -> str:
        """On the page, as HTML."""
        value = self.value(comparison, order)
        if not self.is_time:
            return ratio_text(value)
        if isinstance(value, RatioInterval):
            return " ± ".join(mean_and_half(value.value, value.half_width))
        return ms(value)


def _mean_delay(comparison: Comparison, _: OrderResult) -> RatioInterval:
    observed = comparison.queueing_delay.observed
    return RatioInterval(observed.mean, observed.half_width)


def _versus(name: str) -> Callable[[Comparison, OrderResult], RatioInterval | float | None]:
    """A ratio to the cell in the order of arrival."""
    return lambda _, order: None if order.versus is None else getattr(order.versus, name)


ORDER_COLUMNS = (
    OrderColumn("delay_ms", "delay\n(ms)", "mean delay<br>ms", _mean_delay, is_time=True),
    OrderColumn(
        "delay_ratio",
        "of fcfs\n",
        "of fcfs<br>predicted",
        _versus("delay"),
    ),
    OrderColumn(
        "predicted_delay_ratio",
        "pre-\ndicted",
        "",  # on the page below the ratio
        _versus("predicted"),
    ),
    OrderColumn(
        "p99_ms",
        "p99\n(ms)",
        "p99<br>ms",
        lambda comparison, _: comparison.queueing_delay.quantiles.get("p99"),
        is_time=True,
    ),
    OrderColumn(
        "p99_delay_ratio",
        "of\nfcfs",
        "<br>of fcfs",
        _versus("p99"),
    ),
    OrderColumn(
        "longest_tenth_delay_ms",
        "longest\ntenth (ms)",
        "longest tenth<br>ms",
        lambda _, order: order.longest.delay,
        is_time=True,
    ),
    OrderColumn(
        "longest_tenth_ratio",
        "of fcfs\n",
        "of fcfs<br>predicted",
        _versus("longest"),
    ),
    OrderColumn(
        "predicted_longest_tenth_ratio",
        "pre-\ndicted",
        "",
        _versus("longest_predicted"),
    ),
    OrderColumn(
        "predicted_longest_tenth_delay_ms",
        "",
        "",
        lambda _, order: order.longest.predicted,
        is_time=True,
    ),
)


def show_orders(comparisons: Sequence[Comparison], to: Console) -> None:
    """The tables, where a policy was measured under several orders."""
    ordered = [(c, c.order) for c in comparisons if c.order is not None]
    if not ordered:
        return
    say(to, "")
    to.print(order_table(ordered))
    for line in NOTES:
        say(to, line)
    if not all(order.versus is None or order.versus.paired for _, order in ordered):
        say(to, "of fcfs: not of the same requests, so that the intervals are wide")
    say(to, "")
    to.print(slowdown_table(ordered))
    say(to, SLOWDOWN)


def order_table(ordered: Sequence[tuple[Comparison, OrderResult]]) -> Table:
    """A row per cell."""
    shown = [column for column in ORDER_COLUMNS if column.heading]
    columns = [
        Column(heading="policy", left=True, short=short_form),
        Column(heading="load"),
        *(Column(heading=column.heading) for column in shown),
    ]
    rows = [
        [
            comparison.policy,
            number(comparison.load, ".2f"),
            *(column.text(comparison, order) for column in shown),
        ]
        for comparison, order in ordered
    ]
    return Table(columns, rows, keys=2)


def slowdown_table(ordered: Sequence[tuple[Comparison, OrderResult]]) -> Table:
    """A row per cell, a column per tenth of the lengths."""
    ranges = tenths_of([comparison for comparison, _ in ordered])
    columns = [
        Column(heading="policy", left=True, short=short_form),
        Column(heading="load"),
        *(Column(heading=range_text(*each)) for each in ranges),
    ]
    rows = []
    for comparison, order in ordered:
        groups = {(group.shortest, group.longest): group for group in order.groups}
        rows.append(
            [
                comparison.policy,
                number(comparison.load, ".2f"),
                *(_slowdown(groups.get(each)) for each in ranges),
            ]
        )
    return Table(columns, rows, keys=2)


def tenths_of(comparisons: Sequence[Comparison]) -> list[tuple[int, int]]:
    """Shortest and longest output of each; none without orders."""
    orders = [each.order for each in comparisons if each.order is not None]
    return sorted({(group.shortest, group.longest) for order in orders for group in order.groups})


def order_heads(tenths: Sequence[tuple[int, int]]) -> list[str]:
    """Names of the columns of a CSV; none without orders."""
    if not tenths:
        return []
    ranges = [f"{shortest}_to_{longest}_tokens" for shortest, longest in tenths]
    return ["order", *CSV, *(f"{side}_{tokens}" for side in SLOWDOWNS for tokens in ranges)]


def order_values(
    comparison: Comparison, tenths: Sequence[tuple[int, int]]
) -> list[float | str | None]:
    """The values under these names."""
    if not tenths:
        return []
    order = comparison.order
    if order is None:
        return [None] * len(order_heads(tenths))
    numbers: dict[str, float | None] = {}
    for column in ORDER_COLUMNS:
        value, scale = column.value(comparison, order), MS if column.is_time else 1.0
        if isinstance(value, RatioInterval):
            numbers[f"{column.key}_half_width"] = value.half_width * scale
            value = value.value
        numbers[column.key] = None if value is None else value * scale
    groups = {(group.shortest, group.longest): group for group in order.groups}
    return [
        order.order,
        *(numbers.get(key) for key in CSV),
        *(
            None if (group := groups.get(tenth)) is None else slowdown(group)
            for slowdown in SLOWDOWNS.values()
            for tenth in tenths
        ),
    ]


def range_text(shortest: int, longest: int) -> str:
    """A range of output lengths, in tokens."""
    return str(longest) if shortest == longest else f"{shortest}-{longest}"


def ratio_text(ratio: RatioInterval | float | None) -> str:
    """A ratio, with its half width where it has one."""
    if not isinstance(ratio, RatioInterval):
        return number(ratio, ".2f")
    if not math.isfinite(ratio.value):
        return "-"
    half = f"{ratio.half_width:.2f}" if math.isfinite(ratio.half_width) else "?"
    return f"{ratio.value:.2f} ± {half}"


def _slowdown(group: LengthGroup | None) -> str:
    if group is None:
        return "-"
    if group.predicted is not None:
        return f"{group.slowdown.value:.2f}\n{group.predicted:.2f}"
    again = "" if group.same_arrivals is None else f"\n~{group.same_arrivals:.2f}"
    return f"{group.slowdown.value:.2f}{again}"
