"""Windows from compiled simulations: runs of a million requests as snapshots, without a record of each."""

from __future__ import annotations

import numpy as np

from queueing.estimation.window import FIELDS, Snapshot
from queueing.experiment import simulate_run
from queueing.fast_simulation import SimulatedRun
from queueing.model import Model


def window_of(model: Model, load: float, count: int, seed: int) -> Snapshot:
    """Poisson arrivals at that load, from an empty queue up to the last arrival: who has left by then, in the order of leaving."""
    return snapshot_of_run(simulate_run(model, load * model.largest_stable_rate, count, np.random.SeedSequence(seed)), model)


def snapshot_of_run(run: SimulatedRun, model: Model) -> Snapshot:
    """The whole run as a window that began with its epoch."""
    now = float(run.arrived_at[-1])
    known = {name: getattr(run, name) for name in FIELDS if hasattr(run, name)}
    columns = {name: np.asarray(known.get(name, np.zeros(run.arrived_at.size)), dtype=np.float64) for name in FIELDS}
    rows = np.column_stack([columns[name] for name in FIELDS])
    rows = rows[run.released_at <= now]
    order = np.argsort(rows[:, FIELDS.index("released_at")], kind="stable")
    arrivals, sequences = run.arrived_at, None
    if model.sequences is not None:
        arrivals, counts = np.unique(run.arrived_at, return_counts=True)
        sequences = counts.astype(np.float64)
    return Snapshot(policy=model.text, epoch=0, epoch_at=0.0, start=0.0, now=now, arrivals=arrivals, sequences=sequences, rows=rows[order])
