"""By tokens made so far, without predictions; preemptive, asked after every engine step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from kendall.policies.orders.order import Aging, Form, parameter

MOST_LEVELS = 30


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
