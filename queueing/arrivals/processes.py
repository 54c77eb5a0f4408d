"""Arrival processes: when requests come, drawn as absolute instants before anything is sent.

A process is drawn from unit-rate random numbers that are scaled into time one by one. So the same
seed at another rate meets the same luck (common random numbers), a longer run begins as the shorter
one did, and no instant depends on where the run ends: nothing is rescaled to end on time, and
nothing starts anew after a pause.

Here are the renewal processes and the replay of recorded instants; rates that change with time are
in queueing/arrivals/rates.py, rates that a Markov chain changes in queueing/arrivals/modulated.py,
the text form of all in queueing/arrivals/text.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kendall.policies.text import SpecError

FloatArray = NDArray[np.float64]
MOST = 10**8  # arrivals in a timetable: more is a slip of the pen, and would not fit into memory
# gaps drawn at once where their number is not known beforehand; doubled as long as it is too few
FIRST_DRAW = 1024


class ArrivalStream(Protocol):
    """An arrival process on the line from 0."""

    @property
    def mean_rate(self) -> float:
        """Arrivals per second in the long run, or over the process's own span; not a number
        where undefined.
        """
        ...

    def instants(
        self, rng: np.random.Generator, *, count: int | None = None, duration: float | None = None
    ) -> FloatArray:
        """Seconds after 0, in order: the first `count`, those up to `duration`, or whichever ends
        first.

        A process that ends by itself needs neither. Raises SpecError where the number would be
        infinite.
        """
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent exponential gaps: `rate` in requests per second; infinity sends all at once."""

    rate: float

    def __post_init__(self) -> None:
        check_rate(self.rate)

    @property
    def mean_rate(self) -> float:
        """The asked rate."""
        return self.rate

    def instants(
        self, rng: np.random.Generator, *, count: int | None = None, duration: float | None = None
    ) -> FloatArray:
        """See `ArrivalStream.instants`."""
        check_end(self.rate, count, duration)
        return partial_sums(lambda size: rng.exponential(size=size) / self.rate, count, duration)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Independent gamma gaps of mean 1 / rate and shape `burstiness`, as in `vllm bench serve`:
    their squared coefficient of variation is 1 / burstiness, which is also the index of dispersion
    over long windows. 1 is Poisson, below 1 is burstier, infinity is deterministic. The first
    arrival is one whole gap after 0.
    """

    rate: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        if not self.burstiness > 0:
            raise SpecError(
                f"got burstiness {self.burstiness}; expected a shape > 0 (1 is Poisson, infinity "
                "deterministic)"
            )

    @property
    def mean_rate(self) -> float:
        """The asked rate."""
        return self.rate

    def instants(
        self, rng: np.random.Generator, *, count: int | None = None, duration: float | None = None
    ) -> FloatArray:
        """See `ArrivalStream.instants`."""
        if math.isinf(self.burstiness):
            return Deterministic(self.rate).instants(rng, count=count, duration=duration)
        check_end(self.rate, count, duration)
        return partial_sums(
            lambda size: (
                rng.standard_gamma(self.burstiness, size=size) / self.burstiness / self.rate
            ),
            count,
            duration,
        )


@dataclass(frozen=True, slots=True)
class Deterministic:
    """Arrival n comes at n / rate, n = 1, 2, ...; nothing is drawn."""

    rate: float

    def __post_init__(self) -> None:
        check_rate(self.rate)

    @property
    def mean_rate(self) -> float:
        """The asked rate."""
        return self.rate

    def instants(
        self,
        rng: np.random.Generator,  # noqa: ARG002  the protocol's
        *,
        count: int | None = None,
        duration: float | None = None,
    ) -> FloatArray:
        """See `ArrivalStream.instants`."""
        check_end(self.rate, count, duration)
        size = math.floor((duration or 0) * self.rate) + 1 if count is None else count
        return cut(np.arange(1, size + 1) / self.rate, count, duration)


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """The instants of a recording, as they are: `at` in seconds, in order, none below 0."""

    at: FloatArray

    def __post_init__(self) -> None:
        if not np.all(np.isfinite(self.at)) or np.any(np.diff(self.at, prepend=0.0) < 0):
            raise SpecError("got instants below 0 or out of order; expected seconds >= 0 in order")

    @property
    def mean_rate(self) -> float:
        """Arrivals per second between the first and the last."""
        return delivered_rate(self.at)

    def instants(
        self,
        rng: np.random.Generator,  # noqa: ARG002  the protocol's
        *,
        count: int | None = None,
        duration: float | None = None,
    ) -> FloatArray:
        """See `ArrivalStream.instants`; ends with the recording."""
        check_bounds(count, duration)
        return cut(self.at, count, duration)


def renewal(rate: float, burstiness: float = 1.0) -> Poisson | Gamma | Deterministic:
    """The process that `--request-rate` and `--burstiness` ask for. Raises SpecError."""
    if burstiness == 1:
        return Poisson(rate)
    return Deterministic(rate) if burstiness == math.inf else Gamma(rate, burstiness)


def delivered_rate(instants: FloatArray) -> float:
    """Arrivals per second between the first and the last; not a number below two arrivals,
    infinity for a burst.
    """
    if instants.size < 2:
        return float("nan")
    span = float(instants.max() - instants.min())
    return (instants.size - 1) / span if span > 0 else float("inf")


def partial_sums(
    gaps: Callable[[int], FloatArray], count: int | None, limit: float | None
) -> FloatArray:
    """The sums of the first 1, 2, ... gaps: `count` of them, or those up to `limit`.

    `gaps(n)` gives the next n. The sums are added from left to right however many are drawn at
    once: bit for bit the same numbers for every `count` and `limit`.
    """
    if count is not None and limit is None:
        return np.cumsum(gaps(count))
    sums, size = np.zeros(1), FIRST_DRAW
    while (limit is not None and sums[-1] <= limit) and (count is None or sums.size <= count):
        sums = np.concatenate([sums[:-1], np.cumsum(np.concatenate([sums[-1:], gaps(size)]))])
        size *= 2
    return cut(sums[1:], count, limit)


def cut(instants: FloatArray, count: int | None, limit: float | None) -> FloatArray:
    """The first `count` of those up to and including `limit`."""
    within = (
        instants
        if limit is None
        else instants[: int(np.searchsorted(instants, limit, side="right"))]
    )
    return within[:count]


def check_rate(rate: float) -> None:
    """Raises SpecError unless it is a rate."""
    if not rate > 0:
        raise SpecError(f"got request rate {rate}; expected requests per second > 0")


def check_bounds(count: int | None, duration: float | None) -> None:
    """Raises SpecError where a bound is none."""
    if count is not None and not 1 <= count <= MOST:
        raise SpecError(
            f"got {count} prompts; expected a whole number >= "
            f"1{' and <= 10^8' if count > 1 else ''}"
        )
    if duration is not None and not 0 < duration < math.inf:
        raise SpecError(f"got duration {duration}; expected seconds > 0")


def check_end(rate: float, count: int | None, duration: float | None) -> None:
    """Raises SpecError unless the bounds end a process that would go on for ever."""
    check_bounds(count, duration)
    if count is None and (duration is None or math.isinf(rate)):
        wanted = "a number of requests (--num-prompts)" + (
            "" if math.isinf(rate) else " or seconds (--duration)"
        )
        raise SpecError(f"got arrivals at {rate:g} requests/s with no end; expected {wanted}")
    check_expected(rate * duration if count is None and duration else 0.0)


def check_expected(arrivals: float) -> None:
    """Raises SpecError where more arrivals are expected than fit into memory."""
    if arrivals > MOST:
        raise SpecError(
            f"got about {arrivals:.2g} arrivals; expected 10^8 at most: fewer prompts, a shorter "
            "duration, a lower rate"
        )
