"""How fast the machine was at each moment of a run, and the run's requests served at that pace.

Where every duration is s(t) times the law's, the law's own clock is

    tau(t) = integral of dt / s(t)

in which the machine has a constant speed of 1. So the arrivals are moved to that clock, the law
serves them there, and starts and ends are moved back. s(t) is a step function: over 8 consecutive
batches (continuous: requests; fewer where there are few) it is their measured service time over the
law's, as `queueing.latency.speed` has it for the whole run; between batches it is that of the whole
run. It is taken from service times, never from delays.

One server only; a `max_wait` does not scale with the machine, so `fixed` with one keeps a constant
speed, as policies do that take requests out of service.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies import Fixed, Policy
from policies.ordered import order_of
from queueing.latency.law import LatencyModel
from queueing.latency.speed import Replay, Speed, service_time
from queueing.measurement.batch_means import FloatArray
from queueing.measurement.recursion import Served, batches

SPAN = 8  # batches or requests of one value of s; fewer where there are few
SPANS = 5  # at least, of two batches or more
PASSES = 2  # over a continuous run, whose holding times depend on the speed of their neighbours

Instants = dict[str, tuple[float, float]]  # start and release by id, seconds


@dataclass(frozen=True, eq=False)
class SpeedPath:
    """Instants of the run and of the law's clock at its knots, both increasing; seconds."""

    at: FloatArray
    clock: FloatArray
    outside: float  # speed before the first and after the last knot
    cv: float  # of the residual about the path

    def to_clock(self, instants: FloatArray) -> FloatArray:
        """The law's clock at instants of the run."""
        return _along(self.at, self.clock, 1 / self.outside, instants)

    def to_run(self, clock: FloatArray) -> FloatArray:
        """The other way."""
        return _along(self.clock, self.at, self.outside, clock)


def _along(known: FloatArray, wanted: FloatArray, slope: float, values: FloatArray) -> FloatArray:
    inner = np.interp(values, known, wanted)
    before, after = np.minimum(values - known[0], 0.0), np.maximum(values - known[-1], 0.0)
    result: FloatArray = inner + slope * (before + after)
    return result


def replay_at_pace(
    policy: Policy, requests: Sequence[Served], law: LatencyModel, speed: Speed, replay: Replay
) -> Instants:
    """Start and release of every request had the law served it at the speed that the machine had at
    each moment; at the run's constant speed where no path is known.
    """
    constant = speed.law(law)
    fixed_wait = isinstance(policy, Fixed) and math.isfinite(policy.max_wait)
    if fixed_wait or order_of(policy).preemptive or len({r.server_id for r in requests}) > 1:
        return replay(policy, requests, constant)
    if not policy.joins_running:
        path = _path_of_batches(policy, requests, law, speed)
        return _replayed(path, policy, requests, law, replay)
    return _slots_at_pace(policy, requests, law, speed, replay)


def _path_of_batches(
    policy: Policy, requests: Sequence[Served], law: LatencyModel, speed: Speed
) -> SpeedPath:
    whole = [
        members
        for members in batches(requests)
        if len(members) == members[0].batch_size
        and all(member.completed and member.output_tokens for member in members)
    ]
    begun = np.array([members[0].dispatched_at for members in whole])
    ended = np.array([max(m.server_free_at for m in members) for members in whole])
    fitted = np.array([service_time(policy, members, law.at_speed(1.0)) for members in whole])
    return path_of_batches(begun, ended, fitted, speed.factor)


def path_of_batches(
    begun: FloatArray,
    ended: FloatArray,
    fitted: FloatArray,
    outside: float,
    span: int | None = None,
) -> SpeedPath:
    """Of one server's batches in order, seconds; `fitted`: by the law at speed 1, `outside`: the
    speed between them, `span`: batches of one speed.
    """
    count = begun.size
    begun = begun.copy()
    begun[1:] = np.maximum(begun[1:], np.maximum.accumulate(ended)[:-1])
    lasted = np.maximum(ended - begun, 0.0)
    spans = _spans(count, span)
    pace = np.add.reduceat(lasted, spans) / np.add.reduceat(fitted, spans)
    pace = np.repeat(pace, np.diff([*spans, count]))
    # at the beginning and at the end of every batch; idle between
    slowness = np.column_stack([np.full(count, outside), pace]).ravel()[1:]
    at = np.column_stack([begun, begun + lasted]).ravel()
    scatter = np.sum((lasted - pace * fitted) ** 2) / np.sum((pace * fitted) ** 2)
    freedom = count - len(spans)
    cv = math.sqrt(scatter * count / freedom) if freedom else 0.0
    return _path(at, slowness, outside, cv)


def path_of_slots(
    at: FloatArray, measured: FloatArray, fitted: FloatArray, outside: float, span: int
) -> SpeedPath:
    """Of a continuous server's groups of requests, `span` of one speed; else as of batches."""
    spans = _spans(at.size, span)
    pace = np.add.reduceat(measured, spans) / np.add.reduceat(fitted, spans)
    return _path(np.append(at[spans], at[-1] + measured[-1]), pace, outside, 0.0)


def _slots_at_pace(
    policy: Policy, requests: Sequence[Served], law: LatencyModel, speed: Speed, replay: Replay
) -> Instants:
    """Neighbours share the engine: what a slot is held depends on all of them. Each pass corrects
    the path by the ratio of the holding times.
    """
    order = sorted(requests, key=lambda r: r.dispatched_at)
    order = [r for r in order if r.completed and r.output_tokens]
    spans = _spans(len(order))
    held = np.add.reduceat([r.server_free_at - r.dispatched_at for r in order], spans)
    at = np.array([order[index].dispatched_at for index in spans] + [order[-1].server_free_at])
    pace = np.full(len(spans), speed.factor)
    found = replay(policy, requests, speed.law(law))
    for _ in range(PASSES):
        replayed = np.add.reduceat([found[r.id][1] - found[r.id][0] for r in order], spans)
        pace = pace * held / replayed
        path = _path(at, pace, speed.factor, 0.0)
        found = _replayed(path, policy, requests, law, replay)
    return found


def _spans(count: int, span: int | None = None) -> list[int]:
    """Where each begins; the last has up to twice as many."""
    span = span or min(SPAN, max(2, count // SPANS))
    return list(range(0, max(1, count - span + 1), span))


def _path(at: FloatArray, slowness: FloatArray, outside: float, cv: float) -> SpeedPath:
    """From the knots and the speed between each two."""
    steps = np.diff(at)
    clock = np.concatenate([[0.0], np.cumsum(steps / slowness)])
    kept = np.concatenate([[True], steps > 0])
    return SpeedPath(at[kept], clock[kept], outside, cv)


def _replayed(
    path: SpeedPath,
    policy: Policy,
    requests: Sequence[Served],
    law: LatencyModel,
    replay: Replay,
) -> Instants:
    arrivals = path.to_clock(np.array([r.arrived_at for r in requests]))
    moved = [
        dataclasses.replace(r, arrived_at=at)
        for r, at in zip(requests, arrivals.tolist(), strict=True)
    ]
    found = replay(policy, moved, dataclasses.replace(law, speed=1.0, cv=path.cv))
    clock = np.array([found[r.id] for r in requests])
    instants = path.to_run(clock.ravel()).reshape(-1, 2)
    at_once = clock[:, 0] == arrivals  # the way there and back must not make a delay of these
    instants[at_once, 0] = np.array([r.arrived_at for r in requests])[at_once]
    return {r.id: (start, end) for r, (start, end) in zip(requests, instants.tolist(), strict=True)}
