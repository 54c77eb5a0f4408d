"""The result of a comparison: the values that `loadgen.compare.compare` fills and every report
reads. Seconds; rates per second.

Deviation = observed / theory - 1. For `continuous` the sojourn is compared: waiting for the
engine's next step belongs to service there, and the delay alone is next to nothing at moderate
load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kendall.policies import Policy
from kendall.queueing.estimation.checked import CheckedRun
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.speed import Speed
from kendall.queueing.measurement.check import Check
from kendall.queueing.measurement.recursion import Served
from kendall.queueing.measurement.statistics import Interval
from kendall.queueing.prediction.by_length import ByLength
from kendall.queueing.predictors.predictor_text import PredictorText
from kendall.queueing.queue import Queue

NORMAL = 1.96
Compared = Literal["queueing_delay", "sojourn_time"]
QUANTITIES: tuple[Compared, ...] = ("queueing_delay", "sojourn_time")
PaperKind = Literal["exact", "bound", "printed"]  # what the documents' formula is for this queue


@dataclass(frozen=True, slots=True)
class TheoryEstimate:
    """The mean of one theory, seconds; how far the observation is from it, with the half width of
    that deviation.
    """

    mean: float
    deviation: float  # observed / mean - 1
    half_width: float  # for a theory on the run's own arrivals: of the paired differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One quantity of a run, observed and in theory; None where a theory was not asked or cannot
    say.
    """

    observed: Interval
    # recursion on the run's arrivals, batches and service times
    measured_service: TheoryEstimate | None = None
    # the run's arrivals and lengths simulated under the law at the run's speed
    same_arrivals: TheoryEstimate | None = None
    live: TheoryEstimate | None = None  # theory with rate, lengths, speed and residual of the run
    # theory with the asked rate and lengths, the law as calibrated
    a_priori: TheoryEstimate | None = None
    predicted: TheoryEstimate | None = (
        None  # the same, with the law at the run's speed and residual
    )
    paper: TheoryEstimate | None = None  # the formula as published, at the run's speed
    quantiles: Mapping[str, float] = field(
        default_factory=dict
    )  # observed, by p50 | p90 | p95 | p99
    theory_quantiles: Mapping[str, Mapping[str, float]] = field(
        default_factory=dict
    )  # by theory, then level


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The result of a prediction, seconds, and the load it was made for."""

    load: float | None
    queueing_delay: float | None
    sojourn_time: float | None
    method: str | None = None  # exact | approximation | simulation
    utilisation: float | None = None
    batch_size: float | None = None
    quantiles: Mapping[str, Mapping[str, float]] = field(
        default_factory=dict
    )  # by compared quantity, then level


@dataclass(frozen=True, slots=True)
class SamplingError:
    """The effect of chance alone on the mean of a run of this length under the asked process and
    the calibrated law, seconds.
    """

    long_run: float  # the steady state by simulation, or by the formula where that is exact
    long_run_half_width: float  # 95 %; 0 where exact
    spread: float  # half width (95 %) of the mean of one run of this length
    # the steady state under the asked process, simulated, where it is not Poisson
    process: float | None = None
    process_half_width: float = 0.0  # 95 %

    @property
    def relative_spread(self) -> float:
        """Standard deviation of the mean of one run, over the steady state; a few per cent too
        large, as `spread` is.
        """
        mean = self.long_run if self.process is None else self.process
        return self.spread / NORMAL / mean if mean > 0 else math.inf


@dataclass(frozen=True, slots=True)
class DifferencePart:
    """One named share of the difference between observed and predicted, seconds."""

    name: str
    seconds: float
    half_width: float  # 95 %
    note: str = ""

    @property
    def significant(self) -> bool:
        """True where it is more than chance."""
        return abs(self.seconds) > self.half_width


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """observed - predicted a priori, as parts that add up to it exactly."""

    predicted: float
    observed: float
    parts: tuple[DifferencePart, ...]

    @property
    def total(self) -> float:
        """observed - predicted, seconds."""
        return self.observed - self.predicted

    def part(self, name: str) -> DifferencePart:
        """The part of that name; nothing where the run can have none of it."""
        return next(
            (part for part in self.parts if part.name == name), DifferencePart(name, 0.0, 0.0)
        )

    def share(self, name: str) -> float:
        """The part as a fraction of the prediction."""
        return self.part(name).seconds / self.predicted


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cell in words."""

    kind: str  # agree | disturbed | sampling noise | none | a part's name
    text: str


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """A ratio of two means, or of a mean to 1, with its half width (95 %)."""

    value: float
    half_width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthGroup:
    """The requests of about a tenth of all output lengths, which is the same in all cells that are
    compared.
    """

    shortest: int  # tokens
    longest: int
    mean_tokens: float
    n: int
    slowdown: RatioInterval  # mean sojourn time over mean service time
    predicted: float | None  # by theory at the run's speed
    same_arrivals: float | None  # simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestTenth:
    """The requests with the longest outputs: mean time outside of service, seconds."""

    delay: RatioInterval  # here seconds
    predicted: float | None
    same_arrivals: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersusFirstCome:
    """Ratios of delays to those of the same policy, rate and limit in the order of arrival."""

    delay: RatioInterval  # of the means
    predicted: float | None  # with the law at the runs' speeds
    a_priori: float | None
    same_arrivals: float | None
    p99: float | None
    longest: RatioInterval  # of the longest tenth
    longest_predicted: float | None
    paired: bool  # both served the same requests


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderResult:
    """The effect of an order of service on requests of every length, in a cell whose policy was
    measured under several.
    """

    policy: str  # in the order of arrival
    order: str
    groups: tuple[LengthGroup, ...]
    longest: LongestTenth
    versus: VersusFirstCome | None  # None: the order of arrival, or not measured beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One policy in one epoch."""

    policy: str
    epoch: int
    compared: Compared
    n: int  # requests compared, after warm-up
    arrival_rate: float  # measured, per second
    asked_rate: float | None
    load: float | None
    batch_size: float  # mean over batches; for continuous: mean number in service at a dispatch
    speed: Speed | None
    queueing_delay: Quantity
    sojourn_time: Quantity
    # speed and residual of the law that the prediction a priori uses
    calibrated: Speed | None = None
    utilisation: float | None = None  # fraction of time that a server was busy, observed
    predicted_utilisation: float | None = None
    predicted_batch_size: float | None = None
    method: str | None = None  # of the prediction a priori
    paper_kind: PaperKind | None = None
    distribution: tuple[
        float, ...
    ] = ()  # observed quantiles of what is compared, at DISTRIBUTION_LEVELS
    split: Split | None = None
    # requests of other clients among those measured, where the load generator's records are at hand
    of_others: int = 0
    # of an order that reads predicted lengths: as asked, and as the run's predictions were
    predictor: str | None = None
    predictor_measured: str | None = None
    order: OrderResult | None = None

    @property
    def quantity(self) -> Quantity:
        """The one that is compared."""
        return self.sojourn_time if self.compared == "sojourn_time" else self.queueing_delay

    @property
    def check(self) -> Check | None:
        """The model beside the requests that were measured; None without a law."""
        observed, replayed = self.quantity.observed, self.quantity.same_arrivals
        if replayed is None or not math.isfinite(replayed.mean):
            return None
        recursion = self.quantity.measured_service
        return Check(
            observed=observed.mean,
            modelled=replayed.mean,
            half_width=replayed.half_width * abs(replayed.mean),
            requests=observed.n,
            measured_services=None if recursion is None else recursion.mean,
        )

    @property
    def prediction_error(self) -> float | None:
        """Observed / predicted - 1."""
        predicted = self.quantity.predicted
        return None if predicted is None else predicted.deviation

    @property
    def too_short(self) -> bool:
        """True where the run is too short for its mean to be judged."""
        return self.quantity.observed.too_short


