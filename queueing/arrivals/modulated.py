"""Markov-modulated Poisson arrivals (MMPP): a Markov chain in continuous time chooses the rate.

In state i arrivals are Poisson of rate `rates[i]` for an exponential time of mean `durations[i]`;
then the next state follows in the order given, after the last the first. Started in its stationary
state, so the counts are stationary from instant 0.

With the generator Q, its stationary vector pi, the rates as a diagonal matrix R, e the vector of
ones and D = (e pi - Q)^-1 - e pi the deviation matrix, over a window of t seconds
    E N(t) = pi R e t,    Var N(t) = pi R e t + 2 pi R (D t - D^2 (I - exp(Q t))) R e
(Fischer and Meier-Hellstern 1993, "The Markov-modulated Poisson process (MMPP) cookbook").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kendall.policies.text import SpecError, counted
from kendall.queueing.arrivals.processes import FIRST_DRAW, MOST, FloatArray, check_end, cut
from kendall.queueing.arrivals.rates import check_each, invert_steps, knots, unit_instants


@dataclass(frozen=True, slots=True)
class Mmpp:
    """Two or more states: arrivals per second in each, and its mean duration in seconds."""

    rates: tuple[float, ...]
    durations: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.rates) < 2 or len(self.rates) != len(self.durations):
            got = (
                f"{counted(len(self.rates), 'rate')} and {counted(len(self.durations), 'duration')}"
            )
            raise SpecError(f"got {got}; expected two or more, as many of both")
        check_each("rates", self.rates, positive=False)
        check_each("durations", self.durations, positive=True)
        if not any(self.rates):
            raise SpecError("got rates of 0 only; expected requests per second > 0 in a state")

    @property
    def stationary(self) -> FloatArray:
        """The fraction of time in each state."""
        durations = np.asarray(self.durations)
        return np.asarray(durations / durations.sum())

    @property
    def mean_rate(self) -> float:
        """pi R e."""
        return float(self.stationary @ np.asarray(self.rates))

    @property
    def dispersion(self) -> float:
        """The index of dispersion of counts, Var N(t) / E N(t), over windows that grow without
        bound.
        """
        weighted, deviation, rates = self._parts()
        return float(1 + 2 * weighted @ deviation @ rates / self.mean_rate)

    def dispersion_over(self, window: float) -> float:
        """Var N(t) / E N(t) over windows of t = `window` seconds."""
        from scipy.linalg import expm  # noqa: PLC0415 - a quarter of a second, and only here

        weighted, deviation, rates = self._parts()
        decay = np.eye(rates.size) - expm(self._generator() * window)
        return float(
            1
            + 2
            * weighted
            @ (deviation - deviation @ deviation @ decay / window)
            @ rates
            / self.mean_rate
        )

    def instants(
        self, rng: np.random.Generator, *, count: int | None = None, duration: float | None = None
    ) -> FloatArray:
        """See `ArrivalStream.instants`. The states come from a generator spawned from `rng`, the
        gaps from `rng` itself: other rates in the same states meet the same path and unit gaps.
        """
        check_end(self.mean_rate, count, duration)
        self._check_changes(count, duration)
        states = rng.spawn(1)[0]
        units = None if count is None else unit_instants(rng, count, None)
        path = self._path(
            states,
            math.inf if units is None else float(units[-1]),
            math.inf if duration is None else duration,
        )
        if units is None:
            units = unit_instants(rng, None, float(path[2][-1]))
        return cut(invert_steps(units[units <= path[2][-1]], *path), count, duration)

    def _check_changes(self, count: int | None, duration: float | None) -> None:
        seconds = min(
            math.inf if count is None else count / self.mean_rate,
            math.inf if duration is None else duration,
        )
        changes = seconds / sum(self.durations) * len(self.durations)
        if changes > MOST:
            raise SpecError(
                f"got about {changes:.2g} changes of state; expected 10^8 at most: longer "
                "durations, fewer arrivals"
            )

    def _path(
        self, rng: np.random.Generator, expected: float, duration: float
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Knots of a path of the chain that reaches the cumulative rate or the duration."""
        first = int(np.searchsorted(np.cumsum(self.stationary), rng.random(), side="right"))
        units, size = np.empty(0), FIRST_DRAW
        while True:
            units = np.concatenate([units, rng.exponential(size=size)])
            states = (min(first, len(self.rates) - 1) + np.arange(units.size)) % len(self.rates)
            path = knots(np.asarray(self.rates)[states], units * np.asarray(self.durations)[states])
            if path[1][-1] > duration or path[2][-1] >= expected:
                return path
            size = units.size

    def _generator(self) -> FloatArray:
        leaving = 1 / np.asarray(self.durations)
        return np.asarray(np.roll(np.diag(leaving), 1, axis=1) - np.diag(leaving))

    def _parts(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """pi R, the deviation matrix D, and R e."""
        rates, stationary = np.asarray(self.rates, dtype=np.float64), self.stationary
        ones = np.tile(stationary, (stationary.size, 1))
        return stationary * rates, np.linalg.inv(ones - self._generator()) - ones, rates
