"""Mean sojourn time by kind and size under ranks (SOAP), for one server and Poisson arrivals.

For a job of total service x and kind k, r = sup of its rank over the ages [0, x), w(a) = sup over
[a, x). Over a random job X:

    X0(r)    service in the first interval of ages, beginning at 0, whose rank is at most r
    Xi(r)    service in the i-th later interval of such ages
    Xnew(w)  service until the rank first reaches w (equal ranks go to the earlier arrival)

    E[T | k, x] = lam sum_{i>=0} E[Xi(r)^2] / (2 (1 - lam E[X0(r)]) (1 - lam E[Xnew(r)]))
                  + int_0^x da / (1 - lam E[Xnew(w(a))])

In the class `last_come` it is X0, Xi of ranks below r, and Xnew until the rank exceeds w. Exact for
sizes and predictions that are atoms, with ranks that are piecewise linear in the age, where
Xnew(w) does not change between the ranks at which pieces begin, as under every order of `orders`.
Times in seconds; lam jobs/s, load below 1. A residual (`sizes.Residual`) enters E[Xi(r)^2] only.

Source: Scully, Harchol-Balter and Scheller-Wolf (2018), Theorem 5.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kendall.queueing.distributions.lattice import blocks
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.models.soap.orders import Jobs
from kendall.queueing.predictors.sizes import NO_RESIDUAL, Residual

_PAIRS = 1_000_000  # of a rank and a kind, at once


@dataclass(frozen=True, eq=False)
class Analysis:
    """Ranks as single numbers, and the moments of limited service, for one arrival rate."""

    jobs: Jobs
    arrival_rate: float
    residual: Residual = NO_RESIDUAL

    @cached_property
    def _totals(self) -> Vector:
        return np.add.outer(self.jobs.before, self.jobs.sizes)

    @cached_property
    def _longest(self) -> float:
        return float(self._totals.max())

    @cached_property
    def _keys(self) -> Vector:
        return self.jobs.ranks.keys(self._longest)

    @cached_property
    def _ends(self) -> Vector:
        start = self.jobs.ranks.start
        return np.concatenate([start[:, 1:], np.full((len(start), 1), np.inf)], axis=1)

    @cached_property
    def _cumulative(self) -> tuple[Vector, Vector, Vector]:
        """E[X^j; X <= sizes[i - 1]] of each kind, [kinds, n + 1], sizes without `before`."""
        parts = (self.jobs.joint * self.jobs.sizes**k for k in range(3))
        first, second, third = (np.pad(np.cumsum(part, axis=1), ((0, 0), (1, 0))) for part in parts)
        return first, second, third

    def _limited(self, ages: Vector) -> tuple[Vector, Vector]:
        """E[min(X, a)] and E[min(X, a)^2] of each kind, `ages` [..., kinds]."""
        before, (mass, work, square) = self.jobs.before, self._cumulative
        kinds = np.arange(len(before))
        own = np.minimum(np.maximum(ages - before, 0.0), self.jobs.sizes[-1])
        place = np.searchsorted(self.jobs.sizes, own, side="right")
        left = mass[:, -1] - mass[kinds, place]
        first = work[kinds, place] + own * left
        second = square[kinds, place] + own * own * left
        served = np.minimum(ages, before)
        total = mass[:, -1]
        return served * total + first, served * served * total + 2 * served * first + second

    @cached_property
    def load(self) -> float:
        """lam E[total service]."""
        return self.arrival_rate * float((self.jobs.joint * self._totals).sum())

    def worst(self) -> Vector:
        """The largest rank over the ages [0, total), as keys [kinds, n]."""
        ranks, worst = self.jobs.ranks, np.repeat(self._keys[:, :1], len(self.jobs.sizes), axis=1)
        for p in range(ranks.start.shape[1]):
            begin, key, slope = (x[:, p : p + 1] for x in (ranks.start, self._keys, ranks.slope))
            reach = np.minimum(self._ends[:, p : p + 1], self._totals) - begin
            with np.errstate(invalid="ignore"):
                top = key + np.where(slope > 0, slope * reach, 0.0)
            worst = np.where(reach > 0, np.maximum(worst, top), worst)
        return worst

    def _apart(self, keys: Vector, side: float) -> Vector:
        """The keys, those of class `last_come` moved to the next number on that side."""
        last_come = self.jobs.ranks.last_come
        if last_come is None:
            return keys
        own = np.rint(keys / self.jobs.ranks.width(self._longest)) == last_come
        return np.where(own, np.nextafter(keys, side * np.inf), keys)

    def old(self, keys: Vector) -> tuple[Vector, Vector]:
        """E[X0(r)] and sum_i E[Xi(r)^2] for each r of `keys`."""
        found = [self._old(keys[part]) for part in self._blocks(len(keys))]
        return np.concatenate([one for one, _ in found]), np.concatenate([two for _, two in found])

    def new(self, keys: Vector) -> Vector:
        """E[Xnew(r)] for each r of `keys`."""
        return np.concatenate([self._new(keys[part]) for part in self._blocks(len(keys))])

    def _blocks(self, count: int) -> list[slice]:
        return list(blocks(count, max(1, _PAIRS // len(self.jobs.before))))

    def _old(self, keys: Vector) -> tuple[Vector, Vector]:
        ranks, r = self.jobs.ranks, self._apart(keys, -1.0)[:, None]
        shape = (len(keys), len(self.jobs.before))
        mean, square = np.zeros(shape), np.zeros(shape)
        low, high = np.zeros(shape), np.full(shape, -1.0)  # the open interval of ages, if any
        first = np.zeros(shape, dtype=bool)  # it begins at age 0
        for p in range(ranks.start.shape[1]):
            begin, end = ranks.start[:, p], self._ends[:, p]
            enter, leave = _within(begin, end, self._keys[:, p], ranks.slope[:, p], r)
            inside = leave >= enter
            opened = inside & (enter != high)
            self._add(mean, square, (low, high, opened & first), initial=True)
            self._add(mean, square, (low, high, opened & ~first), initial=False)
            first = np.where(opened, (p == 0) & (enter == 0.0), first)
            low, high = np.where(opened, enter, low), np.where(inside, leave, high)
        self._add(mean, square, (low, high, first), initial=True)
        self._add(mean, square, (low, high, ~first), initial=False)
        return mean.sum(axis=1), square.sum(axis=1)

    def _add(
        self, mean: Vector, square: Vector, interval: tuple[Vector, Vector, Vector], initial: bool
    ) -> None:
        """The service of the ages low..high, of those chosen, in place."""
        low, high, chosen = interval
        chosen = np.logical_and(chosen, high > low)
        if not chosen.any():
            return
        top = np.minimum(np.where(chosen, high, 0.0), self._longest)
        bottom = np.minimum(np.where(chosen, low, 0.0), self._longest)
        served, squares = self._moments(bottom, top)
        square += squares
        if initial:
            mean += served

    def _moments(self, bottom: Vector, top: Vector) -> tuple[Vector, Vector]:
        """Of the service between two ages, E[X; ..] and E[X^2; ..] of each kind."""
        (first, second), (less, lesser) = self._limited(top), self._limited(bottom)
        served = first - less
        squares = np.maximum(second - lesser - 2 * bottom * served, 0.0)
        return served, self.residual.second_moment(served, squares)

    def _new(self, keys: Vector) -> Vector:
        ranks, r = self.jobs.ranks, self._apart(keys, 1.0)[:, None]
        leave = np.full((len(keys), len(self.jobs.before)), np.inf)
        for p in reversed(range(ranks.start.shape[1])):
            begin, end = ranks.start[:, p], self._ends[:, p]
            key, slope = self._keys[:, p], ranks.slope[:, p]
            at_once = key >= r
            with np.errstate(divide="ignore", invalid="ignore"):
                reached = begin + np.where(slope > 0, (r - key) / slope, np.inf)
            leave = np.where(at_once, begin, np.where(reached < end, reached, leave))
        return np.asarray(self._limited(np.minimum(leave, self._longest))[0].sum(axis=1))


def _within(
    begin: Vector, end: Vector, key: Vector, slope: Vector, r: Vector
) -> tuple[Vector, Vector]:
    """Where in the piece the rank is at most r: enter <= leave; leave < enter where nowhere."""
    with np.errstate(divide="ignore", invalid="ignore"):
        crossing = begin + np.where(slope == 0, np.inf, (r - key) / slope)
    below = key <= r
    falling = slope < 0
    enter = np.where(below, begin, np.where(falling, crossing, np.inf))
    leave = np.where(below & ~(slope > 0), end, np.where(below, np.minimum(end, crossing), end))
    nowhere = ~below & (~falling | (crossing >= end))
    return np.where(nowhere, end, enter), np.where(nowhere, -np.inf, leave)


def mean_sojourns(jobs: Jobs, arrival_rate: float, residual: Residual = NO_RESIDUAL) -> Vector:
    """E[T | kind, size] [kinds, n], seconds. Raises UnstableQueueError."""
    analysis = Analysis(jobs, arrival_rate, residual)
    if analysis.load >= 1:
        raise UnstableQueueError(analysis.load)
    keys, index = np.unique(analysis.worst(), return_inverse=True)
    mean, square = analysis.old(keys)
    idle = (1 - arrival_rate * mean) * (1 - arrival_rate * analysis.new(keys))
    waits = arrival_rate * square / (2 * idle)
    return np.asarray(waits[index.reshape(jobs.joint.shape)] + _residence(analysis, keys))


def _residence(analysis: Analysis, keys: Vector) -> Vector:
    """int_0^x da / (1 - lam E[Xnew(w(a))]) of every kind and size."""
    ranks, totals = analysis.jobs.ranks, analysis._totals
    stretch = _AgeStretch(analysis, keys)
    spent, worst = np.zeros(totals.shape), np.full(totals.shape, -np.inf)
    for p in reversed(range(ranks.start.shape[1])):
        begin, key, slope = (x[:, p : p + 1] for x in (ranks.start, analysis._keys, ranks.slope))
        reach = np.minimum(analysis._ends[:, p : p + 1], totals) - begin
        here = reach > 0
        length = np.where(here, reach, 0.0)
        last = key + slope * length
        top = np.maximum(key, last)
        flat = np.maximum(worst, np.where(slope < 0, last, top))  # what holds where w is constant
        falling = np.where((slope < 0) & (key > flat), key - flat, 0.0)
        part = length - falling / np.where(slope < 0, -slope, 1.0)
        here_spent = stretch.at(flat) * part + stretch.between(flat, flat + falling) / np.where(
            slope < 0, -slope, 1.0
        )
        spent += np.where(here, here_spent, 0.0)
        worst = np.where(here, np.maximum(worst, top), worst)
    return spent


class _AgeStretch:
    """1 / (1 - lam E[Xnew(w)]) at any rank w, and its integral: a step function of w."""

    def __init__(self, analysis: Analysis, keys: Vector) -> None:
        begun = analysis._keys[np.isfinite(analysis.jobs.ranks.start)]
        places = np.unique(np.concatenate([keys, begun]))
        self._places = np.concatenate([[places[0] - 1], places, [places[-1] + 1]])
        middles = (self._places[1:] + self._places[:-1]) / 2
        lam = analysis.arrival_rate
        self._at = 1 / (1 - lam * analysis.new(self._places))
        self._inside = 1 / (1 - lam * analysis.new(middles))
        self._integral = np.append(0.0, np.cumsum(np.diff(self._places) * self._inside))

    def at(self, w: Vector) -> Vector:
        """Its value."""
        place = np.searchsorted(self._places, w, side="left")
        inner = np.clip(place, 0, len(self._places) - 1)
        step = np.clip(place - 1, 0, len(self._inside) - 1)
        return np.where(self._places[inner] == w, self._at[inner], self._inside[step])

    def between(self, low: Vector, high: Vector) -> Vector:
        """Its integral."""
        return self._to(high) - self._to(low)

    def _to(self, w: Vector) -> Vector:
        step = np.clip(np.searchsorted(self._places, w, side="right") - 1, 0, len(self._inside) - 1)
        return np.asarray(self._integral[step] + (w - self._places[step]) * self._inside[step])
