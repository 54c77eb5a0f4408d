"""The engine's speed as it was, second by second, and what its changes do to a mean delay.

A path is a level for every block of `WIDTH` seconds: the time that batches spent in it over the
law's time for the part of them that was served in it, a batch's work being spread evenly over its
service time. A block without work has the level of the one before. The queue is simulated with the
path as the engine's clock: a batch of w lawful seconds ends when the integral of 1 / level over
time has grown by w times its residual. Two uses:

    before a cell    windows of the planned length, each beginning at a random instant of the path
                     of all cells so far: where 95 % of the windows' means lie is the band that is
                     stated before the cell. It holds about 19 of 20 means of cells that run along
                     that path, fewer where it is cut from few windows. An engine whose speed moves
                     otherwise than the path says lies outside it
    after a cell     a long run along the cell's own path: the mean delay at the speeds as they
                     were, stalls included

No delay enters. One server that takes a batch when it is free; a continuous engine has no batches,
and no band.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from policies.fixed import Fixed
from queueing.estimation.speed.batch_times import BatchTimes
from queueing.model import Model
from queueing.simulation.fast import SimulatedRun, draw_trace

Vector = npt.NDArray[np.float64]
WIDTH = 1.0  # seconds
WINDOWS = 200  # simulated for a band
LEAST = 200_000  # requests of a run over a cell's own path
MOST_IN_BAND = 6_000_000  # requests of all windows of a band
STEADY = np.ones(1)


@dataclass(frozen=True, slots=True)
class Band:
    """Where the mean of a window lies, seconds: over all windows, and the 2.5 % and 97.5 %
    quantiles.

    Cut from n windows it holds 95 % (n - 1) / (n + 1) of further ones: 94 % for 200, 86 % for 20.
    """

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of its width over its mean."""
        return (self.high - self.low) / 2 / self.mean if self.mean else math.inf


def speed_path(times: BatchTimes, width: float = WIDTH) -> list[float]:
    """The levels, block by block, from the first batch on."""
    if not times.count:
        return []
    start = times.at - times.at[0]
    blocks = int((start + times.measured).max() / width) + 1
    busy, work = np.zeros(blocks), np.zeros(blocks)
    _spread(start, start + times.measured, times.fitted, width, busy, work)
    levels = np.divide(busy, work, out=np.full(blocks, np.nan), where=work > 0)
    last = np.maximum.accumulate(np.where(np.isnan(levels), 0, np.arange(blocks)))
    return [float(level) for level in levels[last]]


