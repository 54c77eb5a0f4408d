"""The check: the requests of a window or a run, as observed and as the model serves the same ones
at the speed that the engine had at each moment (queueing.measurement.check).

What waited or ran when the window began stands at its beginning: a request that was dispatched
before then enters the model at its dispatch, one that waited at the begin of the window. Those
that arrived since are judged, in pairs; no Poisson arrivals and no steady state are assumed. Of a
policy from outside, and of an order that only the policy object itself knows, the last `DRIVEN`
requests of a window are driven through it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kendall.policies import Policy, is_first_come
from kendall.policies.ordered import counts, order_of
from kendall.queueing.estimation.change import Vector
from kendall.queueing.estimation.replayed import (
    DRAWS,
    ENOUGH,
    Holding,
    Machine,
    Replayed,
    keeps_pace,
    replayed,
)
from kendall.queueing.estimation.speed.batch_factors import BatchFactors
from kendall.queueing.estimation.speed.batch_times import BatchTimes, lawful_times
from kendall.queueing.estimation.speed.speeds import Speeds
from kendall.queueing.estimation.summaries import SecondMeans
from kendall.queueing.estimation.window.snapshot import CENSORED, FIELDS, Snapshot
from kendall.queueing.latency.speed import Speed, measured_speed
from kendall.queueing.latency.speed_path import SpeedPath, path_of_slots
from kendall.queueing.measurement.batch_means import BATCHES, batch_means_interval, student
from kendall.queueing.measurement.check import Check
from kendall.queueing.measurement.recursion import batch_starts, by_batch
from kendall.queueing.measurement.warm_up import warm_up
from kendall.queueing.predictors.predictor_text import NO_PREDICTION
from kendall.queueing.queue import Queue
from kendall.queueing.simulation import fast

DRIVEN = 1_000  # requests where the policy object is driven
MANY = 5_000  # requests, of which half of the draws tell enough
FEWEST = 20  # requests
NO_FLOWS = np.empty(0, dtype=np.str_)
TOGETHER, FEWEST_PARTS = 4, 10  # batches in a part of the interval, and such parts


@dataclass(frozen=True, eq=False, kw_only=True)
class Pairs:
    """The judged requests of a window, as they were and as the model has them; seconds."""

    ended_at: Vector  # of what is judged: dispatch, or under continuous the release
    observed: Vector
    draws: npt.NDArray[np.float64]  # a row for each draw of the residuals, a column a request
    check: Check

    def by_second(self, until: float = math.inf) -> SecondMeans:
        """Means over the requests of each second that was over by `until`."""
        over = np.floor(self.ended_at) + 1 <= until
        seconds, place, counts = np.unique(
            np.floor(self.ended_at[over]), return_inverse=True, return_counts=True
        )

        def means(values: Vector) -> Vector:
            return np.bincount(place, values[over], seconds.size) / counts

        each = np.array([means(draw) for draw in self.draws])
        alone = len(each) == 1
        low, high = (None, None) if alone else np.quantile(each, (0.05, 0.95), axis=0).tolist()
        return SecondMeans(
            at=(seconds + 1).tolist(),
            n=counts.tolist(),
            observed=means(self.observed).tolist(),
            modelled=each.mean(axis=0).tolist(),
            low=low,
            high=high,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class WindowRequests:
    """In the order in which they enter the model; seconds and tokens."""

    enters: Vector
    arrived: Vector
    dispatched: Vector
    freed: Vector  # when the engine was done with it
    released: Vector
    held: Vector  # how long it was served; unknown where it was cut short
    prompts: npt.NDArray[np.int64]
    outputs: npt.NDArray[np.int64]
    predicted: Vector
    limits: Vector
    batch: Vector
    size: Vector  # of its batch
    server: Vector
    judged: npt.NDArray[np.bool_]
    row: npt.NDArray[np.intp]  # of the snapshot; none of those that are still in service

    def part(self, kept: Any) -> WindowRequests:
        """Some of them: a mask, indices or a slice."""
        names = (each.name for each in dataclasses.fields(self))
        return WindowRequests(**{name: getattr(self, name)[kept] for name in names})

    def with_running(self, seen: Snapshot) -> WindowRequests:
        """With those that share the engine now, at the tokens that they have."""
        if not seen.in_service:
            return self
        at = np.array([each[0] for each in seen.in_service])
        tokens = np.array([max(1, each[1]) for each in seen.in_service], dtype=np.int64)
        prompt = int(self.prompts.mean()) if self.prompts.size else 0
        running = {
            each.name: np.full(at.size, math.nan) for each in dataclasses.fields(WindowRequests)
        }
        running |= dict.fromkeys(("enters", "arrived", "dispatched"), at)
        running |= {"outputs": tokens, "prompts": np.full(at.size, prompt, dtype=np.int64)}
        running |= {"judged": np.zeros(at.size, dtype=bool), "row": np.full(at.size, -1)}
        return WindowRequests(
            **{name: np.concatenate([getattr(self, name), more]) for name, more in running.items()}
        )

    def batch_factors(self, model: Queue) -> BatchFactors | None:
        """The factors of the batches that a policy forms; None where it interrupts them, because no
        record has the time that an interruption wastes.
        """
        if order_of(model.policy).preemptive:
            return None
        order, first = by_batch(self.batch)

        def over(values: npt.NDArray[Any], how: np.ufunc) -> Vector:
            return np.asarray(how.reduceat(values[order], first), dtype=np.float64)

        size, server = over(self.size, np.maximum), over(self.server, np.maximum)
        at, ends = over(self.dispatched, np.minimum), over(self.freed, np.maximum)
        total, longest = over(self.outputs, np.add), over(self.outputs, np.maximum)
        prompts = over(self.prompts, np.add)
        sums = size, total, longest, prompts
        lawful = np.add(*lawful_times(model.engine.law, sums, padded=model.policy.padded))
        whole = np.isfinite(over(self.held, np.add))  # not a number of one makes it of the sum
        whole &= np.diff(np.append(first, order.size)) == size
        measured, about = np.where(whole, ends - at, math.nan), (size, longest, prompts)
        return BatchFactors.of(server.astype(np.intp), at, measured, lawful, about)

    def replayed(
        self,
        model: Queue,
        speeds: Speeds | None,
        flows: npt.NDArray[np.str_] = NO_FLOWS,
    ) -> Replayed:
        """Served by the model at the speed that the machine had; without `speeds` at the law's."""
        given = trace_of(self, flows)
        if not model.policy.joins_running:
            draws = DRAWS if self.row.size < MANY else DRAWS // 2
            return replayed(model, given, machine=self.batch_factors(model), draws=draws)
        path = None if speeds is None else path_of(model, speeds)
        holding = Holding(self.dispatched, self.held)
        return replayed(model, given, machine=path, holding=holding)

    def delay_by_services(self, policy: Policy, judged: npt.NDArray[np.bool_]) -> float | None:
        """The mean delay by the recursion on batches and service times as measured
        (queueing.measurement.recursion); None where it is not of batches in order of arrival.
        """
        if policy.joins_running or not is_first_come(policy):
            return None
        instants = (self.enters, self.dispatched, self.freed)
        starts = batch_starts(policy, np.stack([*instants, self.batch, self.server]))
        return float((starts[judged] - self.arrived[judged]).mean())


