"""How long prompts and answers are, where a limit cut some and others are not yet over: the
product-limit estimator, weighted.

    S(n) = P(N > n) = prod_{m <= n} (1 - d_m / Y_m)                        (Kaplan and Meier 1958)
    E[min(N, L)] = sum_{n < L} S(n)
    Var = sum_{m < L} (sum_{m <= n < L} S(n))^2 d_m / (Y_m (Y_m - d_m))    (Greenwood)

d_m ended at m, Y_m are known to reach m. N is the length that a request has WITHOUT the gateway's
limit but with its client's own, which stays. A request cut after m tokens, or still in service with
m, says N >= m + 1. Weights fall by half every `half_life` seconds of age and are scaled to sum to
(sum w)^2 / sum w^2, the number of equally weighted requests that would tell as much.

Which requests may enter: those DISPATCHED since the window began, ended or not. Counting only those
that ended favours short answers in a young window; adding all that are in service, whenever they
were dispatched, favours long ones (a snapshot meets a request in proportion to its length).
Conditions: limits and the instant of looking independent of the lengths, given the dispatch. Above
the largest censored count nothing is known: see queueing.estimation.lengths.extrapolation. Only
where no more than one request's worth of probability is left there is it taken to end at that count
(Efron 1967): the longest is often still in service.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.estimation.change import Vector
from kendall.queueing.estimation.interval import NORMAL, UNKNOWN, Estimate, symmetric

NEGLIGIBLE = 0.002  # probability beyond the longest count that may be taken to end there


@dataclass(frozen=True, slots=True)
class SavedLengths:
    """Distinct (count, censored) with their weight: small."""

    counts: Sequence[int] = ()
    censored: Sequence[int] = ()
    weights: Sequence[float] = ()
    number: Sequence[int] = ()
    effective_n: float = math.nan


@dataclass(frozen=True, eq=False)
class Lengths:
    """Token counts, whether each is only a lower bound ("at least so many"), and its weight (any
    scale).
    """

    counts: npt.NDArray[np.int64]
    censored: npt.NDArray[np.bool_]
    weights: Vector
    # effective number, where the weights were read back without their spread
    restored_n: float | None = None

    def __post_init__(self) -> None:
        if not self.counts.size == self.censored.size == self.weights.size:
            raise SpecError(
                f"got {self.counts.size} counts, {self.censored.size} marks, {self.weights.size} "
                "weights; expected as many of each"
            )
        if self.counts.size and (self.counts.min() < 1 or not self.weights.min() > 0):
            raise SpecError(
                "got a count below 1 or a weight that is not > 0; expected token counts and "
                "positive weights"
            )

    @cached_property
    def effective_n(self) -> float:
        """Requests of equal weight that would tell as much."""
        if self.restored_n is not None or not self.counts.size:
            return self.restored_n or 0.0
        return float(self.weights.sum() ** 2 / (self.weights @ self.weights))

    @cached_property
    def known_to(self) -> int:
        """The largest limit up to which the law is known; 0 where there is nothing."""
        return int(self.counts.max()) if self.counts.size else 0

    @property
    def unknown_mass(self) -> float:
        """Estimated P(N >= known_to) of which no ending was seen: 0 where the longest ended by
        itself, or all but.
        """
        left = float(self.survival[-1]) if self.counts.size else 1.0
        return 0.0 if left <= max(NEGLIGIBLE, 1.5 / max(1.0, self.effective_n)) else left

    @cached_property
    def survival(self) -> Vector:
        """`survival[n]` = P(N > n) for n = 0 .. known_to; the last is P(N > known_to), or all of
        the rest where that was censored.
        """
        ended, at_risk = self._tables
        return np.cumprod(
            1 - np.divide(ended, at_risk, out=np.zeros_like(ended), where=at_risk > 0)
        )

    def survival_to(self, top: int) -> Vector:
        """P(N > n) for n = 0 .. top; beyond the longest count what is left of it there."""
        known = self.survival[: top + 1]
        return np.append(known, np.full(top + 1 - known.size, known[-1]))

    @cached_property
    def _tables(self) -> tuple[Vector, Vector]:
        """Weight that ended at each count 0 .. known_to, and weight known to reach it."""
        scaled = self.weights * (self.effective_n / self.weights.sum())
        size = self.known_to + 1
        ended: Vector = np.bincount(self.counts, np.where(self.censored, 0.0, scaled), size).astype(
            np.float64
        )
        clipped: Vector = np.bincount(
            self.counts, np.where(self.censored, scaled, 0.0), size
        ).astype(np.float64)
        leaving = ended + clipped
        # a lower bound c is at risk below c only
        at_risk = np.cumsum(leaving[::-1])[::-1] - clipped
        return ended, np.where(at_risk > 1e-9, at_risk, 0.0)

    def mean(self, limit: int | None = None) -> Estimate:
        """E[min(N, limit)]; without a limit E[N], unknown where the longest request was
        censored. Raises SpecError beyond what is known.
        """
        if not self.counts.size or (limit is None and self.unknown_mass > 0):
            return replace(UNKNOWN, effective_n=self.effective_n)
        top = self._checked(limit)
        ended, at_risk = (table[:top] for table in self._tables)
        survival = self.survival[:top]
        beyond = np.cumsum(survival[::-1])[::-1]  # sum over n from m to limit - 1
        open_after = at_risk - ended
        terms = np.divide(
            ended * beyond**2, at_risk * open_after, out=np.zeros(top), where=open_after > 1e-9
        )
        value = float(survival.sum())
        return symmetric(
            value, NORMAL * math.sqrt(float(terms.sum()) * self._correction), self.effective_n
        )

    @property
    def _correction(self) -> float:
        """n / (n - 1): Greenwood's sum is the plain variance of a mean over n."""
        return self.effective_n / (self.effective_n - 1) if self.effective_n > 1 else math.inf

    def quantile(self, level: float) -> Estimate:
        """The smallest n with P(N <= n) >= level, and where S(n) +- its error crosses; the upper
        end infinite beyond what is known.
        """
        if not self.counts.size:
            return UNKNOWN
        below = 1 - self.survival
        error = NORMAL * self.survival * np.sqrt(np.cumsum(self._hazard_variance))
        ends = [self._first(values, level) for values in (below, below + error, below - error)]
        return Estimate(
            ends[0] if ends[0] < math.inf else math.nan, ends[1], ends[2], self.effective_n
        )

    @cached_property
    def _hazard_variance(self) -> Vector:
        ended, at_risk = self._tables
        open_after = at_risk - ended
        return np.divide(
            ended, at_risk * open_after, out=np.zeros_like(ended), where=open_after > 1e-9
        )

    def _first(self, values: Vector, level: float) -> float:
        reached = values >= level - 1e-12
        return float(np.argmax(reached)) if reached.any() else math.inf

    def law(self, limit: int | None = None) -> TokenDistribution:
        """The law of min(N, limit). Raises SpecError beyond what is known: that needs a named
        family.
        """
        top = self._checked(limit)
        pmf = -np.diff(self.survival[: top + 1], prepend=1.0)
        pmf[top] += self.survival[top]  # what goes beyond the limit ends there
        return TokenDistribution(np.clip(pmf, 0.0, None) / pmf.sum())

    def _checked(self, limit: int | None) -> int:
        if not self.counts.size:
            raise SpecError("got no lengths; expected at least one request")
        if self.unknown_mass > 0 and (limit is None or limit > self.known_to):
            raise SpecError(
                f"got the limit {limit}; lengths are known up to {self.known_to} only: name a "
                "family to go beyond"
            )
        return self.known_to if limit is None else min(limit, self.known_to)

    def without(self, group: int, groups: int) -> Lengths:
        """All but every `groups`-th request, from the `group`-th: for the jackknife."""
        kept = np.arange(self.counts.size) % groups != group
        rest = None if self.restored_n is None else self.restored_n * float(np.mean(kept))
        return Lengths(self.counts[kept], self.censored[kept], self.weights[kept], rest)

    def only(self, group: int, groups: int) -> Lengths:
        """Every `groups`-th request, from the `group`-th."""
        kept = np.arange(self.counts.size) % groups == group
        return Lengths(self.counts[kept], self.censored[kept], self.weights[kept])

    def saved(self) -> SavedLengths:
        """Without the order of the requests."""
        keys, index = np.unique(2 * self.counts + self.censored, return_inverse=True)
        weights = np.bincount(index, self.weights, len(keys))
        number = np.bincount(index, minlength=len(keys))
        return SavedLengths(
            counts=(keys // 2).tolist(),
            censored=(keys % 2).tolist(),
            weights=weights.tolist(),
            number=number.tolist(),
            effective_n=self.effective_n,
        )

    @classmethod
    def restored(cls, saved: SavedLengths) -> Lengths:
        """What was saved; requests with one count share its weight evenly."""
        number = np.asarray(saved.number, dtype=np.int64)
        weights = np.repeat(np.asarray(saved.weights, dtype=float) / number, number)
        counts = np.repeat(np.asarray(saved.counts, dtype=np.int64), number)
        censored = np.repeat(np.asarray(saved.censored, dtype=bool), number)
        return cls(counts, censored, weights, saved.effective_n)


def weigh(ages: Vector, half_life: float) -> Vector:
    """Weights that fall by half every `half_life` seconds of age."""
    return np.asarray(np.exp2(-ages / half_life))


def lengths(
    counts: npt.ArrayLike,
    censored: npt.ArrayLike | None = None,
    ages: npt.ArrayLike | None = None,
    half_life: float = math.inf,
) -> Lengths:
    """From plain lists; ages in seconds. Raises SpecError."""
    values = np.asarray(counts, dtype=np.int64)
    marks = (
        np.zeros(values.size, dtype=bool) if censored is None else np.asarray(censored, dtype=bool)
    )
    weights = (
        np.ones(values.size) if ages is None else weigh(np.asarray(ages, dtype=float), half_life)
    )
    return Lengths(values, marks, weights)
