"""The next minutes: what the queue will do if traffic and machine go on as in the last hour.

The steady state is where a queue tends to; the next five minutes may be far from it, in bursts most
of all. They are simulated, from what waits now, many times over. Each stretch of them draws

    arrivals  pieces of the hour's own, of random length (stationary bootstrap, Politis and Romano
              1994), about a second, a minute or several long, so that bursts and levels both stay;
              which part of the hour they are from is drawn by weights that are random themselves
              (Bayesian bootstrap, Rubin 1981), as its rate is not known for sure; faster or slower
              by as much as the work that came moved from one stretch to the next
    requests  runs of the window's own: prompts, answers, limits, predictions
    speed     of one server pieces of what it was in the window, moment by moment; on the whole
              lognormal about the window's: its own error, and how far one stretch of minutes was
              from the next in the last hour

One stretch is the same for every setting: a gain is known better than either side.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kendall.policies.ordered import counts
from kendall.queueing.estimation.arrivals import while_requests_came
from kendall.queueing.estimation.change import Vector
from kendall.queueing.estimation.checked import (
    FEWEST,
    WindowRequests,
    machine_of,
    plain,
    requests_of,
    trace_of,
)
from kendall.queueing.estimation.estimates import Estimates
from kendall.queueing.estimation.interval import NORMAL, Estimate
from kendall.queueing.estimation.replayed import Machine, keeps_pace, replayed
from kendall.queueing.estimation.speed.batch_factors import BatchFactors
from kendall.queueing.estimation.speed.speed_history import SpeedHistory
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.latency.speed_path import SpeedPath
from kendall.queueing.measurement.batch_means import student
from kendall.queueing.queue import Queue
from kendall.queueing.simulation import fast

HOUR, HORIZON = 3_600.0, 300.0  # seconds
STRETCHES, FEWEST_STRETCHES, DRIVEN_STRETCHES = 48, 12, 6
MOST, DRIVEN = 120_000, 3_000  # requests of all stretches; where the policy object is driven
PIECES = (2.0, 20.0, 120.0)  # seconds, on average
PARTS, RUN = 10, 20  # of what is known; requests
# of the work that comes, from five minutes to the next, as if so many had been seen: 0.07 and 0.21
# in two public traces, 1.2 in the third (Mooncake, Azure 2023 conversation and code)
USUAL_DRIFT, USUAL_STRETCHES = 0.2, 1.0
LEVEL, ENOUGH = 0.9, 19  # of the band; stretches of which one in twenty lies beyond either end
MOST_ERROR = 0.5  # of the speed, relative


@dataclass(slots=True)
class RecentArrivals:
    """Calls of the last hour, and output tokens of those that ended, on a clock that stands still
    while nobody looked, or came.
    """

    at: Vector = field(default_factory=lambda: np.empty(0))
    sizes: Vector = field(default_factory=lambda: np.empty(0))
    ended_at: Vector = field(default_factory=lambda: np.empty(0))
    tokens: Vector = field(default_factory=lambda: np.empty(0))
    clock: float = 0.0
    _until: float = -math.inf

    def add(self, seen: Snapshot) -> None:
        """Add the new arrivals of a window; windows may overlap. Silence before the first calls and
        after the last is not of their traffic.
        """
        seen = while_requests_came(seen)
        since = max(seen.start, self._until)
        if seen.now <= since or seen.arrivals.size < FEWEST:
            return
        new = seen.arrivals > since
        at = np.concatenate([self.at, self.clock + seen.arrivals[new] - since])
        sizes = np.concatenate([self.sizes, seen.call_sizes[new]])
        freed = seen.column("server_free_at")
        done = (freed > since) & (freed <= seen.now)
        ended = np.concatenate([self.ended_at, self.clock + freed[done] - since])
        tokens = np.nan_to_num(seen.column("output_tokens")[done])
        tokens = np.concatenate([self.tokens, tokens])
        self.clock, self._until = self.clock + seen.now - since, seen.now
        kept, known = at > self.clock - HOUR, ended > self.clock - HOUR
        self.at, self.sizes = at[kept], sizes[kept]
        self.ended_at, self.tokens = ended[known], tokens[known]

    @property
    def seconds(self) -> float:
        """Length of the stretch that is known, seconds."""
        return min(self.clock, HOUR)

    def drift(self, seconds: float) -> float:
        """Standard deviation of the log of the output tokens per second of such a stretch about
        that of the one before, beyond chance at one rate and one law of lengths; what is usual
        where there were few.
        """
        number = int(self.seconds / seconds)
        edges = self.clock - seconds * np.arange(number, -1, -1)
        work, squares = (
            np.maximum(np.histogram(self.ended_at, edges, weights=weights)[0], 1.0)
            if number
            else np.empty(0)
            for weights in (self.tokens, self.tokens**2)
        )
        chance = squares / work**2  # of a sum of a Poisson number of them, relative variance
        steps = np.diff(np.log(work)) ** 2 - chance[1:] - chance[:-1]
        sure = USUAL_STRETCHES * USUAL_DRIFT**2 + float(np.maximum(steps, 0.0).sum())
        return math.sqrt(sure / (USUAL_STRETCHES + steps.size))

    def drawn(self, seconds: float, rng: np.random.Generator) -> tuple[Vector, Vector]:
        """Instants and sizes of the calls of such a stretch."""
        begin, end, span = self.clock - self.seconds, self.clock, self.seconds
        weights = rng.dirichlet(np.ones(PARTS))
        length = min(float(rng.choice(PIECES)), span / 2)
        instants, sizes, at = [np.empty(0)], [np.empty(0)], 0.0
        while at < seconds:
            part = (rng.choice(PARTS, p=weights) + rng.random()) / PARTS
            piece = min(float(rng.exponential(length)), seconds - at, span)
            since = begin + part * span
            over = since + piece - span  # at the end of what is known it goes on at the begin
            for low, high, shift in (
                (since, min(since + piece, end), at),
                (begin, over, at + end - since),
            ):
                first, last = np.searchsorted(self.at, (low, high))
                instants.append(self.at[first:last] - low + shift)
                sizes.append(self.sizes[first:last])
            at += piece
        return np.concatenate(instants), np.concatenate(sizes)


@dataclass(frozen=True, eq=False, kw_only=True)
class Outlook:
    """Stretches of the next `seconds`, with the speed of each over the window's; `history`:
    seconds whose traffic they are drawn from.
    """

    stretches: tuple[WindowRequests, ...]
    speeds: Vector
    paths: tuple[SpeedPath | None, ...]  # of one server, with its speed on the whole
    seconds: float
    history: float
    at: float  # the end of the window that it rests on
    least: float = 0.0  # delay, seconds: the gateway's own

    def means(self, model: Queue) -> npt.NDArray[np.float64] | None:
        """Mean queueing delay and sojourn of each stretch in which somebody was served, seconds;
        None of an order that counts the service of flows, which are not known.
        """
        found = self.each(model, fewer=not fast.is_compiled(plain(model)))
        if found is None:
            return None
        served = np.isfinite(found).all(axis=0)
        return found[:, served] if np.count_nonzero(served) > 1 else None

    def each(
        self, model: Queue, limit: int | None = None, *, fewer: bool
    ) -> npt.NDArray[np.float64] | None:
        """The same of all stretches under a token limit, not a number where nobody was served; of
        `fewer` of them, and of their first requests, where a policy object is driven.
        """
        law, model = model.engine.law, plain(model)
        if counts(model.policy):
            return None
        most = DRIVEN_STRETCHES if fewer else STRETCHES
        found = []
        for number, each in enumerate(self.stretches[:most]):
            part = each.part(slice(DRIVEN // DRIVEN_STRETCHES)) if fewer else each
            path, own = self.paths[number] if keeps_pace(model) else None, model
            if path is None:  # stalls are in a path
                own = model.but(law=law.at_speed(self.speeds[number] * law.speed))
            given = trace_of(limited(part, limit))
            run = replayed(own, given, machine=path, draws=1, seed=number)
            ends = np.stack([run.dispatched[0], run.released[0]])
            judged = part.judged & np.isfinite(ends).all(axis=0)
            waited = np.maximum(ends - part.arrived, self.least)[:, judged]
            found.append(waited.mean(axis=1) if judged.any() else np.full(2, np.nan))
        return np.array(found).T if found else None


def limited(requests: WindowRequests, limit: int | None) -> WindowRequests:
    """Under a token limit that none of their own exceeds."""
    if limit is None:
        return requests
    return dataclasses.replace(
        requests,
        outputs=np.minimum(requests.outputs, limit),
        limits=np.fmin(requests.limits, limit),
    )


def outlook(
    seen: Snapshot,
    model: Queue,
    recent: RecentArrivals,
    speed_error: float,
    *,
    least: float = 0.0,
    seconds: float = HORIZON,
    seed: int = 0,
) -> Outlook | None:
    """From the end of the window `seen` on; `speed_error`: relative standard error of the speed
    in the minutes to come. None where too little came.
    """
    told = requests_of(seen, plain(model))
    machine = machine_of(seen, told, plain(model))
    told = told.part(told.row >= 0)
    rate = float(recent.sizes.sum()) / recent.seconds if recent.seconds else 0.0
    if told.row.size < FEWEST or not rate > 0:
        return None
    seconds = min(seconds, MOST / FEWEST_STRETCHES / rate)
    number = int(np.clip(MOST / (rate * seconds), FEWEST_STRETCHES, STRETCHES))
    stretches, speeds, drift = [], np.empty(number), recent.drift(seconds)
    paths: list[SpeedPath | None] = []
    present = seen.waiting + (len(seen.in_service) if model.policy.joins_running else 0)
    for index in range(number):
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(index,)))
        speeds[index] = math.exp(speed_error * rng.standard_normal())
        paths.append(_resampled(machine, seconds, float(speeds[index]), rng.spawn(1)[0]))
        faster = math.exp(drift * rng.standard_normal())
        at, sizes = recent.drawn(seconds * faster, rng)
        at /= faster
        at = np.concatenate([np.zeros(present), np.repeat(at, sizes.astype(int))])
        # runs of neighbours, from parts of random weights
        weights, runs = rng.dirichlet(np.ones(PARTS)), at.size // RUN + 1
        parts = rng.choice(PARTS, size=runs, p=weights) + rng.random(runs)
        begins = (parts / PARTS * told.row.size).astype(np.intp)
        rows = ((begins[:, None] + np.arange(RUN)).ravel() % told.row.size)[: at.size]
        judged = np.arange(at.size) >= present
        stretches.append(dataclasses.replace(told.part(rows), enters=at, arrived=at, judged=judged))
    return Outlook(
        stretches=tuple(stretches),
        speeds=speeds,
        paths=tuple(paths),
        seconds=seconds,
        history=recent.seconds,
        at=seen.now,
        least=least,
    )


def _resampled(
    machine: Machine | None, seconds: float, scale: float, rng: np.random.Generator
) -> SpeedPath | None:
    """Pieces of how fast it was, one after the other."""
    if machine is None:
        return None
    path = machine.path(rng) if isinstance(machine, BatchFactors) else machine
    return path.resampled(seconds, scale, rng)


def band(means: Vector) -> Estimate:
    """Where the mean of the next stretch lies, nine times in ten; none is below 0. Of fewer than
    `ENOUGH` the least and the most hold it less often: Student's, of one more beside these.
    """
    if 1 < means.size < ENOUGH:
        middle, spread = float(means.mean()), float(means.std(ddof=1))
        half = student(means.size - 1, LEVEL) * spread * math.sqrt(1 + 1 / means.size)
        return Estimate(middle, max(0.0, middle - half), middle + half, float(means.size))
    ends = (1 - LEVEL) / 2, (1 + LEVEL) / 2
    low, high = np.quantile(means, ends, method="weibull")  # of one more beside these
    return Estimate(float(means.mean()), float(low), float(high), float(means.size))


def forecast_error(estimates: Estimates, speeds: SpeedHistory) -> float:
    """Relative standard error of the speed in the minutes to come."""
    own = estimates.speed.relative / NORMAL if estimates.speed.known else 0.0
    return min(MOST_ERROR, math.hypot(own, speeds.apart))