def check_window(seen: Snapshot, model: Queue, speeds: Speeds) -> Pairs | None:
    """`model`: the queue at the window's estimates, of which the law's shape, the limits and the
    servers' own speeds count. None where too few requests were served, or the order of service
    counts by flows, of which a window knows nothing, or interrupts batches: what an interruption
    wastes no record tells.
    """
    model = plain(model)
    if model.engine.routing != "central":
        return _check_servers(seen, model)
    policy = model.policy
    if counts(policy) or (order_of(policy).preemptive and not policy.joins_running):
        return None
    requests = requests_of(seen, model)
    if not fast.is_compiled(model) and requests.row.size > DRIVEN:
        requests = requests.part(slice(-DRIVEN, None))
        requests.judged[: warm_up(DRIVEN)] = False  # who ran before is no part of it
    if np.count_nonzero(requests.judged) < FEWEST:
        return None
    model = _at_speed(model, _speed(policy, speeds))
    found = requests.replayed(model, speeds)
    return _pairs(seen, requests, model, found, sojourn=policy.joins_running)


def _check_servers(seen: Snapshot, model: Queue) -> Pairs | None:
    """Servers with a queue each: the requests that came to each, served by it alone."""
    one, sojourn = model.but(servers=1, routing="central"), model.policy.joins_running
    found = [
        check_window(each, one, Speeds.of(one.policy, each, one.engine.law, one.step_tokens))
        for each in seen.of_servers()
    ]
    pairs = [each for each in found if each is not None]
    if not pairs:
        return None
    draws = min(len(each.draws) for each in pairs)
    order = np.argsort(np.concatenate([each.ended_at for each in pairs]), kind="stable")
    ended, observed = (
        np.concatenate([getattr(each, name) for each in pairs])[order]
        for name in ("ended_at", "observed")
    )
    every = np.concatenate([each.draws[:draws] for each in pairs], axis=1)[:, order]
    return _compared(ended, observed, every, batches=BATCHES, held=ENOUGH if sojourn else 0.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class CheckedRun:
    """A run beside the model at its speed; `dispatched` and `released` are means over draws, in the
    order of the rows; seconds.
    """

    speed: Speed
    queueing_delay: Check
    sojourn_time: Check
    dispatched: Vector
    released: Vector


def check_run(
    seen: Snapshot, model: Queue, flows: npt.NDArray[np.str_] = NO_FLOWS
) -> CheckedRun | None:
    """`model`: under the calibrated law; `seen`: the whole run (`window_of_run`), with the flow of
    each of its rows. None where no batch was served whole.
    """
    model = plain(model)
    speeds = Speeds.of(model.policy, seen, model.engine.law, model.step_tokens)
    speed = _speed(model.policy, speeds)
    if speed is None:
        return None
    model, requests = _at_speed(model, speed), requests_of(seen, model)
    if model.policy.joins_running:
        found = requests.replayed(model, None, flows)
        speed = dataclasses.replace(speed, factor=found.speed, cv=0.0)
        model = _at_speed(model, speed)
    model = at_their_speeds(model, speeds.factors)
    found = requests.replayed(model, speeds, flows)
    instants = np.empty((2, requests.row.size))
    instants[:, requests.row] = found.dispatched.mean(axis=0), found.released.mean(axis=0)
    delay, sojourn = (
        _pairs(seen, requests, model, found, sojourn=each).check for each in (False, True)
    )
    return CheckedRun(
        speed=speed,
        queueing_delay=delay,
        sojourn_time=sojourn,
        dispatched=instants[0],
        released=instants[1],
    )


def _speed(policy: Policy, speeds: Speeds) -> Speed | None:
    times = BatchTimes.chained(speeds.slots) if policy.joins_running else speeds.times
    return measured_speed(times.measured, times.fitted)


def _at_speed(model: Queue, speed: Speed | None) -> Queue:
    return model if speed is None else model.but(law=speed.law(model.engine.law))


def at_their_speeds(model: Queue, factors: Mapping[int, float]) -> Queue:
    """Servers in the order of their ids; of one that has served nobody nothing is known."""
    if not factors or model.engine.servers == 1 or model.engine.routing != "central":
        return model
    known = [factors[server] for server in sorted(factors)][: model.engine.servers]
    speeds = (*known, *[1.0] * (model.engine.servers - len(known)))
    return model.but(server_speeds=speeds)


def _pairs(
    seen: Snapshot, requests: WindowRequests, model: Queue, found: Replayed, *, sojourn: bool
) -> Pairs:
    """The judged requests, as they were and as each draw of the model has them."""
    ends = requests.released if sojourn else requests.dispatched
    draws = found.released if sojourn else found.dispatched
    judged = requests.judged & np.isfinite(ends) & np.isfinite(draws).all(axis=0)
    arrived = requests.arrived[judged]
    observed, every = ends[judged] - arrived, np.maximum(draws[:, judged] - arrived, 0.0)
    if not sojourn and math.isfinite(seen.shortest_delay):  # what the gateway needs at least
        every = np.maximum(every, seen.shortest_delay)
    joins, batches = model.policy.joins_running, BATCHES
    if not joins:  # members of a batch share their fate: a part is of several
        batches = min(BATCHES, np.unique(requests.batch[judged]).size // TOGETHER)
    return _compared(
        ends[judged],
        observed,
        every,
        batches=batches,
        held=ENOUGH if joins else 0.0,  # what the holding times are right within
        services=None if sojourn else requests.delay_by_services(model.policy, judged),
    )


def _compared(
    ended_at: Vector,
    observed: Vector,
    every: npt.NDArray[np.float64],
    *,
    batches: int,
    held: float,
    services: float | None = None,
) -> Pairs:
    """The interval of their difference is of so many `batches`; `held`: the relative error of the
    modelled mean; `services`: the mean delay by the measured services.
    """
    modelled, half = every.mean(axis=0), math.inf
    if batches >= FEWEST_PARTS:
        half = batch_means_interval(observed - modelled, batches=batches).half_width
    means = every.mean(axis=1)
    # parts of one path, as in overload, need not be independent: what was seen is one more draw
    if means.size > 1:
        spread = float(means.std(ddof=1)) * math.sqrt(1 + 1 / means.size)
        half = max(half, student(means.size - 1, 0.95) * spread)
    check = Check(
        observed=float(observed.mean()),
        modelled=float(modelled.mean()),
        half_width=half + held * float(modelled.mean()),
        requests=int(observed.size),
        measured_services=services,
    )
    return Pairs(ended_at=ended_at, observed=observed, draws=every, check=check)


def plain(model: Queue) -> Queue:
    """The model of a replay, whose requests are sequences that came one by one: without calls,
    patience, arrival process, predictor and stalls.
    """
    return model.but(
        sequences=None,
        intraclass_correlation=0.0,
        patience=None,
        process=None,
        predictor=NO_PREDICTION,
        law=model.engine.law.without_stalls(),  # they are in the path of the speed
    )


def cut_at(model: Queue, batch_tokens: int | None) -> Queue:
    """With the prompts that the engine takes in one batch, which a replay always heeds."""
    if model.policy.joins_running:
        return model
    return model.but(batch_tokens=batch_tokens)


def requests_of(seen: Snapshot, model: Queue) -> WindowRequests:
    """The dispatched requests of this epoch, with those that were in service when it began."""
    joins = model.policy.joins_running
    dispatched, freed = seen.column("dispatched_at"), seen.column("server_free_at")
    known = np.isfinite(dispatched) & np.isfinite(freed)
    known &= freed > seen.start  # who had left then is no part of it
    own = known & (seen.column("epoch") == seen.epoch)
    before = known & ~own
    busy = float(freed[before].max(initial=-math.inf)) if seen.servers == 1 else -math.inf
    column = {name: seen.column(name)[own] for name in FIELDS}
    arrived, started, ended = (
        column[name] for name in ("arrived_at", "dispatched_at", "server_free_at")
    )
    enters = np.where(started < seen.start, started, np.maximum(arrived, seen.start))
    outputs = np.nan_to_num(column["output_tokens"])
    whole = (column["ending"] <= CENSORED) & (outputs >= 1)
    found = WindowRequests(
        enters=np.maximum(enters, busy),
        arrived=arrived,
        dispatched=started,
        freed=ended,
        released=column["released_at"],
        held=np.where(whole, ended - started, math.nan),
        prompts=np.nan_to_num(column["prompt_tokens"]).astype(np.int64),
        outputs=np.maximum(outputs, 1).astype(np.int64),
        predicted=column["predicted_tokens"],
        limits=column["max_output_tokens"],
        batch=column["batch_id"],
        size=column["batch_size"],
        server=column["server_id"],
        judged=seen.judged_rows(sojourn=joins)[own],
        row=np.flatnonzero(own),
    )
    found = found.with_running(seen) if joins else found
    return found.part(np.lexsort((found.dispatched, found.arrived, found.enters)))


def trace_of(requests: WindowRequests, flows: npt.NDArray[np.str_] = NO_FLOWS) -> fast.Trace:
    """The arrivals of the model; `flows`: of each of the snapshot's rows."""
    limits = np.where(np.isnan(requests.limits), requests.outputs, requests.limits)
    return fast.Trace(
        requests.enters,
        requests.outputs,
        requests.prompts,
        predicted=requests.predicted,
        limits=np.maximum(limits, 1).astype(np.int64),
        flows=flows[requests.row] if flows.size else flows,
    )


def path_of(model: Queue, speeds: Speeds) -> SpeedPath | None:
    """How fast a continuous engine was at each moment; None where it is taken as constant."""
    times = speeds.times
    if model.engine.servers > 1 or times.count < 2:
        return None
    outside = float(times.measured.sum() / times.fitted.sum())
    return path_of_slots(times.at, times.measured, times.fitted, outside)


def machine_of(seen: Snapshot, requests: WindowRequests, model: Queue) -> Machine | None:
    """How fast the one server of a window was at each moment, for whatever it is to serve."""
    if not keeps_pace(model):
        return None
    if not model.policy.joins_running:
        return requests.batch_factors(model)
    return path_of(model, Speeds.of(model.policy, seen, model.engine.law, model.step_tokens))
