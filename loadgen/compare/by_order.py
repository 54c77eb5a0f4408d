"""Orders of service beside that of arrival: what each did to the mean delay, to the 99th percentile
and to the longest requests, observed and in theory.

Cells with one policy, rate and token limit differ in their order only. Their ratios are those of
the requests that both served, where these are rows of one timetable with the same lengths,

    R = sum own / sum first come
    half width: of batch means of (own - R first come) / mean(first come)

so that what both share drops out of the interval; else the intervals count as independent. Delay:
the time outside of service. Slowdown of a group of requests: mean sojourn / mean service time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kendall.loadgen.compare.comparison import (
    Comparison,
    Instants,
    LengthGroup,
    LongestTenth,
    OrderResult,
    RatioInterval,
    Theory,
    TheoryEstimate,
    VersusFirstCome,
)
from kendall.loadgen.compare.epoch_sample import EpochSample
from kendall.policies import format_policy
from kendall.policies.orders import FIRST_COME
from kendall.policies.text import first_come_form, order_text
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.measurement.statistics import FloatArray, batch_means_interval
from kendall.queueing.prediction.by_length import LONGEST, ByLength

GROUPS = 10
ALIKE = 0.95  # share of the joined requests that must be equally long in both cells
IntArray = NDArray[np.int64]
Tenth = tuple[int, int]  # its shortest and its longest output, tokens


@dataclass(frozen=True, eq=False)
class ComparedSample:
    """A comparison and what it was made from."""

    comparison: Comparison
    sample: EpochSample
    theory: Theory | None = None
    replayed: Instants | None = None  # the run's arrivals under the law at its speed

    @property
    def plain_policy(self) -> str:
        """The policy in the order of arrival."""
        return format_policy(first_come_form(self.sample.policy))

    @property
    def order(self) -> str:
        """The order of service with its parameters."""
        return order_text(self.sample.policy)

    @cached_property
    def durations(self) -> RequestDurations:
        """Tokens and seconds of its whole answers."""
        return RequestDurations.of(self.sample, self.replayed)

    @cached_property
    def by_length(self) -> ByLength | None:
        """The prediction by length at the run's speed; None where theory has none."""
        theory, speed = self.theory, self.comparison.speed
        if theory is None or theory.by_length is None:
            return None
        law = theory.law if speed is None else speed.law(theory.law)
        return theory.by_length(self.sample.policy, self.sample.rate, self.sample.requests, law)

    @property
    def predicted_longest(self) -> float | None:
        """The mean delay of its longest tenth in theory, seconds."""
        if self.by_length is None:
            return None
        return float(self.by_length.at(self.durations.tokens[self.durations.longest])[0].mean())

    def order_result(
        self, first_come: ComparedSample | None, tenths: Sequence[Tenth]
    ) -> OrderResult:
        """Compare what its order did with the cell in the order of arrival where there is one."""
        own = self.durations
        beside = first_come if self.order != FIRST_COME.name else None
        again = own.simulated
        return OrderResult(
            policy=self.plain_policy,
            order=self.order,
            groups=tuple(
                self.length_group(tenth, places)
                for tenth in tenths
                if (places := own.within(*tenth)).size
            ),
            longest=LongestTenth(
                delay=_mean(own.delay[own.longest]),
                predicted=self.predicted_longest,
                same_arrivals=None if again is None else float(again[0][own.longest].mean()),
            ),
            versus=None if beside is None else self.versus(beside),
        )

    def length_group(self, tenth: Tenth, places: IntArray) -> LengthGroup:
        """The slowdown of the requests at these places."""
        own, again = self.durations, self.durations.simulated
        tokens, delay, service = own.tokens[places], own.delay[places], own.service[places]
        return LengthGroup(
            shortest=tenth[0],
            longest=tenth[1],
            mean_tokens=float(tokens.mean()),
            n=places.size,
            slowdown=ratio_of_means(delay + service, service),
            predicted=None if self.by_length is None else _slowdown(*self.by_length.at(tokens)),
            same_arrivals=None if again is None else _slowdown(again[0][places], again[1][places]),
        )

    def versus(self, first_come: ComparedSample) -> VersusFirstCome:
        """Ratios to the same policy in the order of arrival."""
        own, other = self.durations, first_come.durations
        mine, theirs = own.joined(other)
        paired = mine is not None and theirs is not None
        longest = _ratio(own.delay[own.longest], other.delay[other.longest])
        delay = _ratio(own.delay, other.delay)
        if mine is not None and theirs is not None:
            delay = ratio_of_means(own.delay[mine], other.delay[theirs])
            both = np.argsort(-own.tokens[mine], kind="stable")[: math.ceil(LONGEST * mine.size)]
            both.sort()
            longest = ratio_of_means(own.delay[mine[both]], other.delay[theirs[both]])
        ours, beside = self.comparison.queueing_delay, first_come.comparison.queueing_delay
        return VersusFirstCome(
            delay=delay,
            predicted=_quotient_of_means(ours.predicted, beside.predicted),
            a_priori=_quotient_of_means(ours.a_priori, beside.a_priori),
            same_arrivals=_quotient(own.simulated_delay(mine), other.simulated_delay(theirs)),
            p99=_quotient(
                float(np.quantile(own.delay, 0.99)), float(np.quantile(other.delay, 0.99))
            ),
            longest=longest,
            longest_predicted=_quotient(self.predicted_longest, first_come.predicted_longest),
            paired=paired,
        )


