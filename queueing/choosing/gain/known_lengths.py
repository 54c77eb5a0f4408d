"""How long answers are under any token limit: as far as the window tells, and beyond that only
under a named family.

    P(N > n)    product-limit up to the largest count k that is known
                (queueing.estimation.lengths.lengths)

What is known to go beyond k stands at k + 1, so that min(N, n), and the share that a limit n cuts,
are right for every n <= k (for n < k). Beyond k, up to `MOST` tokens,

    P(N > n) = S(k - 1) Q(n) / Q(k - 1)    Q(n) = P(N > n) of the family fitted to all requests,
                                           those that were cut as "at least"

The family's parameters are those of largest likelihood (queueing.distributions.fit); requests count
alike, whatever their weight. What sampling leaves open is not that the family may be another one:
`note` goes with every number that rests on this.

`parts` are the same law from a fifth of the requests each: what a quantity scatters over them, over
sqrt 5, is what the sample leaves open. A fit needs more than a fifth: under a family they are all
but an eighth each (delete-a-group jackknife). Small parts scatter more, so less is lost in a
simulation's noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kendall.policies.text import SpecError, suggest
from kendall.queueing.distributions.fit import FAMILIES, FittedDistribution, fit_distribution
from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.errors import NotConvergedError
from kendall.queueing.estimation.lengths.lengths import Lengths

GROUPS, REFITTED = 5, 8
FEWEST = 10 * GROUPS  # requests
MOST = 32_768  # tokens


@dataclass(frozen=True, eq=False, kw_only=True)
class KnownLengths:
    """Lengths without the gateway's limit, their clients' own limits kept."""

    whole: TokenDistribution
    parts: tuple[TokenDistribution, ...]
    to_error: float  # standard error of the whole over the standard deviation of the parts
    known_to: float  # the largest limit that the window tells; infinite where it tells all
    # the largest limit that may be asked: infinite where all is known, or a family goes on
    reach: float
    # where a family was asked for: "extrapolated: ...", or why it could not be fitted
    note: str = ""

    def refusal(self, limit: int | None) -> str | None:
        """Why nothing is said of that limit, and what to do; None where something is."""
        if _number(limit) <= self.reach:
            return None
        asked = "without a token limit" if limit is None else f"at the token limit {limit}"
        cure = self.note or (
            "name a family for the longer ones (family=lognormal), or let a larger limit be in "
            "force for a while"
        )
        return (
            f"nothing is known {asked}: limits so far say no more than how many answers go "
            f"beyond {self.known_to:.0f} tokens; {cure}"
        )

    def notes(self, limit: int | None) -> tuple[str, ...]:
        """What an answer at that limit rests on beside the window."""
        return (self.note,) if self.known_to < _number(limit) <= self.reach else ()

    def law(self, limit: int | None) -> TokenDistribution:
        """The law of min(N, limit)."""
        return self.whole if limit is None else self.whole.clip(limit)

    def clipped_fraction(self, limit: int | None) -> float | None:
        """P(N > limit); None where it is not known."""
        if limit is None:
            return 0.0 if math.isinf(self.reach) else None
        if limit >= self.reach:
            return None
        return float(self.whole.survival[min(limit, self.whole.longest)])


def known_lengths(sample: Lengths, family: str | None = None) -> KnownLengths | None:
    """None where there are fewer than `FEWEST` lengths. Raises SpecError for a name that is no
    family.
    """
    if family is not None and family not in FAMILIES:
        raise SpecError(
            f"got family {family!r}; expected one of "
            f"{', '.join(FAMILIES)}{suggest(family, FAMILIES)}"
        )
    if sample.counts.size < FEWEST:
        return None
    note = ""
    if sample.unknown_mass and family is not None:
        try:
            return _extrapolated(sample, family)
        except (SpecError, NotConvergedError) as error:
            note = f"the family {family} could not be fitted: {error}"
    known = float(sample.known_to) if sample.unknown_mass else math.inf
    return KnownLengths(
        whole=_as_seen(sample),
        parts=tuple(_as_seen(sample.only(group, GROUPS)) for group in range(GROUPS)),
        to_error=GROUPS**-0.5,
        known_to=known,
        reach=known,
        note=note,
    )


def _extrapolated(sample: Lengths, family: str) -> KnownLengths:
    """Beyond the largest known count, by the fitted law of a family."""
    fitted = _fit(sample, family)
    rests = [sample.without(group, REFITTED) for group in range(REFITTED)]
    cut, known = float(sample.survival[sample.known_to - 1]), sample.known_to
    return KnownLengths(
        whole=_spliced(sample, fitted),
        parts=tuple(_spliced(rest, _fit(rest, family)) for rest in rests),
        to_error=(REFITTED - 1) * REFITTED**-0.5,
        known_to=float(known),
        reach=math.inf,
        note=f"extrapolated: {cut:.0%} of the answers were cut at {known} tokens or later; "
        f"beyond, {fitted.text}",
    )


def _fit(sample: Lengths, family: str) -> FittedDistribution:
    found = fit_distribution(sample.counts, sample.censored, families=(family,))
    if not found:
        raise SpecError(f"got lengths that no {family} law can have made; expected another family")
    return found[0]


def _spliced(sample: Lengths, fitted: FittedDistribution) -> TokenDistribution:
    """The known part, and beyond it the fitted one."""
    if not sample.unknown_mass:
        return sample.law(MOST)
    known, tail = sample.known_to, fitted.law(MOST)
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


def _as_seen(sample: Lengths) -> TokenDistribution:
    if not sample.unknown_mass:
        return sample.law()
    pmf = np.append(-np.diff(sample.survival, prepend=1.0), sample.survival[-1])
    return TokenDistribution(np.clip(pmf, 0.0, None) / pmf.sum())


def _number(limit: int | None) -> float:
    return math.inf if limit is None else float(limit)
