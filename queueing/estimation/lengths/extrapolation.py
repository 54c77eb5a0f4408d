"""Lengths beyond the largest limit that was in force: only under a named family, and marked so.

    P(N > n) = S(n)                        up to the limit c that is known (product-limit)
             = S(c - 1) Q(n) / Q(c - 1)    beyond; Q(n) = P(N > n) of the family fitted to all,
                                           clipped ones as "at least"

The family's parameters are those of largest likelihood (queueing.distributions.fit); requests count
alike, whatever their weight. The interval of the mean is a jackknife over groups, each refitted: it
holds what sampling leaves open, NOT that the family may be another one. Compare families by their
AIC, and say "extrapolated" with every number that rests on this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from policies.text import SpecError
from queueing.distributions.fit import FittedDistribution, fit_distribution
from queueing.distributions.token_distribution import TokenDistribution
from queueing.estimation.interval import Estimate, symmetric
from queueing.estimation.lengths.lengths import Lengths

GROUPS = 8


@dataclass(frozen=True, eq=False)
class Extrapolated:
    """The law of min(N, limit), its mean, and what it rests on."""

    law: TokenDistribution
    mean: Estimate
    family: str
    text: str  # the fitted law, distribution grammar
    aic: float
    known_to: int
    mass_beyond: (
        float  # P(N >= known_to): the share of requests whose length is a matter of the family
    )

    @property
    def note(self) -> str:
        """For the list of assumptions."""
        return (
            f"extrapolated: {self.mass_beyond:.0%} of the answers were cut at {self.known_to} "
            f"tokens or later; beyond, {self.text}"
        )


def extrapolate(sample: Lengths, family: str, limit: int, groups: int = GROUPS) -> Extrapolated:
    """Lengths up to `limit`, above what is known. Raises SpecError: too few endings, unknown
    family, or one that cannot fit.
    """
    fitted = _fit(sample, family)
    law = _spliced(sample, fitted, limit)
    return Extrapolated(
        law=law,
        mean=_interval(
            law.mean,
            [part.mean for part in replicates(sample, family, limit, groups)],
            sample.effective_n,
        ),
        family=family,
        text=fitted.text,
        aic=fitted.aic,
        known_to=sample.known_to,
        mass_beyond=float(sample.survival[sample.known_to - 1]),
    )


def replicates(
    sample: Lengths, family: str, limit: int, groups: int = GROUPS
) -> list[TokenDistribution]:
    """The same law from all but one group of the requests, for each group."""
    parts = [sample.without(group, groups) for group in range(groups)]
    return [_spliced(part, _fit(part, family), limit) for part in parts]


def _fit(sample: Lengths, family: str) -> FittedDistribution:
    found = fit_distribution(sample.counts, sample.censored, families=(family,))
    if not found:
        raise SpecError(f"got lengths that no {family} law can have made; expected another family")
    return found[0]


def _spliced(sample: Lengths, fitted: FittedDistribution, limit: int) -> TokenDistribution:
    if limit <= sample.known_to or not sample.unknown_mass:
        return sample.law(limit)
    known = sample.known_to
    tail = fitted.law(limit)
    reach = tail.survival[min(known - 1, tail.longest)]
    if not reach > 0:
        raise SpecError(
            f"got {fitted.text}, which never reaches the {known} tokens that were seen; expected "
            "another family"
        )
    pmf = np.zeros(tail.longest + 1)
    pmf[1:known] = -np.diff(sample.survival[:known])
    pmf[known:] = tail.pmf[known:] / reach * sample.survival[known - 1]
    return TokenDistribution(np.clip(pmf, 0.0, None) / pmf.sum())


def _interval(value: float, parts: list[float], effective_n: float) -> Estimate:
    """Delete-a-group jackknife: Var = (g - 1) / g sum (x_g - mean)^2."""
    groups = len(parts)
    error = math.sqrt((groups - 1) * float(np.var(parts)))
    return symmetric(value, float(stdtrit(groups - 1, 0.975)) * error, effective_n)
