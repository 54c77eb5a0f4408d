"""Observed beside predicted over one window of one epoch, and what is wrong where they part.

    d = observed - predicted mean
    h = sqrt(observed half width^2 + predicted half width^2),   both at 95 %

not enough data   fewer than `ENOUGH` judged requests; or none of the below
disagree          the queue is unstable, or theory has no answer and an assumption fails;
                  or |d| > tolerance and an assumption fails;
                  or |d| > max(tolerance, `BEYOND` h) though none does
agree             |d| <= max(tolerance, h) and h <= `TOO_WIDE` of the predicted mean

tolerance = max(10 % of the predicted mean, 1 ms).

The observation and the estimates come from the same window, so they share most of the luck of its
arrivals and lengths: h overstates the error of d, and clean runs disagree seldom. A failing
assumption is evidence of its own, beyond chance by its own rule, so with it d need not be.
One that the prediction takes as it is (`counted`) is none, and comes behind the others.
`reasons` of a disagreement are the assumptions that fail, causes before what they cause;
"unexplained" where none does. Where rate or speed changed within the window the prediction is that
of the time after the change. The first `WARM_UP` of the window is left out where it begins with the
epoch. Sojourns are compared for continuous, delays else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from policies.text import short_number
from queueing.estimation.assumptions.assumption import Assumption, Name
from queueing.estimation.change import Vector
from queueing.estimation.interval import UNKNOWN, Estimate, symmetric, without_interval
from queueing.estimation.window.snapshot import Snapshot
from queueing.measurement.check import AGREE, Check
from queueing.measurement.delay_variance import single_server_variance
from queueing.measurement.quantile_interval import quantile_intervals
from queueing.measurement.statistics import mean_interval
from queueing.result import LEVELS

Verdict = Literal["agree", "disagree", "not enough data"]
ENOUGH = 200  # requests
FLOOR = 1e-3  # seconds
TOO_WIDE = 0.25
BEYOND = 1.5
ORDER: tuple[Name, ...] = get_args(Name)
BURSTS: Name = "poisson_arrivals"
ENGINE: tuple[Name, ...] = (
    "equal_servers",
    "no_stalls",
    "constant_speed",
    "law_shape",
    "enough_memory",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Seconds. `error` = observed / predicted - 1, not a number without a prediction."""

    verdict: Verdict
    reasons: tuple[str, ...]  # names of assumptions, or "unexplained"; empty unless they disagree
    n: int
    observed: Estimate
    predicted: Estimate
    error: float
    # about how many more a verdict needs; None where there is one or it cannot be told
    requests_missing: int | None = None
    observed_quantiles: Mapping[str, Estimate] = field(default_factory=dict)
    assumptions: tuple[Assumption, ...] = ()
    check: Check | None = None  # the model beside the very requests that came

    @property
    def own_arrivals(self) -> float | None:
        """What the model has for the requests that came, where their arrivals are not Poisson:
        where that is the observed mean, the arrivals are the whole difference. Seconds.
        """
        bursts = any(each.name == BURSTS and each.holds is False for each in self.assumptions)
        return self.check.modelled if bursts and self.check is not None else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "n": self.n,
            "requests_missing": self.requests_missing,
            "observed": self.observed.of_duration().to_dict()
            | {name: each.to_dict() for name, each in self.observed_quantiles.items()},
            "predicted": self.predicted.of_duration().to_dict(),
            "own_arrivals": self.own_arrivals,
            "check": None if self.check is None else self.check.as_object(),
            "error": self.error if math.isfinite(self.error) else None,
            "assumptions": {
                each.name: {"holds": each.holds, "says": each.says} for each in self.assumptions
            },
        }


def compare(
    seen: Snapshot, predicted: Estimate, assumptions: Sequence[Assumption], *, sojourn: bool = False
) -> Compared:
    """The snapshot's own rows against the predicted mean (`UNKNOWN` without a steady state)."""
    values = seen.judged(sojourn=sojourn)
    observed = observed_mean(seen, sojourn=sojourn)
    verdict = _verdict(
        observed,
        predicted,
        values.size,
        {each.name: each.holds for each in assumptions if not each.counted},
    )
    return Compared(
        verdict=verdict,
        reasons=_reasons(assumptions) if verdict == "disagree" else (),
        n=values.size,
        observed=observed,
        predicted=predicted,
        error=observed.value / predicted.value - 1 if predicted.value else math.nan,
        requests_missing=requests_missing(observed, predicted, values.size)
        if verdict == "not enough data"
        else None,
        observed_quantiles=observed_quantiles(values),
        assumptions=tuple(sorted(assumptions, key=lambda each: ORDER.index(each.name))),
    )


