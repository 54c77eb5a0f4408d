"""How many output tokens a request makes: a probability vector over integer counts.

Upper tails keep their relative accuracy: `survival` is summed from the top, and the longest of a
batch is computed from the probabilities themselves, not from differences of powers of the
distribution function. A clip (`max_output_tokens`) is
exact: the mass above it goes to it. How a continuous law is rounded:
queueing/distributions/laws.py; the text form:
queueing/distributions/text.py; files of counts: queueing/distributions/files.py; a tail beyond the
table: queueing/distributions/heavy_tail.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kendall.policies.arguments import whole_number
from kendall.policies.text import SpecError, counted
from kendall.queueing.distributions.files import read_counts
from kendall.queueing.distributions.heavy_tail import Tail
from kendall.queueing.distributions.laws import (
    LAWS,
    SUPPORT_LIMIT,
    TAIL_MASS,
    TooLongError,
    Vector,
    rounded_pmf,
    tailed_pmf,
)
from kendall.queueing.distributions.text import DistributionText, format_distribution, read_text

# what to do about a law whose tail is too long: where the command has this option, and where it has
# none
SET_LIMIT, SHORTER = "set max_output_tokens", "choose a law of shorter lengths"

__all__ = [
    "SUPPORT_LIMIT",
    "TAIL_MASS",
    "TokenDistribution",
    "Vector",
    "format_distribution",
    "parse_distribution",
]


@dataclass(frozen=True, eq=False)
class TokenDistribution:
    """`pmf[n]` = P(n output tokens); index 0 exists and is zero. With a tail the last holds
    P(that many or more).
    """

    pmf: Vector
    tail: Tail | None = None

    def __post_init__(self) -> None:
        pmf = np.asarray(self.pmf, dtype=float)
        if (
            pmf.ndim != 1
            or len(pmf) < 2
            or not np.all(np.isfinite(pmf))
            or np.any(pmf < 0)
            or pmf[0] != 0
        ):
            raise SpecError(
                f"got a vector of shape {pmf.shape}; expected probabilities >= 0 of the counts 0, "
                "1, 2, ... with P(0) = 0"
            )
        if abs(float(pmf.sum()) - 1) > 1e-9:
            raise SpecError(f"got probabilities that sum to {pmf.sum():.12g}; expected 1")
        trimmed = np.array(pmf[: int(np.flatnonzero(pmf)[-1]) + 1]) / pmf.sum()
        trimmed.setflags(write=False)
        object.__setattr__(self, "pmf", trimmed)

    @classmethod
    def from_counts(cls, counts: npt.ArrayLike) -> TokenDistribution:
        """The empirical law of the given counts."""
        values = np.asarray(counts)
        if values.size == 0:
            raise SpecError("got no counts; expected at least one whole number >= 1")
        if (wrong := values[~((values >= 1) & (values == np.floor(values)))]).size:
            raise SpecError(f"got the count {wrong.flat[0]:g}; expected whole numbers >= 1")
        occurrences = np.bincount(values.astype(np.int64)).astype(float)
        return cls(occurrences / occurrences.sum())

    @classmethod
    def mixture(
        cls, weights: Sequence[float], parts: Sequence[TokenDistribution]
    ) -> TokenDistribution:
        """The law of a request that is of kind i with probability `weights[i]` and then follows
        `parts[i]`.
        """
        if (
            not parts
            or len(weights) != len(parts)
            or not all(weight > 0 for weight in weights)
            or abs(sum(weights) - 1) > 1e-9
        ):
            raise SpecError(
                f"got the weights {list(weights)} for {counted(len(parts), 'law')}; expected one "
                "> 0 for each, with sum 1"
            )
        pmf = np.zeros(max(part.longest for part in parts) + 1)
        for weight, part in zip(weights, parts, strict=True):
            pmf[: part.longest + 1] += weight * part.pmf
        tails = {
            part.tail: weight
            for weight, part in zip(weights, parts, strict=True)
            if part.tail is not None
        }
        return cls(pmf, Tail.mixture(list(tails.values()), list(tails)) if tails else None)

    @property
    def longest(self) -> int:
        """The largest count that can occur, or where the tail begins."""
        return len(self.pmf) - 1

    @cached_property
    def shortest(self) -> int:
        """The smallest count that can occur."""
        return int(np.flatnonzero(self.pmf)[0])

    @cached_property
    def counts(self) -> Vector:
        """0, 1, ..., longest."""
        return np.arange(len(self.pmf), dtype=float)

    @cached_property
    def cdf(self) -> Vector:
        """`cdf[n]` = P(at most n tokens); relative accuracy in the lower tail."""
        cumulative = np.cumsum(self.pmf)
        return np.asarray(cumulative / cumulative[-1])

    @cached_property
    def survival(self) -> Vector:
        """`survival[n]` = P(more than n tokens); relative accuracy in the upper tail."""
        return np.append(np.cumsum(self.pmf[:0:-1])[::-1], 0.0)

    @cached_property
    def utilities(self) -> Vector:
        """E[min(1, n / N)] for n = 0 .. longest, the share of an answer that a limit of n leaves:
        P(N <= n) + n E[1/N; N > n].
        """
        inverse = np.zeros(len(self.pmf))
        inverse[1:] = self.pmf[1:] / self.counts[1:]
        beyond = np.append(np.cumsum(inverse[::-1])[::-1][1:], 0.0)
        return np.asarray(self.cdf + self.counts * beyond, dtype=np.float64)

    def clip(self, cap: int) -> TokenDistribution:
        """The law of min(N, cap): the gateway's token limit."""
        if cap < 1:
            raise SpecError(f"got a token limit of {cap}; expected at least 1")
        if cap > self.longest and self.tail is not None:
            raise SpecError(
                f"got a token limit of {cap} for lengths with a tail beyond {self.longest}; "
                "expected a limit up to there, or none"
            )
        if cap >= self.longest:
            return self if self.tail is None else TokenDistribution(self.pmf)
        return TokenDistribution(np.append(self.pmf[:cap], self.pmf[cap:].sum()))

    def maximum(self, batch_size: int) -> TokenDistribution:
        """The law of the longest of `batch_size` independent sequences.

        P(max = n) = F(n)^b - F(n-1)^b = F(n)^b (1 - (1 - P(n)/F(n))^b): no difference of near
        numbers at either end.
        """
        if batch_size < 1:
            raise SpecError(f"got a batch of {batch_size}; expected at least 1")
        if batch_size == 1:
            return self
        first, log_cdf, log_share = self._logs
        pmf = -np.exp(batch_size * log_cdf) * np.expm1(batch_size * log_share)
        tail = None if self.tail is None else self.tail.largest_of(batch_size)
        return TokenDistribution(np.concatenate([np.zeros(first), pmf]), tail)

    @cached_property
    def _logs(self) -> tuple[int, Vector, Vector]:
        """The first count there is; from it on, log F(n) and log(1 - P(n) / F(n))."""
        below = np.cumsum(
            self.pmf
        )  # not normalised: the share of a count in it is then at most 1 exactly
        first = int(np.flatnonzero(self.pmf)[0])
        share = self.pmf[first:] / below[first:]
        lower, upper = self.cdf[first:], self.survival[first:]
        with np.errstate(
            divide="ignore"
        ):  # the shortest count has share 1: log 0, whose power is 0 exactly
            log_share = np.log1p(-share)
        log_cdf = np.where(upper > 0.5, np.log(lower), np.log1p(-np.minimum(upper, 0.5)))
        return first, log_cdf, log_share

    def moment(self, k: int) -> float:
        """E[N^k]."""
        if self.tail is not None:
            return float(self.pmf[:-1] @ self.counts[:-1] ** k) + self.tail.moment(k)
        return float(self.pmf @ self.counts**k)

    @cached_property
    def mean(self) -> float:
        """E[N]."""
        return self.moment(1)

    @cached_property
    def variance(self) -> float:
        """Var N, from centred counts: no cancellation."""
        mean = self.mean
        if self.tail is not None:
            within = float(self.pmf[:-1] @ (self.counts[:-1] - mean) ** 2)
            return (
                within
                + self.tail.moment(2)
                - 2 * mean * self.tail.moment(1)
                + mean**2 * self.tail.moment(0)
            )
        return float(self.pmf @ (self.counts - mean) ** 2)

    @property
    def scv(self) -> float:
        """Squared coefficient of variation, Var N / E[N]^2."""
        return self.variance / self.mean**2

    def quantile(self, q: float) -> int:
        """The smallest n with P(N <= n) >= q, searched in the smaller tail: exact for 1 - 1e-12
        too.
        """
        if not 0 <= q <= 1:
            raise SpecError(f"got quantile {q}; expected a probability between 0 and 1")
        if self.tail is not None and 1 - q < self.pmf[-1]:
            return int(self.tail.counts(np.array([1 - q]))[0])
        if q <= 0.5:
            return max(1, int(np.searchsorted(self.cdf, q - 1e-15)))
        return max(1, int(np.searchsorted(-self.survival, -(1 - q) - 1e-15)))

    def sample(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int64]:
        """`size` independent counts, by inversion: one uniform number each."""
        uniforms = rng.random(size)
        return self.with_tail(
            np.searchsorted(self.cdf, uniforms, side="right").astype(np.int64), uniforms
        )

    def with_tail(self, counts: npt.NDArray[np.int64], uniforms: Vector) -> npt.NDArray[np.int64]:
        """Counts found in the table by these uniform numbers, in place: those at its end are
        what the tail has there.
        """
        if self.tail is not None:
            beyond = counts >= self.longest
            counts[beyond] = self.tail.counts(1 - uniforms[beyond])
        return counts


