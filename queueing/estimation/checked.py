"""The check of the live model: the window's own requests, as observed and as the model serves the
same ones at the speed that the engine had (queueing.measurement.check), in blocks of a tenth of the
window: slow changes of the speed are followed, a law of another shape than the engine's is not.

What waited or ran when the window began stands at its beginning: a request that was dispatched
before then enters the model at its dispatch, one that waited at the begin of the window. Those
that arrived since are judged, in pairs; no Poisson arrivals and no steady state are assumed. The
speed is taken from service times, never from delays; of a policy from outside, and of an order
that only the policy object itself knows, the last `DRIVEN` requests are driven through it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from policies import Fixed, is_first_come
from policies.ordered import counts, order_of
from queueing.estimation.change import Vector
from queueing.estimation.speed.batch_times import SLOT_ERROR
from queueing.estimation.speed.speeds import Speeds
from queueing.estimation.window.snapshot import FIELDS, Snapshot
from queueing.latency.speed_path import SpeedPath, path_of_batches, path_of_slots
from queueing.measurement.batch_means import BATCHES, batch_means_interval, student
from queueing.measurement.check import Check
from queueing.measurement.recursion import batch_starts
from queueing.measurement.statistics import WARM_UP
from queueing.model import Model
from queueing.models.soap.predictor_text import NO_PREDICTION
from queueing.simulation import fast
from queueing.simulation.experiment import run_given

DRAWS = 16  # of the residuals of batches
DRIVEN = 1_000  # requests where the policy object is driven
FEWEST = 20  # requests
SPAN = 50  # batches of one speed, at least: their own residual is a part of it
TOGETHER, FEWEST_PARTS = 4, 10  # batches in a part of the interval, and such parts
BLOCKS = 10  # of a window: the engine's speed is taken as constant in each


@dataclass(frozen=True, eq=False, kw_only=True)
class Pairs:
    """The judged requests of a window, as they were and as the model has them; seconds."""

    ended_at: Vector  # of what is judged: dispatch, or under continuous the release
    observed: Vector
    draws: npt.NDArray[np.float64]  # a row for each draw of the residuals, a column a request
    check: Check

    def by_second(self, until: float = math.inf) -> dict[str, Any]:
        """Means of the requests that ended within each second that was over `until` then: its end,
        their number, the observed one, the model's, and between which the means of nine in ten
        draws lie (none of a single one).
        """
        over = np.floor(self.ended_at) + 1 <= until
        seconds, place, counts = np.unique(
            np.floor(self.ended_at[over]), return_inverse=True, return_counts=True
        )

        def means(values: Vector) -> Vector:
            return np.bincount(place, values[over], seconds.size) / counts

        each = np.array([means(draw) for draw in self.draws])
        alone = len(each) == 1
        low, high = (None, None) if alone else np.quantile(each, (0.05, 0.95), axis=0).tolist()
        return {
            "at": (seconds + 1).tolist(),
            "n": counts.tolist(),
            "observed": means(self.observed).tolist(),
            "modelled": each.mean(axis=0).tolist(),
            "low": low,
            "high": high,
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class _Requests:
    """In the order in which they enter the model; seconds and tokens."""

    enters: Vector
    arrived: Vector
    dispatched: Vector
    freed: Vector  # when the engine was done with it
    ends: Vector  # of what is judged
    prompts: npt.NDArray[np.int64]
    outputs: npt.NDArray[np.int64]
    predicted: Vector
    batch: Vector
    judged: npt.NDArray[np.bool_]

    def part(self, kept: Any) -> _Requests:
        """Some of them: a mask, indices or a slice."""
        names = (each.name for each in dataclasses.fields(self))
        return _Requests(**{name: getattr(self, name)[kept] for name in names})


def check_window(seen: Snapshot, model: Model, speeds: Speeds, turnaround: float) -> Pairs | None:
    """`model`: the queue at the window's estimates; `turnaround`: seconds that the gateway needs at
    least. None where too few requests were served, or the order of service interrupts, or counts by
    flows, of which a window knows nothing.
    """
    model = _plain(model)
    policy, compiled = model.policy, fast.is_compiled(model)
    if counts(policy) or order_of(policy).preemptive:
        return None
    requests = _requests(seen, model)
    if not compiled:
        requests = requests.part(slice(-DRIVEN, None))
    if np.count_nonzero(requests.judged) < FEWEST:
        return None
    draws = _replayed(requests, model, _path(model, speeds), compiled=compiled)
    judged = requests.judged & np.isfinite(draws).all(axis=0)
    arrived = requests.arrived[judged]
    observed, every = requests.ends[judged] - arrived, np.maximum(draws[:, judged] - arrived, 0.0)
    if not policy.joins_running:
        every = np.maximum(every, turnaround)
    modelled = every.mean(axis=0)
    # parts of one path, as in overload, need not be independent: what was seen is one more draw
    within = _interval(observed - modelled, requests.batch[judged], joins=policy.joins_running)
    half_width = max(within, _of_one_more(every.mean(axis=1)))
    if policy.joins_running:  # the speed of slots has an error of its own
        half_width += SLOT_ERROR * float(modelled.mean())
    check = Check(
        observed=float(observed.mean()),
        modelled=float(modelled.mean()),
        half_width=half_width,
        requests=int(observed.size),
        measured_services=_by_services(requests, model, judged),
    )
    return Pairs(ended_at=requests.ends[judged], observed=observed, draws=every, check=check)


def _interval(differences: Vector, batch: Vector, *, joins: bool) -> float:
    """Half width of their mean; members of a batch share their fate: a part is of several."""
    if joins:
        return batch_means_interval(differences).half_width
    parts = np.unique(batch).size // TOGETHER
    if parts < FEWEST_PARTS:
        return math.inf
    return batch_means_interval(differences, batches=min(BATCHES, parts)).half_width


def _of_one_more(means: Vector) -> float:
    """Half width of where the mean of another draw lies about that of these; 0 of a single one."""
    if means.size < 2:
        return 0.0
    spread = float(means.std(ddof=1)) * math.sqrt(1 + 1 / means.size)
    return student(means.size - 1, 0.95) * spread


def _plain(model: Model) -> Model:
    """Of sequences that came one by one; whoever left or was kept out is no part of them."""
    return dataclasses.replace(
        model,
        sequences=None,
        intraclass_correlation=0.0,
        patience=None,
        arrival_process=None,
        predictor=NO_PREDICTION,
        law=model.law.without_stalls(),  # they are in the path of the speed
    )


def _requests(seen: Snapshot, model: Model) -> _Requests:
    """Those of this epoch that were dispatched, with what ran when it began."""
    joins = model.policy.joins_running
    dispatched, freed = seen.column("dispatched_at"), seen.column("server_free_at")
    known = np.isfinite(dispatched) & np.isfinite(freed)
    known &= freed > seen.start  # who had left then is no part of it
    own = known & (seen.column("epoch") == seen.epoch)
    before = known & ~own
    busy = float(freed[before].max(initial=-math.inf)) if seen.servers == 1 else -math.inf
    column = {name: seen.column(name)[own] for name in FIELDS}
    arrived, started = column["arrived_at"], column["dispatched_at"]
    enters = np.where(started < seen.start, started, np.maximum(arrived, seen.start))
    ends = column["released_at" if joins else "dispatched_at"]
    found = _Requests(
        enters=np.maximum(enters, busy),
        arrived=arrived,
        dispatched=started,
        freed=column["server_free_at"],
        ends=ends,
        prompts=np.nan_to_num(column["prompt_tokens"]).astype(np.int64),
        outputs=np.maximum(np.nan_to_num(column["output_tokens"]), 1).astype(np.int64),
        predicted=column["predicted_tokens"],
        batch=column["batch_id"],
        judged=_judged(seen, arrived, ends),
    )
    found = _with_running(found, seen) if joins else found
    return found.part(np.lexsort((found.dispatched, found.arrived, found.enters)))


def _judged(seen: Snapshot, arrived: Vector, ends: Vector) -> npt.NDArray[np.bool_]:
    """The same requests as the forecast is judged by (queueing.estimation.assumptions.verdict)."""
    own = np.flatnonzero(arrived >= seen.start)
    own = own[np.argsort(arrived[own], kind="stable")]
    own = own[int(WARM_UP * own.size) :] if seen.start <= seen.epoch_at else own
    judged = np.zeros(arrived.size, dtype=bool)
    judged[own] = True
    judged &= np.isfinite(ends)
    return judged


def _with_running(found: _Requests, seen: Snapshot) -> _Requests:
    """And those that share the engine now, with the tokens that they have."""
    if not seen.in_service:
        return found
    at = np.array([each[0] for each in seen.in_service])
    tokens = np.array([max(1, each[1]) for each in seen.in_service], dtype=np.int64)
    unknown, none = np.full(at.size, math.nan), np.zeros(at.size, dtype=bool)
    prompt = int(found.prompts.mean()) if found.prompts.size else 0
    running = _Requests(
        enters=at,
        arrived=at,
        dispatched=at,
        freed=unknown,
        ends=unknown,
        prompts=np.full(at.size, prompt, dtype=np.int64),
        outputs=tokens,
        predicted=unknown,
        batch=unknown,
        judged=none,
    )
    names = [each.name for each in dataclasses.fields(_Requests)]
    return _Requests(
        **{name: np.concatenate([getattr(found, name), getattr(running, name)]) for name in names}
    )


def _path(model: Model, speeds: Speeds) -> SpeedPath | None:
    """How fast the engine was at each moment; None where it is taken as constant."""
    policy, times = model.policy, speeds.times
    waits = isinstance(policy, Fixed) and math.isfinite(policy.max_wait)
    if model.servers > 1 or waits or times.count < 2:
        return None
    speed, span = model.law.speed, max(SPAN, times.count // BLOCKS)
    if policy.joins_running:
        span = max(2, times.count // BLOCKS)  # of groups, each of several requests
        return path_of_slots(times.at, times.measured, times.fitted, speed, span)
    ended = times.at + times.measured
    return path_of_batches(times.at, ended, times.fitted, speed, span)


def _replayed(
    requests: _Requests, model: Model, path: SpeedPath | None, *, compiled: bool
) -> npt.NDArray[np.float64]:
    """Where each ends, as what is judged of it, of every draw; seconds."""
    enters = requests.enters
    if path is not None:
        enters = path.to_clock(enters)
        cv = model.law.cv if model.policy.joins_running else path.cv
        model = dataclasses.replace(model, law=dataclasses.replace(model.law, speed=1.0, cv=cv))
    told = requests.predicted
    given = fast.Trace(
        enters,
        requests.outputs,
        requests.prompts,
        predicted=told if not compiled or np.isfinite(told).all() else np.empty(0),
        limits=np.empty(0, dtype=np.int64) if compiled else requests.outputs,
    )
    draws = DRAWS if compiled and model.law.cv and not model.policy.joins_running else 1
    found = np.empty((draws, enters.size))
    for ends, stream in zip(found, np.random.SeedSequence(0).spawn(draws), strict=True):
        run = run_given(model, given, stream)
        ends[:] = run.released_at if model.policy.joins_running else run.dispatched_at
    if path is None:
        return found
    at_once = found == enters  # the way there and back must not make a delay of these
    return np.where(at_once, requests.enters, path.to_run(found.ravel()).reshape(found.shape))


def _by_services(requests: _Requests, model: Model, judged: npt.NDArray[np.bool_]) -> float | None:
    """The mean delay by the recursion on batches and service times as measured
    (queueing.measurement.recursion); None where it is not one server's in order of arrival.
    """
    policy = model.policy
    if policy.joins_running or model.servers > 1 or not is_first_come(policy):
        return None
    rows = (requests.enters, requests.dispatched, requests.freed, requests.batch)
    starts = batch_starts(policy, np.stack([*rows, np.zeros(requests.batch.size)]))
    return float((starts[judged] - requests.arrived[judged]).mean())
