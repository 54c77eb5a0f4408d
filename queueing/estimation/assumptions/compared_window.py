"""One window of one epoch: what was observed, the check of the model by the very requests that came
(queueing.measurement.check), the forecast of the steady state, and the assumptions.

The verdict is that of the check, which takes nothing for granted of those who send: what can fail
is the engine (`ENGINE`) or the gateway, and `reasons` of a disagreement are these; "unexplained"
where none does. The forecast has conditions of its own, all other assumptions, and is not judged by
a short window. Where rate or speed changed within the window it
is that of the time after the change. Sojourns are compared for continuous, delays else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kendall.policies.text import short_number
from kendall.queueing.estimation.assumptions.assumption import Assumption
from kendall.queueing.estimation.assumptions.engine_assumptions import ENGINE_TESTS
from kendall.queueing.estimation.change import Vector
from kendall.queueing.estimation.interval import UNKNOWN, Estimate, symmetric, without_interval
from kendall.queueing.estimation.summaries import ComparisonSummary, Judgement, ObservedDelay
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.measurement.check import SAID, Check
from kendall.queueing.measurement.delay_variance import single_server_variance
from kendall.queueing.measurement.quantile_interval import quantile_intervals
from kendall.queueing.measurement.statistics import mean_interval
from kendall.queueing.result import LEVELS

BURSTS = "poisson_arrivals"
ENGINE = tuple(test.name for test in ENGINE_TESTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Seconds. `error` = observed / predicted - 1, not a number without a prediction."""

    n: int
    observed: Estimate
    predicted: Estimate  # by the forecast
    error: float
    observed_quantiles: Mapping[str, Estimate] = field(default_factory=dict)
    assumptions: tuple[Assumption, ...] = ()
    check: Check | None = None  # the model beside the very requests that came

    @property
    def verdict(self) -> str:
        """Of the check; without one nothing is judged."""
        return "not enough data" if self.check is None else SAID[self.check.verdict]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Of a disagreement: "gateway", names of the engine's assumptions that fail, or
        "unexplained".
        """
        if self.check is None or self.verdict != "disagree":
            return ()
        gateway = ("gateway",) if self.check.of_gateway else ()
        return (*gateway, *(each.name for each in self.suspects)) or ("unexplained",)

    @property
    def suspects(self) -> tuple[Assumption, ...]:
        """Assumptions of the engine that fail, which the model of the same requests lacks too."""
        return tuple(
            each for each in self.assumptions if each.name in ENGINE and each.holds is False
        )

    def with_check(self, check: Check, *, sojourn: bool) -> Compared:
        """With the model of the same requests, also in the words of arrivals that are not
        Poisson.
        """
        what = "sojourn time" if sojourn else "queueing delay"
        modelled = (
            f"; with these arrivals the model has a mean {what} of "
            f"{short_number(check.modelled, 3)} s"
        )
        assumptions = tuple(
            dataclasses.replace(each, says=each.says + modelled)
            if each.name == BURSTS and each.holds is False
            else each
            for each in self.assumptions
        )
        suspects = tuple(f"the engine: {each.says}" for each in self.suspects)
        closed = any(each.name == "open_loop" and each.holds is False for each in assumptions)
        check = dataclasses.replace(check, suspects=suspects, closed_loop=closed)
        return dataclasses.replace(self, check=check, assumptions=assumptions)

    def summary(self) -> ComparisonSummary:
        """What is shown of it."""
        return ComparisonSummary(
            verdict=self.verdict,
            reasons=self.reasons,
            n=self.n,
            observed=ObservedDelay(
                mean=self.observed.of_duration(), quantiles=self.observed_quantiles
            ),
            predicted=self.predicted.of_duration(),
            check=self.check,
            error=self.error,
            assumptions={
                each.name: Judgement(each.holds, each.says, each.applies)
                for each in self.assumptions
            },
        )


def compare(
    seen: Snapshot, predicted: Estimate, assumptions: Sequence[Assumption], *, sojourn: bool = False
) -> Compared:
    """The snapshot's own rows and the forecast's mean (`UNKNOWN` without a steady state)."""
    values = seen.judged(sojourn=sojourn)
    observed = observed_mean(seen, sojourn=sojourn)
    return Compared(
        n=values.size,
        observed=observed,
        predicted=predicted,
        error=observed.value / predicted.value - 1 if predicted.value else math.nan,
        observed_quantiles=observed_quantiles(values),
        assumptions=tuple(assumptions),
    )


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
