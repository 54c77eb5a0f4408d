"""Means, standard errors and quantiles of simulated runs: the error from the replications, of
one run from 20 batch means. And which means say nothing, however long the run: those of durations
that a tail of the lengths leaves without a variance.

Arrivals that cluster make delays hang together for longer, and so do high loads. There the error
of a run is the widest of those from batch means of several lengths and from the correlation of
delays (queueing.measurement.mean_interval): a path that was spared long bursts has a low mean and
a low variance. Of several runs it is that of the batch means of all, and no less than from the
spread of the runs. A note says where a run is too short. Runs of a process that ends differ in
their number of requests: the error is that of a ratio of two sums.

Without a second moment of the lengths the delay behind one server has no mean, and a mean that
exists elsewhere, as of a sojourn, has no standard error. With patience a delay is bounded, and so
settles.

Control variate of single and continuous servers: one server, first come, first served, on the same
arrivals and lengths, S_i = (slot time of N_i tokens at full slots) / c, c slots or servers, whose
law is exact (queueing.models.mg1, gig1). Mean and each quantile are corrected by b (exact -
simulated) of that queue, b by regression over 20 batches; under an order other than of arrival the
mean alone. At load .95 and 10^6 requests the noise of the p99 falls from 9 to 2 % (SCV 4, 8 and 32
slots), from 8 to 0.7 % (geometric); of means at .9 to a sixteenth (4 servers), a tenth (8 slots,
gaps of SCV 4), a third (orders by length). Of batches without a bound:
queueing.simulation.drift_control.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from kendall.policies.immediate import Continuous, Single
from kendall.policies.registry import is_first_come
from kendall.queueing.arrivals.notation import cycle, has_end
from kendall.queueing.arrivals.processes import Recorded
from kendall.queueing.distributions.token_distribution import Vector
from kendall.queueing.errors import NotConvergedError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.measurement.batch_means import (
    LEAST_EFFECTIVE,
    TOO_WIDE,
    FloatArray,
    batch_means_interval,
    replications_interval,
    variance_of_mean,
)
from kendall.queueing.measurement.mean_interval import widest_interval
from kendall.queueing.models.gig1 import solve_gig1
from kendall.queueing.models.mg1 import solve_service
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS, Levels, Prediction, Quantiles

BATCH_MEANS = 20
MORE = "ask for more requests"
TOO_SHORT = "TOO SHORT: "  # how the note begins
RISING = f"{TOO_SHORT}ever more requests are in the system"
LEAST_CYCLES = 100  # of the states of a modulated process, in a simulation
# steady: plain batch means; bursty: of an arrival process, widened for their correlation; spans: of
# one that ends; recorded: one path, whose only chance is that of the services
Mask = npt.NDArray[np.bool_]
Kind = Literal["steady", "bursty", "spans", "recorded"]
_BOUNDED = ("queueing_delay", "served_queueing_delay", "time_to_first_token")  # by the patience


@dataclass(frozen=True)
class Companion:
    """One server, first come, first served, with the work of all servers or slots: a service of
    `fixed` seconds and `per_token` for each token; `exact`: its queueing delay.
    """

    fixed: float
    per_token: float
    exact: Quantiles

    def delays(self, arrived_at: Vector, output_tokens: npt.NDArray[np.int64]) -> Vector:
        """Lindley's recursion from an empty queue."""
        services = self.fixed + self.per_token * output_tokens
        walk = np.concatenate([[0.0], np.cumsum(services[:-1] - np.diff(arrived_at))])
        return np.asarray(walk - np.minimum.accumulate(walk))


def companion_of(model: Queue, arrival_rate: float) -> Companion | None:
    """None where there is no such queue, its delays have no variance or no known law, or memory
    decides how many slots are taken.
    """
    independent = model.arrivals.process is None or model.arrivals.scv != 1
    applies = (
        isinstance(model.policy, Continuous | Single)
        and model.bound is not None
        and independent
        and model.requests.sequences is None
        and model.lossless
        and model.requests.tail_index > 3
        and model.engine.second_model is None
        and not (model.engine.disaggregated or model.engine.server_speeds or model.memory_limited)
        and not model.on_demand
    )
    if not applies:
        return None
    fixed, per_token = _shared_work(model)
    if fixed + per_token * model.requests.output_tokens.shortest <= 0:
        return None
    law = LatencyModel(k2=fixed, k4=per_token)
    service = ServiceTime.of(law, model.requests.output_tokens)
    try:
        queue = (
            solve_service(service, arrival_rate, levels=model.levels)
            if model.arrivals.scv == 1
            else solve_gig1(service, arrival_rate, model.arrivals.scv, levels=model.levels)
        )
    except NotConvergedError:
        return None
    exact = queue.delay if is_first_come(model.policy) else Quantiles(queue.delay.mean)
    return Companion(fixed, per_token, exact)


