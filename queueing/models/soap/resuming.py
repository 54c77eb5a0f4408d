"""Orders whose interruptions cost something: an approximation (stretched ages).

A job in service at rank r is interrupted at rate theta = lam P(first rank of an arrival < r), where
its rank never rises. Before its first token, at the age `first`, it begins again then; behind it
the step in flight (`step` seconds) is lost, and `cost` seconds are served before the next one. An
interruption of these begins them anew. So the server works on average

    f(a) = (e^(theta first) - 1) / (theta first)                       a < first
    f(a) = (1 - e^(-theta step)) e^(theta (cost + step)) / (theta step)  beyond

seconds on a job for each second of its age. Both are exact for services of whole steps, and so is
the load, lam E[int_0^X f(a) da]. The analysis of ranks (`analysis`) then runs
with every service stretched by f; the variance of what interruptions add, as that of independent
repetitions, enters E[Xi(r)^2]. What is left out: that interruptions come with arrivals that are
themselves ahead. Conditions: ranks that never rise (not FB, MLFQ, SRPT-B); one server.

Measured against simulation: docs/why/theory.md. W was up to 7 % too short where interruptions
lengthen the services by less than 12 % and the load is below 0.93; `resume_doubt` names the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import gammainc

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.models.soap.analysis import Analysis
from kendall.queueing.models.soap.orders import DrawnJobs, Jobs, Order
from kendall.queueing.predictors.laws import Predictor
from kendall.queueing.predictors.sizes import Atoms, SizeGrid

_SMALL = 1e-4  # interruptions in the seconds looked at, below which a series is more accurate
_NEVER = 1e-12
# how much longer services may be, and how busy the server, where W was within 10 %
_LONGER, _BUSY = 1.12, 0.93


@dataclass(frozen=True)
class ResumeCost:
    """Seconds: `cost` of each time that a job goes on; `first`: the age before which it begins
    again instead; `step`: what it makes whole or not at all behind that.
    """

    cost: float
    first: float
    step: float

    def __post_init__(self) -> None:
        if not (self.cost >= 0 and self.first > 0 and self.step > 0):
            raise SpecError(
                f"got a resume cost of {self.cost} s, a first token after {self.first} s and a "
                f"step of {self.step} s; expected seconds > 0, the cost >= 0"
            )


@dataclass(frozen=True)
class Resuming:
    """An order with a cost. Raises SpecError where its ranks may rise."""

    order: Order
    cost: ResumeCost

    @property
    def ties_matter(self) -> bool:
        """See `Order`."""
        return self.order.ties_matter

    def boundaries(self, predictor: Predictor) -> tuple[float, ...]:
        """See `Order`."""
        return self.order.boundaries(predictor)

    def jobs(self, sizes: Atoms, predictor: Predictor, grid: SizeGrid) -> Jobs:
        """See `Order`."""
        found = self.order.jobs(sizes, predictor, grid)
        if may_rise(found):
            raise SpecError(
                "got an order under which a request in service loses its rank; expected one "
                "whose interruptions come from arrivals only"
            )
        return found

    def draw(self, rng: np.random.Generator, sizes: Vector, predictor: Predictor) -> DrawnJobs:
        """See `Order`."""
        return dataclasses.replace(self.order.draw(rng, sizes, predictor), resume=self.cost.cost)


def resume_doubt(load: float, bare_load: float) -> str | None:
    """Why W may be off by more than 10 %; None where it was not. `bare_load`: without what
    interruptions add.
    """
    if load < _BUSY and load < _LONGER * bare_load:
        return None
    return (
        f"interruptions lengthen the services by {load / bare_load - 1:.0%}, to a load of "
        f"{load:.2f}: the delay was measured -19 to +7 % off where they do by 12 % or more, or "
        f"the load is {_BUSY} or more"
    )


def may_rise(jobs: Jobs) -> bool:
    """Whether a rank rises with the age, or jobs have service before their sizes."""
    ranks, longest = jobs.ranks, float(jobs.sizes[-1])
    keys, later = ranks.keys(longest), np.isfinite(ranks.start[:, 1:])
    lengths = np.where(later, ranks.start[:, 1:] - ranks.start[:, :-1], 0.0)
    ends = keys[:, :-1] + ranks.slope[:, :-1] * lengths
    rises = later & (keys[:, 1:] > ends + 1e-9 * np.abs(ends))
    return bool(rises.any() or (ranks.slope > 0).any() or jobs.before.any())


def repeated(rate: Vector, seconds: float) -> tuple[Vector, Vector]:
    """Mean and variance of the time to serve so many seconds in one piece, begun again after each
    interruption.
    """
    x = np.maximum(rate * seconds, _NEVER)
    exact = np.exp(2 * x) - 1 - 2 * x * np.exp(x)
    variance = np.where(x < _SMALL, x**3 / 3, exact)
    return np.expm1(x) / x * seconds, variance / x**2 * seconds**2


def step_times(rate: Vector, cost: ResumeCost) -> tuple[Vector, Vector]:
    """Mean and variance of the time of a step behind the first token, with all that its
    interruptions add.
    """
    x = np.maximum(rate * cost.step, _NEVER)
    goes, stays = -np.expm1(-x), np.exp(-x)
    lost, lost_square = (cost.step / x * gammainc(2, x), 2 * (cost.step / x) ** 2 * gammainc(3, x))
    again, variance = repeated(rate, cost.cost + cost.step)
    mean = stays * cost.step + lost + goes * again
    square = stays * cost.step**2 + lost_square + 2 * lost * again
    square += goes * (variance + again * again)
    return mean, np.maximum(square - mean * mean, 0.0)


@dataclass(frozen=True, eq=False)
class _Steps:
    """A function of the rank that is constant between places: its values there and between."""

    places: Vector
    at: Vector
    inside: Vector

    @cached_property
    def _integral(self) -> Vector:
        return np.append(0.0, np.cumsum(np.diff(self.places) * self.inside))

    def times(self, other: _Steps) -> _Steps:
        """Their product; both have the same places."""
        return _Steps(self.places, self.at * other.at, self.inside * other.inside)

    def value(self, keys: Vector) -> Vector:
        """At any rank."""
        place = np.clip(np.searchsorted(self.places, keys), 0, len(self.places) - 1)
        between = np.clip(place - 1, 0, len(self.inside) - 1)
        return np.where(self.places[place] == keys, self.at[place], self.inside[between])

    def to(self, keys: Vector) -> Vector:
        """Its integral from the first place."""
        step = np.clip(
            np.searchsorted(self.places, keys, side="right") - 1, 0, len(self.inside) - 1
        )
        return np.asarray(self._integral[step] + (keys - self.places[step]) * self.inside[step])


@dataclass(frozen=True, eq=False)
class ResumingAnalysis(Analysis):
    """The analysis of ranks with stretched services. Jobs as `Resuming` gives them."""

    cost: ResumeCost = dataclasses.field(kw_only=True)

    @cached_property
    def _places(self) -> Vector:
        begun = np.unique(self._keys[np.isfinite(self.jobs.ranks.start)])
        places = np.unique(np.concatenate([begun, self.worst().ravel()]))
        least = float((self._keys + np.minimum(self.jobs.ranks.slope, 0) * self._longest).min())
        return np.concatenate([[min(least, places[0]) - 1], places, [places[-1] + 1]])

    def _rates(self, keys: Vector) -> Vector:
        """How often a job in service at a rank is interrupted, 1/s."""
        first = self._keys[:, 0]
        order = np.argsort(first)
        chance = np.append(0.0, np.cumsum(self.jobs.joint.sum(axis=1)[order]))
        return self.arrival_rate * chance[np.searchsorted(first[order], keys)]

    def _by_rank(self, function: Callable[[Vector], Vector]) -> _Steps:
        middles = (self._places[1:] + self._places[:-1]) / 2
        return _Steps(self._places, function(self._places), function(middles))

    @cached_property
    def _factors(self) -> tuple[tuple[_Steps, _Steps], tuple[_Steps, _Steps]]:
        """Before the first token and behind it: seconds for each second of age; their variance."""
        cost = self.cost

        def of(moment: int) -> tuple[_Steps, _Steps]:
            return (
                self._by_rank(lambda k: repeated(self._rates(k), cost.first)[moment] / cost.first),
                self._by_rank(lambda k: step_times(self._rates(k), cost)[moment] / cost.step),
            )

        return of(0), of(1)

    def along(self, ages: Vector, factors: tuple[_Steps, _Steps]) -> Vector:
        """int_0^a of the factor at the rank of each age, `ages` [..., kinds]."""
        ranks, total = self.jobs.ranks, np.zeros(np.shape(ages))
        borders = (0.0, self.cost.first), (self.cost.first, np.inf)
        for p in range(ranks.start.shape[1]):
            begin, end = ranks.start[:, p], self._ends[:, p]
            key, slope = self._keys[:, p], ranks.slope[:, p]
            for factor, (low, high) in zip(factors, borders, strict=True):
                bottom = np.maximum(begin, low)
                top = np.minimum(np.minimum(ages, end), high)
                length = np.maximum(top - bottom, 0.0)
                origin = key + slope * np.maximum(low - begin, 0.0)
                fall = factor.to(origin) - factor.to(origin + slope * length)
                flat = factor.value(key) * length
                total += np.where(slope < 0, fall / np.where(slope < 0, -slope, 1.0), flat)
        return total

    def seconds(self, ages: Vector) -> Vector:
        """Of the server, up to these ages."""
        return self.along(ages, self._factors[0])

    @cached_property
    def services(self) -> Vector:
        """Of each kind and size, [kinds, n]."""
        return self._of_sizes(self._factors[0])

    def _of_sizes(self, factors: tuple[_Steps, _Steps]) -> Vector:
        kinds = len(self.jobs.joint)
        return self.along(np.repeat(self.jobs.sizes[:, None], kinds, axis=1), factors).T

    @cached_property
    def load(self) -> float:
        """lam E[service with what interruptions add]."""
        return self.arrival_rate * float((self.jobs.joint * self.services).sum())

    @cached_property
    def _sums(self) -> tuple[Vector, ...]:
        """E[T^j; X <= sizes[i - 1]] of each kind, j = 0, 1, 2, and of the variance."""
        parts = [self.jobs.joint * self.services**k for k in range(3)]
        parts.append(self.jobs.joint * self._of_sizes(self._factors[1]))
        return tuple(np.pad(np.cumsum(part, axis=1), ((0, 0), (1, 0))) for part in parts)

    def _served(self, ages: Vector) -> tuple[Vector, Vector, Vector]:
        """E[T(min(X, a))], E[T(min(X, a))^2] and the mean variance, of each kind."""
        mass, work, square, spread = self._sums
        kinds = np.arange(len(mass))
        place = np.searchsorted(self.jobs.sizes, ages, side="right")
        left, time = mass[:, -1] - mass[kinds, place], self.seconds(ages)
        return (
            work[kinds, place] + time * left,
            square[kinds, place] + time * time * left,
            spread[kinds, place] + self.along(ages, self._factors[1]) * left,
        )

    def _limited(self, ages: Vector) -> tuple[Vector, Vector]:
        return self._served(ages)[:2]

    def _moments(self, bottom: Vector, top: Vector) -> tuple[Vector, Vector]:
        first, second, spread = self._served(top)
        less, lesser, narrower = self._served(bottom)
        served = first - less
        squares = np.maximum(second - lesser - 2 * self.seconds(bottom) * served, 0.0)
        return served, self.residual.second_moment(served, squares + spread - narrower)

    def sojourns(self) -> Vector:
        """E[T | kind, size] [kinds, n], seconds. Raises UnstableQueueError."""
        if self.load >= 1:
            raise UnstableQueueError(self.load)
        keys, index = np.unique(self.worst(), return_inverse=True)
        mean, square = self.old(keys)
        lam = self.arrival_rate
        waits = lam * square / (2 * (1 - lam * mean) * (1 - lam * self.new(keys)))
        stretch = self._by_rank(lambda k: 1 / (1 - lam * self.new(k)))
        before, behind = (stretch.times(factor) for factor in self._factors[0])
        return np.asarray(
            waits[index.reshape(self.jobs.joint.shape)] + self._of_sizes((before, behind))
        )
