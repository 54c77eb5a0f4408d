"""Shares, durations and their intervals in words of advice and decisions: light to import, for the
commands too.
"""

from __future__ import annotations

import math

from kendall.queueing.estimation.interval import Estimate

HALF_A_PERCENT = 0.005
# in a sentence of advice, where a better setting was found all the same
NO_CHANGE = "no change is worth making"
DIGITS = 4  # of a share near 1


def share(value: float) -> str:
    """In percent, without a decimal unless that would print a 100 that it is not; halves are
    rounded away from 0.
    """
    whole, rest = divmod(abs(100 * value), 1)
    size = int(whole) + (rest >= 0.5)  # an int has no minus zero
    text, places = f"{-size if value < 0 else size:d}", 0
    while value < 1 and float(text) >= 100 and places < DIGITS:
        places += 1
        text = f"{100 * value:.{places}f}"
    return "over 99.9999" if value < 1 and float(text) >= 100 else text


def small_share(value: float | None) -> str:
    """In percent with its sign, a fraction that is not 0 never as 0 %; in words where it is not
    known.
    """
    if value is None:
        return "an unknown share"
    return f"{share(value)} %" if value == 0 or value >= HALF_A_PERCENT else "under 0.5 %"


def seconds(value: float | None) -> str:
    """A duration; none without a steady state."""
    if value is None:
        return "without bound"
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def bounded(value: Estimate, missing: str = "without bound") -> str:
    """A duration with its interval."""
    if not math.isfinite(value.value):
        return missing
    ends = (
        seconds(max(0.0, end)) if math.isfinite(end) else "unbounded"
        for end in (value.low, value.high)
    )
    return f"{seconds(value.value)} ({' to '.join(ends)})"


def less(gain: Estimate) -> str:
    """A gain with its interval."""
    ends = (share(end) if math.isfinite(end) else "unbounded" for end in (gain.low, gain.high))
    return f"{share(gain.value)} % less ({' to '.join(ends)})"
