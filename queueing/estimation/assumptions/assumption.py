"""One assumption of the model, as a window shows it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from policies.text import short_number

Name = Literal[
    "all_admitted",
    "no_retries",
    "open_loop",
    "settled",
    "stable_queue",
    "constant_rate",
    "poisson_arrivals",
    "independent_lengths",
    "equal_servers",
    "no_stalls",
    "constant_speed",
    "law_shape",
    "enough_memory",
]


@dataclass(frozen=True, slots=True)
class Assumption:
    """`holds` is None where the window cannot tell; `measure` is the number that decided, `says`
    the sentence for the operator. `counted`: the prediction takes it as it is, so that it is no
    reason to doubt the prediction.
    """

    name: Name
    holds: bool | None
    measure: float
    says: str
    counted: bool = False


def factor(ratio: float) -> str:
    """The size of a change up or down, in three significant digits: `1.97`, `1,050`."""
    return short_number(max(ratio, 1 / ratio if ratio else math.inf), 3)
