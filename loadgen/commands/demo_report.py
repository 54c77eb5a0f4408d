"""What the demo found: a table that fits 80 columns, a verdict for every cell, and one sentence
that counts them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from loadgen.compare.comparison import TOO_WIDE, Comparison, Verdict
from loadgen.compare.residual import AGREE, verdict_at_speed
from policies.text import short_form
from queueing.commands.terminal import Column, Table, say

HEADINGS = ("policy", "load", "n", "observed\n(ms)", "predicted\n(ms)", "deviation", "verdict")
NOTES = (
    (
        "observed: mean queueing delay and half width of its 95 % interval; predicted: the exact "
        "model (continuous: an approximation) for the requested rate and lengths, at the engine's "
        "speed in the run; deviation: observed / predicted - 1"
    ),
    (
        f"agree: the prediction lies in the observed interval or within {AGREE * 100:.0f} % of the "
        "observation"
    ),
)
SOJOURN = (
    "*: mean sojourn time; before a continuous engine, waiting for its next step is part of "
    "the service"
)
SHORT = {"sampling noise": "chance"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy at one load, and what came of it."""

    policy: str
    load: float
    comparison: Comparison
    speeds: tuple[float, float]  # of the engine, by the short calibrations before and after

    @property
    def verdict(self) -> Verdict:
        """Of the prediction that the table shows."""
        return verdict_at_speed(self.comparison)

    @property
    def name(self) -> str:
        """Policy and load in a sentence."""
        return f"{self.policy} at {self.load:g}"


def print_report(cells: Sequence[Cell], console: Console) -> None:
    """Table, notes and conclusion."""
    console.print(table(cells))
    say(console, "")
    starred = any(cell.comparison.compared == "sojourn_time" for cell in cells)
    changed = max(abs(after / before - 1) for before, after in (cell.speeds for cell in cells))
    speed = (
        f"speed of the engine between two short calibrations: changed by {changed * 100:.0f} "
        "% at most"
    )
    for note in (*NOTES, *([SOJOURN] if starred else []), speed):
        say(console, note)
    say(console, "")
    say(console, conclusion(cells), hang=0)
    if any(cell.verdict.kind == "too short" for cell in cells):
        say(
            console,
            "A longer run on a quiet machine can judge more: `kendall demo --scale 3`.",
            hang=0,
        )


def table(cells: Sequence[Cell]) -> Table:
    """One row for each cell."""
    columns = [
        Column(heading=heading, left=heading in ("policy", "verdict")) for heading in HEADINGS
    ]
    return Table(columns, [_row(cell) for cell in cells], keys=2)


def _row(cell: Cell) -> tuple[str, ...]:
    comparison = cell.comparison
    observed, predicted = comparison.quantity.observed, comparison.quantity.predicted
    kind = cell.verdict.kind
    return (
        short_form(cell.policy) + ("*" if comparison.compared == "sojourn_time" else ""),
        f"{cell.load:g}",
        str(comparison.n),
        f"{_ms(observed.mean)} ± {_ms(observed.half_width):>5}",
        "-" if predicted is None else _ms(predicted.mean),
        "-" if predicted is None else f"{predicted.deviation * 100:+.1f} %",
        SHORT.get(kind, kind),
    )


def conclusion(cells: Sequence[Cell]) -> str:
    """How many cells agree, and why every other one does not."""
    agree = sum(cell.verdict.kind == "agree" for cell in cells)
    parts = (
        [f"{agree} of {len(cells)} cells agree"]
        if len(cells) > 1
        else [f"{cells[0].name}: {'agrees' if agree else 'does not agree'}"]
    )
    for where, covered in (("within", True), ("outside", False)):
        if short := [
            f"{cell.name} ({_width(cell)})"
            for cell in cells
            if cell.verdict.kind == "too short" and _covers(cell) is covered
        ]:
            parts.append(
                f"too short to judge, with the prediction {where} the interval: {', '.join(short)}"
            )
    if disturbed := [
        f"{cell.name} ({cell.verdict.text})" for cell in cells if cell.verdict.kind == "disturbed"
    ]:
        parts.append(f"disturbed and not judged: {', '.join(disturbed)}")
    return (
        "; ".join(
            [
                *parts,
                *(
                    _why(cell)
                    for cell in cells
                    if cell.verdict.kind not in ("agree", "too short", "disturbed")
                ),
            ]
        )
        + "."
    )


def _covers(cell: Cell) -> bool:
    quantity = cell.comparison.quantity
    return quantity.predicted is not None and quantity.observed.covers(quantity.predicted.mean)


def _width(cell: Cell) -> str:
    observed = cell.comparison.quantity.observed
    if not math.isfinite(observed.relative):
        return "no interval"
    enough = observed.relative > TOO_WIDE  # said by the width alone
    return f"± {observed.relative * 100:.0f} %" + (
        "" if enough else f", {observed.effective_n:.0f} independent samples"
    )


def _why(cell: Cell) -> str:
    found, predicted = cell.verdict, cell.comparison.quantity.predicted
    if predicted is None:
        return f"{cell.name}: {found.text}"
    reason = (
        "no part of the difference is beyond chance"
        if found.kind == "sampling noise"
        else found.text
    )
    side = "above" if predicted.deviation > 0 else "below"
    return f"{cell.name}: {abs(predicted.deviation) * 100:.0f} % {side} the prediction ({reason})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if math.isfinite(seconds) else "-"
