"""By predicted output length or by tokens made, preemptive: a request that is outranked leaves the
engine and goes on later behind the tokens that it has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from kendall.policies.orders.by_length import ShortestFirst, Threshold
from kendall.policies.orders.order import Aging, ByLength, Form, Learns, Order, parameter

MOST_LEVELS = 30
BY = ("tokens", "residual", "service")


@dataclass(frozen=True, kw_only=True)
class ByRemaining(ByLength):
    """By predicted tokens that are left; `by` residual: their mean given the prediction and the
    tokens made (SERPT; `queueing.models.gittins` has the ranks), `tokens` until that is known.
    """

    by: str = parameter("tokens, residual or service", BY.__contains__, BY[0], choices=BY)

    @property
    def learns(self) -> Learns | None:
        return "residual" if self.by == "residual" else super().learns


@dataclass(frozen=True, kw_only=True)
class ShortestRemaining(ByRemaining):
    """SPRPT: the shortest predicted remaining length first; SRPT where predictions are exact. What
    outlives its prediction goes on.
    """

    name: ClassVar[str] = "sprpt"
    preemptive: ClassVar[bool] = True

    @cached_property
    def form(self) -> Form:
        plain = self.by_length(per_token=-1.0)
        return self.by_table(plain) or plain


@dataclass(frozen=True, kw_only=True)
class Bouncing(ByLength):
    """SRPT-B: as sprpt, but what outlives its prediction loses rank with every token again, until
    it stands where it began (Scully, Grosof and Mitzenmacher 2022).
    """

    name: ClassVar[str] = "srpt-b"
    preemptive: ClassVar[bool] = True

    @cached_property
    def form(self) -> Form:
        return self.by_length(per_token=-1.0, bounces=True)


@dataclass(frozen=True, kw_only=True)
class SkipPredict(Order):
    """SkipPredict (Shahout and Mitzenmacher 2024): requests predicted up to `threshold` tokens, for
    which a bit is enough, first, by arrival; the others behind all of them as sprpt.
    """

    threshold: float = parameter(
        "a finite number of tokens >= 0", lambda tokens: 0 <= tokens < math.inf
    )
    name: ClassVar[str] = "skippredict"
    predicts: ClassVar[bool] = True
    preemptive: ClassVar[bool] = True

    @cached_property
    def form(self) -> Form:
        return Form(quantity="prediction", first_up_to=self.threshold, per_token=-1.0)


@dataclass(frozen=True, kw_only=True)
class DelayPredict(Order):
    """DelayPredict (Shahout and Mitzenmacher 2024): the first `limit` tokens of every request
    first, by arrival; those that outlive them, which alone need a prediction, as sprpt behind them.
    """

    limit: int = parameter("a whole number of tokens >= 0", lambda tokens: tokens >= 0)
    name: ClassVar[str] = "delaypredict"
    predicts: ClassVar[bool] = True
    preemptive: ClassVar[bool] = True

    @cached_property
    def form(self) -> Form:
        return Form(quantity="prediction", first_tokens=self.limit, per_token=-1.0)


@dataclass(frozen=True, kw_only=True)
class PreemptiveShortest(ShortestFirst):
    """PSPJF; PSJF where predictions are exact."""

    name: ClassVar[str] = "pspjf"
    preemptive: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class PreemptiveThreshold(Threshold):
    """One bit: requests predicted up to `threshold` tokens interrupt the others."""

    name: ClassVar[str] = "threshold-preemptive"
    preemptive: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Trail(ByRemaining):
    """TRAIL (2025): as sprpt, not interrupted from c x the prediction on."""

    c: float = parameter("a number >= 0", lambda c: c >= 0, 0.8)
    name: ClassVar[str] = "trail"
    preemptive: ClassVar[bool] = True

    @cached_property
    def form(self) -> Form:
        plain = self.by_length(per_token=-1.0, settled=self.c)
        return self.by_table(plain) or plain


@dataclass(frozen=True, kw_only=True)
class Levels(Aging):
    """MLFQ, multi-level feedback: a request goes a level down after `quantum`, then 2 x, 4 x
    `quantum` more tokens; in order of arrival within a level, not interrupted in the last.
    """

    quantum: int = parameter("tokens, at least 1", lambda tokens: tokens >= 1, 16)
    levels: int = parameter(
        f"a whole number from 1 to {MOST_LEVELS}", lambda levels: 1 <= levels <= MOST_LEVELS, 4
    )
    name: ClassVar[str] = "mlfq"
    preemptive: ClassVar[bool] = True

    @cached_property
    def form(self) -> Form:
        """The level, from 0: below quantum (2^(k + 1) - 1) tokens it is k."""
        starts = tuple(self.quantum * (2**level - 1) for level in range(self.levels))
        return Form(starts=starts, aging=self.aging)


@dataclass(frozen=True, kw_only=True)
class LeastAttained(Aging):
    """FB, LAS: least attained service first (foreground-background), by steps of `quantum`
    tokens.
    """

    quantum: int = parameter("tokens, at least 1", lambda tokens: tokens >= 1, 1)
    name: ClassVar[str] = "fb"
    preemptive: ClassVar[bool] = True

    @cached_property
    def form(self) -> Form:
        return Form(starts=(0,), every=self.quantum, aging=self.aging)


@dataclass(frozen=True, kw_only=True)
class Gittins(Aging):
    """Gittins index: the least expected service per completion to come first, by tokens made
    (`queueing.models.gittins` has the ranks). Until the distribution of the output lengths is
    known: first come, first served.
    """

    name: ClassVar[str] = "gittins"
    preemptive: ClassVar[bool] = True

    @cached_property
    def form(self) -> Form:
        return self.by_table(Form(aging=self.aging)) or Form(settled=0.0)

    @property
    def learns(self) -> Learns:
        return "gittins"


@dataclass(frozen=True, kw_only=True)
class PredictedGittins(Gittins):
    """Gittins index of each request's own length, whose distribution follows from its prediction
    (`queueing.predictors.classes`).
    """

    name: ClassVar[str] = "gittins-predicted"
    predicts: ClassVar[bool] = True

    @cached_property
    def form(self) -> Form:
        by_table = self.by_table(Form(quantity="prediction", aging=self.aging))
        return by_table or Form(quantity="prediction", weight=0.0, settled=0.0)
