"""Quantiles of what the clients of a continuous engine see, for live looks: of delay, sojourn, time
to first token and gaps between tokens. The formula gives their means only.

They come from a simulation at the window's estimates in which each request, beside what the law
says, takes what one of the window's requests took (`ResidualVariance`): the steps of a real engine
vary, those of the law do not, and a p95 of the time to the first token was 4 to 13 % too short
without (measured: docs/why/production-validation.md). A simulation costs some 0.1 s of a processor.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kendall.queueing.errors import OutOfReachError
from kendall.queueing.estimation.speed.fitted_law import ResidualVariance
from kendall.queueing.prediction.steady_state import with_quantiles_of
from kendall.queueing.queue import Queue
from kendall.queueing.result import APPROXIMATE_MEANS, Prediction
from kendall.queueing.simulation.experiment import begin_of, steady_run, summary
from kendall.queueing.simulation.fast import COLUMNS, SimulatedRun, is_compiled
from kendall.queueing.simulation.run_limits import affordable_requests, enough_slots

DRAWN = 300_000  # requests: a p95 to 1 or 3 %
NAMES = (
    "queueing_delay",
    "served_queueing_delay",
    "inter_token_latency",
    "sojourn_time",
    "time_to_first_token",
)


def with_answer_quantiles(
    prediction: Prediction,
    model: Queue,
    rate: float,
    scatter: ResidualVariance | None,
    least: float,
) -> Prediction:
    """The prediction with those, and its own means; as it is where a simulation costs too much.
    `least`: seconds that the gateway itself needs from an arrival to its dispatch.
    """
    roomy = enough_slots(model, rate)
    if not is_compiled(roomy):
        return prediction
    try:
        count = affordable_requests(model, rate, DRAWN)
    except OutOfReachError:
        return prediction
    begin = begin_of(roomy, rate, count)
    run = scattered(steady_run(roomy, rate, begin, np.random.SeedSequence(0)), scatter)
    simulated = summary([run], model, model.load(rate), ())
    noted = prediction
    if prediction.method != "simulation":
        note = f"{APPROXIMATE_MEANS}quantiles from a simulation of {DRAWN:,} requests"
        noted = dataclasses.replace(prediction, assumptions=(*prediction.assumptions, note))
    return with_quantiles_of(simulated.with_turnaround(least), noted, NAMES)


def scattered(run: SimulatedRun, scatter: ResidualVariance | None) -> SimulatedRun:
    """Every request takes longer, or shorter, by what one of the window's requests did."""
    if scatter is None:
        return run
    drawn = np.random.default_rng(0).integers(0, scatter.first.size, run.arrived_at.size)
    first = np.maximum(run.first_token_at + scatter.first[drawn], run.dispatched_at)
    columns = {name: getattr(run, name) for name in COLUMNS} | {"first_token_at": first}
    for name in ("released_at", "server_free_at"):
        columns[name] = np.maximum(getattr(run, name) + scatter.whole[drawn], first)
    return SimulatedRun(run.arrived_at, run.output_tokens, columns, gaps=run.gaps)
