"""What an SLO costs: a recorded trace on a fleet whose replicas are set by different rules, in
virtual time (queueing.simulation.fleet).

attained   share of the requests whose durations are all within the SLOs' bounds
cost       replica-seconds that are paid for, over those of the peak pool: the fewest replicas that,
           always there, keep the SLOs over the whole trace

Every fleet begins with the peak pool's replicas, and none may have more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from kendall.policies.text import SpecError, short_number
from kendall.queueing.arrivals.timetable import Timetable
from kendall.queueing.choosing.autoscaling import FixedReplicas, ForecastScaler, Hpa, within
from kendall.queueing.choosing.objective import Objective
from kendall.queueing.choosing.search import Point
from kendall.queueing.queue import Queue
from kendall.queueing.result import Quantity
from kendall.queueing.simulation.fleet import Autoscaler, serve_by_fleet

THRESHOLDS = (1.0, 5.0, 16.0, 250.0)  # waiting requests of a replica that the community sets
PEAK, FORECAST = "peak pool", "forecast"
BILLED: tuple[Quantity, ...] = ("queueing_delay", "sojourn_time", "time_to_first_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Of every fleet alike."""

    start_up: float  # seconds until a replica that is ordered serves
    thresholds: Sequence[float] = THRESHOLDS
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BillLine:
    """One rule: what it attained, what it cost, and the number of replicas that were paid for."""

    rule: str
    attained: float
    kept: bool  # every SLO, over the whole trace
    replica_seconds: float
    cost: float
    fewest: int
    mean: float
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SloBill:
    """A line for each rule, the peak pool's first."""

    slo: str
    requests: int
    terms: Terms
    lines: Sequence[BillLine]

    def to_dict(self) -> Point:
        """Plain values for JSON."""
        return {
            "slo": self.slo,
            "requests": self.requests,
            "start_up": self.terms.start_up,
            "seed": self.terms.seed,
            "lines": [asdict(line) for line in self.lines],
        }


def check_billed(goal: Objective) -> None:
    """Raises SpecError where an SLO bounds what no single request has."""
    for slo in goal.slos:
        if slo.level is None or slo.field not in BILLED:
            raise SpecError(
                f"got --slo {slo} with --start-up; expected a quantile of "
                f"{', '.join(BILLED)}: requests within its bound are counted"
            )


def make_bill(
    model: Queue,
    trace: Timetable,
    goal: Objective,
    peak: int,
    terms: Terms,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> SloBill:
    """`model`: the queue of one replica; `peak`: replicas of the peak pool; `tell` hears what is
    being worked on. Raises SpecError.
    """
    check_billed(goal)
    lines: list[BillLine] = []
    for name, rule in _rules(model, goal, peak, terms):
        tell(f"bill: {name}")
        fleet = serve_by_fleet(
            model,
            trace,
            rule,
            first=peak,
            largest=peak,
            start_up=terms.start_up,
            seed=terms.seed,
        )
        paid, number = fleet.replica_seconds, fleet.paid()[1][:-1]
        kept = [within(fleet.run, slo) for slo in goal.slos]
        lines.append(
            BillLine(
                rule=name,
                attained=float(np.all(kept, axis=0).mean()),
                kept=all(
                    each.mean() >= (slo.level or 1)
                    for each, slo in zip(kept, goal.slos, strict=True)
                ),
                replica_seconds=paid,
                cost=paid / (lines[0].replica_seconds if lines else paid),
                fewest=int(number.min()),
                mean=paid / fleet.seconds,
                most=int(number.max()),
            )
        )
    return SloBill(slo=goal.constraint, requests=len(trace), terms=terms, lines=lines)


def _rules(
    model: Queue, goal: Objective, peak: int, terms: Terms
) -> Iterator[tuple[str, Autoscaler]]:
    yield PEAK, FixedReplicas(replicas=peak)
    yield (
        FORECAST,
        ForecastScaler(model, goal, start_up=terms.start_up, largest=peak, seed=terms.seed),
    )
    for threshold in terms.thresholds:
        yield f"HPA, {short_number(threshold)} waiting", Hpa(target=threshold)
