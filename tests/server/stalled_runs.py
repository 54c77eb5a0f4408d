"""Runs of a machine that stands still now and then."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kendall.queueing.estimation.change import Vector
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.fast import SimulatedRun, Trace, draw_trace, replay

SHARE, STALL = 0.02, 0.1  # of the time; seconds each
SLOWED = 1e-6  # speed of a machine that stalls: it keeps the order of what arrives meanwhile


def stalled_run(
    model: Queue, rate: float, count: int, seed: int, *, share: float = SHARE, stall: float = STALL
) -> SimulatedRun:
    """The same machine on a clock that all but stands still for `stall` s at a time, the `share`
    of the time.
    """
    trace = draw_trace(model, rate, count, np.random.SeedSequence(seed))
    wall, machine = clocks(
        float(trace.arrived_at[-1]), np.random.default_rng((seed, 1)), share, stall
    )
    return on_clock(model, trace, wall, machine)


def on_clock(model: Queue, trace: Trace, wall: Vector, machine: Vector) -> SimulatedRun:
    """Served by a machine whose clock has gone to `machine` at the instants `wall`."""
    run = replay(model, replace(trace, arrived_at=np.interp(trace.arrived_at, wall, machine)))
    columns = {name: getattr(run, name) for name in ("batch_id", "batch_size", "server_id")}
    instants = ("dispatched_at", "released_at", "first_token_at", "server_free_at")
    return SimulatedRun(
        trace.arrived_at,
        trace.output_tokens,
        columns | {name: np.interp(getattr(run, name), machine, wall) for name in instants},
    )


def clocks(
    until: float, rng: np.random.Generator, share: float, stall: float
) -> tuple[Vector, Vector]:
    """The same instants by the wall clock and by the machine's, which counts a stall as `SLOWED`
    of its length.
    """
    gaps = rng.exponential(stall * (1 - share) / share, int(2 * until * share / stall) + 20)
    steps = np.column_stack([gaps, np.full(gaps.size, stall)]).ravel()
    slow = np.column_stack([gaps, np.full(gaps.size, SLOWED * stall)]).ravel()
    return np.cumsum(np.append(0.0, steps)), np.cumsum(np.append(0.0, slow))
