"""Orders of service as tables for people: delays beside those in the order of arrival, and the
slowdown of requests by output length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console

from loadgen.compare.comparison import Comparison, LengthGroup, OrderResult, RatioInterval
from policies.text import short_form
from queueing.commands.terminal import Column, Table, say

HEADINGS = (
    "load",
    "delay\n(ms)",
    "of fcfs\n",
    "pre-\ndicted",
    "p99\n(ms)",
    "of\nfcfs",
    "longest\ntenth (ms)",
    "of fcfs\n",
    "pre-\ndicted",
)
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


def show_orders(comparisons: Sequence[Comparison], to: Console) -> None:
    """The tables, where a policy was measured under several orders."""
    found = [(each, each.order) for each in comparisons if each.order is not None]
    if not found:
        return
    say(to, "")
    to.print(order_table(found))
    for line in NOTES:
        say(to, line)
    if not all(order.versus is None or order.versus.paired for _, order in found):
        say(to, "of fcfs: not of the same requests, so that the intervals are wide")
    say(to, "")
    to.print(slowdown_table(found))
    say(to, SLOWDOWN)


def order_table(found: Sequence[tuple[Comparison, OrderResult]]) -> Table:
    """A row per cell."""
    columns = [
        Column(heading="policy", left=True, short=short_form),
        *(Column(heading=heading) for heading in HEADINGS),
    ]
    return Table(columns, [_row(*each) for each in found], keys=2)


def slowdown_table(found: Sequence[tuple[Comparison, OrderResult]]) -> Table:
    """A row per cell, a column per tenth of the lengths."""
    ranges = tenths_of([comparison for comparison, _ in found])
    columns = [
        Column(heading="policy", left=True, short=short_form),
        Column(heading="load"),
        *(Column(heading=range_text(*each)) for each in ranges),
    ]
    rows = []
    for comparison, order in found:
        groups = {(group.shortest, group.longest): group for group in order.groups}
        rows.append(
            [
                comparison.policy,
                _load(comparison),
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
    sides = ("slowdown", "predicted_slowdown", "same_arrivals_slowdown")
    return ["order", *CSV, *(f"{side}_{each}" for side in sides for each in ranges)]


def order_values(
    comparison: Comparison, tenths: Sequence[tuple[int, int]]
) -> list[float | str | None]:
    """Under these names."""
    if not tenths:
        return []
    order = comparison.order
    if order is None:
        return [None] * len(order_heads(tenths))
    groups = {(group.shortest, group.longest): group for group in order.groups}
    found = [groups.get(tenth) for tenth in tenths]
    versus, longest = order.versus, order.longest
    ratios: list[float | None] = [None] * 7
    if versus is not None:
        far, near = versus.longest, versus.delay
        ratios = [near.value, near.half_width, versus.predicted, versus.p99]
        ratios += [far.value, far.half_width, versus.longest_predicted]
    return [
        order.order,
        comparison.queueing_delay.observed.mean * 1e3,
        longest.delay.value * 1e3,
        None if longest.predicted is None else longest.predicted * 1e3,
        *ratios,
        *(None if group is None else group.slowdown.value for group in found),
        *(None if group is None else group.predicted for group in found),
        *(None if group is None else group.same_arrivals for group in found),
    ]


def range_text(shortest: int, longest: int) -> str:
    """Of output lengths."""
    return str(longest) if shortest == longest else f"{shortest}-{longest}"


def _row(comparison: Comparison, order: OrderResult) -> list[str]:
    versus, delays = order.versus, comparison.queueing_delay
    return [
        comparison.policy,
        _load(comparison),
        _ms(delays.observed.mean),
        ratio_text(None if versus is None else versus.delay),
        number_text(None if versus is None else versus.predicted),
        _ms(delays.quantiles.get("p99", math.nan)),
        number_text(None if versus is None else versus.p99),
        _ms(order.longest.delay.value),
        ratio_text(None if versus is None else versus.longest),
        number_text(None if versus is None else versus.longest_predicted),
    ]


def ratio_text(ratio: RatioInterval | None) -> str:
    """With its half width."""
    if ratio is None or not math.isfinite(ratio.value):
        return "-"
    half = f"{ratio.half_width:.2f}" if math.isfinite(ratio.half_width) else "?"
    return f"{ratio.value:.2f} ± {half}"


def number_text(value: float | None) -> str:
    """A ratio, or a dash."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.2f}"


def _slowdown(group: LengthGroup | None) -> str:
    if group is None:
        return "-"
    if group.predicted is not None:
        return f"{group.slowdown.value:.2f}\n{group.predicted:.2f}"
    again = "" if group.same_arrivals is None else f"\n~{group.same_arrivals:.2f}"
    return f"{group.slowdown.value:.2f}{again}"


def _load(comparison: Comparison) -> str:
    return "-" if comparison.load is None else f"{comparison.load:.2f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if math.isfinite(seconds) else "-"
