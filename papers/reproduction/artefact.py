"""What a reproduced table or figure consists of: statements beside our values, panels of curves,
and what is missing.

A verdict is computed, never written down: a stated number is met when ours rounds (or truncates) to
its printed digits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from scipy.optimize import minimize_scalar

Say = Callable[[str], None]  # told what is being computed
Kind = Literal["exact", "approximation", "printed", "simulated", "measured"]
MET, TRUNCATED, WITHIN, HOLDS, EXPLAINED, FAULT, FAILED, UNPRINTED = (
    "met",
    "met (printed truncated)",
    "within 0.5 %",
    "holds",
    "explained",
    "fault of the document",
    "NOT MET",
    "not printed",
)
FITTED = "met by construction"
NOISE = 0.005  # relative, of a number that the document itself has simulated


@dataclass(frozen=True, slots=True)
class Statement:
    """One thing that a document says, and what we find; `ours` in the unit of `stated`."""

    quantity: str
    stated: str  # as printed, its digits are its precision; "" where the document gives no number
    ours: float | str
    note: str = ""
    holds: bool | None = None  # of a claim in words
    fitted: bool = False  # a value that the document does not print was chosen so that this is met
    sampled: bool = False  # the document has simulated this number: its last digits are noise
    fault: bool = False  # the document contradicts its own model, or the model's mathematics

    @property
    def number(self) -> float | None:
        """The printed number, None for a claim in words."""
        found = re.match(r"-?\d+(\.\d+)?(e-?\d+)?", self.stated)
        return float(found.group()) if found and isinstance(self.ours, float | int) else None

    @property
    def deviation(self) -> float | None:
        """ours / stated - 1."""
        number = self.number
        return float(self.ours) / number - 1 if number else None

    @property
    def verdict(self) -> str:
        """One of the words above."""
        if not self.stated:
            return UNPRINTED
        number = self.number
        if number is None:
            return (
                HOLDS if self.holds else FAULT if self.fault else EXPLAINED if self.note else FAILED
            )
        step = _last_place(self.stated)
        excess = float(self.ours) - number
        if abs(excess) <= step / 2 * (1 + 1e-9):
            return FITTED if self.fitted else MET
        if 0 < excess < step:
            return FITTED if self.fitted else TRUNCATED
        if self.sampled and abs(excess) <= NOISE * abs(number):
            return WITHIN
        return FAULT if self.fault else EXPLAINED if self.note else FAILED


def _last_place(text: str) -> float:
    decimals = re.match(r"-?\d+\.(\d+)", text)
    return 10.0 ** -len(decimals.group(1)) if decimals else 1.0


@dataclass(frozen=True, slots=True)
class Curve:
    """`y` over `x`; `error` = standard errors."""

    label: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    kind: Kind = "exact"
    error: tuple[float, ...] = ()


def curve(
    label: str, x: Iterable[Any], y: Iterable[Any], kind: Kind = "exact", error: Iterable[Any] = ()
) -> Curve:
    """A curve from any numbers."""
    values = tuple(None if value is None else float(value) for value in y)
    return Curve(
        label,
        tuple(float(value) for value in x),
        values,
        kind,
        tuple(float(value) for value in error),
    )


def largest_over(value: Callable[[float], float], loads: Sequence[float]) -> float:
    """The maximum of `value` from the first to the last of `loads`, in between too: about the best
    of them it is searched for.

    A bound of two branches is worst where they cross, which no grid meets. Condition: one peak
    between the best one's neighbours.
    """
    values = [value(load) for load in loads]
    best = values.index(max(values))
    between = loads[max(best - 1, 0)], loads[min(best + 1, len(loads) - 1)]
    found = minimize_scalar(
        lambda load: -value(load), bounds=between, method="bounded", options={"xatol": 1e-7}
    )
    return max(-float(found.fun), values[best])


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    logarithmic: str = ""  # "x", "y" or "xy"
    marks: tuple[tuple[float, str], ...] = ()  # vertical lines
    top: float | None = None  # largest y shown


@dataclass(frozen=True, slots=True)
class Artefact:
    """A table or a figure, reproduced."""

    name: str
    title: str
    statements: tuple[Statement, ...] = ()
    panels: tuple[Panel, ...] = ()
    assumed: tuple[str, ...] = ()  # values that the document does not print
    remarks: tuple[str, ...] = ()  # what cannot be reproduced, and why
    values: dict[str, Any] = field(default_factory=dict)  # anything else worth keeping as data

    @property
    def failed(self) -> list[Statement]:
        """Statements neither met nor explained."""
        return [statement for statement in self.statements if statement.verdict == FAILED]