def _shared_work(model: Queue) -> tuple[float, float]:
    """Seconds of a request, and of each of its tokens, while all servers and slots are taken."""
    slots, time = model.bound or 1, model.slot_time
    if isinstance(model.policy, Single):
        per_token, whole = model.engine.law.step(1), model.batch_time.mean(1)
    else:
        taken, share = time.parts(slots, refilled=True)
        per_token, whole = time.law.step(1 + (slots - 1) * share) / slots, taken / slots
    lanes = model.engine.servers
    return whole / lanes - per_token * time.mean_tokens / lanes, per_token / lanes


def controlled(
    values: Vector,
    companion: Vector | Paired,
    exact: Quantiles,
    levels: Levels = LEVELS,
    *,
    by_mean: bool = False,
) -> Quantiles:
    """Of one value a request, beside the companion's delay of each; `by_mean`: every statistic by
    the companion's mean. A duration of 0 stays 0.
    """
    beside = companion if isinstance(companion, Paired) else Paired.of(companion, levels)
    statistics, names = _statistics(levels), ("mean", *levels)
    mine, parts = statistics(values), _of_parts(statistics, values)
    found, every = _corrected(mine, parts, beside, exact, names, by_mean=by_mean)
    mean, *quantiles = found.tolist()
    error, *errors = every.tolist()
    order = sorted(range(len(levels)), key=list(levels.values()).__getitem__)
    rising = dict(zip(order, np.maximum.accumulate(np.array(quantiles)[order]), strict=True))
    ordered = [float(rising[at]) for at in range(len(levels))]
    return Quantiles.of(levels, mean, ordered, error, dict(zip(levels, errors, strict=True)))


def controlled_mean(
    values: Vector, companion: Vector, exact: Quantiles, counts: Vector
) -> Quantiles:
    """The mean alone, where each value counts so many times."""
    beside = Paired(_mean(companion), _of_parts(_mean, companion))
    mine, parts = _weighted(values, counts), _of_parts(_weighted, values, counts)
    found, errors = _corrected(mine, parts, beside, exact, ("mean",))
    return Quantiles(float(found[0]), standard_error=float(errors[0]))


@dataclass(frozen=True, eq=False)
class Paired:
    """Mean and quantiles of the companion's delays, and those of each batch, a row each."""

    whole: Vector
    parts: Vector

    @classmethod
    def of(cls, delays: Vector, levels: Levels = LEVELS) -> Paired:
        """Of one a request."""
        statistics = _statistics(levels)
        return cls(statistics(delays), _of_parts(statistics, delays))


def _corrected(
    mine: Vector,
    parts: Vector,
    beside: Paired,
    exact: Quantiles,
    names: Sequence[str],
    *,
    by_mean: bool = False,
) -> tuple[Vector, Vector]:
    """The statistics, of which the mean is the first, and their standard errors."""
    known = np.array([exact.value(name) for name in names], dtype=float)  # None: nan
    column = np.zeros(mine.size, dtype=int) if by_mean else np.arange(mine.size)
    known, whole, others = known[column], beside.whole[column], beside.parts[:, column]
    spread, shared = others - others.mean(axis=0), parts - parts.mean(axis=0)
    squares = (spread**2).sum(axis=0)
    usable = (squares > 0) & np.isfinite(known) & (mine > 0)
    slopes = np.where(usable, (spread * shared).sum(axis=0) / np.where(usable, squares, 1.0), 0.0)
    found = np.maximum(0.0, mine + slopes * np.where(usable, known - whole, 0.0))
    left = ((shared - slopes * spread) ** 2).sum(axis=0) / (BATCH_MEANS - 1 - usable)
    of_exact = slopes * (exact.standard_error or 0.0)
    return found, np.hypot(np.sqrt(left / BATCH_MEANS), of_exact)


def _of_parts(statistics: Callable[..., Vector], *columns: Vector) -> Vector:
    """Of each batch, a row each."""
    parts = [np.array_split(column, BATCH_MEANS) for column in columns]
    return np.array([statistics(*part) for part in zip(*parts, strict=True)])


def _statistics(levels: Levels) -> Callable[[Vector], Vector]:
    """Mean and quantiles."""
    return partial(_mean_and_quantiles, list(levels.values()))


def _mean_and_quantiles(levels: Sequence[float], values: Vector) -> Vector:
    return np.append(values.mean(), np.quantile(values, levels))


def _mean(values: Vector) -> Vector:
    return np.array([values.mean()])


def _weighted(values: Vector, counts: Vector) -> Vector:
    return np.array([np.average(values, weights=counts)])


