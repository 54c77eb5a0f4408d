"""How many output tokens a request makes: a probability vector over integer counts, and its text form.

A continuous law is rounded to the nearest integer, at least 1: with survival function G, P(n) = G(n - 1/2) - G(n + 1/2)
for n >= 2 and P(1) = 1 - G(3/2). An infinite support ends where the tail mass falls below 1e-12; what is beyond goes to
the last count. A clip (`max_output_tokens`) is exact: the mass above it goes to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from policies.text import SpecError, parse_number, split_spec, suggest
from queueing.record import read_run

Vector = npt.NDArray[np.floating[Any]]
Survival = Callable[[Vector], Vector]

SUPPORT_LIMIT = 100_000
TAIL_MASS = 1e-12


@dataclass(frozen=True, eq=False)
class TokenDistribution:
    """`pmf[n]` = P(n output tokens); index 0 exists and is zero."""

    pmf: Vector

    def __post_init__(self) -> None:
        pmf = np.asarray(self.pmf, dtype=float)
        if pmf.ndim != 1 or len(pmf) < 2 or not np.all(np.isfinite(pmf)) or np.any(pmf < 0) or pmf[0] != 0:
            raise SpecError(f"got a vector of shape {pmf.shape}; expected probabilities >= 0 of the counts 0, 1, 2, ... with P(0) = 0")
        if abs(float(pmf.sum()) - 1) > 1e-9:
            raise SpecError(f"got probabilities that sum to {pmf.sum():.12g}; expected 1")
        trimmed = np.array(pmf[: int(np.flatnonzero(pmf)[-1]) + 1]) / pmf.sum()
        trimmed.setflags(write=False)
        object.__setattr__(self, "pmf", trimmed)

    @classmethod
    def from_counts(cls, counts: npt.ArrayLike) -> TokenDistribution:
        """The empirical law of the given counts."""
        values = np.asarray(counts)
        if values.size == 0 or np.any(values < 1):
            raise SpecError("got no counts, or one below 1; expected output token counts >= 1")
        occurrences = np.bincount(values.astype(np.int64)).astype(float)
        return cls(occurrences / occurrences.sum())

    @property
    def longest(self) -> int:
        """The largest count that can occur."""
        return len(self.pmf) - 1

    @cached_property
    def counts(self) -> Vector:
        """0, 1, ..., longest."""
        return np.arange(len(self.pmf), dtype=float)

    @cached_property
    def cdf(self) -> Vector:
        """`cdf[n]` = P(at most n tokens)."""
        cumulative = np.cumsum(self.pmf)
        return np.asarray(cumulative / cumulative[-1])

    def clip(self, cap: int) -> TokenDistribution:
        """The law of min(N, cap): the gateway's token limit."""
        if cap < 1:
            raise SpecError(f"got a token limit of {cap}; expected at least 1")
        if cap >= self.longest:
            return self
        return TokenDistribution(np.append(self.pmf[:cap], self.pmf[cap:].sum()))

    def maximum(self, batch_size: int) -> TokenDistribution:
        """The law of the longest of `batch_size` independent sequences: P(max <= n) = P(N <= n)^batch_size."""
        return self if batch_size == 1 else TokenDistribution(np.diff(self.cdf**batch_size, prepend=0.0))

    def moment(self, k: int) -> float:
        """E[N^k]."""
        return float(self.pmf @ self.counts**k)

    @property
    def mean(self) -> float:
        """E[N]."""
        return self.moment(1)

    @property
    def variance(self) -> float:
        """Var N, from centred counts: no cancellation."""
        return float(self.pmf @ (self.counts - self.mean) ** 2)

    @property
    def scv(self) -> float:
        """Squared coefficient of variation, Var N / E[N]^2."""
        return self.variance / self.mean**2

    def quantile(self, q: float) -> int:
        """The smallest n with P(N <= n) >= q."""
        if not 0 <= q <= 1:
            raise SpecError(f"got quantile {q}; expected a probability between 0 and 1")
        return max(1, int(np.searchsorted(self.cdf, q - 1e-15)))

    def sample(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int64]:
        """`size` independent counts, by inversion: one uniform number each."""
        return np.searchsorted(self.cdf, rng.random(size), side="right").astype(np.int64)


def parse_distribution(text: str, max_output_tokens: int | None = None) -> TokenDistribution:
    """The law that a text names, clipped. Raises SpecError: unknown name or key, value out of range, support too long."""
    name, pairs = split_spec(text)
    if name not in _KEYS:
        raise SpecError(f"unknown distribution {name!r}; expected one of {', '.join(_KEYS)}{suggest(name, tuple(_KEYS))}")
    for key in pairs:
        if key not in _KEYS[name]:
            raise SpecError(f"distribution {name} has no key {key!r}; its keys are {', '.join(_KEYS[name])}{suggest(key, _KEYS[name])}")
    for key in _KEYS[name]:
        if key not in pairs:
            raise SpecError(f"distribution {name} needs {key}, for example {_EXAMPLES[name]}")
    if max_output_tokens is not None and max_output_tokens < 1:
        raise SpecError(f"got max_output_tokens={max_output_tokens}; expected at least 1")
    if name == "empirical":
        law = TokenDistribution.from_counts(_read_counts(Path(pairs["path"])))
        return law if max_output_tokens is None else law.clip(max_output_tokens)
    numbers = [parse_number(key, pairs[key], text) for key in _KEYS[name]]
    return _rounded(_LAWS[name](text, *numbers), text, max_output_tokens)


