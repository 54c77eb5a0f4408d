"""The text of a predictor of output lengths, `name[:key=value{,key=value}]`:

    none                        no prediction: every request counts as the longest
    exact                       the true length
    exponential                 exponential with the true length as its mean
    lognormal:sigma=0.5         true length times exp(sigma Z)
    uniform:low=0.5,high=1.5    true length times a number uniform between the two: bounded noise
    onebit:threshold=200        above the threshold or not; right with probability `accuracy`
                                (default 1), told as half or twice the threshold; or the two errors
                                apart: `miss_short` of a short length, `miss_long` of a long one
    joint:path=pairs.csv        as in the pairs of a file (`predictors.pairs`): the prediction of
                                one whose true length is the nearest, times true over its true

Lengths in tokens, after clipping; a prediction is a whole number of tokens >= 1. Laws:
`predictors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kendall.policies.core import Policy
from kendall.policies.ordered import order_of
from kendall.policies.text import (
    SpecError,
    check_keys,
    check_text,
    format_number,
    order_text,
    parse_number,
    split_spec,
    suggest,
)
from kendall.queueing.predictors.pairs import read_pairs

EXAMPLES = {
    "none": "none",
    "exact": "exact",
    "exponential": "exponential",
    "lognormal": "lognormal:sigma=0.5",
    "uniform": "uniform:low=0.5,high=1.5",
    "onebit": "onebit:threshold=200,accuracy=0.9",
    "joint": "joint:path=pairs.csv",
}
LARGEST = 1_000_000  # times the true length
_MISSES = ("miss_short", "miss_long")
_OPTIONAL = ("accuracy", *_MISSES)
EXPECTED = (
    "none, exact, exponential, lognormal:sigma=0.5, uniform:low=0.5,high=1.5, "
    "onebit:threshold=200 or joint:path=FILE"
)
_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "sigma": (lambda value: 0 <= value < math.inf, "a number >= 0"),
    "threshold": (lambda value: value >= 1, "tokens >= 1"),
    "low": (lambda value: 0 <= value < LARGEST, "a number >= 0"),
    "high": (lambda value: 0 < value <= LARGEST, f"a number > 0, at most {LARGEST:,}"),
    **dict.fromkeys(_OPTIONAL, (lambda value: 0 <= value <= 1, "a probability")),
}


@dataclass(frozen=True, slots=True)
class PredictorText:
    """A predictor, taken apart; `threshold` in tokens. Raises SpecError."""

    name: str = "none"
    sigma: float = 0.0
    threshold: int = 1
    accuracy: float = 1.0
    miss_short: float | None = None  # None: 1 - accuracy, as `miss_long`
    miss_long: float | None = None
    low: float = 0.0
    high: float = 1.0
    path: str = ""

    def __post_init__(self) -> None:
        if self.name not in EXAMPLES:
            raise SpecError(
                f"got predictor {self.name!r}; expected one of "
                f"{', '.join(EXAMPLES)}{suggest(self.name, EXAMPLES)}"
            )
        for key, (within, expected) in _RANGES.items():
            value = getattr(self, key)
            if value is not None and not within(value):
                raise SpecError(f"got {key}={format_number(value)}; expected {expected}")
        if self.low >= self.high:
            raise SpecError(
                f"got low={format_number(self.low)} and high={format_number(self.high)}; "
                "expected low below high"
            )

    @property
    def misses(self) -> tuple[float, float]:
        """The share of short lengths that one bit predicts long, and of long ones that it predicts
        short.
        """
        wrong = 1 - self.accuracy
        short, long = self.miss_short, self.miss_long
        return wrong if short is None else short, wrong if long is None else long

    def __str__(self) -> str:
        keys: dict[str, object] = {}
        if self.name == "lognormal":
            keys = {"sigma": self.sigma}
        elif self.name == "uniform":
            keys = {"low": self.low, "high": self.high}
        elif self.name == "joint":
            keys = {"path": self.path}
        elif self.name == "onebit":
            right = {} if self.accuracy == 1 else {"accuracy": self.accuracy}
            missed = {key: getattr(self, key) for key in _MISSES if getattr(self, key) is not None}
            keys = {"threshold": self.threshold, **right, **missed}
        told = ",".join(
            f"{key}={format_number(value) if isinstance(value, float) else value}"
            for key, value in keys.items()
        )
        return f"{self.name}:{told}" if told else self.name


NO_PREDICTION = PredictorText()


def without_predictor(policies: Iterable[Policy]) -> str | None:
    """A warning where an order goes by predicted lengths and nothing predicts them."""
    reading = dict.fromkeys(order_text(each) for each in policies if order_of(each).predicts)
    if not reading:
        return None
    return (
        f"got --predictor none for the order{'' if len(reading) == 1 else 's'} "
        f"{', '.join(reading)}; expected one, for example lognormal:sigma=0.5: without predicted "
        "lengths every request counts as the longest"
    )


def parse_predictor(text: str) -> PredictorText:
    """Raises SpecError: no text, unknown or missing name or key, value out of range."""
    check_text("predictor", text, EXAMPLES["lognormal"])
    if not text.strip():
        raise SpecError(f"got an empty predictor; expected {EXPECTED}")
    name, pairs = split_spec(text, EXAMPLES)
    PredictorText(name)  # is known
    keys = (*split_spec(EXAMPLES[name])[1], *(_MISSES if name == "onebit" else ()))
    check_keys(pairs, keys, f"predictor {name}")
    for key in keys:
        if key not in pairs and key not in _OPTIONAL:
            raise SpecError(f"got {text!r}; expected {key} too, for example {EXAMPLES[name]}")
    if name == "joint":
        read_pairs(pairs["path"])
        return PredictorText(name, path=pairs["path"])
    return PredictorText(name, **_numbers(pairs, text))


def _numbers(pairs: dict[str, str], text: str) -> dict[str, Any]:
    numbers: dict[str, Any] = {key: parse_number(key, value, text) for key, value in pairs.items()}
    if "accuracy" in pairs and any(key in pairs for key in _MISSES):
        raise SpecError(
            f"got {text!r}; expected accuracy, or miss_short and miss_long, which are its two parts"
        )
    if not numbers.get("threshold", 1.0).is_integer():
        raise SpecError(
            f"got threshold={pairs['threshold']} in {text!r}; expected a whole number of tokens "
            ">= 1"
        )
    if "threshold" in numbers:
        numbers["threshold"] = int(numbers["threshold"])
    return numbers
