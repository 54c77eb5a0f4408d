"""The named orders. Each gives the kinds of jobs that it tells apart: their total service (the time
that predictions take on the server included), their probabilities, and their ranks.

    FifoRanks              first come first served
    PredictedRanks         by prediction and age:
        SHORTEST_FIRST         SPJF: the shortest predicted first, not interrupted
        LONGEST_FIRST          the longest predicted first, not interrupted
        PREEMPTIVE_SHORTEST    PSPJF: the shortest predicted first, preemptive
        SHORTEST_REMAINING     SPRPT: the shortest predicted remaining time first; with `share` = c
                               not interrupted from the age c x prediction on (TRAIL): c = 0 is
                               SPJF, infinity SPRPT
    BounceRanks            SRPT-B: as SPRPT, but what outlives its prediction loses rank again
    LeastAttainedRanks     FB (LAS): the least served first; no prediction
    LevelsRanks            multi-level feedback: classes by age, first come first served in each
    SkipRanks              predicted short first, by arrival; behind them SPRPT (SkipPredict)
    DelayRanks             everyone first up to an age, by arrival; behind that SPRPT (DelayPredict)
    SteppedRanks           a given rank from each age on, rising or falling: Gittins; of each
                           class of predictions its own
    ThresholdRanks         predicted short before predicted long; `preemptive` as in the slides, or
                      in order of arrival

SkipPredict and DelayPredict with independent bits and sizes, and predictions on the server:
`papers.prediction_costs`.

Sources: Mitzenmacher, Scheduling with predictions and the price of misprediction (2020); Queues
with small advice (2020); Scully, Grosof and Mitzenmacher, Uniform bounds for scheduling with job
size estimates (2022); Shahout et al., Don't stop me now (TRAIL, 2025); the slides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.models.soap import ranks
from kendall.queueing.models.soap.ranks import Ranks
from kendall.queueing.predictors.classes import joint_of_classes
from kendall.queueing.predictors.laws import OneBit, Predictor
from kendall.queueing.predictors.sizes import Atoms, SizeGrid


@dataclass(frozen=True, eq=False)
class Jobs:
    """Kinds of jobs: service `before` [kinds] + sizes [n], probabilities `joint` [kinds, n];
    `exact`: kinds are no cells of predictions.
    """

    sizes: Vector
    joint: Vector
    before: Vector
    ranks: Ranks
    exact: bool = True


@dataclass(frozen=True, eq=False)
class DrawnJobs:
    """A sample: total service [count] and the ranks of each job; `resume`: seconds that it takes to
    go on after an interruption.
    """

    totals: Vector
    ranks: Ranks
    resume: float = 0.0


class Order(Protocol):
    """An order of service."""

    @property
    def ties_matter(self) -> bool:
        """Whether, of two jobs that differ little, the later arrival may interrupt the other's
        service: cells of a continuous law are then served half in order of arrival, half last come
        first, which is right up to the square of a cell's width.
        """

    def boundaries(self, predictor: Predictor) -> tuple[float, ...]:
        """Sizes that lie in the inside of no cell of sizes."""

    def jobs(self, sizes: Atoms, predictor: Predictor, grid: SizeGrid) -> Jobs:
        """For the analysis; about `grid.count` predictions where they are continuous."""

    def draw(self, rng: np.random.Generator, sizes: Vector, predictor: Predictor) -> DrawnJobs:
        """For the simulation: jobs of these sizes, predictions drawn."""


class _ByPrediction:
    """An order whose ranks follow from one prediction."""

    @property
    def ties_matter(self) -> bool:
        return False

    def ranks(self, predicted: Vector) -> Ranks:
        """Of jobs with these predictions."""
        raise NotImplementedError

    def boundaries(self, predictor: Predictor) -> tuple[float, ...]:
        return (predictor.threshold,) if isinstance(predictor, OneBit) else ()

    def jobs(self, sizes: Atoms, predictor: Predictor, grid: SizeGrid) -> Jobs:
        law = predictor.joint(sizes, grid)
        kinds = len(law.predictions)
        return Jobs(law.sizes, law.joint, np.zeros(kinds), self.ranks(law.predictions), law.exact)

    def draw(self, rng: np.random.Generator, sizes: Vector, predictor: Predictor) -> DrawnJobs:
        return DrawnJobs(sizes, self.ranks(predictor.sample(rng, sizes)))


class _ByAge(_ByPrediction):
    """An order that asks for no prediction: one kind of job."""

    def jobs(self, sizes: Atoms, predictor: Predictor, grid: SizeGrid) -> Jobs:  # noqa: ARG002 - the protocol's
        return Jobs(sizes.sizes, sizes.weights[None, :], np.zeros(1), self.ranks(np.zeros(1)))

    def draw(self, rng: np.random.Generator, sizes: Vector, predictor: Predictor) -> DrawnJobs:  # noqa: ARG002 - the protocol's
        return DrawnJobs(sizes, self.ranks(np.zeros(sizes.size)))


@dataclass(frozen=True)
class FifoRanks(_ByAge):
    """First come first served."""

    def ranks(self, predicted: Vector) -> Ranks:
        return ranks.constant(np.zeros(len(predicted)))


@dataclass(frozen=True)
class LeastAttainedRanks(_ByAge):
    """FB, LAS."""

    def ranks(self, predicted: Vector) -> Ranks:
        return ranks.age(len(predicted))


@dataclass(frozen=True)
class LevelsRanks(_ByAge):
    """MLFQ: `quanta` seconds of service in each class but the last."""

    quanta: tuple[float, ...]

    def boundaries(self, predictor: Predictor) -> tuple[float, ...]:  # noqa: ARG002 - the protocol's
        return tuple(accumulate(self.quanta))

    def ranks(self, predicted: Vector) -> Ranks:
        return ranks.levels(len(predicted), self.quanta)


@dataclass(frozen=True)
class SteppedRanks(_ByPrediction):
    """Of each class of predictions a row of `values`, one from each of `ages` on, seconds; the
    first age is 0. `classes`: the largest prediction of each class but the last, seconds.
    """

    ages: tuple[float, ...]
    values: tuple[float, ...]
    classes: tuple[float, ...] = ()

    def boundaries(self, predictor: Predictor) -> tuple[float, ...]:
        return (*super().boundaries(predictor), *self.ages[1:])

    def ranks(self, predicted: Vector) -> Ranks:
        rows = np.reshape(self.values, (-1, len(self.ages)))
        return ranks.steps(self.ages, rows[np.searchsorted(self.classes, predicted)])

    def jobs(self, sizes: Atoms, predictor: Predictor, grid: SizeGrid) -> Jobs:  # noqa: ARG002 - the protocol's
        joint = joint_of_classes(predictor, self.classes, sizes.sizes, sizes.weights)
        kinds = np.append(self.classes, math.inf)
        return Jobs(sizes.sizes, joint, np.zeros(len(kinds)), self.ranks(kinds))


@dataclass(frozen=True, kw_only=True)
class PredictedRanks(_ByPrediction):
    """`weight` x prediction + `slope` x age, lower first; interrupted, if at all, before the age
    `share` x prediction. The first `setup` seconds of a service do not count as served.
    """

    weight: float = 1.0
    interrupts: bool = True
    slope: float = 0.0  # not above 0
    share: float | None = None  # to the end
    setup: float = 0.0

    def __post_init__(self) -> None:
        if self.share is not None and not self.share >= 0:
            raise SpecError(f"got share={self.share}; expected a number >= 0")

    @property
    def ties_matter(self) -> bool:
        return self.interrupts and self.slope == 0

    def ranks(self, predicted: Vector) -> Ranks:
        value = self.weight * predicted
        if not self.interrupts:
            return ranks.never_interrupted(value)
        share = self.share
        settled = None if share is None else self.setup + share * (predicted - self.setup)
        return ranks.moving(value, self.slope, self.setup, settled)


SHORTEST_FIRST = PredictedRanks(interrupts=False)
LONGEST_FIRST = PredictedRanks(weight=-1.0, interrupts=False)
PREEMPTIVE_SHORTEST = PredictedRanks()
SHORTEST_REMAINING = PredictedRanks(slope=-1.0)


@dataclass(frozen=True)
class BounceRanks(_ByPrediction):
    """SRPT-B. The first `setup` seconds of a service do not count as served."""

    setup: float = 0.0

    def ranks(self, predicted: Vector) -> Ranks:
        return ranks.bouncing(predicted, self.setup)


@dataclass(frozen=True)
class SkipRanks(_ByPrediction):
    """Predictions up to `threshold` seconds first. The first `setup` seconds of a service do not
    count as served.
    """

    threshold: float
    setup: float = 0.0

    def ranks(self, predicted: Vector) -> Ranks:
        long = np.where(predicted > self.threshold, 1.0, 0.0)
        pieces: list[ranks.Piece] = [(0.0, long, long * predicted, 0.0)]
        return Ranks.of(len(predicted), [*pieces, (self.setup, long, long * predicted, -long)])


@dataclass(frozen=True)
class DelayRanks(_ByPrediction):
    """Everyone first up to the age `limit` seconds."""

    limit: float

    def boundaries(self, predictor: Predictor) -> tuple[float, ...]:
        return (*super().boundaries(predictor), self.limit)

    def ranks(self, predicted: Vector) -> Ranks:
        later = (self.limit, 1.0, predicted - self.limit, -1.0)
        return Ranks.of(len(predicted), [(0.0, 0.0, 0.0, 0.0), later])


@dataclass(frozen=True)
class ThresholdRanks(_ByPrediction):
    """One bit: predictions up to `threshold` seconds first."""

    threshold: float
    preemptive: bool = False
    last_come: bool = True  # preemptive: a short job interrupts other short jobs too

    def ranks(self, predicted: Vector) -> Ranks:
        long = np.where(predicted > self.threshold, 1.0, 0.0)
        return ranks.two_classes(long, self.preemptive, self.last_come)

    def _bit(self, predictor: Predictor) -> Predictor:
        if isinstance(predictor, OneBit):
            return predictor
        return OneBit(self.threshold, predictor)

    def boundaries(self, predictor: Predictor) -> tuple[float, ...]:
        return super().boundaries(self._bit(predictor))

    def jobs(self, sizes: Atoms, predictor: Predictor, grid: SizeGrid) -> Jobs:
        return super().jobs(sizes, self._bit(predictor), grid)
