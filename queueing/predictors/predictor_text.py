"""The text of a predictor of output lengths, `name[:key=value{,key=value}]`:

    none                        no prediction: every request counts as the longest
    exact                       the true length
    exponential                 exponential with the true length as its mean
    lognormal:sigma=0.5         true length times exp(sigma Z)
    onebit:threshold=200        above the threshold or not; right with probability `accuracy`
                                (default 1), told as half or twice the threshold

Lengths in tokens, after clipping; a prediction is a whole number of tokens >= 1. Laws:
`predictors`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kendall.policies.core import Policy
from kendall.policies.ordered import order_of
from kendall.policies.text import (
    SpecError,
    check_text,
    format_number,
    order_text,
    parse_number,
    split_spec,
    suggest,
)

EXAMPLES = {
    "none": "none",
    "exact": "exact",
    "exponential": "exponential",
    "lognormal": "lognormal:sigma=0.5",
    "onebit": "onebit:threshold=200,accuracy=0.9",
}
OPTIONAL = ("accuracy",)
EXPECTED = "none, exact, exponential, lognormal:sigma=0.5 or onebit:threshold=200"


@dataclass(frozen=True, slots=True)
class PredictorText:
    """A predictor, taken apart; `threshold` in tokens."""

    name: str = "none"
    sigma: float = 0.0
    threshold: int = 1
    accuracy: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in EXAMPLES:
            raise SpecError(
                f"got predictor {self.name!r}; expected one of "
                f"{', '.join(EXAMPLES)}{suggest(self.name, EXAMPLES)}"
            )
        if not 0 <= self.sigma < math.inf:
            raise SpecError(f"got sigma={format_number(self.sigma)}; expected a number >= 0")
        if self.threshold < 1:
            raise SpecError(f"got threshold={self.threshold}; expected tokens >= 1")
        if not 0 <= self.accuracy <= 1:
            raise SpecError(f"got accuracy={format_number(self.accuracy)}; expected a probability")

    def __str__(self) -> str:
        match self.name:
            case "lognormal":
                return f"lognormal:sigma={format_number(self.sigma)}"
            case "onebit":
                right = "" if self.accuracy == 1 else f",accuracy={format_number(self.accuracy)}"
                return f"onebit:threshold={self.threshold}{right}"
            case _:
                return self.name


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
    keys = tuple(split_spec(EXAMPLES[name])[1])
    for key in pairs:
        if key not in keys:
            raise SpecError(
                f"got key {key!r} for predictor {name}; expected {', '.join(keys) or 'no key'}"
                f"{suggest(key, keys)}"
            )
    for key in keys:
        if key not in pairs and key not in OPTIONAL:
            raise SpecError(f"got {text!r}; expected {key} too, for example {EXAMPLES[name]}")
    numbers = {key: parse_number(key, value, text) for key, value in pairs.items()}
    if not numbers.get("threshold", 1.0).is_integer():
        raise SpecError(
            f"got threshold={pairs['threshold']} in {text!r}; expected a whole number of tokens "
            ">= 1"
        )
    return PredictorText(
        name,
        numbers.get("sigma", 0.0),
        int(numbers.get("threshold", 1)),
        numbers.get("accuracy", 1.0),
    )
