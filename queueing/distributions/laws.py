"""The named laws of output lengths, before rounding: both tails of each, and the probabilities of
the rounded counts.

A draw X is rounded to the nearest integer, at least 1:

    P(n) = P(n - 1/2 < X <= n + 1/2) for n >= 2,    P(1) = P(X <= 3/2)

Method: the difference is taken in the smaller tail, G(n - 1/2) - G(n + 1/2) above the median and
F(n + 1/2) - F(n - 1/2) below it, so that a probability of 1e-12 keeps its digits at either end.
Every law gives F and G by its own formula, never one as 1 minus the other where that would cancel.
An infinite support ends where the tail mass falls below 1e-12; what is beyond goes to the last
count. A law with more than that beyond 2^20, or with moments that count there, has a tail
(queueing.distributions.heavy_tail) or is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from kendall.policies.text import SpecError
from kendall.queueing.distributions.heavy_tail import MOST_BEYOND, Tail

Vector = npt.NDArray[np.floating[Any]]
SUPPORT_LIMIT = 100_000  # of files of counts, constants and searched token limits
LONGEST = 2**20  # of a named law
TAIL_MASS = 1e-12
# of the second moment, beyond which a power law has a tail however little mass that is
_MISSED = 1e-3


@dataclass(frozen=True, slots=True)
class Law:
    """`below(x)` = P(X <= x) and `above(x)` = P(X > x), each accurate where it is small."""

    below: Callable[[Vector], Vector]
    above: Callable[[Vector], Vector]

    def probabilities(self, counts: Vector) -> Vector:
        """P(n) of the rounded law at each of the counts (>= 1)."""
        left, right = np.where(counts == 1, 0.5, counts - 0.5), counts + 0.5
        above_left = np.where(counts == 1, 1.0, self.above(left))
        below_left = np.where(counts == 1, 0.0, self.below(left))
        return np.where(
            above_left < 0.5, above_left - self.above(right), self.below(right) - below_left
        )

    def at_least(self, counts: Vector) -> Vector:
        """P(N >= n) of the rounded law at each of the counts (>= 1)."""
        return np.where(counts == 1, 1.0, self.above(np.where(counts == 1, 0.5, counts - 0.5)))

    def pmf(self, longest: int) -> Vector:
        """The probability vector over 0, 1, ..., `longest`; what is beyond goes to the last."""
        last = self.at_least(np.array([float(longest)]))
        return np.concatenate([[0.0], self.probabilities(np.arange(1.0, longest)), last])


class TooLongError(SpecError):
    """A law that only a limit makes usable; the message ends where the caller names its own way
    to set one.
    """


def rounded_pmf(law: Law, text: str, cap: int | None) -> Vector:
    """The probability vector over 0, 1, ..., cut at `cap` or where nothing is left. Raises
    TooLongError.
    """
    for most in (SUPPORT_LIMIT, LONGEST):
        limit = most if cap is None else min(cap, most)
        negligible = law.above(np.arange(1, limit + 1) + 0.5) < TAIL_MASS
        if negligible[-1]:
            return law.pmf(int(np.argmax(negligible)) + 1)
        if limit == cap:
            return law.pmf(cap)
    beyond = float(law.above(np.array([LONGEST + 0.5]))[0])
    lacks = ""  # of its moments
    alpha = re.match(r"pareto:.*alpha=([^,]+)", text.strip())
    if alpha is not None and float(alpha[1]) <= 2:
        lacks = " (alpha <= 2: its variance and a mean delay are infinite)"
        if float(alpha[1]) <= 1:
            lacks = " (alpha <= 1: its mean is infinite)"
    exceeds = f"of which a share of {beyond:.2g} exceeds {LONGEST:,} tokens{lacks}"
    raise TooLongError(f"got {text!r}, {exceeds}; expected at most {TAIL_MASS:g}: ")


def tailed_pmf(law: Law, text: str, index: float) -> tuple[Vector, Tail | None]:
    """The same without a cap, with what lies beyond `LONGEST` where that is no more than
    `MOST_BEYOND`; its moments end at `index`.

    Raises TooLongError: more of it there, or no mean.
    """
    if index <= 1:
        raise TooLongError(
            f"got {text!r}, whose mean is infinite (alpha <= 1), as is the load at every arrival "
            "rate; "
        )
    beyond = float(law.above(np.array([LONGEST - 0.5]))[0])
    if 0 < beyond <= MOST_BEYOND and (beyond >= TAIL_MASS or index < math.inf):
        pmf, tail = law.pmf(LONGEST), Tail.of(law.above, LONGEST - 0.5, index)
        if beyond >= TAIL_MASS or tail.moment(2) > _MISSED * float(
            pmf @ np.arange(len(pmf)) ** 2.0
        ):
            return pmf, tail
    return rounded_pmf(law, text, None), None


def _check(holds: bool, text: str, expected: str) -> None:
    if not holds:
        raise SpecError(f"got {text!r}; expected {expected}")


def _deterministic(text: str, value: float) -> Law:
    _check(0 <= value <= SUPPORT_LIMIT, text, f"a value between 0 and {SUPPORT_LIMIT}")
    count = max(1, math.floor(value + 0.5))
    return Law(lambda x: (x >= count).astype(float), lambda x: (x < count).astype(float))


def _uniform(text: str, low: float, high: float) -> Law:
    _check(0 <= low < high < math.inf, text, "0 <= low < high")
    width = high - low
    return Law(
        lambda x: np.clip((x - low) / width, 0.0, 1.0),
        lambda x: np.clip((high - x) / width, 0.0, 1.0),
    )


def _normal(text: str, mean: float, std: float) -> Law:
    _check(math.isfinite(mean) and 0 < std < math.inf, text, "a finite mean and std > 0")
    positive, negative = float(ndtr(mean / std)), float(ndtr(-mean / std))
    _check(positive > 1e-6, text, "a mean that is not far below zero: the law is truncated at 0")

    def below(x: Vector) -> Vector:
        if mean < 0:  # both terms of the other form are near 1
            return np.asarray((positive - ndtr((mean - x) / std)) / positive)
        return np.asarray((ndtr((x - mean) / std) - negative) / positive)

    return Law(below, lambda x: ndtr((mean - x) / std) / positive)


def _lognormal(text: str, mu: float, sigma: float) -> Law:
    _check(math.isfinite(mu) and 0 < sigma < math.inf, text, "a finite mu and sigma > 0")
    return Law(lambda x: ndtr((np.log(x) - mu) / sigma), lambda x: ndtr((mu - np.log(x)) / sigma))


def _exponential(text: str, mean: float) -> Law:
    _check(0 < mean < math.inf, text, "mean > 0")
    return Law(lambda x: -np.expm1(-x / mean), lambda x: np.exp(-x / mean))


def _geometric(text: str, mean: float) -> Law:
    _check(1 <= mean < math.inf, text, "mean >= 1")
    if mean == 1:
        return _deterministic(text, 1.0)
    log_stay = math.log1p(-1 / mean)  # of making one token more
    return Law(
        lambda x: -np.expm1(np.floor(x) * log_stay), lambda x: np.exp(np.floor(x) * log_stay)
    )


def _weibull(text: str, shape: float, scale: float) -> Law:
    _check(0 < shape < math.inf and 0 < scale < math.inf, text, "shape > 0 and scale > 0")

    def hazard(x: Vector) -> Vector:
        with np.errstate(over="ignore"):  # an infinite hazard is a survival of exactly 0
            return np.asarray((x / scale) ** shape)

    return Law(lambda x: -np.expm1(-hazard(x)), lambda x: np.exp(-hazard(x)))


def _pareto(text: str, alpha: float, minimum: float) -> Law:
    _check(0 < alpha < math.inf and 0 < minimum < math.inf, text, "alpha > 0 and minimum > 0")

    def log_above(x: Vector) -> Vector:
        return np.asarray(-alpha * np.log(np.maximum(x, minimum) / minimum))

    return Law(lambda x: -np.expm1(log_above(x)), lambda x: np.exp(log_above(x)))


LAWS: dict[str, Callable[..., Law]] = {
    "deterministic": _deterministic,
    "uniform": _uniform,
    "normal": _normal,
    "lognormal": _lognormal,
    "exponential": _exponential,
    "geometric": _geometric,
    "weibull": _weibull,
    "pareto": _pareto,
}