def with_check(compared: Compared, check: Check, *, sojourn: bool) -> Compared:
    """With the model of the same requests, also in the words of arrivals that are not Poisson."""
    what = "sojourn time" if sojourn else "queueing delay"
    told = (
        f"; with these arrivals the model has a mean {what} of {short_number(check.modelled, 3)} s"
    )
    assumptions = tuple(
        dataclasses.replace(each, says=each.says + told)
        if each.name == BURSTS and each.holds is False
        else each
        for each in compared.assumptions
    )
    suspects = tuple(f"the engine: {each.says}" for each in assumptions if _of_engine(each))
    check = dataclasses.replace(check, suspects=suspects)
    return dataclasses.replace(compared, check=check, assumptions=assumptions)


def _of_engine(each: Assumption) -> bool:
    """Whether the model of the same requests lacks it too."""
    return each.name in ENGINE and each.holds is False


def observed_mean(seen: Snapshot, *, sojourn: bool = False) -> Estimate:
    """Of the judged delays or sojourns. Served one by one, arrivals and service times say how
    far a lucky window may lie off.
    """
    values, mine = seen.judged(sojourn=sojourn), seen.mine
    if not values.size:
        return UNKNOWN
    alone = not sojourn and seen.sequences is None  # arrivals one by one
    interval = mean_interval(
        values, theory=single_server_variance(*mine.served_in_order()) if alone else None
    )
    return symmetric(interval.mean, interval.half_width, interval.effective_n)


def observed_quantiles(values: Vector) -> dict[str, Estimate]:
    """Of values in their order, with the interval where the run can tell it."""
    found = quantile_intervals(values, LEVELS.values())
    given = {name: found[level] for name, level in LEVELS.items()}
    return {
        name: without_interval(float(np.quantile(values, LEVELS[name])))
        if one is None
        else Estimate(one.value, one.low, one.high, float(values.size))
        for name, one in given.items()
        if values.size
    }


def _verdict(
    observed: Estimate, predicted: Estimate, n: int, holds: Mapping[str, bool | None]
) -> Verdict:
    if n < ENOUGH:
        return "not enough data"
    if holds.get("stable_queue") is False:
        return "disagree"
    fails = False in holds.values()
    if not predicted.known or not observed.known:
        return "disagree" if fails and observed.known else "not enough data"
    apart = abs(observed.value - predicted.value)
    tolerance = max(AGREE * predicted.value, FLOOR)
    half = _half(observed, predicted)
    if apart > tolerance and (fails or apart > BEYOND * half):
        return "disagree"
    return (
        "agree"
        if apart <= max(tolerance, half) and half <= max(TOO_WIDE * predicted.value, FLOOR)
        else "not enough data"
    )


def requests_missing(observed: Estimate, predicted: Estimate, n: int) -> int | None:
    """About how many more requests a verdict needs: `ENOUGH` in all, and a narrow interval, if both
    means stay where they are and h shrinks as 1 / sqrt(n).
    """
    if not predicted.known or not observed.known:
        return ENOUGH - n if n < ENOUGH else None
    half = _half(observed, predicted)
    widths = [half / max(TOO_WIDE * predicted.value, FLOOR)]
    apart = abs(observed.value - predicted.value)
    if apart > max(AGREE * predicted.value, FLOOR, half):
        widths.append(BEYOND * half / apart)
    return max(1, ENOUGH - n, math.ceil(n * (max(widths) ** 2 - 1)))


def _half(observed: Estimate, predicted: Estimate) -> float:
    return math.hypot((observed.high - observed.low) / 2, (predicted.high - predicted.low) / 2)


def _reasons(assumptions: Sequence[Assumption]) -> tuple[str, ...]:
    failing = [each for each in assumptions if each.holds is False]
    failing.sort(key=lambda each: (each.counted, ORDER.index(each.name)))
    return tuple(each.name for each in failing) or ("unexplained",)
