"""How fast the machine was at each moment of a run.

Where every duration is s(t) times the law's, the law's own clock is

    tau(t) = integral of dt / s(t)

in which the machine has a constant speed of 1. So the arrivals are moved to that clock, the law
serves them there, and starts and ends are moved back. s(t) is a step function: of batches one value
each, between them that of the whole run (queueing.estimation.speed.batch_factors); of slots one
value for each tenth of the run. It is taken from service times, never from delays.

One server only; a `max_wait` does not scale with the machine, so `fixed` with one keeps a constant
speed, as policies do that take requests out of service.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.measurement.batch_means import FloatArray

BLOCKS = 10  # of a run of slots, each of one speed
PIECES = (20.0, 120.0)  # seconds, on average; no shorter than what slows a machine


@dataclass(frozen=True, eq=False)
class SpeedPath:
    """Instants of the run at its knots, increasing, seconds; between each two the speed."""

    at: FloatArray
    speed: FloatArray
    outside: float  # speed before the first and after the last knot

    @cached_property
    def clock(self) -> FloatArray:
        """The law's clock at the knots, seconds."""
        return np.concatenate([[0.0], np.cumsum(np.diff(self.at) / self.speed)])

    def to_clock(self, instants: Vector) -> FloatArray:
        """The law's clock at instants of the run."""
        return _along(self.at, self.clock, 1 / self.outside, instants)

    def to_run(self, clock: Vector) -> FloatArray:
        """The other way."""
        return _along(self.clock, self.at, self.outside, clock)

    def corrected(
        self, at: Vector, measured: Vector, modelled: Vector, power: float = 1.0
    ) -> SpeedPath:
        """With each speed so many times as large as what began then took longer, in sum, than in
        the model, to this power.
        """
        count = self.speed.size
        place = np.clip(np.searchsorted(self.at, at, "right") - 1, 0, count - 1)
        took, model = (np.bincount(place, each, count) for each in (measured, modelled))
        known = (took > 0) & (model > 0)
        ratio = np.where(known, took / np.where(known, model, 1.0), 1.0)
        return dataclasses.replace(self, speed=self.speed * ratio**power)

    def resampled(self, seconds: float, scale: float, rng: np.random.Generator) -> SpeedPath | None:
        """Pieces of it in random order, from 0 on for so many seconds, each speed `scale` times as
        large; None of a path without length.
        """
        span, at, knots, speeds = float(self.at[-1] - self.at[0]), 0.0, [np.zeros(1)], []
        length = min(float(rng.choice(PIECES)), span / 2)
        while at < seconds and span > 0:
            piece = min(float(rng.exponential(length)), seconds - at, span)
            since = self.at[0] + rng.random() * (span - piece)
            first = int(np.searchsorted(self.at, since, "right")) - 1
            last = max(first + 1, int(np.searchsorted(self.at, since + piece, "left")))
            knots.append(np.append(self.at[first + 1 : last], since + piece) - since + at)
            speeds.append(self.speed[first:last])
            at += piece
        if not speeds:
            return None
        return SpeedPath(
            np.concatenate(knots), scale * np.concatenate(speeds), scale * self.outside
        )


def _along(known: FloatArray, wanted: FloatArray, slope: float, values: Vector) -> FloatArray:
    inner = np.interp(values, known, wanted)
    before, after = np.minimum(values - known[0], 0.0), np.maximum(values - known[-1], 0.0)
    result: FloatArray = inner + slope * (before + after)
    return result


def path_of_batches(
    begun: FloatArray, ended: FloatArray, speed: FloatArray, outside: float
) -> SpeedPath:
    """Of one server's batches in order, seconds, each with its speed; `outside`: between them."""
    begun = np.maximum(begun, np.append(-np.inf, np.maximum.accumulate(ended)[:-1]))
    at = np.column_stack([begun, np.maximum(ended, begun)]).ravel()
    speeds = np.column_stack([np.full(begun.size, outside), speed]).ravel()[1:]
    kept = np.append(True, np.diff(at) > 0)
    return SpeedPath(at[kept], speeds[kept[1:]], outside)


def path_of_slots(
    at: FloatArray, measured: FloatArray, fitted: FloatArray, outside: float
) -> SpeedPath:
    """Of a continuous server's groups of requests; else as of batches."""
    spans = block_begins(at.size, max(2, at.size // BLOCKS))
    pace = np.add.reduceat(measured, spans) / np.add.reduceat(fitted, spans)
    knots = np.append(at[spans], at[-1] + measured[-1])
    return SpeedPath(knots, pace, outside)


def block_begins(count: int, span: int) -> list[int]:
    """Where each block of so many begins; the last has up to twice as many."""
    return list(range(0, max(1, count - span + 1), span))
