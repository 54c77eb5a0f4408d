"""Comparisons as a table for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from loadgen.compare import Comparison, Estimate

WIDTH = 120
HEADINGS = (
    "policy",
    "load",
    "n",
    "batch",
    "speed",
    "observed\n(ms)",
    "measured\nservice (ms)",
    "same\narrivals (ms)",
    "predicted",
)


def table(comparisons: Iterable[Comparison]) -> Table:
    """One row per policy and epoch: the observed mean, then what each theory says and the observation's deviation from it."""
    result = Table(box=None, pad_edge=False, padding=(0, 1))
    for heading in HEADINGS:
        result.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=heading != "policy", overflow="fold")
    for comparison in comparisons:
        result.add_row(*_row(comparison))
    return result


def notes(comparisons: Sequence[Comparison]) -> list[str]:
    """What a reader of the table must know, one line each."""
    lines = [
        "means of the queueing delay in ms ± 95 % half width (batch means)",
        "in brackets: observed / theory - 1, ± its half width where a sample stands behind it",
    ]
    if any(c.compared == "sojourn_time" for c in comparisons):
        lines.append("*: means of the sojourn time; before a continuous engine, waiting for its next step belongs to service")
    short = [c.policy for c in comparisons if c.too_short]
    if short:
        lines.append(f"too short to judge (half width > 25 % of the mean): {', '.join(short)}")
    correlated = [c.policy for c in comparisons if c.quantity.observed.correlated and not c.too_short]
    if correlated:
        lines.append(f"batch means hang together, the interval may be too narrow: {', '.join(correlated)}")
    return lines


def text(comparisons: Sequence[Comparison], width: int = WIDTH) -> str:
    """Table and notes without colour."""
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table(comparisons))
    return "\n".join([capture.get().rstrip(), *notes(comparisons)])


def as_object(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON has it: seconds, and what follows from its fields."""
    return {
        **msgspec.to_builtins(comparison, enc_hook=float),
        "prediction_error": comparison.prediction_error,
        "too_short": comparison.too_short,
    }


def _row(comparison: Comparison) -> tuple[str, ...]:
    quantity = comparison.quantity
    star = "*" if comparison.compared == "sojourn_time" else ""
    observed = quantity.observed
    return (
        comparison.policy + star,
        _plain(comparison.load, ".2f"),
        str(comparison.n),
        f"{comparison.batch_size:.2f}",
        _plain(comparison.speed.factor if comparison.speed else None, ".3f"),
        f"{_ms(observed.mean)} ± {_ms(observed.half_width)}",
        *(_beside(e) for e in (quantity.measured_service, quantity.same_arrivals, quantity.predicted)),
    )


def _beside(estimate: Estimate | None) -> str:
    if estimate is None or math.isnan(estimate.mean):
        return "-"
    shown = estimate.half_width >= 5e-4 and math.isfinite(estimate.half_width)
    width = f"±{estimate.half_width * 100:.0f}" if shown else ""
    return f"{_ms(estimate.mean)} ({estimate.deviation * 100:+.1f}{width}%)"


def _plain(value: float | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if math.isfinite(seconds) else "-"
