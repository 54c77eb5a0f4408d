"""Lengths that a token limit cut: "at least n". The product-limit estimator on whole counts.

    P(N > n) = prod_{m <= n} (1 - events(m) / at risk(m))        (Kaplan and Meier, 1958)

A clipped count c says N >= c: it is at risk for every count below c, not for c itself. The limits
are estimated the same way with the parts exchanged: a request that ended at n had a limit above n.
With one common limit this gives exactly that limit. Conditions: limits independent of lengths.
Above the largest limit nothing is known: the estimates stop there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kendall.policies.text import SpecError

Vector = npt.NDArray[np.floating[Any]]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Distinct counts in ascending order, and how many requests ended there (`ended`) or were
    clipped there (`clipped`).
    """

    values: Counts
    ended: Counts
    clipped: Counts

    @property
    def size(self) -> int:
        """How many requests."""
        return int(self.ended.sum() + self.clipped.sum())

    def survival(self) -> Vector:
        """Estimated P(N > n) at each of the values."""
        at_risk = self.size - self._before(self.ended) - np.cumsum(self.clipped)
        return _product_limit(self.ended, at_risk)

    def limits(self) -> tuple[Counts, Vector]:
        """Limits that occurred and the estimated probability of each; the rest of the mass is
        "no limit".
        """
        at_risk = self.size - np.cumsum(self.ended) + self.ended - self._before(self.clipped)
        survival = _product_limit(self.clipped, at_risk)
        shares = -np.diff(survival, prepend=1.0)
        return self.values[self.clipped > 0], shares[self.clipped > 0]

    @staticmethod
    def _before(numbers: Counts) -> Counts:
        return np.cumsum(numbers) - numbers


def _product_limit(events: Counts, at_risk: Counts) -> Vector:
    return np.cumprod(np.where(events > 0, 1 - events / np.maximum(at_risk, 1), 1.0))


def sample(counts: npt.ArrayLike, censored: npt.ArrayLike | None = None) -> Sample:
    """The sample of these counts; `censored[i]` marks a clipped one. Raises SpecError."""
    lengths = np.asarray(counts)
    marks = (
        np.zeros(lengths.shape, dtype=bool)
        if censored is None
        else np.asarray(censored, dtype=bool)
    )
    if lengths.ndim != 1 or lengths.size == 0 or marks.shape != lengths.shape:
        raise SpecError(
            f"got counts of shape {lengths.shape} and marks of shape {marks.shape}; expected a "
            "list of each, as long"
        )
    if np.any(lengths < 1) or np.any(lengths != np.floor(lengths)):
        raise SpecError("got a count that is no whole number >= 1; expected output token counts")
    values, index = np.unique(lengths.astype(np.int64), return_inverse=True)
    totals = np.bincount(index, minlength=len(values))
    clipped = np.bincount(index, weights=marks, minlength=len(values)).astype(np.int64)
    return Sample(values, totals - clipped, clipped)


def redraw(law_counts: Counts, of: Sample, rng: np.random.Generator) -> Sample:
    """Drawn lengths clipped at limits drawn as estimated from `of`: what a sample of this law
    would have looked like.
    """
    limits, shares = of.limits()
    if not len(limits):
        return sample(law_counts)
    table = np.append(limits, np.iinfo(np.int64).max)
    drawn = table[np.searchsorted(np.cumsum(shares), rng.random(len(law_counts)), side="right")]
    return sample(np.minimum(law_counts, drawn), law_counts >= drawn)