Instants = Mapping[str, tuple[float, float]]  # start and release by id, seconds
Replay = Callable[[Policy, Sequence[Served], LatencyModel], Instants]  # at the law's speed
# the run, as a window too, beside the model at its speed
CheckOf = Callable[[Policy, Sequence[Served], Snapshot], CheckedRun | None]
Predict = Callable[
    [Policy, float, Sequence[Served], LatencyModel], Predicted
]  # policy, measured rate, the run, the law
Published = Callable[
    [Policy, float, Sequence[Served], LatencyModel], tuple[float, PaperKind] | None
]
SamplingErrorOf = Callable[
    [Policy, float, Sequence[Served], Compared, Predicted], SamplingError | None
]

LengthsOf = Callable[[Policy, float, Sequence[Served], LatencyModel], ByLength | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Theory:
    """The theory that a run is compared with: the law, and how to simulate and predict under
    it.
    """

    law: LatencyModel
    replay: Replay | None = None
    check: CheckOf | None = None
    predict: Predict | None = None  # with the asked rate and lengths
    live: Predict | None = None  # with the run's own
    published: Published | None = None
    sampling_error: SamplingErrorOf | None = None
    asked_rate: float | None = None
    # the queue that was asked for, under the calibrated law
    model: Callable[[Policy, Sequence[Served]], Queue] | None = None
    by_length: LengthsOf | None = None
    predictor: PredictorText | None = None  # as asked; None: not known
    pads: bool = True  # the engine could pad a batch: else a padded policy ran as elastic


DISTRIBUTION_LEVELS = (*(step / 100 for step in range(100)), 0.995, 0.999, 1.0)
