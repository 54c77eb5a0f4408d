"""Runs whose assumptions are broken one at a time: a small simulator of one batch server, the
arrivals given or made by clients.

Its clean runs are the simulator's own (tests compare them); it exists because there arrivals cannot
depend on departures, nor the law on the clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.estimation.window.window import Snapshot, snapshot_of
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record

Vector = npt.NDArray[np.float64]
LAW = LatencyModel(k1=0.0003, k2=0.0014, k3=0.00002, k4=0.0012, cv=0.15)
LENGTHS = parse_distribution("uniform:low=1,high=32")


@dataclass(frozen=True)
class Engine:
    """Takes min(waiting, most) when it is free; its durations are the law's times residual times
    `speed(now)`.
    """

    most: int = 64
    law: LatencyModel = LAW
    speed: Callable[[float], float] = lambda _: 1.0
    stall: Callable[[int], float] = lambda _: 0.0  # seconds added to a batch

    def duration(
        self, at: float, batch: int, lengths: Sequence[int], rng: np.random.Generator
    ) -> float:
        """Of one padded batch, seconds."""
        return self.law.padded(len(lengths), max(lengths)) * self.law.residual(rng) * self.speed(
            at
        ) + self.stall(batch)


def serve(
    arrivals: Vector,
    engine: Engine,
    seed: int,
    *,
    lengths: TokenDistribution = LENGTHS,
    again: Callable[[float, np.random.Generator], float | None] | None = None,
    most: int = 10**9,
) -> list[Record]:
    """Every request's record, in order of its end; `again(end)`: the instant at which its client
    asks again (a closed loop).
    """
    rng = np.random.default_rng(seed)
    coming = [float(at) for at in arrivals]
    heapq.heapify(coming)
    waiting: list[float] = []
    records: list[Record] = []
    free, batch = 0.0, 0
    while (coming or waiting) and len(records) < most:
        at = max(free, waiting[0] if waiting else coming[0])
        while coming and coming[0] <= at:
            waiting.append(heapq.heappop(coming))
        taken, waiting = waiting[: engine.most], waiting[engine.most :]
        counts = lengths.sample(rng, len(taken)).tolist()
        free = at + engine.duration(at, batch, counts, rng)
        records += [
            record_of(len(records) + i, batch, len(taken), arrived, at, free, count)
            for i, (arrived, count) in enumerate(zip(taken, counts, strict=True))
        ]
        batch += 1
        if again is not None:
            for _ in taken:
                following = again(free, rng)
                if following is not None:
                    heapq.heappush(coming, following)
    return records


def record_of(
    number: int, batch: int, size: int, arrived: float, at: float, end: float, count: int
) -> Record:
    return Record(
        request_id=str(number),
        outcome="completed",
        epoch=0,
        server_id=0,
        batch_id=batch,
        batch_size=size,
        arrived_at=arrived,
        dispatched_at=at,
        released_at=end,
        server_free_at=end,
        prompt_tokens=32,
        output_tokens=count,
    )


def seen(records: list[Record], policy: str, servers: int = 1) -> Snapshot:
    """The whole run as a window that ends with the last arrival; it began with the epoch."""
    last = max(record.arrived_at or 0.0 for record in records)
    kept = [record for record in records if (record.released_at or 0.0) <= last]
    every, ended = (
        snapshot_of(some, policy, 0.0, last, servers=servers) for some in (records, kept)
    )
    return every.having(ended.rows)


def poisson(rate: float, count: int, seed: int) -> Vector:
    """Arrival instants, seconds."""
    return np.cumsum(np.random.default_rng((seed, 1)).exponential(1 / rate, count))


def gamma(rate: float, count: int, seed: int, burstiness: float) -> Vector:
    """Gamma gaps of that shape: below 1 burstier than Poisson."""
    return np.cumsum(
        np.random.default_rng((seed, 2)).gamma(burstiness, 1 / burstiness / rate, count)
    )


def modulated(
    rates: tuple[float, float], durations: tuple[float, float], count: int, seed: int
) -> Vector:
    """Poisson at one of two rates, each for an exponential time."""
    rng = np.random.default_rng((seed, 3))
    instants: list[float] = []
    now, state = 0.0, 0
    while len(instants) < count:
        end = now + rng.exponential(durations[state])
        number = rng.poisson(rates[state] * (end - now))
        instants += sorted(rng.uniform(now, end, number))
        now, state = end, 1 - state
    return np.array(instants[:count])