def weighted_quantiles(values: Vector, counts: Vector, levels: Levels = LEVELS) -> Vector:
    """Where each value counts so many times."""
    if (counts == 1).all():
        return np.quantile(values, list(levels.values()))
    order = np.argsort(values)
    reached = np.cumsum(counts[order])
    return values[order[np.searchsorted(reached / reached[-1], list(levels.values()))]]


def kind_of_runs(model: Queue) -> Kind:
    """How the errors of its means are found."""
    if model.arrivals.process is None:
        return "steady"
    if isinstance(model.arrivals.process, Recorded):
        return "recorded"
    return "spans" if has_end(model.arrivals.process) else "bursty"


def summary_of_runs(
    series: Sequence[Vector], kind: Kind = "steady", levels: Levels = LEVELS
) -> Quantiles:
    """Of one value a request, an array for each run."""
    values = np.concatenate(series)
    if not len(values):
        return Quantiles()
    mean, error = mean_of_runs(series, kind)
    found = np.quantile(values, list(levels.values()))
    errors = {} if error is None else _errors_of_quantiles(series, levels, found, error)
    return Quantiles.of(levels, mean, found.tolist(), error, errors)


def _errors_of_quantiles(
    series: Sequence[Vector], levels: Levels, found: Vector, error: float
) -> dict[str, float]:
    """Of a share of the values below a quantile the error is that of a mean, over the batches or
    runs; and of the quantile half the distance between those at the level less and more that error.
    `error`: of the mean of the values; where it is more than that of the batches, as under bursts,
    all errors are.
    """
    values = np.concatenate(series)
    parts = series if len(series) > 1 else np.array_split(values, BATCH_MEANS)
    plain = _error_of_ratio(parts, float(values.mean()))
    wider = max(1.0, error / plain) if plain else 1.0
    shares = np.array(
        [
            _error_of_ratio(below, float(np.concatenate(below).mean())) or 0.0
            for below in (
                [np.asarray(part <= each, dtype=float) for part in parts] for each in found
            )
        ]
    )
    at = np.array(list(levels.values()))
    low, high = at - wider * shares, at + wider * shares
    inside = high <= 1
    ends = np.quantile(values, np.concatenate([np.maximum(low, 0.0), np.minimum(high, 1.0)]))
    below, above = ends[: at.size], ends[at.size :]
    errors = np.where(inside, (above - below) / 2, found - below)
    return dict(zip(levels, errors.tolist(), strict=True))


def weighted_mean(
    series: Sequence[Vector], weights: Sequence[Vector], kind: Kind = "steady"
) -> Quantiles:
    """The mean where each value counts `weights` times, as one a token does for its answer."""
    values, counts = np.concatenate(series), np.concatenate(weights)
    if not len(values):
        return Quantiles()
    mean = float(np.average(values, weights=counts))
    # of a ratio: the standard error of its residuals, as each value's share of all counts
    shares = [(of - mean) * n / counts.mean() for of, n in zip(series, weights, strict=True)]
    return Quantiles(mean, standard_error=mean_of_runs(shares, kind)[1])


@dataclass(frozen=True)
class Sampled:
    """What the simulated values are, as they are. Called with an array of values for each run, and
    who they are of (not asked here).
    """

    kind: Kind
    levels: Levels = field(default_factory=lambda: LEVELS)

    def __call__(self, series: Sequence[Vector], _: Sequence[Mask]) -> Quantiles:
        """Mean, its standard error, quantiles."""
        return summary_of_runs(series, self.kind, self.levels)

    def mean(
        self, series: Sequence[Vector], _: Sequence[Mask], counts: Sequence[Vector]
    ) -> Quantiles:
        """`counts`: how often each counts."""
        return weighted_mean(series, counts, self.kind)


@dataclass(frozen=True)
class Controlled:
    """The same of one run, corrected by the companion's delay `beside` each request, whose law is
    `exact`; a few values are left as they are.
    """

    beside: Vector
    exact: Quantiles
    levels: Levels = field(default_factory=lambda: LEVELS)
    by_mean: bool = False

    def __call__(self, series: Sequence[Vector], kept: Sequence[Mask]) -> Quantiles:
        """`kept`: the requests of which there are values."""
        (values,), (own,) = series, kept
        if len(values) <= BATCH_MEANS:
            return Sampled("steady", self.levels)(series, kept)
        beside = self._of_all if own.all() else Paired.of(self.beside[own], self.levels)
        return controlled(values, beside, self.exact, self.levels, by_mean=self.by_mean)

    def mean(
        self, series: Sequence[Vector], kept: Sequence[Mask], counts: Sequence[Vector]
    ) -> Quantiles:
        """`counts`: how often each counts."""
        (values,), (own,) = series, kept
        if len(values) <= BATCH_MEANS:
            return Sampled("steady").mean(series, kept, counts)
        return controlled_mean(values, self.beside[own], self.exact, counts[0])

    @cached_property
    def _of_all(self) -> Paired:
        return Paired.of(self.beside, self.levels)


