"""What the law says of a cell: at the speed at which the engine served it, no delay used.

speed           the factor on the law at which the simulator, on the cell's own arrivals, lengths
                and predictions, serves for as long as the engine did: seconds in service, restarts
                of preempted requests included on both sides
predicted       simulated at that speed, the asked rate and the law of the lengths
formula         the approximation by one server that `kendall predict` answers with at once, and
                its doubt; None where no formula covers the order
same arrivals   the simulator on the cell's own requests: what is left is engine and gateway
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.ordering.design import LENGTHS, LIMIT, PREDICTION, PROMPT_TOKENS
from bench.ordering.observed import Figures, figures_of
from policies.core import Request
from queueing.latency.law import parse_law
from queueing.measurement.record import Record
from queueing.model import Model
from queueing.prediction import predict_model
from queueing.prediction.ordered import ordered_methods
from queueing.simulation.experiment import simulate_run
from queueing.simulation.reference import Job, SimulatedEngine, simulate_trace

SIMULATED, REPLICATIONS = 22_000, 2  # requests, the first tenth not counted
CLOSE, MOST_STEPS = 5e-4, 8  # of the speed
Cell = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Seconds."""

    speed: float
    load: float  # of the live model: asked rate over the largest stable one at that speed
    predicted: Figures
    same_arrivals: Figures
    formula: float | None  # mean delay
    doubt: str | None


def predicted_of(cell: Cell, simulated: int = SIMULATED) -> Predicted:
    """Raises UnstableQueueError: at its own speed the engine could not keep up."""
    speed, records = own_speed(cell)
    model = model_of(cell, speed)
    rate = float(cell["rate"])
    load = model.stable_load(rate)
    runs = [
        simulate_run(model, rate, simulated, stream).after(simulated // 10)
        for stream in np.random.SeedSequence(int(cell["seed"])).spawn(REPLICATIONS)
    ]
    delays, sojourns, lengths = (
        np.concatenate([getattr(run, name) for run in runs])
        for name in ("queueing_delay", "sojourn_time", "output_tokens")
    )
    formula, doubt = _formula(model, rate)
    return Predicted(
        speed=speed,
        load=load,
        predicted=figures_of(delays, sojourns, lengths),
        same_arrivals=_counted(cell, records),
        formula=formula,
        doubt=doubt,
    )


def model_of(cell: Cell, speed: float) -> Model:
    """The queue of a cell, but for its rate."""
    return Model.read(
        cell["policy"],
        LENGTHS,
        parse_law(cell["law"]).at_speed(speed),
        max_output_tokens=LIMIT,
        prompt_tokens=PROMPT_TOKENS,
        max_num_seqs=int(cell["max_num_seqs"]),
        predictor=PREDICTION,
    )


def own_speed(cell: Cell) -> tuple[float, list[Record]]:
    """By secant steps from the estimate of the live model; with the simulated records at the
    last one.
    """
    wanted = float(np.sum(cell["columns"]["service_time"]))
    speed, slope, before = float(cell["estimated_speed"]), 1.0, None
    for _ in range(MOST_STEPS):
        records = _replayed(cell, speed)
        error = math.log(sum(record.service_time or 0.0 for record in records) / wanted)
        if abs(error) < CLOSE:
            break
        if before is not None and speed != before[0]:
            slope = max(0.5, (error - before[1]) / math.log(speed / before[0]))
        before = speed, error
        speed *= math.exp(-error / slope)
    return speed, records


def _replayed(cell: Cell, speed: float) -> list[Record]:
    """In the order of arrival."""
    columns = cell["columns"]
    jobs = [
        Job(
            Request(
                id=str(place),
                arrived_at=at,
                prompt_tokens=int(columns["prompt_tokens"][place]),
                max_output_tokens=LIMIT,
                predicted_output_tokens=float(columns["predicted_output_tokens"][place]),
            ),
            int(columns["output_tokens"][place]),
        )
        for place, at in enumerate(columns["arrived_at"])
    ]
    model = model_of(cell, speed)
    engine = SimulatedEngine(model.law, int(cell["max_num_seqs"]))
    records = simulate_trace(model.policy, jobs, engine, [np.random.default_rng(0)])
    return sorted(records, key=lambda record: int(record.request_id))


def _counted(cell: Cell, records: list[Record]) -> Figures:
    kept = records[int(cell["first"]) :][: int(cell["counted"])]
    columns = [
        np.array([getattr(record, name) for record in kept], dtype=float)
        for name in ("queueing_delay", "sojourn_time", "output_tokens")
    ]
    return figures_of(*columns)


def _formula(model: Model, rate: float) -> tuple[float | None, str | None]:
    if ordered_methods(model)[0] == "simulation":
        return None, None
    found = predict_model(model, rate)
    doubts = [text for text in found.assumptions if "in doubt" in text]
    return found.queueing_delay.mean, "; ".join(doubts) or None
