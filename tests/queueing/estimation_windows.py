"""Windows from compiled simulations: runs of a million requests as snapshots, without a record
of each.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kendall.queueing.estimation.assumptions.assumption import Assumption, Evidence, judged
from kendall.queueing.estimation.assumptions.forecast_assumptions import FORECAST_TESTS
from kendall.queueing.estimation.window.window import FIELDS, WIDTH, Snapshot
from kendall.queueing.measurement.record import Record
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_run
from kendall.queueing.simulation.fast import SimulatedRun


def window_of(model: Queue, load: float, count: int, seed: int) -> Snapshot:
    """Poisson arrivals at that load, from an empty queue up to the last arrival: who has left by
    then, in the order of leaving.
    """
    return snapshot_of_run(
        simulate_run(model, load * model.largest_stable_rate, count, np.random.SeedSequence(seed)),
        model,
    )


def arrival_assumptions(
    instants: npt.NDArray[np.float64], *, explained: bool = False
) -> tuple[Assumption, Assumption]:
    """constant_rate and poisson_arrivals of these instants; `explained`: clients retry."""
    start, now = (
        (float(end) for end in (instants[0], instants[-1])) if instants.size else (0.0, 0.0)
    )
    window = Snapshot(
        policy="single",
        epoch=0,
        epoch_at=start,
        start=start,
        now=now,
        arrivals=instants,
        rows=np.empty((0, WIDTH)),
    )
    retries = Assumption("no_retries", not explained, float(explained), "")
    names = "constant_rate", "poisson_arrivals"
    tests = (test for test in FORECAST_TESTS if test.name in names)
    _, constant, process = judged(Evidence(seen=window, verdicts={"no_retries": retries}), tests)
    return constant, process


def snapshot_of_run(
    run: SimulatedRun,
    model: Queue,
    prompt_tokens: npt.NDArray[np.int64] | None = None,
    max_output_tokens: float = np.nan,
) -> Snapshot:
    """The whole run as a window that began with its epoch; every request had that limit."""
    now = float(run.arrived_at[-1])
    known = {name: getattr(run, name) for name in FIELDS if hasattr(run, name)}
    known["max_output_tokens"] = np.full(run.arrived_at.size, max_output_tokens)
    known |= {} if prompt_tokens is None else {"prompt_tokens": prompt_tokens}
    columns = {
        name: np.asarray(known.get(name, np.zeros(run.arrived_at.size)), dtype=np.float64)
        for name in FIELDS
    }
    rows = np.column_stack([columns[name] for name in FIELDS])
    rows = rows[run.released_at <= now]
    order = np.argsort(rows[:, FIELDS.index("released_at")], kind="stable")
    arrivals, sequences = run.arrived_at, None
    if model.requests.sequences is not None:
        arrivals, counts = np.unique(run.arrived_at, return_counts=True)
        sequences = counts.astype(np.float64)
    return Snapshot(
        policy=model.text,
        epoch=0,
        epoch_at=0.0,
        start=0.0,
        now=now,
        arrivals=arrivals,
        sequences=sequences,
        rows=rows[order],
        servers=model.engine.servers,
    )


def record(number: int, at: float, **changed: object) -> Record:
    fields = {
        "request_id": str(number),
        "outcome": "completed",
        "epoch": 0,
        "batch_id": number,
        "batch_size": 1,
        "arrived_at": at,
        "dispatched_at": at,
        "released_at": at + 1,
        "server_free_at": at + 1,
        "prompt_tokens": 8,
        "output_tokens": 10,
    }
    return Record(**(fields | changed))  # type: ignore[arg-type]
