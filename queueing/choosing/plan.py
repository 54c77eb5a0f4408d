"""Capacity at a glance: for each kind of server, number of slots and token limit the fewest servers
that keep every SLO, and what they cost together.

frontier   no other option costs no more, cuts no more answers, and has no longer the duration that
           the first SLO bounds
best       the cheapest; of equal costs the one that cuts the fewest answers, then the one with the
           shortest such duration
headroom   the largest rate that the best one still keeps the SLOs at; of a recorded trace none
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from kendall.policies.text import SpecError, counted
from kendall.queueing.choosing.answer import Prices
from kendall.queueing.choosing.objective import Objective
from kendall.queueing.choosing.rates import largest_rate
from kendall.queueing.choosing.search import Point, Predict
from kendall.queueing.choosing.servers import fewest_servers
from kendall.queueing.errors import NoStableChoiceError, UnattainableError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction.query import PredictionQuery
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction

CUTS = "the token limit cuts"  # how a reason begins
PRECISION = 0.01  # of the headroom, relative
DROPPED = ("stable", "score")  # of a point of a search, which a plan says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of server, as it can be bought."""

    name: str
    law: LatencyModel
    cost: float  # of one, in a unit of the operator's


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The kinds, slots and token limits whose combinations are the options of a plan."""

    kinds: Sequence[Kind]
    slots: Sequence[int]  # max_num_seqs of one server
    limits: Sequence[int | None]  # on output tokens; None: no limit
    largest: int  # number of servers

    def __iter__(self) -> Iterator[tuple[Kind, int, int | None]]:
        return product(self.kinds, self.slots, self.limits)

    def __len__(self) -> int:
        return len(self.kinds) * len(self.slots) * len(self.limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The requests that come, and the objective to be kept."""

    # by slots, law and token limit
    query: Callable[[int, LatencyModel, int | None], PredictionQuery]
    clipped: Callable[[int | None], float]  # fraction of the answers that a limit cuts
    goal: Objective

    def option(
        self,
        choice: tuple[Kind, int, int | None],
        largest: int,
        tell: Callable[[Queue], None] = lambda _: None,
    ) -> Point:
        """The fewest servers of a choice, at most `largest`; `tell` hears of every prediction."""
        kind, slots, limit = choice
        cut, most = self.clipped(limit), self.goal.max_clipped_fraction
        option: Point = {
            "latency": kind.name,
            "max_num_seqs": slots,
            "max_output_tokens": limit,
            "clipped_fraction": cut,
            "servers": None,
            "cost": None,
            "why": None,
        }
        if cut > most:
            return option | {"why": f"{CUTS} {cut:.3g} of the answers, more than {most:g}"}
        query = self.query(slots, kind.law, limit)
        try:
            quick, full = predictors(query, self.goal, tell)
            found = fewest_servers(
                query.model, query.arrival_rate, self.goal, largest, quick, full=full
            )
        except UnattainableError as error:
            return option | {"why": str(error).partition(f"; {error.remedy}")[0]}
        except NoStableChoiceError as error:
            return option | {"why": str(error).partition("; lower the arrival rate")[0]}
        known = {name: value for name, value in found.best.items() if name not in DROPPED}
        return option | known | {"cost": known["servers"] * kind.cost}

    def headroom(self, law: LatencyModel, best: Point) -> float | None:
        """The largest rate at which an option keeps the SLOs; None of a recorded trace."""
        query = self.query(best["max_num_seqs"], law, best["max_output_tokens"])
        if query.trace is not None:
            return None
        model = query.model.but(servers=int(best["servers"]))
        quick, full = predictors(query, self.goal)
        found = largest_rate(model, self.goal, PRECISION, quick, full=full)
        return max(float(found.best["arrival_rate"]), query.arrival_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """Every option, in the order of the choices: `servers` and `cost` None where there is none,
    and `why` says so.
    """

    goal: Objective
    options: Sequence[Point]
    best: Point | None
    largest_rate: float | None = None  # of the best: the SLOs are kept up to there

    def to_dict(self) -> Point:
        """Plain values for JSON."""
        return {
            "slo": self.goal.constraint,
            "best": self.best,
            "largest_rate": self.largest_rate,
            "options": list(self.options),
        }


def make_plan(
    demand: Demand, choices: Choices, tell: Callable[[str], None] = lambda _: None
) -> CapacityPlan:
    """`tell` hears what is being worked on. Raises SpecError."""
    options = []
    for number, choice in enumerate(choices, start=1):
        kind, slots, _ = choice
        name = f"option {number} of {len(choices)}: {kind.name}, {counted(slots, 'slot')}"
        options.append(
            demand.option(
                choice,
                choices.largest,
                lambda model, name=name: tell(f"{name}, {counted(model.engine.servers, 'server')}"),  # type: ignore[misc]
            )
        )
    marked = with_frontier(options, demand.goal)
    possible = [each for each in marked if each["servers"] is not None]
    if not possible:
        return CapacityPlan(goal=demand.goal, options=marked, best=None)
    best = min(possible, key=lambda each: _ranks(each, demand.goal))
    tell(f"headroom of {best['servers']} of {best['latency']}")
    law = next(kind.law for (kind, *_), each in zip(choices, marked, strict=True) if each is best)
    return CapacityPlan(
        goal=demand.goal, options=marked, best=best, largest_rate=demand.headroom(law, best)
    )


def predictors(
    query: PredictionQuery, goal: Objective, tell: Callable[[Queue], None] = lambda _: None
) -> tuple[Predict, Predict | None]:
    """The quick and the full predictions of a search; a trace is replayed, and has no full ones.
    `tell` hears of every prediction.
    """
    prices = Prices(goal.slos)

    def told(predict: Predict) -> Predict:
        def predicted(model: Queue, arrival_rate: float) -> Prediction:
            tell(model)
            return predict(model, arrival_rate)

        return predicted

    if query.trace is not None:
        return told(lambda model, _: dataclasses.replace(query, model=model).predict()), None
    return told(prices.quick), told(prices.full)


def _ranks(option: Point, goal: Objective) -> tuple[float, float, float]:
    """Less is better in each."""
    assert goal.slo is not None
    value = option.get(goal.slo.name)
    return option["cost"], option["clipped_fraction"], math.inf if value is None else value


def with_frontier(options: Sequence[Point], goal: Objective) -> list[Point]:
    """Each with whether it lies on the frontier."""
    ranks = [None if each["servers"] is None else _ranks(each, goal) for each in options]

    def beaten(own: tuple[float, ...]) -> bool:
        return any(
            other is not None
            and other != own
            and all(theirs <= mine for theirs, mine in zip(other, own, strict=True))
            for other in ranks
        )

    return [
        each | {"frontier": own is not None and not beaten(own)}
        for each, own in zip(options, ranks, strict=True)
    ]


def check_costs(latencies: Sequence[str], costs: Sequence[float]) -> list[float]:
    """One for each kind of server; all 1 where none is given. Raises SpecError."""
    if not costs:
        return [1.0] * len(latencies)
    if len(costs) != len(latencies):
        raise SpecError(
            f"got {len(costs)} --cost for {len(latencies)} --latency; expected one for each, in "
            "the same order"
        )
    for cost in costs:
        if not 0 < cost < math.inf:
            raise SpecError(f"got --cost {cost:g}; expected a finite number > 0")
    return list(costs)
