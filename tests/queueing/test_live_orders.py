"""The live model under orders by predicted lengths: what it predicts from a window alone, against
what was observed.
"""

from __future__ import annotations

import numpy as np
import pytest

from kendall.policies import Request, parse_policy
from kendall.queueing.control.assess import assess
from kendall.queueing.estimation.window.window import Window
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from kendall.queueing.simulation.reference import Job, SimulatedEngine, simulate_trace

LAW = LatencyModel(k1=0.0, k2=0.02, k3=0.0005, k4=0.01)
COUNT = 12_000
LIMIT = 100


def records_of(
    policy: str, rate: float, sigma: float | None, law: LatencyModel = LAW
) -> list[Record]:
    rng = np.random.default_rng(8)
    arrivals = np.cumsum(rng.exponential(1 / rate, COUNT))
    lengths = np.minimum(np.ceil(rng.lognormal(2.4, 0.8, COUNT)), LIMIT - 1).astype(int)
    told = lengths * np.exp((sigma or 0.0) * rng.standard_normal(COUNT))
    jobs = [
        Job(
            Request(
                id=str(place),
                arrived_at=float(at),
                prompt_tokens=4,
                max_output_tokens=LIMIT,
                predicted_output_tokens=None if sigma is None else max(1.0, round(float(guess))),
            ),
            int(length),
        )
        for place, (at, length, guess) in enumerate(zip(arrivals, lengths, told, strict=True))
    ]
    return simulate_trace(parse_policy(policy), jobs, SimulatedEngine(law), [rng])


def predicted_and_observed(
    policy: str, rate: float, sigma: float | None
) -> tuple[float, float, bool]:
    """Mean delays, and whether the prediction says that it is in doubt."""
    records = records_of(policy, rate, sigma)
    window = Window(seconds=1e9, most=COUNT, epoch_at=0.0)
    for record in sorted(records, key=lambda each: each.arrived_at or 0.0):
        window.on_arrival(record.arrived_at or 0.0)
    for record in records:
        window.on_record(record)
    end = max(record.released_at or 0.0 for record in records)
    found = assess(window.snapshot(policy, end), LAW, QueueLimits())
    assert found.prediction is not None
    delays = [record.queueing_delay or 0.0 for record in records]
    mean = found.prediction.queueing_delay.mean
    assert mean is not None
    doubt = any("in doubt" in note for note in found.prediction.assumptions)
    return mean, float(np.mean(delays)), doubt


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.0, 0.6])
@pytest.mark.parametrize(
    ("policy", "rate"),
    [
        ("single:order=spjf", 4.0),
        ("single:order=sprpt", 4.0),
        ("continuous:max_batch_size=4,order=spjf", 15.0),
        ("continuous:max_batch_size=4,order=sprpt", 15.0),
    ],
)
def test_it_predicts_the_delay_with_the_predictor_it_saw(
    policy: str, rate: float, sigma: float
) -> None:
    predicted, observed, doubt = predicted_and_observed(policy, rate, sigma)
    assert doubt == (policy == "continuous:max_batch_size=4,order=spjf"), "and simulated for that"
    assert predicted == pytest.approx(observed, rel=0.1)


@pytest.mark.slow
def test_interruptions_that_are_more_than_the_engine_can_do_are_told_as_load() -> None:
    """The requests alone load it by about two thirds, and each token costs an admission too."""
    policy, rate = "continuous:max_batch_size=2,order=fb", 5.0
    law = LatencyModel(k1=0.0, k2=0.02, k3=0.0005, k4=0.01, kr=0.02)
    records = records_of(policy, rate, 0.0, law)
    end = max(record.arrived_at or 0.0 for record in records)
    window = Window(seconds=1e9, most=COUNT, epoch_at=0.0)
    for record in sorted(records, key=lambda each: each.arrived_at or 0.0):
        window.on_arrival(record.arrived_at or 0.0)
    for record in records:
        if (record.released_at or 0.0) <= end:
            window.on_record(record)
    found = assess(window.snapshot(policy, end), law, QueueLimits())
    assert found.model is not None
    assert found.model.load(found.estimates.arrival_rate.value) < 0.9
    assert found.prediction is None
    assert found.load.value > 1
    stable = {each.name: each for each in found.compared.assumptions}["stable_queue"]
    assert stable.says.endswith("the queue grows without bound")


@pytest.mark.left_out
def test_without_predictions_the_order_is_that_of_arrival() -> None:
    predicted, observed, _ = predicted_and_observed("single:order=spjf", 4.0, None)
    assert predicted == pytest.approx(observed, rel=0.1)
    ordered, *_ = predicted_and_observed("single:order=spjf", 4.0, 0.0)
    assert ordered < 0.9 * predicted
