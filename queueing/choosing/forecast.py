"""Forecasts of single settings at the estimates of a window: the common currency of what-ifs,
advice and autopilot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from kendall.queueing.estimation.interval import UNKNOWN, Estimate
from kendall.queueing.json_form import fields_of
from kendall.queueing.result import Prediction, Quantiles, Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A policy and a token limit, which the gateway can change while it serves, and a number of
    servers, which only an operator can change.
    """

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

    def summary(self) -> ForecastSummary:
        """The forecast as the page and `/admin/prediction` show it."""
        found = self.prediction
        return ForecastSummary(
            policy=self.setting.policy,
            max_output_tokens=self.setting.max_output_tokens,
            servers=self.setting.servers,
            effective_max_batch_size=None if found is None else found.effective_max_batch_size,
            stable=None if self.pending else self.stable,
            load=self.load,
            method=None if found is None else found.method,
            queueing_delay=None if found is None else found.queueing_delay,
            sojourn_time=None if found is None else found.sojourn_time,
            time_to_first_token=None if found is None else found.time_to_first_token,
            interval=self.mean,
            sojourn_interval=self.sojourn,
            clipped_fraction=self.clipped_fraction,
            notes=self.notes,
            pending=self.pending or UNSET,
        )

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return fields_of(self.summary())


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastSummary:
    """A forecast as it is shown; `load` is not a number where nothing is known of the lengths."""

    policy: str
    max_output_tokens: int | None
    servers: int
    effective_max_batch_size: int | None
    stable: bool | None
    load: float
    method: str | None
    queueing_delay: Quantiles | None
    sojourn_time: Quantiles | None
    time_to_first_token: Quantiles | None
    interval: Estimate | None
    sojourn_interval: Estimate | None
    clipped_fraction: float | None
    notes: tuple[str, ...]
    pending: bool | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """Of a setting over the one in force, as shares of the mean; `same_requests`: the mean of the
    window's own requests, seconds, of which `gain` is (95 %: `gain_low` to `gain_high`). Nine in
    ten gains of the next minutes lie between the last two.
    """

    same_requests: float | None = None
    gain: float = math.nan
    gain_low: float = math.nan
    gain_high: float = math.nan
    next_gain_low: float = math.nan
    next_gain_high: float = math.nan


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class WhatIf:
    """One setting beside the one in force, compared by this duration; `at`: the end of the window
    that it rests on, None where that is of an earlier life of the gateway.
    """

    forecast: ForecastSummary
    gains: Gains
    compared: Quantity
    at: float | None

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        about = {"compared": self.compared, "at": self.at}
        return fields_of(self.forecast) | fields_of(self.gains) | about


@dataclass(frozen=True, eq=False, kw_only=True)
class Advice:
    """The best choice of one target beside what is in force. `best` is None where there is none,
    and `says` why.
    """

    target: str  # max-output-tokens | batch-size | policy | servers
    objective: str
    compared: Quantity | None = (
        # the duration that chose and that the gain is of; None for throughput, v1, v2
        "queueing_delay"
    )
    current: Forecast
    best: Forecast | None
    # 1 - best / current of the objective's measure; 1 where the current setting is unstable
    gain: Estimate
    curve: tuple[Mapping[str, object], ...]
    says: str  # one sentence for the operator
    change: bool = False  # whether it says to set something
    # between which nine in ten gains of the next minutes lie
    next_gain_low: float | UnsetType = UNSET
    next_gain_high: float | UnsetType = UNSET
    at: float | UnsetType | None = UNSET  # as of a what-if


@dataclass(frozen=True, slots=True, kw_only=True)
class RateBounds:
    """Requests per second: observed, and the largest that the setting in force can serve, with a
    steady state and within the SLO; None where there is none, and `reason` says why.
    """

    observed: Estimate
    largest_stable: float | None = None
    slo: str | None
    largest_within_slo: float | None = None
    reason: str | None = None
    factor: float = 1.0  # that was asked about
    refused: str | None = None  # what kept calls out, which are not counted
    says: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralQueue:
    """Durations of a setting whose servers share one queue."""

    method: str | None = None
    queueing_delay: Quantiles | None = None
    sojourn_time: Quantiles | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedQueues:
    """Durations with a queue at each server, and how much longer their means are than behind one
    queue; or `reason` says why there are none.
    """

    routing: str
    method: str | None = None
    queueing_delay: Quantiles | None = None
    sojourn_time: Quantiles | None = None
    more: Mapping[str, float | None] | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBalancerCost:
    """A setting with one queue and with a queue at each server."""

    servers: int
    policy: str
    compared: Quantity
    central: CentralQueue
    routings: list[RoutedQueues]
