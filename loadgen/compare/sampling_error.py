"""The sampling error of a run: the mean of runs of this very length under the asked process and
the calibrated law.

`RUNS` simulated runs of n requests, each from an empty queue and with the same warm-up dropped,
give

    spread = t(RUNS - 1) * s * sqrt(1 + 1 / RUNS)        of one run's mean around the others'

and a difference within it is sampling, not a fault. Where the formula is an approximation, one long
simulation with the same inputs says how far it is from the steady state that it approximates.

Predictions are made for Poisson arrivals. Where another process was asked for, the runs are of that
process, and one long simulation of it stands beside the steady state of Poisson arrivals.
"""

from __future__ import annotations

import math

import numpy as np

from kendall.loadgen.compare.comparison import NORMAL, Compared, Predicted, SamplingError
from kendall.queueing.errors import PredictionError
from kendall.queueing.measurement.batch_means import student
from kendall.queueing.measurement.statistics import warm_up
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_model, simulate_run
from kendall.queueing.simulation.fast import is_compiled

RUNS, GENERIC_RUNS = 40, 10  # the simulator that drives policy objects is a hundred times slower
LONG_RUN, GENERIC_LONG_RUN = 200_000, 5_000  # requests


def sampling_error(
    model: Queue, rate: float, count: int, compared: Compared, answer: Predicted, *, seed: int = 0
) -> SamplingError | None:
    """Estimate that of the mean over `count` requests; None where there is no steady state or the
    run is too short to have a mean. `answer`: for Poisson arrivals, whatever the model's process.
    """
    mean, dropped = getattr(answer, compared), warm_up(count)
    if mean is None or not math.isfinite(mean) or count - dropped < 2:
        return None
    long_run, half_width = mean, 0.0
    if answer.method == "approximation":
        poisson = model.but(process=None, scv=1.0)
        long_run, half_width = _simulated(poisson, rate, compared, seed)
    if long_run is None:
        return None
    runs = RUNS if is_compiled(model) else GENERIC_RUNS
    patient = model.but(patience=None)
    means = [
        float(np.mean(getattr(simulate_run(patient, rate, count, stream), compared)[dropped:]))
        for stream in np.random.SeedSequence((seed, count)).spawn(runs)
    ]
    spread = student(runs - 1, 0.95) * float(np.std(means, ddof=1)) * math.sqrt(1 + 1 / runs)
    process, of_process = None, 0.0
    if model.arrivals.process is not None:
        process, of_process = _simulated(model, rate, compared, seed)
    return SamplingError(long_run, half_width, spread, process, of_process)


def _simulated(
    model: Queue, rate: float, compared: Compared, seed: int
) -> tuple[float | None, float]:
    """The mean of one long simulation, and the half width of what is known about it."""
    try:
        simulated = simulate_model(
            model,
            rate,
            num_requests=LONG_RUN if is_compiled(model) else GENERIC_LONG_RUN,
            seed=seed,
        )
    except PredictionError:
        return None, math.inf
    quantity = getattr(simulated, compared)
    return quantity.mean, NORMAL * (quantity.standard_error or 0.0)
