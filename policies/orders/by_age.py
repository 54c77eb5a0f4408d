"""By tokens made so far, without predictions; preemptive, asked after every engine step.

mlfq  multi-level feedback: a request goes a level down after `quantum`, then 2 x, 4 x `quantum`
      more tokens; in order of arrival within a level, not interrupted in the last
fb    least attained service first (foreground-background), by steps of `quantum` tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kendall.policies.core import Request
from kendall.policies.errors import SpecError
from kendall.policies.orders.order import Ranked

MOST_LEVELS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastAttained(Ranked):
    """FB, LAS."""

    quantum: int = 1
    name: ClassVar[str] = "fb"
    preemptive: ClassVar[bool] = True
    wants_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Ranked.__post_init__(self)
        if self.quantum < 1:
            raise SpecError(f"got quantum={self.quantum}; expected tokens, at least 1")

    def value(self, request: Request, made: int) -> float:
        """Whole quanta made."""
        del request
        return float(made // self.quantum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels(LeastAttained):
    """MLFQ."""

    quantum: int = 16
    levels: int = 4
    name: ClassVar[str] = "mlfq"

    def __post_init__(self) -> None:
        LeastAttained.__post_init__(self)
        if not 1 <= self.levels <= MOST_LEVELS:
            raise SpecError(
                f"got levels={self.levels}; expected a whole number from 1 to {MOST_LEVELS}"
            )

    def value(self, request: Request, made: int) -> float:
        """The level, from 0: below quantum (2^(k + 1) - 1) tokens it is k."""
        del request
        return float(min((made // self.quantum + 1).bit_length() - 1, self.levels - 1))
