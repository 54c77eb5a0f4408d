"""What the predicting process answers, and what the live model shows of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import msgspec

from kendall.queueing.choosing.forecast import Advice, LoadBalancerCost, RateBounds, Setting
from kendall.queueing.estimation.interval import Estimate
from kendall.queueing.estimation.summaries import (
    ComparisonSummary,
    DelayHistogram,
    EstimatesSummary,
    Judgement,
    ObservedDelay,
    SecondMeans,
)
from kendall.queueing.json_form import Json, fields_of
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.check import Check
from kendall.queueing.result import Mean, Number, Prediction, Quantiles, Quantity

if TYPE_CHECKING:
    from kendall.policies.orders.order import Order
    from kendall.queueing.control.wait_ahead import BatchService, SlotService

STEADY_STATE = (  # of a prediction
    "method",
    "stable",
    "load",
    "utilisation",
    "queueing_delay",
    "sojourn_time",
    "time_to_first_token",
    "inter_token_latency",
    "service_time",
)


class NoQuantiles(Quantiles):
    """Those of a queue without a steady state: an empty object in JSON."""

    def as_dict(self) -> dict[str, float | None]:
        """As JSON."""
        return {}


NO_QUANTILES = NoQuantiles()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpredicted:
    """What is known of a queue without a prediction; `stable`: None where nothing says it."""

    policy: str
    method: None = None
    stable: bool | None
    load: float
    queueing_delay: Quantiles = NO_QUANTILES
    sojourn_time: Quantiles = NO_QUANTILES
    time_to_first_token: ClassVar[Quantiles | None] = None
    utilisation: ClassVar[float | None] = None
    batch_size: ClassVar[Mean] = Mean()
    queue_length: ClassVar[Number] = Number()


@dataclass(frozen=True, slots=True)
class DatedCheck:
    """The check of the window that ended `at`."""

    check: Check
    at: float

    def as_dict(self) -> dict[str, object]:
        """As JSON: in one object."""
        return self.check.as_dict() | {"at": self.at}


@dataclass(frozen=True, slots=True, kw_only=True)
class NextMinutes:
    """The mean of the next minutes, and between what nine in ten of their like have it; `history`:
    seconds whose traffic they are drawn from.
    """

    seconds: float
    mean: float
    low: float
    high: float
    history: float
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRunSummary:
    """The steady state: its numbers, its conditions, what it is computed from, and `next`."""

    predicted: Prediction | Unpredicted
    interval: Estimate
    conditions: Mapping[str, Judgement]
    at: float
    arrival_rate: float
    law: LatencyModel
    queueing_delay_interval: Estimate | None
    sojourn_time_interval: Estimate | None
    next: NextMinutes | None

    def as_dict(self) -> dict[str, object]:
        """As JSON: with some members of the prediction."""
        members, own = fields_of(self.predicted), fields_of(self)
        del own["predicted"]
        return {name: members[name] for name in STEADY_STATE if name in members} | own


@dataclass(frozen=True, slots=True)
class Stretch:
    """Of time, in seconds."""

    start: float
    end: float
    seconds: float


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class AssessmentSummary:
    """An assessment, as `/admin/prediction` shows it: rates per second, times in seconds."""

    predicted: Prediction | Unpredicted
    check: DatedCheck | None
    forecast: LongRunSummary
    epoch: int
    at: float
    window: Stretch
    n: int
    observed_mean: float | None
    observed_queueing_delay: ObservedDelay | None
    arrival_rate: float
    rate_seconds: float  # of which that rate is
    speed: float
    server_speeds: Mapping[int, float]
    cv: float
    law: LatencyModel
    compared: Quantity
    interval: Estimate
    gateway_turnaround: float
    load_interval: Estimate
    doubts: tuple[str, ...]
    estimates: EstimatesSummary
    comparison: ComparisonSummary

    def as_dict(self) -> dict[str, object]:
        """As JSON: with the members of the prediction."""
        predicted, own = self.predicted, fields_of(self)
        del own["predicted"]
        plain = predicted.as_dict() if isinstance(predicted, Prediction) else fields_of(predicted)
        return plain | own


class Decided(Protocol):
    """A decision of the autopilot (`queueing.choosing.autopilot.decision`): its words, and the
    setting that it puts in force if it acts.
    """

    @property
    def says(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def acts(self) -> bool: ...
    @property
    def after(self) -> Setting: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Of one assessment: the prediction, or the reason why there is none."""

    estimates: EstimatesSummary | None = None
    prediction: AssessmentSummary | None = None
    ahead: BatchService | SlotService | None = None
    state: msgspec.Raw | None = None  # the estimates, as they are saved
    ranking: Order | None = None  # of an order that learns, by the lengths of the window
    reason: str | None = None
    pilot_failure: str | None = None
    can_say_what_if: bool = False
    decision: Decided | None = None
    pilot: msgspec.Raw | None = None  # what the autopilot remembers, as it is saved


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceAnswer:
    """What would be best, what a load balancer would cost, and the rates that the setting in force
    can serve.
    """

    advice: list[Advice]
    load_balancer: LoadBalancerCost | None
    rate: RateBounds | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayCharts:
    """What a page draws of an assessment; `modelled`: mean and quantiles of the same requests,
    where they can be driven through the model.
    """

    compared: Quantity
    epoch: int
    assessed_at: float
    histogram: DelayHistogram | None = None
    modelled: Mapping[str, float] | None = None
    pairs: SecondMeans | None = None

    @property
    def about(self) -> dict[str, Json]:
        """What both are of."""
        return {"compared": self.compared, "epoch": self.epoch, "assessed_at": self.assessed_at}