def mean_of_runs(
    series: Sequence[Vector], kind: Kind = "steady"
) -> tuple[float | None, float | None]:
    """Mean, and its standard error from the replications; of one run, from batch means of
    consecutive values.
    """
    values = np.concatenate(series)
    if not len(values):
        return None, None
    mean = float(values.mean())
    if kind == "spans":
        return mean, _error_of_ratio(series, mean)
    if len(series) == 1 and kind == "recorded":
        return mean, None
    parts = series if len(series) > 1 else np.array_split(series[0], BATCH_MEANS)
    if any(len(part) == 0 for part in parts):
        return mean, None
    if kind == "bursty":
        return mean, _error_of_bursts(series)
    means = np.array([part.mean() for part in parts])
    return mean, float(means.std(ddof=1) / math.sqrt(len(means)))


def _error_of_bursts(series: Sequence[Vector]) -> float:
    """Of one run from its widest interval on any scale; of several from the batch means of all,
    and no less than from the spread of their means.
    """
    runs = [_double(run) for run in series]
    if len(runs) == 1:
        (values,) = runs
        spread = float(values.var(ddof=1))
        return math.sqrt(spread / widest_interval(values).effective_n) if spread else 0.0
    inside = sum(variance_of_mean(run, BATCH_MEANS)[0] * run.size**2 for run in runs)
    between = float(np.var([run.mean() for run in runs], ddof=1)) / len(runs)
    return math.sqrt(max(inside / sum(run.size for run in runs) ** 2, between))


def _double(values: Vector) -> FloatArray:
    return np.asarray(values, dtype=np.float64)


def _error_of_ratio(series: Sequence[Vector], mean: float) -> float | None:
    """Of a sum of values over their number, both of which differ from run to run."""
    if len(series) < 2:
        return None
    excess = np.array([float(part.sum()) - mean * len(part) for part in series])
    return math.sqrt(float(excess @ excess) / (1 - 1 / len(series))) / sum(map(len, series))


def brevity(model: Queue, arrived_at: Sequence[Vector], sojourns: Sequence[Vector]) -> str | None:
    """Where runs of an arrival process are too short for their errors to be believed; an array
    for each run, of all requests and of the served.
    """
    process = model.arrivals.process
    if process is None or kind_of_runs(model) != "bursty":
        return None
    if seconds := cycle(process):
        cycles = sum(float(at[-1] - at[0]) for at in arrived_at) / seconds
        if cycles < LEAST_CYCLES:
            return (
                f"{TOO_SHORT}{cycles:.3g} cycles of the states of the arrivals, expected at least "
                f"{LEAST_CYCLES}: {MORE}"
            )
    served = [_double(run) for run in sojourns]
    interval = (
        batch_means_interval(served[0]) if len(served) == 1 else replications_interval(served)
    )
    if not interval.n or not interval.too_short:
        return None
    return (
        f"{TOO_SHORT}the sojourn times tell as much as {interval.effective_n:.0f} independent "
        f"ones, mean +-{100 * interval.relative:.2g} %; expected {LEAST_EFFECTIVE} and "
        f"+-{100 * TOO_WIDE:.0f} %: {MORE}"
    )


def no_second_moment(model: Queue) -> str:
    """Of lengths that have none."""
    return (
        f"the lengths have no second moment (tail index {model.requests.tail_index:g}, at most 2)"
    )


def tail_notes(model: Queue) -> tuple[str, ...]:
    """What a tail of the lengths does to simulated means."""
    if model.requests.tail_index <= 2:
        which = (
            "no means of durations"
            if model.requests.patience is None
            else "no mean of the sojourn time"
        )
        return (
            f"{which}: {no_second_moment(model)}, so that a simulated mean does not settle, "
            "however long the run",
        )
    if model.requests.tail_index <= 3:
        return (
            "simulated means settle slowly: the delays have no variance (tail index "
            f"{model.requests.tail_index:g}, at most 3)",
        )
    return ()


def without_unsettled(simulated: Prediction, model: Queue) -> Prediction:
    """Quantiles only, of the durations whose mean does not settle."""
    if model.requests.tail_index > 2:
        return simulated
    bare = simulated.without_means(
        "sojourn_time", *(() if model.requests.patience is not None else _BOUNDED)
    )
    if not simulated.stations:
        return bare
    *before, decode = simulated.stations
    delay = dataclasses.replace(decode.queueing_delay, mean=None, standard_error=None)
    return dataclasses.replace(
        bare, stations=(*before, dataclasses.replace(decode, queueing_delay=delay))
    )
