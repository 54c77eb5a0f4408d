"""Comparisons as a table for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from loadgen.compare import Comparison, Estimate

WIDTH = 112
HEADINGS = (
    "policy",
    "load",
    "n",
    "batch\nsize",
    "speed",
    "observed\n(ms)",
    "measured\nservice",
    "same\narrivals",
    "predicted\n(ms)",
    "deviation\n",
)


def table(comparisons: Iterable[Comparison]) -> Table:
    """One row per policy and epoch: the observed mean, then what each theory says and the observation's deviation from it."""
    result = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 1))
    for heading in HEADINGS:
        result.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for comparison in comparisons:
        result.add_row(*_row(comparison))
    return result


def notes(comparisons: Sequence[Comparison]) -> list[str]:
    """What a reader of the table must know, one line each."""
    lines = [
        "observed: mean queueing delay ± 95 % half width (batch means); deviation = observed / predicted - 1",
        "in percent: observed / theory - 1; speed: measured service times over the calibrated law's (> 1: slower)",
    ]
    if any(c.compared == "sojourn_time" for c in comparisons):
        lines.append("*: means of the sojourn time; before a continuous engine, waiting for its next step belongs to service")
    if any(c.too_short for c in comparisons):
        lines.append("too short: the half width is more than 25 % of the mean, the cell says nothing about agreement")
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
        *(_beside(e) for e in (quantity.measured_service, quantity.same_arrivals)),
        "-" if quantity.predicted is None else _ms(quantity.predicted.mean),
        _deviation(comparison),
    )


def _deviation(comparison: Comparison) -> str:
    if comparison.too_short:
        return "too short"
    error = comparison.prediction_error
    return "-" if error is None else f"{error * 100:+.1f} %"


def _beside(estimate: Estimate | None) -> str:
    if estimate is None or math.isnan(estimate.mean):
        return "-"
    return f"{_ms(estimate.mean)} {f'{estimate.deviation * 100:+.1f}%':>6}"


def _plain(value: float | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if math.isfinite(seconds) else "-"