@dataclass(frozen=True, eq=False)
class RequestDurations:
    """Tokens and seconds of the answers that were whole, in the order of their rows."""

    rows: IntArray  # of the timetable; their places in the run where it names none
    tokens: FloatArray
    delay: FloatArray
    service: FloatArray
    simulated: tuple[FloatArray, FloatArray] | None  # delay and service

    @classmethod
    def of(cls, sample: EpochSample, replayed: Instants | None) -> RequestDurations:
        """Raises nothing: a run without whole answers has none."""
        place = {request.id: index for index, request in enumerate(sample.requests)}
        kept = []
        for request, released_at in sample.whole:
            number = (request.client_request_id or request.id).rpartition("-")[2]
            row = int(number) if number.isdecimal() else place[request.id]
            kept.append((row, request, released_at))
        kept.sort(key=lambda numbered: numbered[0])
        instants = [(r.arrived_at, r.dispatched_at, released) for _, r, released in kept]
        again = None
        if replayed is not None:
            again = _durations([(r.arrived_at, *replayed[r.id]) for _, r, _ in kept])
        return cls(
            np.array([row for row, _, _ in kept], dtype=np.int64),
            np.array([request.output_tokens for _, request, _ in kept], dtype=np.float64),
            *_durations(instants),
            again,
        )

    @property
    def longest(self) -> IntArray:
        """Places of the longest tenth; of equal lengths those of the first rows."""
        count = math.ceil(LONGEST * self.tokens.size)
        return np.sort(np.argsort(-self.tokens, kind="stable")[:count])

    def within(self, shortest: int, longest: int) -> IntArray:
        """Places of the requests of these lengths."""
        return np.flatnonzero((self.tokens >= shortest) & (self.tokens <= longest))

    def joined(self, other: RequestDurations) -> tuple[IntArray, IntArray] | tuple[None, None]:
        """Places of the requests that both cells served; None where they are not the same ones."""
        _, mine, theirs = np.intersect1d(self.rows, other.rows, return_indices=True)
        if mine.size < 2:
            return None, None
        alike = self.tokens[mine] == other.tokens[theirs]
        return (mine, theirs) if alike.mean() >= ALIKE else (None, None)

    def simulated_delay(self, places: IntArray | None) -> float | None:
        """Mean delay of the requests at these places, or of all, on the run's arrivals."""
        if self.simulated is None:
            return None
        delay = self.simulated[0]
        return float((delay if places is None else delay[places]).mean())


def _durations(instants: Sequence[tuple[float, float, float]]) -> tuple[FloatArray, FloatArray]:
    """Delay and service from arrival, start and release."""
    arrived, started, released = np.array(instants, dtype=np.float64).reshape(-1, 3).T
    return started - arrived, released - started


def with_orders(
    cells: Sequence[ComparedSample], conditions: Sequence[Hashable]
) -> list[Comparison]:
    """The comparisons; those of a policy that was measured under another order than that of
    arrival with what the order did. Cells of equal `conditions` (rate, limit) are beside one
    another.
    """
    keys = [
        (cell.plain_policy, condition) for cell, condition in zip(cells, conditions, strict=True)
    ]
    ordered = {key for cell, key in zip(cells, keys, strict=True) if cell.order != FIRST_COME.name}
    first_come: dict[Hashable, ComparedSample] = {}
    for cell, key in zip(cells, keys, strict=True):
        if cell.order == FIRST_COME.name:
            first_come.setdefault(key, cell)
    several = [cell for cell, key in zip(cells, keys, strict=True) if key in ordered]
    tokens = np.concatenate([[], *(cell.durations.tokens for cell in several)])
    tenths: list[Tenth] = []
    if tokens.size:  # equal lengths stay together
        shares = np.arange(1, GROUPS + 1) / GROUPS
        ends = np.unique(np.quantile(tokens, shares, method="lower")).astype(int).tolist()
        tenths = list(zip([int(tokens.min()), *(end + 1 for end in ends)], ends, strict=False))
    return [
        dataclasses.replace(cell.comparison, order=cell.order_result(first_come.get(key), tenths))
        if key in ordered and cell.durations.tokens.size
        else cell.comparison
        for cell, key in zip(cells, keys, strict=True)
    ]


def _slowdown(delay: Vector, service: Vector) -> float | None:
    total = float(service.sum())
    return 1 + float(delay.sum()) / total if total > 0 else None


def ratio_of_means(top: FloatArray, bottom: FloatArray) -> RatioInterval:
    """The ratio of paired values in the order of time."""
    mean = float(bottom.mean())
    if not mean:
        return RatioInterval(math.nan, math.inf)
    ratio = float(top.mean()) / mean
    return RatioInterval(ratio, batch_means_interval((top - ratio * bottom) / mean).half_width)


def _ratio(top: FloatArray, bottom: FloatArray) -> RatioInterval:
    """The ratio of values that are not paired."""
    over, under = _mean(top), _mean(bottom)
    if not under.value:
        return RatioInterval(math.nan, math.inf)
    ratio = over.value / under.value
    spread = math.hypot(over.half_width / under.value, ratio * under.half_width / under.value)
    return RatioInterval(ratio, spread)


def _mean(values: FloatArray) -> RatioInterval:
    interval = batch_means_interval(values)
    return RatioInterval(interval.mean, interval.half_width)


def _quotient_of_means(own: TheoryEstimate | None, other: TheoryEstimate | None) -> float | None:
    return None if own is None or other is None else _quotient(own.mean, other.mean)


def _quotient(own: float | None, other: float | None) -> float | None:
    return own / other if own is not None and other else None
