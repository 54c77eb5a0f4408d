"""High loads on virtual time: the queue on an engine whose speed is the recorded trace, judged by
the rule of the real cells.

The trace (speed-trace.json beside this file) is the speed of a real engine on a machine that was
not quiet, in blocks of 0.2 s, and is repeated: once its calm first two minutes, once the whole of
it. What a run at load 0.3 shows of it, second by second, is the hour before the cells: it gives
their bands. A cell is as long as `queueing.simulation.run_length` advises for +-10 % at a constant
speed, and is doubled while it is too short, up to `MOST` requests. What is measured is given to the
estimators of the live model; no delay enters a prediction.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.live.judgement import verdict
from bench.live.observation import at_its_speeds
from bench.live.speed_path import Band, LoadedQueue, Vector, speed_path
from queueing.control.assess import Assessment, assess
from queueing.estimation.speed.batch_times import batch_times
from queueing.estimation.window.snapshot import FIELDS, Snapshot
from queueing.estimation.window_queue import Limits
from queueing.latency.law import LatencyModel, parse_law
from queueing.measurement.batch_means import TOO_WIDE
from queueing.model import Model
from queueing.simulation.fast import SimulatedRun
from queueing.simulation.run_length import advise_model

TRACE = Path(__file__).with_name("speed-trace.json")
POLICIES = ("single", "fixed:batch_size=4", "capped:max_batch_size=8", "elastic:max_batch_size=8")
LOADS = (0.75, 0.9)
LAW = parse_law(
    "k1=0.00014,k2=0.00206,k3=0.000028,k4=0.00114,kp=0.0000083,cv=0.08"
)  # of the engine of the trace
LENGTHS, PROMPTS, BOUND = "uniform:low=1,high=31", "deterministic:value=32", 16
RELATIVE, MOST = 0.10, 400_000
SEEN_BEFORE = 100_000  # requests at load 0.3
CALM = 120.0  # seconds from the beginning of the trace


@dataclass(frozen=True, eq=False)
class Trace:
    """The levels, relative to the mean speed, and what the file says of them."""

    levels: Vector
    step: float
    header: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path = TRACE) -> Trace:
        """Of the committed file."""
        plain = json.loads(path.read_bytes())
        levels = np.array(plain.pop("levels"))
        return cls(
            levels * float(np.mean(1 / levels)), float(plain["step_seconds"]), plain
        )  # mean of 1 / level: work done per second

    def first(self, seconds: float) -> Trace:
        """Its beginning, relative to the mean speed there."""
        levels = self.levels[: round(seconds / self.step)]
        return Trace(levels * float(np.mean(1 / levels)), self.step, self.header)

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.levels.size * self.step


@dataclass(frozen=True, eq=False, kw_only=True)
class VirtualCell:
    """One cell, measured."""

    policy: str
    load: float
    seconds: float
    band: Band  # along the path that the run at load 0.3 showed
    true_band: Band  # along the trace itself
    found: Assessment
    at_its_speeds: float | None

    def lies_in(self, band: Band) -> bool:
        """Whether the observed mean does."""
        return band.low <= self.found.compared.observed.value <= band.high

    def says(self, predicted: float | None) -> str:
        """The rule of the real cells, of either prediction."""
        observed = self.found.compared.observed
        return verdict(observed.value, observed.value - observed.low, predicted)


def virtual_cells(
    trace: Trace, policies: tuple[str, ...] = POLICIES, loads: tuple[float, ...] = LOADS
) -> Iterator[VirtualCell]:
    """Policy by policy; the band of each is there before it is measured."""
    for policy in policies:
        model = Model.read(policy, LENGTHS, LAW, prompt_tokens=PROMPTS, max_num_seqs=BOUND)
        before = _path_before(model, trace)
        for load in loads:
            yield _cell(model, load, trace, before)


def _path_before(model: Model, trace: Trace) -> list[float]:
    """What a run at low load shows of the trace."""
    rate = 0.3 * model.largest_stable_rate
    count = min(SEEN_BEFORE, round(rate * trace.seconds))
    run = _queue(model, rate).run(
        trace.levels, 0.0, count, np.random.SeedSequence(7), width=trace.step
    )
    return speed_path(batch_times(model.policy, snapshot_of(run, model), _shape(LAW)))


def _cell(model: Model, load: float, trace: Trace, before: list[float]) -> VirtualCell:
    rate = load * model.largest_stable_rate
    queue, count = _queue(model, rate), advise_model(model, rate, relative=RELATIVE).requests
    count = min(count, MOST)
    while True:
        band = queue.stated_band(before, count / rate, 0.0, 1)
        run = queue.run(
            trace.levels, 0.0, count, np.random.SeedSequence(round(1000 * load)), width=trace.step
        )
        seen = snapshot_of(run, model)
        found = assess(seen, _shape(LAW), Limits(max_num_seqs=BOUND))
        if found.compared.observed.relative <= TOO_WIDE or 2 * count > MOST:
            break
        count *= 2
    path = speed_path(batch_times(model.policy, seen, _shape(LAW)))
    along = at_its_speeds(found, _shape(LAW), path)
    true = queue.stated_band(trace.levels.tolist(), count / rate, 0.0, 1, width=trace.step)
    seconds = float(run.arrived_at[-1])
    return VirtualCell(
        policy=model.text,
        load=load,
        seconds=seconds,
        band=band,
        true_band=true,
        found=found,
        at_its_speeds=along,
    )


def _queue(model: Model, rate: float) -> LoadedQueue:
    found = LoadedQueue.of(model, rate)
    assert found is not None
    return found


def _shape(law: LatencyModel) -> LatencyModel:
    """As calibrated: the speed and the residual are the run's."""
    return law.at_speed(1.0)


def snapshot_of(run: SimulatedRun, model: Model) -> Snapshot:
    """The whole run as a window that began with its epoch and ends with the last arrival."""
    arrivals = np.asarray(run.arrived_at, dtype=np.float64)
    count, now = arrivals.size, float(arrivals[-1])
    known = {name: getattr(run, name) for name in FIELDS if hasattr(run, name)} | {
        "prompt_tokens": np.full(count, 32)
    }
    rows = np.column_stack(
        [np.asarray(known.get(name, np.zeros(count)), dtype=np.float64) for name in FIELDS]
    )
    rows = rows[run.released_at <= now]
    order = np.argsort(rows[:, FIELDS.index("released_at")], kind="stable")
    return Snapshot(
        policy=model.text,
        epoch=0,
        epoch_at=0.0,
        start=0.0,
        now=now,
        arrivals=arrivals,
        rows=rows[order],
    )
