"""What the autopilot is shown each time: the window's estimates, what was observed, which
assumptions fail, what is in force.
"""

from __future__ import annotations

from dataclasses import dataclass

from kendall.policies import parse_policy, served_as
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.estimation.assumptions.assumption import Assumption
from kendall.queueing.estimation.estimates import Estimates, estimate
from kendall.queueing.estimation.interval import UNKNOWN, Estimate, symmetric
from kendall.queueing.estimation.speed.speeds import Speeds
from kendall.queueing.estimation.window.window import Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.statistics import FloatArray, batch_means_interval
from kendall.queueing.result import Quantity

LONGEST = 32_768  # tokens
ENOUGH = 200  # requests


@dataclass(frozen=True, eq=False, kw_only=True)
class AssessedWindow:
    """Seconds and tokens; instants on the driver's clock."""

    now: float
    estimates: Estimates
    shape: LatencyModel  # the calibrated law
    current: Setting
    limits: QueueLimits
    # mean queueing delay of this epoch, with an interval that respects autocorrelation
    observed: Estimate = UNKNOWN
    observed_sojourn: Estimate = UNKNOWN  # likewise
    judged: int = 0  # requests behind it
    assumptions: tuple[Assumption, ...] = ()
    waiting: int = 0
    longest: int = LONGEST  # answer that the engine can give: its context

    def observed_of(self, quantity: Quantity) -> Estimate:
        """The observed mean of what settings are compared by."""
        return self.observed_sojourn if quantity == "sojourn_time" else self.observed

    def failing(self) -> tuple[Assumption, ...]:
        """Those whose failure leaves predictions without ground; a queue that has not settled
        and a rate that moved are waited for.
        """
        return tuple(
            each
            for each in self.assumptions
            if each.holds is False
            and not each.counted
            and each.name not in ("settled", "constant_rate")
        )

    def holds(self, name: str) -> bool | None:
        """Of one assumption; None where it was not judged."""
        return next((each.holds for each in self.assumptions if each.name == name), None)

    @property
    def enough(self) -> bool:
        """Whether the window has been judged on enough requests."""
        return self.judged >= ENOUGH and bool(self.assumptions)


def assessed_window(
    seen: Snapshot,
    shape: LatencyModel,
    current: Setting,
    limits: QueueLimits,
    estimates: Estimates | None,
    *,
    assumptions: tuple[Assumption, ...] = (),
    longest: int = LONGEST,
) -> AssessedWindow:
    """From a window. `estimates` and `assumptions` are those of its assessment, None and none where
    it could not be assessed (a limit beyond what the lengths are known for).
    """
    delays, sojourns = seen.judged(), seen.judged(sojourn=True)
    if estimates is None:
        policy = served_as(parse_policy(seen.policy), pads=limits.pads)
        speeds = Speeds.of(policy, seen, shape, limits.engine.step_tokens)
        estimates = estimate(seen, policy, shape, speeds=speeds)
    return AssessedWindow(
        now=seen.now,
        estimates=estimates,
        shape=shape,
        current=current,
        limits=limits,
        observed=_mean(delays),
        observed_sojourn=_mean(sojourns),
        judged=int(delays.size),
        assumptions=assumptions,
        waiting=seen.waiting,
        longest=longest,
    )


def _mean(values: FloatArray) -> Estimate:
    """Weighed against a prediction, never printed as a mean."""
    if not values.size:
        return UNKNOWN
    interval = batch_means_interval(values)
    return symmetric(interval.mean, interval.half_width, interval.effective_n)
