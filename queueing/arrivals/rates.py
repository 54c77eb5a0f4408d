"""Poisson arrivals whose rate changes with time: steps and ramps, by inversion of the cumulative
rate.

With Lambda(t) the integral of the rate up to t and u_1 < u_2 < ... the instants of a Poisson
process of rate 1, the instants Lambda^-1(u_n) are a Poisson process of the asked rate (Cinlar 1975,
ch. 4). The inverse is a formula in every case here, so nothing is thinned: arrival n comes from gap
n at every rate (common random numbers).

Both processes end with their last second; no arrival comes later, however many were asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kendall.policies.text import SpecError, counted
from kendall.queueing.arrivals.processes import (
    FloatArray,
    check_bounds,
    check_expected,
    cut,
    partial_sums,
)


@dataclass(frozen=True, slots=True)
class Piecewise:
    """Rate `rates[i]` (requests per second, 0 for a pause) for `durations[i]` seconds, one after
    the other.
    """

    rates: tuple[float, ...]
    durations: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rates or len(self.rates) != len(self.durations):
            got = (
                f"{counted(len(self.rates), 'rate')} and {counted(len(self.durations), 'duration')}"
            )
            raise SpecError(f"got {got}; expected as many of both")
        check_each("rates", self.rates, positive=False)
        check_each("durations", self.durations, positive=True)
        if not any(self.rates):
            raise SpecError("got rates of 0 only; expected requests per second > 0 somewhere")

    @property
    def mean_rate(self) -> float:
        """Expected arrivals per second over the whole span."""
        return float(np.dot(self.rates, self.durations) / sum(self.durations))

    def instants(
        self, rng: np.random.Generator, *, count: int | None = None, duration: float | None = None
    ) -> FloatArray:
        """See `ArrivalStream.instants`; ends with the last piece."""
        check_bounds(count, duration)
        rates, starts, expected = knots(np.asarray(self.rates), np.asarray(self.durations))
        units = unit_instants(rng, count, float(expected[-1]))
        return cut(invert_steps(units, rates, starts, expected), count, duration)


@dataclass(frozen=True, slots=True)
class Ramp:
    """From rate `start` to rate `end` (requests per second) within `duration` seconds.

    Linear: start + (end - start) t / duration. Exponential: start (end / start)^(t / duration).
    """

    start: float
    end: float
    duration: float
    shape: Literal["linear", "exponential"] = "linear"

    def __post_init__(self) -> None:
        positive = self.shape == "exponential"
        check_each("start", (self.start,), positive)
        check_each("end", (self.end,), positive)
        check_each("duration", (self.duration,), positive=True)
        if self.shape not in {"linear", "exponential"}:
            raise SpecError(f"got shape {self.shape!r}; expected linear or exponential")
        if self.start == self.end == 0:
            raise SpecError("got a ramp from 0 to 0; expected requests per second > 0 at one end")

    @property
    def mean_rate(self) -> float:
        """Expected arrivals per second over the whole ramp."""
        if self.shape == "linear" or self.start == self.end:
            return (self.start + self.end) / 2
        return (self.end - self.start) / math.log(self.end / self.start)

    def instants(
        self, rng: np.random.Generator, *, count: int | None = None, duration: float | None = None
    ) -> FloatArray:
        """See `ArrivalStream.instants`; ends with the ramp."""
        check_bounds(count, duration)
        units = unit_instants(rng, count, self.mean_rate * self.duration)
        return cut(np.minimum(self._invert(units), self.duration), count, duration)

    def _invert(self, units: FloatArray) -> FloatArray:
        """The instants at which the cumulative rate reaches `units`; no difference of near
        numbers is taken.
        """
        if self.shape == "linear" or self.start == self.end:
            slope = (self.end - self.start) / self.duration
            at_instant = np.sqrt(
                np.maximum(self.start**2 + 2 * slope * units, 0.0)
            )  # the rate there
            return np.asarray(2 * units / (self.start + at_instant))
        growth = math.log(self.end / self.start) / self.duration
        return np.asarray(np.log1p(growth * units / self.start) / growth)


def unit_instants(rng: np.random.Generator, count: int | None, limit: float | None) -> FloatArray:
    """A Poisson process of rate 1: `count` instants, or those up to `limit`."""
    check_expected(limit if count is None and limit else 0.0)
    return partial_sums(lambda size: rng.exponential(size=size), count, limit)


def knots(rates: FloatArray, durations: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The rates, and the instant and the cumulative rate at which each piece starts and the last
    one ends.
    """
    starts = np.concatenate([[0.0], np.cumsum(durations)])
    return rates, starts, np.concatenate([[0.0], np.cumsum(rates * durations)])


def invert_steps(
    units: FloatArray, rates: FloatArray, starts: FloatArray, expected: FloatArray
) -> FloatArray:
    """The instants at which the cumulative rate reaches `units` > 0, none above its end; a pause
    is never chosen.
    """
    piece = np.searchsorted(expected, units, side="left") - 1
    return np.minimum(starts[piece] + (units - expected[piece]) / rates[piece], starts[piece + 1])


def check_each(name: str, values: tuple[float, ...], positive: bool) -> None:
    """Raises SpecError unless all are finite and > 0, or >= 0."""
    for value in values:
        if not (0 < value < math.inf or (value == 0 and not positive)):
            raise SpecError(
                f"got {name} with {value}; expected finite numbers {'>' if positive else '>='} 0"
            )
