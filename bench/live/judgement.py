"""Whether a cell holds, by rules that were stated before the run.

    gateway     |observed - measured service| <= max(2 %, 0.3 ms), always
    mean        |observed - live prediction| <= max(10 %, half width of the observed mean, 1 ms), up to load 0.6
    band        above: the observation lies in the band that the speed's wander gives; where the speed did not wander,
                or the band is narrower than the tolerance below 0.6, that tolerance
    p99         |observed - live prediction| <= 20 %; of continuous that of the sojourn, simulated at the same estimates
    quiet       every block's speed within 10 % of the cell's, the speeds before and after within 5 % of each other

Of a cell that was measured twice, the attempt counts whose mean became known; with two or none, the quiet one; with two or none,
the one with the smaller deviations. Whether observed and predicted agree has no say in that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

SERVICE, SERVICE_FLOOR = 0.02, 0.3e-3
MEAN, MEAN_FLOOR = 0.10, 1e-3
P99 = 0.20
LOW_LOAD = 0.6
BAND_SAYS = (
    "Above, where it lies in the band that the speed's wander gives; where the speed did not wander beyond chance there is no band, "
    "and the same tolerance decides. An open band (-) says that the queue has no steady state at some of the speeds."
)
Plain = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One cell; None where there is nothing to judge."""

    result: Plain
    observed: float
    half_width: float
    predicted: float | None
    holds: bool | None
    in_band: bool | None  # None: the speed did not wander
    gateway_holds: bool
    p99: tuple[float, float] | None  # observed, predicted
    quiet: bool

    @property
    def error(self) -> float | None:
        """Observed / predicted - 1."""
        return None if not self.predicted else self.observed / self.predicted - 1

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
    in_band = _in_band(observed, live["wander_band"])
    near = None if predicted is None else abs(observed - predicted) <= max(MEAN * predicted, half, MEAN_FLOOR)
    service = result["measured_service"]
    apart = abs(service["observed"] - service["recursion"])
    return Judged(
        result=result,
        observed=observed,
        half_width=half,
        predicted=predicted,
        holds=near if result["load"] <= LOW_LOAD + 1e-9 else bool(near) if in_band is None else in_band,
        in_band=in_band,
        gateway_holds=apart <= max(SERVICE * service["recursion"], SERVICE_FLOOR),
        p99=_p99(result, live),
        quiet=not result["noise"],
    )


def source_of(result: Plain) -> Plain:
    """What the gateway predicted while it served; without it, the same from the run file."""
    found: Plain = result["live"] or result["offline"]
    return found


def _in_band(observed: float, band: Plain | None) -> bool | None:
    if band is None:
        return None
    low, high = (0.0 if band["low"] is None else band["low"]), (math.inf if band["high"] is None else band["high"])
    return bool(low <= observed <= high)


def _p99(result: Plain, live: Plain) -> tuple[float, float] | None:
    if result["waiting"] is not None:
        predicted = result["waiting"]["simulated_sojourn_p99"]
    else:
        plain = live.get("prediction", live) or {}
        predicted = (plain.get("served_queueing_delay") or {}).get("p99")
    observed = (result["observed"].get("p99") or {}).get("value")
    return (observed, predicted) if predicted and observed is not None else None


def noise(blocks: Sequence[float], speeds: tuple[float, float | None], *, block_deviation: float, bracket_deviation: float) -> list[str]:
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
    return min(
        attempts, key=lambda each: (out_of_time(each), bool(each["noise"]), largest_deviation(each["block_speeds"]), each["attempt"])
    )


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
    """The acceptance numbers, for the cells that there are."""
    low = [cell for cell in cells if cell.low]
    errors = [abs(cell.error) for cell in low if cell.error is not None]
    share = len(cells) / 24 if cells else 0.0  # of the whole table, where only a part of it was measured
    return [
        Count("gateway within max(2 %, 0.3 ms) of its measured service", sum(c.gateway_holds for c in cells), len(cells), len(cells)),
        Count("cells that hold", sum(bool(c.holds) for c in cells), len(cells), math.ceil(21 * share)),
        Count("median error of the mean up to load 0.6", median(errors) if errors else math.nan, None, 0.05),
        Count(
            "p99 within 20 % up to load 0.6",
            sum(c.p99_error is not None and abs(c.p99_error) <= P99 for c in low),
            len(low),
            math.ceil(14 / 18 * len(low)),
        ),
    ]
