"""What one setting would do at the estimates of a window: the common currency of what-ifs, advice
and autopilot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kendall.queueing.estimation.interval import UNKNOWN, Estimate
from kendall.queueing.result import Prediction, Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the gateway can change while it serves; `servers` only an operator can."""

    policy: str  # canonical policy text
    max_output_tokens: int | None = None
    servers: int = 1

    @property
    def limit_words(self) -> str:
        """`no token limit`, or `token limit 96`."""
        limit = self.max_output_tokens
        return "no token limit" if limit is None else f"token limit {limit}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Forecast:
    """One setting at the rate, lengths, speed and residual of a window."""

    setting: Setting
    load: float
    prediction: Prediction | None  # None: no steady state there, or no answer (`notes` say which)
    # queueing delay of dispatched requests, seconds, with what the estimates leave open
    mean: Estimate
    sojourn: Estimate = UNKNOWN  # likewise
    clipped_fraction: (
        float | None
    )  # of all requests, by the gateway's limit; None where it is not known
    notes: tuple[str, ...] = ()
    pending: bool = False  # only its load is known so far

    @property
    def stable(self) -> bool:
        """Whether it has a steady state."""
        return self.prediction is not None and self.prediction.stable

    def interval(self, quantity: Quantity) -> Estimate:
        """The mean sojourn time, or else the mean queueing delay, with its interval."""
        return self.sojourn if quantity == "sojourn_time" else self.mean

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        found = self.prediction
        return {
            "policy": self.setting.policy,
            "max_output_tokens": self.setting.max_output_tokens,
            "servers": self.setting.servers,
            "effective_max_batch_size": None if found is None else found.effective_max_batch_size,
            "stable": None if self.pending else self.stable,
            "load": self.load
            if math.isfinite(self.load)
            else None,  # not a number where nothing is known of the lengths
            "method": None if found is None else found.method,
            "queueing_delay": None if found is None else found.queueing_delay.as_dict(),
            "sojourn_time": None if found is None else found.sojourn_time.as_dict(),
            "time_to_first_token": None if found is None else found.time_to_first_token.as_dict(),
            "interval": self.mean.to_dict(),
            "sojourn_interval": self.sojourn.to_dict(),
            "clipped_fraction": self.clipped_fraction,
            "notes": list(self.notes),
        } | ({"pending": True} if self.pending else {})


@dataclass(frozen=True, eq=False, kw_only=True)
class Advice:
    """The best choice of one target beside what is in force. `best` is None where there is none,
    and `says` why.
    """

    target: str  # max-output-tokens | batch-size | policy | servers
    objective: str
    current: Forecast
    best: Forecast | None
    # 1 - best / current of the objective's measure; 1 where the current setting is unstable
    gain: Estimate
    curve: tuple[Mapping[str, Any], ...]
    says: str  # one sentence for the operator
    change: bool = False  # whether it says to set something
    compared: Quantity | None = (
        # the duration that chose and that the gain is of; None for throughput, v1, v2
        "queueing_delay"
    )

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "target": self.target,
            "objective": self.objective,
            "compared": self.compared,
            "current": self.current.to_dict(),
            "best": None if self.best is None else self.best.to_dict(),
            "gain": self.gain.to_dict(),
            "curve": [dict(point) for point in self.curve],
            "says": self.says,
            "change": self.change,
        }
