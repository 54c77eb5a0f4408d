"""The values of a window that are shown and saved, by the gateway, which imports this module and
not the estimation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from msgspec import UNSET, UnsetType

from kendall.queueing.estimation.interval import UNKNOWN, Estimate
from kendall.queueing.json_form import fields_of
from kendall.queueing.measurement.check import Check

Sample = TypeVar("Sample")


@dataclass(frozen=True, slots=True)
class WithinCalls:
    """The intraclass correlation of output lengths as it tells of the longest of a call, and of
    its total.
    """

    longest: Estimate = UNKNOWN
    total: Estimate = UNKNOWN


@dataclass(frozen=True, slots=True)
class SlowSpeed:
    """sigma: standard deviation of the log speed's slow part; tau: its time constant, seconds."""

    sigma: Estimate
    tau: float = math.nan
    significant: bool = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class SpeedDrift(SlowSpeed):
    """`fast_cv`: what is not slow."""

    fast_cv: float = math.nan


NO_WANDER = SpeedDrift(UNKNOWN, significant=False)


@dataclass(frozen=True, slots=True)
class Stalls:
    """Batches far beyond the law, and by how much."""

    count: int
    time_share: float  # q, of the busy time, in excess of the others' speed
    longest: float  # seconds in excess
    last_at: float | None = None
    size: float = 0.0  # s, seconds: second moment of the excess over its mean
    others: float = 1.0  # pace of the other servers of the queue meanwhile, over their mean


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsSummary:
    """Tokens, or sequences of a call; known up to `known_to`."""

    known_to: int
    unknown_mass: float
    mean_to_known: Estimate
    mean: Estimate
    p50: Estimate
    p90: Estimate
    p99: Estimate


@dataclass(frozen=True, eq=False, kw_only=True)
class WindowEstimates(Generic[Sample]):
    """Rates per second, times in seconds, lengths in tokens; `speed` is a factor on the law's
    durations (> 1: slower).
    """

    policy: str
    epoch: int
    start: float
    now: float
    count: int  # requests of this epoch that were dispatched and ended
    rate_changed_at: float | None = None
    speed_changed_at: float | None = None
    # seconds that the gateway itself needs from an arrival to its dispatch: the shortest delay so
    # far
    gateway_turnaround: float = 0.0
    arrival_rate: Estimate  # of calls
    dispersion: Estimate  # index of dispersion of counts
    speed: Estimate
    cv: Estimate
    output_tokens: Sample
    prompt_tokens: Sample
    sequences: Sample  # of a call
    # how alike the output lengths of a call are
    within_calls: WithinCalls = field(default_factory=WithinCalls)
    # tokens of KV memory that a request holds beside the prompt that was computed, on average; not
    # a number where nothing says it
    held_tokens: float = math.nan
    # a continuous engine's own: factor on the shape's kp, and seconds on its turnaround, beside the
    # speed
    prefill: float = 1.0
    # batches whose prompts take all that the engine computes in one step
    prompts_cut: float = 0.0
    admission: float = 0.0
    wander: SlowSpeed
    stalls: Stalls
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class EstimatesSummary(WindowEstimates[LengthsSummary]):
    """The estimates that `/admin/state` shows; `restored`: from an earlier run of the gateway."""

    restored: bool | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedDelay:
    """A mean with its interval, and quantiles by their names; seconds."""

    mean: Estimate
    quantiles: Mapping[str, Estimate]

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON, in one object."""
        return fields_of(self.mean) | dict(self.quantiles)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether an assumption holds, None where the window cannot tell; in words."""

    holds: bool | None
    says: str
    applies: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSummary:
    """The verdict on a window; seconds. `error` = observed / predicted - 1."""

    verdict: str
    reasons: tuple[str, ...]  # of a disagreement
    n: int
    observed: ObservedDelay
    predicted: Estimate
    check: Check | None
    error: float
    assumptions: Mapping[str, Judgement]


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayHistogram:
    """Shares of delays, observed and predicted, in classes of one width in seconds; `beyond` is
    what lies above the last.
    """

    width: float
    observed: list[float]
    predicted: list[float]
    beyond: list[float]
    n: int
    drawn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondMeans:
    """Means of the requests that ended within each second: its end, their number, the observed one,
    the model's, and between which the means of nine in ten draws lie (none of a single one).
    """

    at: list[float]
    n: list[int]
    observed: list[float]
    modelled: list[float]
    low: list[float] | None
    high: list[float] | None