def parse_distribution(
    text: str, max_output_tokens: int | None = None, *, tail: bool = False, remedy: str = SET_LIMIT
) -> TokenDistribution:
    """The law that a text names, clipped; without a clip with its `tail`, for those who can carry
    one.

    Raises SpecError: unknown name or key, value out of range, support too long; `remedy` says what
    to do about that, in the words of the command.
    """
    if max_output_tokens is not None:
        max_output_tokens = whole_number("max_output_tokens", max_output_tokens)
    try:
        return _build(
            read_text(text), text, max_output_tokens, tail=tail and max_output_tokens is None
        )
    except TooLongError as error:
        raise SpecError(f"{error}{remedy}") from None


def _build(spec: DistributionText, text: str, cap: int | None, *, tail: bool) -> TokenDistribution:
    if spec.parts:
        return TokenDistribution.mixture(
            spec.numbers, [_build(part, str(part), cap, tail=tail) for part in spec.parts]
        )
    if spec.path is not None:
        counts = read_counts(Path(spec.path))
        kept = counts if cap is None else [min(count, cap) for count in counts]
        if kept and max(kept) > SUPPORT_LIMIT:
            raise TooLongError(
                f"got {text!r}, whose counts exceed {SUPPORT_LIMIT:,}; expected shorter lengths: "
            )
        return TokenDistribution.from_counts(kept)
    law = LAWS[spec.name](text, *spec.numbers)
    if tail:
        return TokenDistribution(
            *tailed_pmf(law, text, spec.numbers[0] if spec.name == "pareto" else math.inf)
        )
    return TokenDistribution(rounded_pmf(law, text, cap))