def _rounded(survival: Survival, text: str, cap: int | None) -> TokenDistribution:
    longest = _longest(survival, text, cap)
    above = survival(np.arange(1, longest) + 0.5)  # P(count > n) for n = 1 .. longest - 1
    return TokenDistribution(np.append(0.0, -np.diff(above, prepend=1.0, append=0.0)))


def _longest(survival: Survival, text: str, cap: int | None) -> int:
    limit = SUPPORT_LIMIT if cap is None else min(cap, SUPPORT_LIMIT)
    negligible = survival(np.arange(1, limit + 1) + 0.5) < TAIL_MASS
    if negligible[-1]:
        return int(np.argmax(negligible)) + 1
    if cap is None or cap > SUPPORT_LIMIT:
        raise SpecError(f"got {text!r}, whose counts exceed {SUPPORT_LIMIT}; expected shorter outputs: set --max-output-tokens")
    return cap


def _check(holds: bool, text: str, expected: str) -> None:
    if not holds:
        raise SpecError(f"got {text!r}; expected {expected}")


def _deterministic(text: str, value: float) -> Survival:
    _check(0 <= value <= SUPPORT_LIMIT, text, f"a value between 0 and {SUPPORT_LIMIT}")
    count = max(1, math.floor(value + 0.5))
    return lambda x: (x < count).astype(float)


def _uniform(text: str, low: float, high: float) -> Survival:
    _check(0 <= low < high < math.inf, text, "0 <= low < high")
    return lambda x: np.clip((high - x) / (high - low), 0.0, 1.0)


def _normal(text: str, mean: float, std: float) -> Survival:
    _check(math.isfinite(mean) and 0 < std < math.inf, text, "a finite mean and std > 0")
    positive = float(ndtr(mean / std))
    _check(positive > 1e-6, text, "a mean that is not far below zero: the law is truncated at 0")
    return lambda x: ndtr((mean - x) / std) / positive


def _lognormal(text: str, mu: float, sigma: float) -> Survival:
    _check(math.isfinite(mu) and 0 < sigma < math.inf, text, "a finite mu and sigma > 0")
    return lambda x: ndtr((mu - np.log(x)) / sigma)


def _exponential(text: str, mean: float) -> Survival:
    _check(0 < mean < math.inf, text, "mean > 0")
    return lambda x: np.exp(-x / mean)


def _geometric(text: str, mean: float) -> Survival:
    _check(1 <= mean < math.inf, text, "mean >= 1")
    return lambda x: (1 - 1 / mean) ** np.floor(x)


def _weibull(text: str, shape: float, scale: float) -> Survival:
    _check(0 < shape < math.inf and 0 < scale < math.inf, text, "shape > 0 and scale > 0")
    return lambda x: np.exp(-((x / scale) ** shape))


def _pareto(text: str, alpha: float, minimum: float) -> Survival:
    _check(0 < alpha < math.inf and 0 < minimum < math.inf, text, "alpha > 0 and minimum > 0")
    return lambda x: (minimum / np.maximum(x, minimum)) ** alpha


_LAWS: dict[str, Callable[..., Survival]] = {
    "deterministic": _deterministic,
    "uniform": _uniform,
    "normal": _normal,
    "lognormal": _lognormal,
    "exponential": _exponential,
    "geometric": _geometric,
    "weibull": _weibull,
    "pareto": _pareto,
}
_EXAMPLES = {
    "deterministic": "deterministic:value=128",
    "uniform": "uniform:low=0,high=1000",
    "normal": "normal:mean=800,std=20",
    "lognormal": "lognormal:mu=7,sigma=0.7",
    "exponential": "exponential:mean=200",
    "geometric": "geometric:mean=200",
    "weibull": "weibull:shape=1.5,scale=200",
    "pareto": "pareto:alpha=2.5,minimum=20",
    "empirical": "empirical:path=counts.txt",
}
_KEYS = {name: tuple(split_spec(example)[1]) for name, example in _EXAMPLES.items()}


def _read_counts(path: Path) -> list[int]:
    """One count per line, or the output tokens of a run file."""
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):
            counts = [record.output_tokens for record in read_run(path)[1]]
            return [count for count in counts if count]  # a request that made no token has no length to learn from
        return [int(line) for line in text.split()]
    except OSError as error:
        raise SpecError(f"got path={path}: {error.strerror}; expected a file with one count per line, or a run file") from None
    except ValueError as error:
        raise SpecError(f"got path={path}: {error}; expected one whole number per line, or a run file") from None
