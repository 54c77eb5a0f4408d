"""What arrivals that are not Poisson cost: the window's own arrivals in the model of the window,
beside the prediction for Poisson arrivals at the same rate.

Lengths and service times are drawn as the model has them, arrivals are those that came. Where the
observation is near this mean, the arrivals are the whole reason why it is far from the prediction.
The queue begins empty, and the first arrivals are left out (`WARM_UP` of them), as those of a
window that begins with its epoch are.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from policies.text import short_number
from queueing.arrivals.processes import Recorded
from queueing.estimation.assumptions.client_assumptions import FEWEST
from queueing.estimation.assumptions.verdict import Compared
from queueing.estimation.window.snapshot import Snapshot
from queueing.measurement.statistics import WARM_UP
from queueing.model import Model
from queueing.simulation.experiment import simulate_run

MOST_RUNS = 20


def with_own_arrivals(
    compared: Compared, model: Model, seen: Snapshot, simulated: int, *, least: float = 0.0
) -> Compared:
    """Where the arrivals are not Poisson, with that mean beside the prediction, also in the words
    of the assumption; no shorter than `least` seconds.
    """
    fails = [
        each.name == "poisson_arrivals" and each.holds is False for each in compared.assumptions
    ]
    mean = own_arrivals_mean(model, seen, simulated) if any(fails) else None
    if mean is None:
        return compared
    what = "sojourn time" if model.policy.joins_running else "queueing delay"
    mean = max(mean, least)
    told = f"; with these arrivals the model has a mean {what} of {short_number(mean, 3)} s"
    assumptions = tuple(
        dataclasses.replace(each, says=each.says + told) if failed else each
        for each, failed in zip(compared.assumptions, fails, strict=True)
    )
    return dataclasses.replace(compared, own_arrivals=mean, assumptions=assumptions)


def own_arrivals_mean(model: Model, seen: Snapshot, simulated: int) -> float | None:
    """Mean queueing delay of the dispatched, or sojourn time of continuous, in seconds, over about
    `simulated` requests. None for calls of several sequences, and for few arrivals.
    """
    instants = seen.arrivals[-simulated:]
    if model.sequences is not None or instants.size < FEWEST:
        return None
    process = Recorded(instants - instants[0])
    replayed = dataclasses.replace(model, arrival_process=process)
    runs = min(MOST_RUNS, max(1, simulated // instants.size))
    left_out = int(WARM_UP * instants.size)
    means = []
    for stream in np.random.SeedSequence(0).spawn(runs):
        run = simulate_run(replayed, process.mean_rate, instants.size, stream).after(left_out)
        values = run.sojourn_time if model.policy.joins_running else run.queueing_delay
        means.append(float(np.mean(values[~run.lost])))
    return float(np.mean(means))
