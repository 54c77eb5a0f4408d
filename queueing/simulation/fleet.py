"""A fleet in virtual time: replicas fed from one queue, whose number an autoscaler sets while a
trace is replayed by the event-driven simulator (queueing.simulation.reference).

A replica that is ordered takes work `start_up` seconds later. One that is given up takes no more
and ends what it has in service; those that still start are given up first, then the newest. Each is
paid for from its order to its end: it is given up, and its last answer has left.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kendall.queueing.arrivals.timetable import Timetable
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.driven_engine import DrivenEngine
from kendall.queueing.simulation.experiment import jobs_of, run_of, simulated_engine
from kendall.queueing.simulation.recorded import given_of
from kendall.queueing.simulation.reference import Driver

if TYPE_CHECKING:
    from kendall.queueing.simulation.fast import SimulatedRun

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """What an autoscaler said: the number that its rule asks for, and the number that it sets,
    which what it asked for before may hold higher.
    """

    at: float
    asked: int
    replicas: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Seen:
    """What an autoscaler knows at `now`. The length of an answer is known once it has ended; until
    then `output_tokens` has 0.
    """

    now: float
    ready: int
    starting: int
    waiting: int
    arrived_at: Vector
    prompt_tokens: Tokens
    output_tokens: Tokens
    earlier: Sequence[ScalingDecision]

    @property
    def replicas(self) -> int:
        """Those that are paid for and not given up."""
        return self.ready + self.starting


class Autoscaler(Protocol):
    """Sets the number of replicas every so many seconds; keeps nothing but its parameters."""

    @property
    def every(self) -> float:
        """Seconds between two decisions."""
        ...

    def decide(self, seen: Seen) -> ScalingDecision:
        """The decision of an instant. Does not modify what it sees."""
        ...


@dataclass(slots=True, kw_only=True)
class FleetReplica:
    """One replica from its order to its end, seconds on the trace's clock."""

    place: int  # its server's number; of one at a time
    ordered_at: float
    ready_at: float
    given_up_at: float = math.inf
    ended_at: float = math.inf


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FleetRun:
    """What happened to every request, and every replica."""

    run: SimulatedRun
    replicas: Sequence[FleetReplica]

    @property
    def seconds(self) -> float:
        """From the beginning until the last answer has left."""
        return float(self.run.released_at.max())

    @property
    def replica_seconds(self) -> float:
        """What is paid for."""
        return math.fsum(each.ended_at - each.ordered_at for each in self.replicas)

    def paid(self) -> tuple[Vector, Tokens]:
        """Instants at which the number of replicas that are paid for changes, and the numbers from
        there on.
        """
        begins = np.array([each.ordered_at for each in self.replicas])
        ends = np.array([each.ended_at for each in self.replicas])
        at = np.unique(np.concatenate([begins, ends]))
        number = np.searchsorted(np.sort(begins), at, "right")
        return at, number - np.searchsorted(np.sort(ends), at, "right")


def serve_by_fleet(
    model: Queue,
    trace: Timetable,
    autoscaler: Autoscaler,
    *,
    first: int,
    largest: int,
    start_up: float,
    seed: int = 0,
) -> FleetRun:
    """The trace on `first` replicas that serve from the beginning, and then on as many as the
    autoscaler sets, 1 to `largest`. `model`: the queue of one replica.
    """
    fleet, decisions = (
        _Fleet(model, trace, seed),
        [ScalingDecision(at=0.0, asked=first, replicas=first)],
    )
    fleet.set(first, 0.0)
    for number in count(1):
        if fleet.advance(number * autoscaler.every):
            break
        said = autoscaler.decide(fleet.seen(decisions))
        said = dataclasses.replace(said, replicas=min(max(said.replicas, 1), largest))
        decisions.append(said)
        fleet.set(said.replicas, start_up)
    return fleet.settled()


class _Fleet:
    """The driver of the queue, and the replicas in it. A place is taken again once it is empty."""

    def __init__(self, model: Queue, trace: Timetable, seed: int) -> None:
        self.model, self.trace, self.now = model, trace, 0.0
        self.stream = np.random.SeedSequence(seed)
        jobs = jobs_of(model, given_of(model, trace, self.stream))
        self.engine, self.engines = simulated_engine(model), list[DrivenEngine]()
        self._new_place()
        self.driver = Driver(model.policy, jobs, self.engines, in_use=())
        self.known = np.zeros(len(jobs), dtype=np.int64)  # output tokens of those that have ended
        self.counted = 0  # records that `known` has
        self.replicas: list[FleetReplica] = []

    def current(self) -> list[FleetReplica]:
        """Those that are not given up, in the order of their orders."""
        return [each for each in self.replicas if each.given_up_at == math.inf]

    def set(self, number: int, start_up: float) -> None:
        """So many from now on; more of them begin to serve after `start_up` seconds."""
        current = self.current()
        for _ in range(number - len(current)):
            place = self._free_place()
            ready_at = self.now + start_up
            self.replicas.append(FleetReplica(place=place, ordered_at=self.now, ready_at=ready_at))
        oldest = sorted(current, key=lambda each: (each.ready_at > self.now, each.ordered_at))
        for each in oldest[number:]:
            each.given_up_at = self.now
        self._use(self.now)

    def _free_place(self) -> int:
        taken = {each.place for each in self.current()}
        for place, engine in enumerate(self.engines):
            if place not in taken and not engine.in_service:
                return place
        return self._new_place()

    def _new_place(self) -> int:
        rng = np.random.default_rng(self.stream.spawn(1)[0])
        self.engines.append(self.engine.driven(len(self.engines), rng))
        return len(self.engines) - 1

    def _use(self, at: float) -> None:
        self.driver.use(at, [each.place for each in self.current() if each.ready_at <= at])

    def advance(self, until: float) -> bool:
        """Every event before that instant; whether all requests have ended."""
        instants = {each.ready_at for each in self.current()}
        for at in sorted(at for at in instants if self.now < at < until):
            self._use(at)
        self.driver.advance(until)
        self.now = until
        for record in self.driver.records[self.counted :]:
            self.known[int(record.request_id)] = record.output_tokens or 0
        self.counted = len(self.driver.records)
        return self.counted == len(self.known)

    def seen(self, earlier: Sequence[ScalingDecision]) -> Seen:
        """What an autoscaler may know."""
        current, come = self.current(), self.driver.arrived
        ready = sum(each.ready_at <= self.now for each in current)
        return Seen(
            now=self.now,
            ready=ready,
            starting=len(current) - ready,
            waiting=len(self.driver.queue),
            arrived_at=self.trace.intended_at[:come],
            prompt_tokens=self.trace.prompt_tokens[:come],
            output_tokens=self.known[:come].copy(),
            earlier=earlier,
        )

    def settled(self) -> FleetRun:
        """The run, when all requests have ended."""
        run = run_of(self.model, self.driver.records, self.driver.jobs)
        last = float(run.released_at.max())
        for each in self.replicas:
            own = (
                (run.server_id == each.place)
                & (run.dispatched_at >= each.ready_at)
                & (run.dispatched_at <= each.given_up_at)
            )
            drained = run.released_at.max(where=own, initial=0.0)
            each.ended_at = min(last, max(each.given_up_at, drained))
        return FleetRun(run=run, replicas=self.replicas)
