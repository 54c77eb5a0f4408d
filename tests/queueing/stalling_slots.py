"""Continuous servers that stall, by events: time passes in steps, and a stall holds all that are in
service. Independent of the package's simulators, which know no stalls of slots.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np

from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record


@dataclass(frozen=True, kw_only=True)
class StallingSlots:
    """`share` of its busy time each server is stalled, `size` seconds on average (exponential);
    `others`: the pace of the others meanwhile, 0 where they are held too.
    """

    law: LatencyModel
    slots: int
    servers: int
    share: float
    size: float
    others: float = 1.0


def serve(engine: StallingSlots, arrivals: Vector, tokens: Vector, seed: int) -> list[Record]:
    """Every request's record; the server with the fewest requests takes the next one."""
    return _Run(engine, arrivals, tokens, np.random.default_rng(seed)).records()


@dataclass
class _Run:
    engine: StallingSlots
    arrivals: Vector
    tokens: Vector
    rng: np.random.Generator
    now: float = 0.0
    waiting: list[int] = field(default_factory=list)  # the next one last
    in_service: dict[int, tuple[float, int, int]] = field(default_factory=dict)
    done: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        servers = range(self.engine.servers)
        self.steps = [0.0] * self.engine.servers  # that each has made
        self.ends: list[list[tuple[float, int]]] = [[] for _ in servers]  # in steps
        self.stalled_until = [-math.inf] * self.engine.servers
        self.next_stall = [self._gap() for _ in servers]  # seconds of service until it

    def records(self) -> list[Record]:
        coming = list(range(len(self.arrivals)))[::-1]
        while coming or self.waiting or self.in_service:
            at, server = min((self._next(each), each) for each in range(self.engine.servers))
            if coming and self.arrivals[coming[-1]] < at:
                self._pass(float(self.arrivals[coming[-1]]))
                self.waiting.insert(0, coming.pop())
            else:
                self._pass(at)
                self._happen(server)
            self._dispatch()
        return self.done

    def _gap(self) -> float:
        engine = self.engine
        return float(self.rng.exponential(engine.size * (1 - engine.share) / engine.share))

    def _pace(self, server: int) -> float:
        """Steps per second."""
        others = (until for each, until in enumerate(self.stalled_until) if each != server)
        if self.stalled_until[server] > self.now or not self.ends[server]:
            return 0.0
        step = self.engine.law.k3 * len(self.ends[server]) + self.engine.law.k4
        return (self.engine.others if any(until > self.now for until in others) else 1.0) / step

    def _next(self, server: int) -> float:
        """When something happens there."""
        if self.ends[server] and self.stalled_until[server] > self.now:
            return self.stalled_until[server]
        pace = self._pace(server)
        if not pace:
            return math.inf
        end = (self.ends[server][0][0] - self.steps[server]) / pace
        return self.now + min(end, self.next_stall[server])

    def _pass(self, at: float) -> None:
        for server in range(self.engine.servers):
            if pace := self._pace(server):
                self.steps[server] += pace * (at - self.now)
                self.next_stall[server] -= at - self.now
        self.now = at

    def _happen(self, server: int) -> None:
        if self.stalled_until[server] == self.now:
            return
        if self.next_stall[server] <= 1e-12:
            self.stalled_until[server] = self.now + float(self.rng.exponential(self.engine.size))
            self.next_stall[server] = self._gap()
            return
        _, request = heapq.heappop(self.ends[server])
        begun, where, size = self.in_service.pop(request)
        self.done.append(
            Record(
                request_id=str(request),
                outcome="completed",
                epoch=0,
                server_id=where,
                batch_id=request,
                batch_size=size,
                arrived_at=float(self.arrivals[request]),
                dispatched_at=begun,
                released_at=self.now,
                server_free_at=self.now,
                prompt_tokens=32,
                output_tokens=int(self.tokens[request]),
            )
        )

    def _dispatch(self) -> None:
        while self.waiting:
            server = min(range(self.engine.servers), key=lambda each: len(self.ends[each]))
            if len(self.ends[server]) >= self.engine.slots:
                return
            request = self.waiting.pop()
            end = self.steps[server] + float(self.tokens[request])
            heapq.heappush(self.ends[server], (end, request))
            self.in_service[request] = (self.now, server, len(self.ends[server]))
