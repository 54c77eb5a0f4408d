"""What the autopilot is shown each time: the window's estimates, what was observed, which assumptions fail, what is in force."""

from __future__ import annotations

from dataclasses import dataclass

from policies import parse_policy
from queueing.advice.forecast import Knobs
from queueing.estimation.assess import Assessment, Limits
from queueing.estimation.assumption import Assumption
from queueing.estimation.estimates import Estimates, estimate
from queueing.estimation.interval import UNKNOWN, Estimate, symmetric
from queueing.estimation.verdict import ENOUGH, judged
from queueing.estimation.window import Snapshot
from queueing.latency import LatencyModel
from queueing.statistics import batch_means_interval

LONGEST = 32_768  # tokens


@dataclass(frozen=True, eq=False, kw_only=True)
class Look:
    """Seconds and tokens; instants on the driver's clock."""

    now: float
    estimates: Estimates
    shape: LatencyModel  # the calibrated law
    current: Knobs
    limits: Limits
    observed: Estimate = UNKNOWN  # mean queueing delay of this epoch, with an interval that respects autocorrelation
    judged: int = 0  # requests behind it
    assumptions: tuple[Assumption, ...] = ()
    waiting: int = 0
    longest: int = LONGEST  # answer that the engine can give: its context

    def failing(self) -> tuple[Assumption, ...]:
        """Those whose failure leaves predictions without ground; a queue that has not settled and a rate that moved are waited for."""
        return tuple(each for each in self.assumptions if each.holds is False and each.name not in ("settled", "constant_rate"))

    def holds(self, name: str) -> bool | None:
        """Of one assumption; None where it was not judged."""
        return next((each.holds for each in self.assumptions if each.name == name), None)

    @property
    def enough(self) -> bool:
        """Whether the window has been judged on enough requests."""
        return self.judged >= ENOUGH and bool(self.assumptions)


def look(seen: Snapshot, shape: LatencyModel, current: Knobs, limits: Limits, found: Assessment | None, *, longest: int = LONGEST) -> Look:
    """From a window. `found` is None where it could not be assessed (a limit beyond what the lengths are known for)."""
    delays = judged(seen)
    interval = batch_means_interval(delays) if delays.size else None  # weighed against a prediction, never printed as a mean
    return Look(
        now=seen.now,
        estimates=estimate(seen, parse_policy(seen.policy), shape) if found is None else found.estimates,
        shape=shape,
        current=current,
        limits=limits,
        observed=UNKNOWN if interval is None else symmetric(interval.mean, interval.half_width, interval.effective_n),
        judged=int(delays.size),
        assumptions=() if found is None else found.compared.assumptions,
        waiting=seen.waiting,
        longest=longest,
    )