@dataclass(frozen=True, slots=True)
class LoadedQueue:
    """One server that takes batches, Poisson calls at `rate` per second."""

    model: Model
    rate: float

    @classmethod
    def of(cls, model: Model, rate: float) -> LoadedQueue | None:
        """None for what is not simulated here: a continuous engine, several servers, patience."""
        plain = not model.policy.joins_running and model.servers == 1 and model.patience is None
        return cls(model, rate) if plain else None

    def stated_band(
        self,
        path: Sequence[float],
        seconds: float,
        settle: float,
        seed: int,
        *,
        width: float = WIDTH,
    ) -> Band:
        """Of windows of `seconds` that begin `settle` seconds after an empty queue.

        `path`: levels relative to the speed of the model, each for `width` seconds.
        """
        levels = np.array(path) if len(path) else STEADY
        count = max(2, round(self.rate * (seconds + settle) * self.model.call_size))
        windows = max(20, min(WINDOWS, MOST_IN_BAND // count))
        streams = np.random.SeedSequence((seed, count)).spawn(windows)
        means = [self._window_mean(levels, width, count, settle, stream) for stream in streams]
        return Band(
            float(np.mean(means)), *(float(value) for value in np.quantile(means, [0.025, 0.975]))
        )

    def at_speeds(self, path: Sequence[float], count: int = LEAST, seed: int = 0) -> float | None:
        """The mean delay along the path, of at least `count` requests and five times the path;
        None without a path.
        """
        if len(path) < 2:
            return None
        count = max(count, round(5 * self.rate * len(path) * WIDTH * self.model.call_size))
        arrived_at, starts = self.simulate(np.array(path), 0.0, count, np.random.SeedSequence(seed))
        return float(np.mean(starts - arrived_at))

    def simulate(
        self, levels: Vector, offset: float, count: int, stream: np.random.SeedSequence
    ) -> tuple[Vector, Vector]:
        """Arrivals and dispatches of `count` requests; the path begins `offset` seconds from its
        start and is repeated.
        """
        run = self.run(levels, offset, count, stream)
        return np.asarray(run.arrived_at, dtype=np.float64), np.asarray(
            run.dispatched_at, dtype=np.float64
        )

    def run(
        self,
        levels: Vector,
        offset: float,
        count: int,
        stream: np.random.SeedSequence,
        *,
        width: float = WIDTH,
    ) -> SimulatedRun:
        """The whole of it; `width`: seconds of a level."""
        trace, law, policy = (
            draw_trace(self.model, self.rate, count, stream),
            self.model.law,
            self.model.policy,
        )
        residuals = (
            trace.residuals[0].gamma(law.cv**-2, law.cv**2, count) if law.cv else np.ones(count)
        )
        coefficients = (law.k1, law.k2, law.k3, law.k4, law.kp, law.speed)
        bound = min(self.model.bound or count, count)
        wait_for = bound if isinstance(policy, Fixed) else 1
        starts, ends = np.empty((2, count))
        batch, sizes = np.empty((2, count), dtype=np.int64)
        given = (
            trace.arrived_at,
            trace.output_tokens,
            trace.prompt_tokens,
            trace.call_ends,
            coefficients,
            residuals,
        )
        done = np.concatenate([[0.0], np.cumsum(width / levels)])
        _run(
            *given,
            done,
            (offset / width, width),
            bound,
            wait_for,
            policy.padded,
            starts,
            ends,
            batch,
            sizes,
        )
        columns: dict[str, npt.NDArray[Any]] = {"dispatched_at": starts, "released_at": ends}
        columns |= {"first_token_at": ends, "server_free_at": ends}
        columns |= {
            "batch_id": batch,
            "batch_size": sizes,
            "server_id": np.zeros(count, dtype=np.int32),
        }
        return SimulatedRun(
            np.asarray(trace.arrived_at, dtype=np.float64), trace.output_tokens, columns
        )

    def _window_mean(
        self,
        levels: Vector,
        width: float,
        count: int,
        settle: float,
        stream: np.random.SeedSequence,
    ) -> float:
        offset = float(np.random.default_rng(stream.spawn(1)[0]).uniform(0, levels.size * width))
        run = self.run(levels, offset, count, stream, width=width)
        arrived_at, starts = run.arrived_at, run.dispatched_at
        kept = arrived_at > min(settle, arrived_at[-1] / 2)
        return float(np.mean(starts[kept] - arrived_at[kept]))


@njit(cache=True)
def _spread(starts, ends, fitted, width, busy, work):  # type: ignore[no-untyped-def]
    """Each batch's time and work over the blocks that it lasted."""
    for i in range(len(starts)):
        lasted = ends[i] - starts[i]
        for block in range(int(starts[i] / width), int(ends[i] / width) + 1):
            within = min(ends[i], (block + 1) * width) - max(starts[i], block * width)
            if within > 0:
                busy[block] += within
                work[block] += fitted[i] * within / lasted


@njit(cache=True)
def _end(start, work, done, first_block, width):  # type: ignore[no-untyped-def]
    """The instant at which `work` lawful seconds are done; `done[k]`: those that the first k
    blocks of a path do, which is repeated.
    """
    blocks = len(done) - 1
    at = start / width + first_block
    rounds = np.floor(at / blocks)
    at -= rounds * blocks
    block = min(int(at), blocks - 1)
    target = done[block] + (at - block) * (done[block + 1] - done[block]) + work
    more = np.floor(target / done[blocks])
    target -= more * done[blocks]
    last = min(np.searchsorted(done, target, "right") - 1, blocks - 1)
    within = (target - done[last]) / (done[last + 1] - done[last])
    return ((rounds + more) * blocks + last + within - first_block) * width


@njit(cache=True)
def _run(  # type: ignore[no-untyped-def]
    arrived_at,
    lengths,
    prompts,
    call_ends,
    law,
    residuals,
    done,
    place,
    bound,
    wait_for,
    padded,
    starts,
    ends,
    batches,
    sizes,
):
    """From batch to batch, as `queueing.simulation.kernels.run_padded`, on the engine's clock;
    `place`: first block, width.
    """
    n, free, head, batch = len(arrived_at), -np.inf, 0, 0
    k1, k2, k3, k4, kp, speed = law
    while head < n:
        last, start = head + 1, max(free, arrived_at[head])
        if wait_for > 1:
            last = min(head + wait_for, n)
            start = max(free, arrived_at[last - 1])
        elif arrived_at[head] >= free:
            last = max(last, min(call_ends[head], head + bound)) if len(call_ends) > 0 else last
        else:
            while last < min(n, head + bound) and arrived_at[last] < free:
                last += 1
        longest, total, inputs, size = 0, 0, 0, last - head
        for i in range(head, last):
            starts[i] = start
            longest, total, inputs = (
                max(longest, lengths[i]),
                total + lengths[i],
                inputs + prompts[i],
            )
        decoding = (k3 * size + k4) * longest if padded else k3 * total + k4 * longest
        free = _end(
            start,
            speed * residuals[batch] * (k1 * size + k2 + kp * inputs + decoding),
            done,
            place[0],
            place[1],
        )
        for i in range(head, last):
            ends[i], batches[i], sizes[i] = free, batch, size
        head, batch = last, batch + 1
