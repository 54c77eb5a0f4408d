"""The texts of a cell and of its numbers."""

from __future__ import annotations

import math
from html import escape

from kendall.loadgen.compare.cells import ReportCell
from kendall.policies.text import short_form

MS = 1e3
NO_NUMBER = "–"
# kind of a verdict -> class of its chip; others "off"
CHIPS = {
    "agree": "agree",
    "disturbed": "short",
    "sampling noise": "noise",
    "no prediction": "short",
}


def chip_class(kind: str) -> str:
    """The colour of a verdict."""
    return CHIPS.get(kind, "off")


def number(value: float | None, form: str, nothing: str = "-") -> str:
    """A number in this format, or the sign of one that is not known."""
    return nothing if value is None or not math.isfinite(value) else format(value, form)


def plain_ms(seconds: float) -> str:
    """Milliseconds on a terminal."""
    return number(seconds * MS, ".1f")


def with_small(value: str, small: str | None) -> str:
    """A value, and below it what belongs to it."""
    return value if small is None else f"{value}<br><small>{small}</small>"


def label(cell: ReportCell) -> str:
    """A cell's policy, short; with its token limit where there is one, a star where the sojourn
    is compared.
    """
    text = short_form(cell.comparison.policy)
    text += "*" if cell.comparison.compared == "sojourn_time" else ""
    return text if cell.max_output_tokens is None else f"{text}, limit {cell.max_output_tokens}"


def load_text(load: float | None) -> str:
    """A load as a reader says it."""
    return "load not known" if load is None else f"load {load:.2f}".rstrip("0").rstrip(".")


def ms(seconds: float | None) -> str:
    """Milliseconds: one decimal, more only below 1 ms, so that columns align."""
    if seconds is None or not math.isfinite(seconds):
        return NO_NUMBER
    return f"{seconds * MS:,.{decimals(seconds)}f}"


def decimals(seconds: float) -> int:
    """The decimals of a time in milliseconds."""
    size = abs(seconds) * MS
    return 1 if size >= 1 or not size else 2 if size >= 0.1 else 3


def mean_and_half(mean: float, half_width: float) -> tuple[str, str]:
    """Write both in milliseconds with the mean's decimals."""
    digits = decimals(mean)
    return f"{mean * MS:,.{digits}f}", f"{half_width * MS:,.{digits}f}" if math.isfinite(
        half_width
    ) else "∞"


def typeset(text: str) -> str:
    """Escape for HTML, a number and its percent sign on one line."""
    return escape(text).replace(" %", "\N{NO-BREAK SPACE}%")


def percent(share: float | None) -> str:
    """A share in percent with its sign, as typeset."""
    if share is None or not math.isfinite(share):
        return NO_NUMBER
    text = f"{share * 100:+,.1f} %".replace("-", "−")
    return "0.0 %" if text[1:] == "0.0 %" else text
