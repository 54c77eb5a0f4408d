"""What a prediction of an output length costs, as a text:

    2ms, external=2ms      predicted outside of the engine: the request joins the queue so much
                           later
    server=2ms             predicted by the engine, which serves nobody meanwhile
    server=8tokens         so long as the engine takes for so many tokens of one request alone
    server=2ms,bit=0.5ms   a bit, whether the length is above a threshold, costs less than a length

Who pays what, under an order of service (`policies.orders`):

    threshold, threshold-preemptive  every request a bit; without `bit` a length
    skippredict                      every request a bit; those predicted long a length too
    delaypredict                     those that outlive `limit` tokens a length
    others by predicted lengths      every request a length
    others                           nobody

Source: Shahout and Mitzenmacher, SkipPredict: when to invest in predictions for scheduling (2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kendall.policies.durations import parse_duration
from kendall.policies.orders.order import Form
from kendall.policies.text import (
    SpecError,
    check_keys,
    check_text,
    format_number,
    parse_number,
    short_number,
    split_pairs,
)
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.predictors.laws import Predictor

EXPECTED = "a duration such as 2ms, external=2ms, server=2ms or server=8tokens, and ,bit=0.5ms"
TOKENS = "tokens"
_PLACES = ("external", "server")
_KEYS = (*_PLACES, "bit")


@dataclass(frozen=True, slots=True)
class PredictionCost:
    """`length` of a predicted length and `bit` of a bit, in `unit`; None: not given. Raises
    SpecError.
    """

    length: float
    bit: float | None = None
    place: Literal["external", "server"] = "external"
    unit: Literal["seconds", "tokens"] = "seconds"

    def __post_init__(self) -> None:
        for key, value in ((self.place, self.length), ("bit", self.bit)):
            if value is not None and not 0 <= value < math.inf:
                raise SpecError(
                    f"got a prediction cost of {key}={format_number(value)}; expected finite "
                    f"{self.unit} >= 0"
                )
        if self.place == "external" and self.unit == TOKENS:
            raise SpecError(
                "got an external prediction cost in tokens; expected a duration such as "
                "external=2ms: only the engine's time is told in tokens"
            )

    def __str__(self) -> str:
        suffix = TOKENS if self.unit == TOKENS else ""
        given = {self.place: self.length, "bit": self.bit}
        return ",".join(
            f"{key}={format_number(value)}{suffix}"
            for key, value in given.items()
            if value is not None
        )

    def under(self, form: Form, step: float) -> PaidPredictions:
        """Under an order by predicted lengths, on an engine that takes `step` seconds for a token
        of one request alone.
        """
        unit = step if self.unit == TOKENS else 1.0
        length, bit = unit * self.length, None if self.bit is None else unit * self.bit
        if form.first_up_to is not None:
            return PaidPredictions(bit or 0.0, length, above=form.first_up_to)
        if form.first_tokens:
            return PaidPredictions(0.0, length, beyond=form.first_tokens)
        of_a_bit = form.above is not None and bit is not None
        return PaidPredictions(bit if of_a_bit and bit is not None else length)


@dataclass(frozen=True, slots=True)
class PaidPredictions:
    """Seconds of predictions: `every` request pays the first, those predicted above `above` tokens,
    or that make more than `beyond`, the second too.
    """

    every: float
    some: float = 0.0
    above: float | None = None
    beyond: int | None = None

    def seconds(self, predicted: Vector, output_tokens: Vector) -> Vector:
        """Of requests with these predicted and true lengths."""
        if self.above is not None:
            return self.every + self.some * (predicted > self.above)
        beyond = math.inf if self.beyond is None else self.beyond
        return self.every + self.some * (output_tokens > beyond)

    def expected(self, output_tokens: Vector, predictor: Predictor) -> Vector:
        """Mean of requests with these true lengths, predicted in tokens."""
        if self.above is None:
            return self.seconds(output_tokens, output_tokens)
        short = predictor.at_most(np.array(math.floor(self.above)), output_tokens)
        return np.asarray(self.every + self.some * (1 - short))

    def __str__(self) -> str:
        """Who pays what."""
        parts = [f"{short_number(self.every)} s for every request"] if self.every else []
        if self.above is not None:
            whom = f"predicted above {format_number(self.above)} tokens"
            parts.append(f"{short_number(self.some)} s for those {whom}")
        if self.beyond is not None:
            parts.append(f"{short_number(self.some)} s for those that outlive {self.beyond} tokens")
        return ", ".join(parts) or "0 s"


NO_COST = PaidPredictions(0.0)


def parse_prediction_cost(text: str) -> PredictionCost:
    """Raises SpecError: no text, unknown keys, two places or units, an amount out of range."""
    check_text("prediction_cost", text, "external=2ms")
    if not text.strip():
        raise SpecError(f"got an empty prediction cost; expected {EXPECTED}")
    first = text.partition(",")[0]
    if "=" not in first:
        text = f"{'server' if first.strip().endswith(TOKENS) else 'external'}={text.strip()}"
    pairs = split_pairs(text, context=text, example="external=2ms")
    check_keys(pairs, _KEYS, "a prediction cost", EXPECTED)
    places = [key for key in _PLACES if key in pairs]
    if len(places) != 1:
        given = " and ".join(places) or "no cost of a length"
        raise SpecError(f"got {given} in {text!r}; expected either external=.. or server=..")
    units = {key: value.strip().endswith(TOKENS) for key, value in pairs.items()}
    if len(set(units.values())) > 1:
        raise SpecError(f"got {text!r}; expected both as durations or both in tokens")
    amounts = {key: _amount(key, value, text) for key, value in pairs.items()}
    place: Literal["external", "server"] = "external" if places == ["external"] else "server"
    unit: Literal["seconds", "tokens"] = "tokens" if units[place] else "seconds"
    return PredictionCost(amounts[place], amounts.get("bit"), place, unit)


def _amount(key: str, value: str, text: str) -> float:
    if value.strip().endswith(TOKENS):
        return parse_number(key, value.strip().removesuffix(TOKENS).strip(), text)
    try:
        return parse_duration(value)
    except SpecError:
        raise SpecError(
            f"got {key}={value} in the prediction cost {text!r}; expected {EXPECTED}"
        ) from None
