"""What the demo measured: a table that fits 80 columns, and one sentence over all its requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from kendall.loadgen.compare.comparison import Comparison
from kendall.loadgen.compare.residual import disturbance
from kendall.loadgen.report.columns import difference
from kendall.loadgen.report.report import (
    CHECK_HEADINGS,
    CHECK_NOTES,
    check_columns,
    check_sentence,
)
from kendall.policies.text import counted, short_form
from kendall.queueing.commands.terminal import Column, Table, say

HEADINGS = ("policy", "load", "n", "observed\n(ms)", *CHECK_HEADINGS, "a priori\n(ms)")
NOTES = (
    "observed: mean queueing delay",
    *CHECK_NOTES,
    (
        "a priori: the steady state of the queue for the requested rate and lengths, at the "
        "calibrated speed; so few requests need not reach it"
    ),
)
SOJOURN = (
    "*: mean sojourn time; before a continuous engine, waiting for its next step is part of "
    "the service"
)


@dataclass(frozen=True, slots=True)
class DemoCell:
    """One policy at one load, and what came of it."""

    policy: str
    load: float
    comparison: Comparison

    @property
    def name(self) -> str:
        """Policy and load in a sentence."""
        return f"{self.policy} at {self.load:g}"

    @property
    def line(self) -> str:
        """The result in one line."""
        comparison = self.comparison
        observed = _ms(comparison.quantity.observed.mean)
        said = f"{self.name}: {counted(comparison.n, 'request')}, observed {observed} ms"
        if (check := comparison.check) is not None:
            said += f", model {_ms(check.modelled)} ms ({difference(check)})"
        return said + (f"; {disturbance(comparison)}" if comparison.of_others else "")


def print_report(cells: Sequence[DemoCell], console: Console) -> None:
    console.print(table(cells))
    say(console, "")
    starred = any(cell.comparison.compared == "sojourn_time" for cell in cells)
    for note in (*NOTES, *([SOJOURN] if starred else [])):
        say(console, note)
    say(console, "")
    say(console, conclusion(cells), hang=0)


def table(cells: Sequence[DemoCell]) -> Table:
    """One row for each cell."""
    columns = [Column(heading=heading, left=heading == "policy") for heading in HEADINGS]
    rows = []
    for cell in cells:
        comparison = cell.comparison
        a_priori = comparison.quantity.a_priori
        row = (
            short_form(cell.policy) + ("*" if comparison.compared == "sojourn_time" else ""),
            f"{cell.load:g}",
            str(comparison.n),
            _ms(comparison.quantity.observed.mean),
            *check_columns(comparison),
            "-" if a_priori is None else _ms(a_priori.mean),
        )
        rows.append(row)
    return Table(columns, rows, keys=2)


def conclusion(cells: Sequence[DemoCell]) -> str:
    """The model beside all requests, and the cells that were disturbed."""
    parts = [check_sentence([cell.comparison for cell in cells]) or "Nothing could be compared."]
    if disturbed := [
        f"{cell.name} ({disturbance(cell.comparison)})"
        for cell in cells
        if cell.comparison.of_others
    ]:
        parts.append(f"Disturbed and left out: {', '.join(disturbed)}.")
    return " ".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if math.isfinite(seconds) else "-"
