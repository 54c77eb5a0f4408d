"""The text of a service-level objective, which every command reads alike:

    p99_queueing_delay=2s         a quantile, above p0 and up to p99.99, of a duration of requests
    mean_sojourn_time<=500ms      or its mean; `=`, `<=` and `<` mean the same

A command that cannot answer all of them says so behind the reading: predictions have the quantiles
of `queueing.result.LEVELS`, admission predicts queueing delays.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import cast

from policies.durations import parse_duration
from policies.text import SpecError, suggest
from queueing.result import Quantity

QUANTITIES: tuple[Quantity, ...] = ("queueing_delay", "sojourn_time", "time_to_first_token")
_TEXT = re.compile(r"(mean|p\d{1,2}(?:\.\d{1,2})?)_([a-z_]+?)\s*(?:=|<=?)\s*(.+)")
FORM = "mean_QUANTITY=TIME or pNN_QUANTITY=TIME, for example p99_queueing_delay=2s"


@dataclass(frozen=True, slots=True)
class SloText:
    """`statistic` ("mean", "p99", "p99.9") of `quantity` is to be at most `seconds`."""

    statistic: str
    level: float | None  # of a quantile, in (0, 1); None: the mean
    quantity: Quantity
    seconds: float


def read_slo(text: str, name: str = "--slo ") -> SloText:
    """`name`: of the option or the argument, as errors say it. Raises SpecError."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise SpecError(f"got {name}{text!r}; expected {FORM}")
    statistic, quantity = match[1], match[2]
    if quantity not in QUANTITIES:
        raise SpecError(
            f"got {name}{text!r}; expected one of "
            f"{', '.join(QUANTITIES)}{suggest(quantity, QUANTITIES)}"
        )
    try:
        seconds = parse_duration(match[3])
    except SpecError:
        raise SpecError(
            f"got {name}{text!r}; expected a duration such as 2s or 100ms behind the sign"
        ) from None
    percent = None if statistic == "mean" else float(statistic[1:])
    if not 0 < seconds < math.inf or percent == 0:
        raise SpecError(f"got {name}{text!r}; expected finite seconds > 0 and a quantile above p0")
    if percent is None:
        return SloText(statistic, None, cast("Quantity", quantity), seconds)
    level = round(percent / 100, 6)  # 0.999 for p99.9, not 0.9990000000000001
    return SloText(f"p{percent:g}", level, cast("Quantity", quantity), seconds)
