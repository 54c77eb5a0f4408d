"""Whether a cell holds, by one rule that was stated before the run.

    too short      the half width of the observed mean (95 %) is more than a quarter of it: the cell
                   says nothing
    holds          the predicted mean lies in the 95 % interval of the observed mean, or within
                   5 % of the observed mean
    does not hold  neither

Besides, and never in place of it:

    gateway        |observed - measured service| <= max(2 %, 0.3 ms)
    p99            |observed - live prediction| <= 20 %; of continuous that of the sojourn,
                   simulated at the same estimates
    quiet          every block's speed within 10 % of the cell's, the speeds before and after within
                   5 % of each other

Of a cell that was measured twice, the attempt whose observed mean is known better counts. Whether
observed and predicted agree has no say in that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from queueing.measurement.batch_means import TOO_WIDE

SERVICE, SERVICE_FLOOR = 0.02, 0.3e-3
CLOSE = 0.05
P99 = 0.20
LOW_LOAD = 0.6
CELLS, WANTED, ERROR = (
    24,
    23,
    0.03,
)  # of the table: how many, how many should hold, median error up to LOW_LOAD
RULE = (
    "One rule for every cell: it **holds** where the predicted mean lies in the 95 % interval of "
    "the observed mean, or within 5 % of the observed mean; it is **too short**, and says "
    "nothing, where that interval reaches further than a quarter of the observed mean to either "
    "side."
)
Plain = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One cell; None where there is nothing to judge."""

    result: Plain
    observed: float
    half_width: float
    predicted: float | None
    holds: bool | None  # None: too short, or nothing predicted
    too_short: bool
    gateway_holds: bool
    p99: tuple[float, float] | None  # observed, predicted
    quiet: bool

    @property
    def error(self) -> float | None:
        """Observed / predicted - 1."""
        return None if not self.predicted else self.observed / self.predicted - 1

    @property
    def at_its_speeds(self) -> float | None:
        """The prediction with what the speed's changes within the cell do to it; None where they
        were not simulated.
        """
        found: float | None = self.result.get("at_its_speeds")
        return found

    @property
    def says(self) -> str:
        """The rule's verdict."""
        return verdict(self.observed, self.half_width, self.predicted)

    @property
    def p99_error(self) -> float | None:
        """Observed / predicted - 1."""
        return None if self.p99 is None else self.p99[0] / self.p99[1] - 1

    @property
    def low(self) -> bool:
        """Whether it is one of those up to load 0.6."""
        return bool(self.result["load"] <= LOW_LOAD + 1e-9)


def judge(result: Plain) -> Judged:
    """By the live prediction; by the offline one where the gateway gave none."""
    live = source_of(result)
    observed = result["observed"]["value"]
    low = result["observed"]["low"]
    half = math.inf if low is None else observed - low
    predicted = live["interval"]["value"]
    says = verdict(observed, half, predicted)
    service = result["measured_service"]
    apart = abs(service["observed"] - service["recursion"])
    return Judged(
        result=result,
        observed=observed,
        half_width=half,
        predicted=predicted,
        holds={"holds": True, "does not hold": False}.get(says),
        too_short=says == "too short",
        gateway_holds=apart <= max(SERVICE * service["recursion"], SERVICE_FLOOR),
        p99=_p99(result, live),
        quiet=not result["noise"],
    )


def verdict(observed: float, half_width: float, predicted: float | None) -> str:
    """The rule."""
    if half_width > TOO_WIDE * observed:
        return "too short"
    if predicted is None:
        return "nothing predicted"
    return (
        "holds"
        if abs(observed - predicted) <= max(half_width, CLOSE * observed)
        else "does not hold"
    )


def source_of(result: Plain) -> Plain:
    """What the gateway predicted while it served; without it, the same from the run file."""
    found: Plain = result["live"] or result["offline"]
    return found


def _p99(result: Plain, live: Plain) -> tuple[float, float] | None:
    if result["waiting"] is not None:
        predicted = result["waiting"]["simulated_sojourn_p99"]
    else:
        plain = live.get("prediction", live) or {}
        predicted = (plain.get("served_queueing_delay") or {}).get("p99")
    observed = (result["observed"].get("p99") or {}).get("value")
    return (observed, predicted) if predicted and observed is not None else None


def noise(
    blocks: Sequence[float],
    speeds: tuple[float, float | None],
    *,
    block_deviation: float,
    bracket_deviation: float,
) -> list[str]:
    """Why the machine was not quiet; empty where it was."""
    found = []
    worst = largest_deviation(blocks)
    if worst > block_deviation:
        found.append(f"a block's speed lay {worst:.0%} from the cell's")
    if speeds[1] is None:
        found.append("the speed after the cell is not known")
    elif abs(speeds[1] / speeds[0] - 1) > bracket_deviation:
        found.append(f"the speed changed by {speeds[1] / speeds[0] - 1:+.0%} from before to after")
    return found


def largest_deviation(blocks: Sequence[float]) -> float:
    """Of any block's speed from their mean, as a fraction."""
    mean = sum(blocks) / len(blocks) if blocks else 1.0
    return max((abs(block / mean - 1) for block in blocks), default=0.0)


def out_of_time(result: Plain) -> bool:
    """Whether it ended before its mean was known well enough."""
    return bool(result["ended"] == "time")


def counted(attempts: Iterable[Plain]) -> Plain:
    """The attempt that counts."""
    return min(attempts, key=lambda each: (relative_half_width(each), each["attempt"]))


def relative_half_width(result: Plain) -> float:
    """Of the observed mean; infinite where there is no interval."""
    value, low = result["observed"]["value"], result["observed"]["low"]
    return math.inf if low is None or not value else float((value - low) / value)


@dataclass(frozen=True, slots=True)
class Count:
    """So many of so many, against what was asked."""

    says: str
    found: float
    of: int | None  # None: `found` is a fraction
    asked: float

    @property
    def holds(self) -> bool:
        """A fraction must not exceed what was asked, a number must reach it."""
        return self.found <= self.asked if self.of is None else self.found >= self.asked


def counts(cells: Sequence[Judged]) -> list[Count]:
    """The acceptance numbers, for the cells of the table that there are."""
    cells = [cell for cell in cells if not cell.result.get("longer")]
    low = [cell for cell in cells if cell.low]
    errors = [abs(cell.error) for cell in low if cell.error is not None]
    # of the whole table, where only a part of it was measured
    share = len(cells) / CELLS if cells else 0.0
    return [
        Count(
            "gateway within max(2 %, 0.3 ms) of its measured service",
            sum(c.gateway_holds for c in cells),
            len(cells),
            len(cells),
        ),
        Count(
            "cells that hold",
            sum(bool(c.holds) for c in cells),
            len(cells),
            math.ceil(WANTED * share),
        ),
        Count(
            "median error of the mean up to load 0.6",
            median(errors) if errors else math.nan,
            None,
            ERROR,
        ),
        Count(
            "p99 within 20 % up to load 0.6",
            sum(c.p99_error is not None and abs(c.p99_error) <= P99 for c in low),
            len(low),
            math.ceil(14 / 18 * len(low)),
        ),
    ]
