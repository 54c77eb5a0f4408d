"""A small driver of policies on one server under the law, written apart from the simulator: records
to compare with.

It knows nothing but `Policy.decide` and `ServiceProcess`, and steps from event to event.
"""

from __future__ import annotations

import math

import numpy as np

from kendall.policies import (
    Dispatch,
    Policy,
    QueueState,
    Request,
    Running,
    Server,
    Waiting,
    WaitUntil,
    format_policy,
)
from kendall.queueing.arrivals.timetable import Timetable, draw
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service import Member, ServiceProcess
from kendall.queueing.measurement.record import Record

LAW = LatencyModel(k1=0.002, k2=0.01, k3=0.0002, k4=0.002)
LENGTHS = parse_distribution("uniform:low=1,high=60")
ONE = TokenDistribution(np.array([0.0, 1.0]))


def timetable(rate: float, n: int, seed: int = 0) -> Timetable:
    return draw(rate, n, seed, ONE, LENGTHS)


class Driver:
    """Serves a timetable to its end; the last batch of fixed leaves when nothing more will
    arrive.
    """

    def __init__(
        self,
        policy: Policy,
        table: Timetable,
        law: LatencyModel = LAW,
        seed: int = 0,
        max_num_seqs: int = 64,
        epoch: int = 0,
    ) -> None:
        self.policy, self.table, self.epoch = policy, table, epoch
        self.service = ServiceProcess(law, np.random.default_rng(seed))
        self.bound = max_num_seqs
        self.waiting: list[Waiting] = []
        self.running: dict[str, Running] = {}
        self.of: dict[str, tuple[float, int, int]] = {}  # dispatched_at, batch_id, batch_size
        self.ended: dict[str, float] = {}
        self.held: list[str] = []
        self.records: list[Record] = []
        self.deadline, self.batches = math.inf, 0

    def run(self) -> list[Record]:
        arrivals = self.table.intended_at.tolist()
        following = 0
        while len(self.records) < len(arrivals):
            arrival = arrivals[following] if following < len(arrivals) else math.inf
            now = min(arrival, self.deadline, self.service.next_change_at())
            if now == self.service.next_change_at():
                self.end(now)
            if now == arrival:
                self.waiting.append(
                    Waiting(
                        Request(
                            id=str(following),
                            arrived_at=now,
                            prompt_tokens=1,
                            max_output_tokens=100,
                        )
                    )
                )
                following += 1
            self.ask(now, closing=following == len(arrivals))
        return self.records

    def end(self, now: float) -> None:
        self.held += [member.id for member in self.service.advance(to_change=True)]
        for id in self.held:
            self.ended.setdefault(id, now)
        if self.policy.joins_running:
            self.leave(now, dict.fromkeys(self.held, now))
        elif self.service.idle:
            batch = self.policy.release == "batch"
            self.leave(now, {id: now if batch else self.ended[id] for id in self.held})

    def leave(self, now: float, released: dict[str, float]) -> None:
        for id, at in released.items():
            request = self.running.pop(id).request
            self.records.append(self.record(request, at, now))
        self.held = []

    def record(self, request: Request, released_at: float, free_at: float) -> Record:
        dispatched_at, batch_id, batch_size = self.of[request.id]
        return Record(
            request_id=f"{self.epoch}-{request.id}",
            outcome="completed",
            policy=format_policy(self.policy),
            epoch=self.epoch,
            server_id=0,
            batch_id=batch_id + 10_000_000 * self.epoch,
            batch_size=batch_size,
            arrived_at=request.arrived_at,
            dispatched_at=dispatched_at,
            released_at=released_at,
            server_free_at=free_at,
            prompt_tokens=1,
            output_tokens=int(self.table.output_tokens[int(request.id)]),
        )

    def ask(self, now: float, closing: bool) -> None:
        while True:
            server = Server(id=0, in_service=list(self.running.values()), max_batch_size=self.bound)
            decision = self.policy.decide(
                QueueState(tuple(self.waiting), (server,), closing=closing), now
            )
            if isinstance(decision, WaitUntil):
                self.deadline = decision.deadline
                return
            assert isinstance(decision, Dispatch)
            self.dispatch(decision.request_ids, now)

    def dispatch(self, ids: tuple[str, ...], now: float) -> None:
        chosen = [w for w in self.waiting if w.request.id in ids]
        self.waiting = [w for w in self.waiting if w.request.id not in ids]
        for one in chosen:
            self.running[one.request.id] = Running(one.request, now)
        for one in chosen:
            self.of[one.request.id] = (now, self.batches, len(self.running))
        self.batches += 1
        members = [
            Member(w.request.id, 1, int(self.table.output_tokens[int(w.request.id)]))
            for w in chosen
        ]
        self.service.admit(
            now, members, padded=self.policy.padded, joining=self.policy.joins_running
        )


def drive(
    policy: Policy, rate: float, n: int = 2000, seed: int = 0, **settings: object
) -> list[Record]:
    return Driver(policy, timetable(rate, n, seed), **settings).run()  # type: ignore[arg-type]
