"""A number that was estimated: its value, a 95 % interval and how many independent observations
would tell as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NORMAL = 1.959963984540054  # two-sided 95 %


@dataclass(frozen=True, slots=True)
class Estimate:
    """`value` is not a number and the interval all of the line where nothing is known."""

    value: float = math.nan
    low: float = -math.inf
    high: float = math.inf
    effective_n: float = math.nan

    @property
    def relative(self) -> float:
        """Half the width of the interval over the value."""
        return (self.high - self.low) / 2 / abs(self.value) if self.value else math.inf

    @property
    def known(self) -> bool:
        """Whether there is a value and both ends of the interval."""
        return math.isfinite(self.value) and math.isfinite(self.low) and math.isfinite(self.high)

    def covers(self, truth: float) -> bool:
        """Whether it lies in the interval."""
        return self.low <= truth <= self.high

    def scaled(self, factor: float) -> Estimate:
        """The same in other units; factor > 0."""
        return Estimate(
            self.value * factor, self.low * factor, self.high * factor, self.effective_n
        )

    def at_least(self, least: float) -> Estimate:
        """The same of what cannot be below `least`; what has no lower end gets none by that."""
        return (
            Estimate(
                max(self.value, least),
                max(self.low, least) if math.isfinite(self.low) else self.low,
                max(self.high, least),
                self.effective_n,
            )
            if least > 0
            else self
        )

    def of_duration(self) -> Estimate:
        """The same without the part of the interval below 0, which a duration cannot take."""
        return (
            Estimate(self.value, max(0.0, self.low), max(0.0, self.high), self.effective_n)
            if self.known
            else self
        )


UNKNOWN = Estimate(math.nan, -math.inf, math.inf, 0.0)


def without_interval(value: float) -> Estimate:
    """A value of which nothing says how far it is off."""
    return Estimate(value, -math.inf, math.inf, 0.0)


def symmetric(value: float, half_width: float, effective_n: float) -> Estimate:
    """The estimate whose interval is value - half_width to value + half_width."""
    return Estimate(value, value - half_width, value + half_width, effective_n)
