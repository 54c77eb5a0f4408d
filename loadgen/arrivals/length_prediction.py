"""Predicted output lengths that may be sent along with a request, with a named error.

    exact                               the true length
    exponential                         exponential with the true length as its mean
    lognormal:sigma=0.5                 true length times exp(sigma Z): the median is right, the
                                        mean exp(sigma^2 / 2) too high
    one_bit:threshold=200,accuracy=0.9  "above the threshold or not", right with probability
                                        `accuracy`

The exponential model is the standard one of the theory of queues with predictions (Mitzenmacher and
Shahout 2025, "Queueing, Predictions, and LLMs: Challenges and Open Problems"), the single bit that
of Mitzenmacher's "Queues with Small Advice" (2021). A bit is sent as a number: half the threshold
for "not above", twice the threshold for "above", whatever the lengths; the numbers carry the bit
and nothing more.

A prediction is a whole number >= 1: a continuous draw is rounded to the nearest. Every model draws
one number per request, so a longer run begins as the shorter one did.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loadgen.arrivals.spec_text import read_spec
from policies.text import SpecError, format_number, parse_number

IntArray = NDArray[np.int64]
LONGEST = 2**53  # tokens: every number up to it is exact
EXAMPLES = {
    "exact": "exact",
    "exponential": "exponential",
    "lognormal": "lognormal:sigma=0.5",
    "one_bit": "one_bit:threshold=200,accuracy=0.9",
}


class LengthPrediction(Protocol):
    """Predicts what a request will make, from what it will truly make."""

    def predict(self, rng: np.random.Generator, output_tokens: IntArray) -> IntArray:
        """One whole number >= 1 per true length; does not modify."""
        ...


@dataclass(frozen=True, slots=True)
class Exact:
    """No error."""

    def predict(self, rng: np.random.Generator, output_tokens: IntArray) -> IntArray:  # noqa: ARG002  the protocol's
        """See `LengthPrediction.predict`."""
        return output_tokens.copy()


@dataclass(frozen=True, slots=True)
class Exponential:
    """Exponential with the true length as its mean."""

    def predict(self, rng: np.random.Generator, output_tokens: IntArray) -> IntArray:
        """See `LengthPrediction.predict`."""
        return _whole(output_tokens * rng.exponential(size=output_tokens.size))


@dataclass(frozen=True, slots=True)
class Lognormal:
    """The true length times exp(sigma Z), Z standard normal."""

    sigma: float

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf:
            raise SpecError(f"got sigma={self.sigma}; expected a number >= 0")

    def predict(self, rng: np.random.Generator, output_tokens: IntArray) -> IntArray:
        """See `LengthPrediction.predict`."""
        with np.errstate(over="ignore"):
            factors = np.exp(self.sigma * rng.standard_normal(output_tokens.size))
            return _whole(output_tokens * factors)


@dataclass(frozen=True, slots=True)
class OneBit:
    """Above `threshold` tokens or not, right with probability `accuracy`; sent as twice or half
    the threshold.
    """

    threshold: int
    accuracy: float

    def __post_init__(self) -> None:
        if self.threshold < 1:
            raise SpecError(
                f"got threshold={self.threshold}; expected a whole number of tokens >= 1"
            )
        if not 0 <= self.accuracy <= 1:
            raise SpecError(f"got accuracy={self.accuracy}; expected a probability")

    def predict(self, rng: np.random.Generator, output_tokens: IntArray) -> IntArray:
        """See `LengthPrediction.predict`."""
        right = rng.random(output_tokens.size) < self.accuracy
        above = (output_tokens > self.threshold) == right
        return np.where(above, 2 * self.threshold, max(self.threshold // 2, 1)).astype(np.int64)


Model = Exact | Exponential | Lognormal | OneBit


def parse_length_prediction(text: str) -> Model:
    """The error model that a text names. Raises SpecError."""
    name, pairs = read_spec(text, "length prediction", EXAMPLES)
    if name == "exact":
        return Exact()
    if name == "exponential":
        return Exponential()
    if name == "lognormal":
        return Lognormal(parse_number("sigma", pairs["sigma"], text))
    threshold = parse_number("threshold", pairs["threshold"], text)
    if not threshold.is_integer():
        raise SpecError(
            f"got threshold={pairs['threshold']} in {text!r}; expected a whole number of tokens "
            ">= 1"
        )
    return OneBit(int(threshold), parse_number("accuracy", pairs["accuracy"], text))


def format_length_prediction(model: Model) -> str:
    """The canonical text."""
    match model:
        case Exact() | Exponential():
            return type(model).__name__.lower()
        case Lognormal():
            return f"lognormal:sigma={format_number(model.sigma)}"
        case OneBit():
            return f"one_bit:threshold={model.threshold},accuracy={format_number(model.accuracy)}"


def _whole(values: NDArray[np.float64]) -> IntArray:
    return np.asarray(np.clip(np.rint(values), 1, LONGEST), dtype=np.int64)
