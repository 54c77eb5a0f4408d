"""The engine's speed as it was, second by second, and what its changes do to a mean delay.

A path is the measured over the lawful service time of all batches that began in a block of `WIDTH` seconds, block after block; an empty
block has the value of the one before. The queue is simulated with the path: a batch that begins in a block takes the law's time, times
the residual, times the block's value. Two uses:

    before a cell    windows of the planned length, each beginning at a random instant of the path of all cells so far: where 95 % of
                     the windows' means lie is the band that is stated before the cell
    after a cell     a long run over the cell's own path, beside one at its mean speed with the same arrivals, lengths and residuals:
                     how much the speed's changes within the cell lengthen the mean delay

No delay enters. One server that takes a batch when it is free; a continuous engine has no batches, and no band.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from policies.fixed import Fixed
from queueing.estimation.batch_times import BatchTimes
from queueing.fast_simulation import draw_trace
from queueing.model import Model

Vector = npt.NDArray[np.float64]
WIDTH = 1.0  # seconds
WINDOWS = 200  # simulated for a band
LEAST = 200_000  # requests of a run over a cell's own path
MOST_IN_BAND = 6_000_000  # requests of all windows of a band
STEADY = np.ones(1)


@dataclass(frozen=True, slots=True)
class Band:
    """Where the mean of a window lies, seconds: over all windows, and the 2.5 % and 97.5 % quantiles."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of its width over its mean."""
        return (self.high - self.low) / 2 / self.mean if self.mean else math.inf


def speed_path(times: BatchTimes) -> list[float]:
    """Measured over lawful time, block by block."""
    if not times.count:
        return []
    block = ((times.at - times.at[0]) / WIDTH).astype(int)
    measured, fitted = np.bincount(block, times.measured), np.bincount(block, times.fitted)
    levels = np.divide(measured, fitted, out=np.full(measured.size, np.nan), where=fitted > 0)
    last = np.maximum.accumulate(np.where(np.isnan(levels), 0, np.arange(levels.size)))
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

    def stated_band(self, path: Sequence[float], seconds: float, settle: float, seed: int) -> Band:
        """Of windows of `seconds` that begin `settle` seconds after an empty queue; `path` relative to the speed of the model."""
        levels = np.array(path) if len(path) else STEADY
        count = max(2, round(self.rate * (seconds + settle) * self.model.call_size))
        windows = max(20, min(WINDOWS, MOST_IN_BAND // count))
        streams = np.random.SeedSequence((seed, count)).spawn(windows)
        means = [self._window_mean(levels, count, settle, stream) for stream in streams]
        return Band(float(np.mean(means)), *(float(value) for value in np.quantile(means, [0.025, 0.975])))

    def lengthened(self, path: Sequence[float], cv: float, seed: int = 0) -> float | None:
        """The factor that the path puts on the mean delay, beside its mean speed, which is that of the model; `cv` along the path.

        None without a path.
        """
        if len(path) < 2:
            return None
        levels = np.array(path) / np.mean(path)
        count = max(LEAST, round(10 * self.rate * len(path) * WIDTH * self.model.call_size))
        law = dataclasses.replace(self.model.law, cv=cv)
        along = LoadedQueue(dataclasses.replace(self.model, law=law), self.rate)
        wandering, steady = (
            queue.simulate(values, 0.0, count, np.random.SeedSequence(seed)) for queue, values in ((along, levels), (self, STEADY))
        )
        return float(np.mean(wandering[1] - wandering[0]) / np.mean(steady[1] - steady[0]))

    def simulate(self, levels: Vector, offset: float, count: int, stream: np.random.SeedSequence) -> tuple[Vector, Vector]:
        """Arrivals and dispatches of `count` requests; the path begins `offset` seconds from its start and is repeated."""
        trace, law, policy = draw_trace(self.model, self.rate, count, stream), self.model.law, self.model.policy
        residuals = trace.residuals[0].gamma(law.cv**-2, law.cv**2, count) if law.cv else np.ones(count)
        coefficients = (law.k1, law.k2, law.k3, law.k4, law.kp, law.speed)
        bound = min(self.model.bound or count, count)
        wait_for = bound if isinstance(policy, Fixed) else 1
        starts = np.empty(count)
        given = (trace.arrived_at, trace.output_tokens, trace.prompt_tokens, trace.call_ends, coefficients, residuals)
        _run(*given, levels, offset / WIDTH, WIDTH, bound, wait_for, policy.padded, starts)
        return np.asarray(trace.arrived_at, dtype=np.float64), starts

    def _window_mean(self, levels: Vector, count: int, settle: float, stream: np.random.SeedSequence) -> float:
        offset = float(np.random.default_rng(stream.spawn(1)[0]).uniform(0, levels.size * WIDTH))
        arrived_at, starts = self.simulate(levels, offset, count, stream)
        kept = arrived_at > min(settle, arrived_at[-1] / 2)
        return float(np.mean(starts[kept] - arrived_at[kept]))


@njit(cache=True)
def _run(arrived_at, lengths, prompts, call_ends, law, residuals, levels, first_block, width, bound, wait_for, padded, starts):  # type: ignore[no-untyped-def]
    """From batch to batch, as `queueing.kernels.run_padded`, each at the speed of the block in which it begins."""
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
            longest, total, inputs = max(longest, lengths[i]), total + lengths[i], inputs + prompts[i]
        decoding = (k3 * size + k4) * longest if padded else k3 * total + k4 * longest
        level = levels[int(first_block + start / width) % len(levels)]
        free = start + speed * level * residuals[batch] * (k1 * size + k2 + kp * inputs + decoding)
        head, batch = last, batch + 1
