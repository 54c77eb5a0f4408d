"""How many requests wait, and how many there are, at any instant of a simulation: seen at equally
spaced instants from when those that the warm-up left behind are gone to the last arrival.

Where requests are interrupted, or wait at two servers in turn, nobody knows when each waited, so
only those in the system are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kendall.policies.ordered import order_of
from kendall.queueing.queue import Queue
from kendall.queueing.result import Count, Levels

if TYPE_CHECKING:
    from kendall.queueing.simulation.fast import SimulatedRun

_MOST = 1_000_000  # instants of a run
_LEAST = 100
_Numbers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.floating[Any]]


def counts_of(runs: Sequence[SimulatedRun], model: Queue) -> Mapping[str, Count]:
    """By the names of `Prediction`; none where the runs are too short."""
    waits = [_waiting_until(run, model) for run in runs]
    leaves = [
        np.where(run.lost, until, run.released_at) for run, until in zip(runs, waits, strict=True)
    ]
    ends = {"number_in_system": leaves}
    interrupted = order_of(model.policy).preemptive or model.on_demand
    if not (interrupted or model.engine.disaggregated):
        ends["queue_length"] = waits
    found = {
        name: [_seen(run.arrived_at, until) for run, until in zip(runs, of, strict=True)]
        for name, of in ends.items()
    }
    numbers = {name: np.concatenate(of) for name, of in found.items()}
    return {name: count(of, model.levels) for name, of in numbers.items() if of.size >= _LEAST}


def count(numbers: _Numbers, levels: Levels) -> Count:
    """Of numbers that are seen equally often."""
    return count_of(np.cumsum(np.bincount(numbers)) / numbers.size, levels)


def count_of(at_most: _Floats, levels: Levels) -> Count:
    """From the chances of at most 0, 1, ... requests."""
    at = np.searchsorted(at_most, [level - 1e-12 for level in levels.values()])
    return Count(float(at_most[0]), dict(zip(levels, at.astype(float).tolist(), strict=True)))


def _waiting_until(run: SimulatedRun, model: Queue) -> _Floats:
    patience = np.where(run.rejected, 0.0, model.requests.patience or 0.0)
    return np.where(run.lost, run.arrived_at + patience, run.dispatched_at)


def _seen(begins: _Floats, ends: _Floats) -> _Numbers:
    """How many have begun and not ended."""
    if begins.size < 2:
        return np.empty(0, np.int64)
    first, last = float(begins.min()), float(begins.max())
    if first == last:
        return np.empty(0, np.int64)
    first = min(first + float((ends - begins).max()), first + (last - first) / 10)
    at = np.linspace(first, last, min(begins.size, _MOST), endpoint=False)
    changes = _changes(begins, at, last) - _changes(ends, at, last)
    return np.cumsum(changes)


def _changes(instants: _Floats, at: _Floats, last: float) -> _Numbers:
    """How many of them come after each point of the grid `at`, which ends before `last`, and up to
    the next one; neither has to be sorted for it.
    """
    size = at.size
    place = np.ceil((instants - at[0]) * (size / (last - at[0])))
    index = np.clip(place, 0, size).astype(np.intp)
    index -= (index > 0) & (at[index - 1] >= instants)  # the division was rounded
    index += (index < size) & (at[np.minimum(index, size - 1)] < instants)
    return np.bincount(index, minlength=size + 1)[:size]
