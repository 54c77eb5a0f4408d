"""Durations as a person writes them: `2s`, `100ms`, `500us`, `1.5min`, `1m30s`, `1h`; a bare number
is seconds.

Every flag, variable, key of a file, header and service level objective that holds a duration is
read here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from kendall.policies.errors import SpecError

UNITS = {
    "ns": "1e-9",
    "us": "1e-6",
    "µs": "1e-6",
    "ms": "1e-3",
    "s": "1",
    "min": "60",
    "m": "60",
    "h": "3600",
    "d": "86400",
}  # seconds
EXAMPLES = "2s, 100ms, 500us, 1.5min (or 1.5m), 1h, 7d or a bare number of seconds"
_PART = re.compile(
    r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(ns|us|µs|ms|s|min|m|h|d)(?![a-zµ])\s*"
)


def parse_duration(text: str) -> float:
    """Seconds, correctly rounded. Raises SpecError for another unit, not a number, a negative
    duration.

    >>> [parse_duration(text) for text in ("2s", "100ms", "500us", "1.5min", "1m30s", "0.25")]
    [2.0, 0.1, 0.0005, 90.0, 90.0, 0.25]
    """
    seconds = _units(text)
    if seconds is None:
        seconds = _bare(text)
    if seconds is None or not seconds >= 0:
        raise SpecError(f"got {text!r}; expected a duration: {EXAMPLES}")
    return seconds


def _units(text: str) -> float | None:
    total, at = Decimal(0), 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None:
            return None
        try:
            total += Decimal(part[1]) * Decimal(UNITS[part[2]])
        except ArithmeticError:  # an exponent beyond those of a Decimal
            return None
        at = part.end()
    return float(total) if at else None


def seconds_or_nan(text: str) -> float:
    """As `parse_duration`; not a number where that would raise."""
    try:
        return parse_duration(text)
    except SpecError:
        return math.nan


def _bare(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def rounded_duration(seconds: float) -> str:
    """A rounded duration for people: `90 s`, `45 min`, `2.5 h`, `12 days`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:,.0f} days"


@dataclass(frozen=True, slots=True)
class Duration:
    """The type of an option that takes a duration, as text or as a number of seconds; `least`
    may be set.
    """

    least: float = 0.0  # seconds
    endless: bool = True  # inf may be given

    def __call__(self, value: str | float) -> float:
        """Seconds. Raises SpecError."""
        seconds = parse_duration(value) if isinstance(value, str) else float(value)
        endless = math.isinf(seconds) and not self.endless
        if math.isnan(seconds) or seconds < self.least or endless:
            at_least = f" of at least {self.least:g} s" if self.least else ""
            raise SpecError(f"got {value!r}; expected a duration{at_least}: {EXAMPLES}")
        return seconds

    @property
    def __name__(self) -> str:
        """For the help."""
        return "duration"
