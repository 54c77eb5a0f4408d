"""What the prediction assumes, each with a test on a window of observations.

To add one, add an entry to `FORECAST_TESTS` (forecast_assumptions.py) or `ENGINE_TESTS`
(engine_assumptions.py), causes before what they cause: a verdict may rest on those before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from kendall.policies import Policy
from kendall.policies.text import short_number
from kendall.queueing.estimation.interval import Estimate
from kendall.queueing.estimation.speed.speeds import Speeds
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.measurement.arrival_audit import Audit, audit_arrivals

LEVEL = 0.0005  # significance of the audit of arrivals
AUDITED = 10_000  # arrivals, at most: the last ones


@dataclass(frozen=True, slots=True)
class Assumption:
    """The verdict on one assumption.

    `holds` is None where the window cannot tell; `measure` is the number that decided, `says` the
    sentence for the operator. `counted`: the prediction takes the failure into account, so that it
    is no reason to doubt the prediction.
    """

    applies: ClassVar[bool] = True

    name: str
    holds: bool | None
    measure: float
    says: str
    counted: bool = False


class NotApplicable(Assumption):
    """The verdict on an assumption that says nothing of such a policy, or of such traffic."""

    __slots__ = ()
    applies: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class StalledDelay:
    """The predicted mean delay, and what it would be without the stalls; seconds."""

    mean: float
    smooth: float

    @property
    def price(self) -> float:
        """What the stalls add."""
        return self.mean - self.smooth

    @property
    def effect(self) -> float:
        """The same as a share of the mean."""
        return self.price / self.mean if self.mean else 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class ForecastEvidence:
    """The queue at the window's estimates, and its forecast; seconds, requests per second."""

    policy: Policy
    speeds: Speeds
    load: Estimate
    mean: float | None  # predicted
    stalled: StalledDelay | None
    # relative half width or shift that the wander gives to the mean delay
    wander_effect: float | None
    relaxation: float  # time
    free_rate: float  # of requests that can be served beyond those that arrive
    waiting_before: int  # requests that waited when the epoch began
    patience: float | None
    slots: int | None  # of each server; None: no bound
    own_queues: bool  # of several servers each has one
    # the intraclass correlation of the lengths in a call, and the mean delay with independent
    # lengths over the predicted one; None: every call is of one sequence
    alike: Estimate | None
    independent_effect: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Evidence:
    """A window; its forecast, where there is one; the verdicts so far."""

    seen: Snapshot
    forecast: ForecastEvidence | None = None
    verdicts: dict[str, Assumption] = field(default_factory=dict)

    @cached_property
    def audit(self) -> Audit:
        """Whether the arrivals pass as Poisson."""
        return audit_arrivals(self.seen.arrivals[-AUDITED:], significance=LEVEL)

    def fails(self, name: str) -> bool:
        """Whether that assumption has failed."""
        return name in self.verdicts and self.verdicts[name].holds is False


@dataclass(frozen=True, slots=True)
class AssumptionTest:
    """An assumption of which the window alone tells.

    `judge` gives the verdict; `inapplicable` says why the assumption does not apply, if so.
    """

    name: str
    judge: Callable[[Evidence], Assumption]
    inapplicable: Callable[[Evidence], str | None] = lambda _: None

    def verdict(self, evidence: Evidence) -> Assumption | None:
        """Of the window."""
        why = self.inapplicable(evidence)
        return self.judge(evidence) if why is None else not_judged(self.name, why)


@dataclass(frozen=True, slots=True)
class ForecastTest:
    """The same where the forecast is needed too; None without one."""

    name: str
    judge: Callable[[Evidence, ForecastEvidence], Assumption | None]
    inapplicable: Callable[[ForecastEvidence], str | None] = lambda _: None

    def verdict(self, evidence: Evidence) -> Assumption | None:
        """Of the window."""
        forecast = evidence.forecast
        if forecast is None:
            return None
        why = self.inapplicable(forecast)
        return self.judge(evidence, forecast) if why is None else not_judged(self.name, why)


def not_judged(name: str, why: str, measure: float = math.nan) -> Assumption:
    """The verdict on an assumption that does not apply."""
    return NotApplicable(name, None, measure, f"not judged: {why}")


def judged(
    evidence: Evidence, tests: Iterable[AssumptionTest | ForecastTest]
) -> tuple[Assumption, ...]:
    """The verdicts of these tests, in their order; `evidence` collects them."""
    for test in tests:
        verdict = test.verdict(evidence)
        if verdict is not None:
            evidence.verdicts[test.name] = verdict
    return tuple(evidence.verdicts.values())


def factor(ratio: float) -> str:
    """The size of a change up or down, in three significant digits: `1.97`, `1,050`."""
    return short_number(max(ratio, 1 / ratio if ratio else math.inf), 3)
