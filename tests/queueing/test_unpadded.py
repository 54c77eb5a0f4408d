"""Padded policies on an engine that cannot pad: their queue is that of elastic batches, in the
formulas, in the simulation and in what is estimated of a window.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kendall.policies import parse_policy, served_as
from kendall.queueing.choosing.autopilot.assessed_window import assessed_window
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.control.assess import assess
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.estimates import estimate
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_model, simulate_run
from tests.queueing.estimation_windows import window_of

LAW = LatencyModel(k1=0.005, k2=0.02, k3=0.001, k4=0.004)
LENGTHS = parse_distribution("uniform:low=1,high=60")
ASKED = "capped:max_batch_size=8"
CANNOT = QueueLimits(pads=False, engine=EngineBounds(max_num_seqs=64))


def model_of(text: str, *, pads: bool) -> Queue:
    policy = served_as(parse_policy(text), pads=pads)
    return Queue.read(policy, LENGTHS, LAW, max_num_seqs=64)


@pytest.mark.parametrize(("size", "load"), [(4, 0.45), (8, 0.8)])
def test_a_fixed_batch_that_is_not_padded_has_an_exact_answer(size: int, load: float) -> None:
    """The delay is that of its batch times; each member leaves with its own last token."""
    model = model_of(f"fixed:batch_size={size}", pads=False)
    rate = load * model.largest_stable_rate
    answer = predict_model(model, rate)
    run = simulate_model(model, rate, num_requests=40_000, replications=4, seed=5)
    assert answer.method == "exact"
    assert answer.policy == f"fixed:batch_size={size}"
    for exact, simulated in (
        (answer.queueing_delay, run.queueing_delay),
        (answer.sojourn_time, run.sojourn_time),
        (answer.time_to_first_token, run.time_to_first_token),
    ):
        assert exact.mean is not None
        assert simulated.mean is not None
        assert simulated.standard_error is not None
        assert simulated.standard_error < 0.02 * simulated.mean
        assert abs(exact.mean - simulated.mean) < 4 * simulated.standard_error
    assert answer.inter_token_latency.mean is None, "a batch that shrinks speeds up"


def test_its_members_leave_sooner_than_those_of_a_padded_batch() -> None:
    padded, unpadded = (model_of("fixed:batch_size=4", pads=pads) for pads in (True, False))
    assert unpadded.largest_stable_rate > 1.15 * padded.largest_stable_rate
    answers = [predict_model(model, 5.0) for model in (padded, unpadded)]
    own = [(each.sojourn_time.mean or 0) - (each.queueing_delay.mean or 0) for each in answers]
    assert own[1] < 0.8 * own[0]


@pytest.mark.parametrize("text", ["fixed:batch_size=4", "fixed:batch_size=4,max_wait=0.3"])
def test_the_kernel_of_an_unpadded_fixed_batch_is_the_reference(text: str) -> None:
    """Request by request."""
    model, stream = model_of(text, pads=False), np.random.SeedSequence(3)
    quick = simulate_run(model, 5.0, 400, stream)
    whole = simulate_run(model, 5.0, 400, np.random.SeedSequence(3), generic=True)
    for name in ("dispatched_at", "released_at", "server_free_at"):
        np.testing.assert_allclose(getattr(quick, name), getattr(whole, name), atol=1e-9)
    assert (quick.released_at < quick.server_free_at).any()


def test_a_window_of_an_engine_that_cannot_pad_is_assessed_by_the_elastic_law() -> None:
    """Speed and prediction: the padded law would take the batches for quicker than it is."""
    model = model_of(ASKED, pads=False)
    window = replace(window_of(model, 0.6, 800, seed=2), policy=ASKED)
    found = assess(window, LAW, CANNOT)
    assert found.model is not None
    assert found.model.policy == parse_policy("elastic:max_batch_size=8")
    assert found.estimates.speed.value == pytest.approx(1.0, abs=1e-6)
    assert found.prediction is not None
    rate = found.estimates.arrival_rate.value
    assert found.prediction.queueing_delay == predict_model(found.model, rate).queueing_delay
    assert estimate(window, parse_policy(ASKED), LAW).speed.value < 0.95


def test_what_ifs_and_the_autopilot_see_elastic_batches_too() -> None:
    model = model_of(ASKED, pads=False)
    window = replace(window_of(model, 0.6, 3000, seed=2), policy=ASKED)
    found = assess(window, LAW, CANNOT)
    setting = Setting(policy="dynamic")
    for limits, padded in (
        (CANNOT, False),
        (QueueLimits(engine=EngineBounds(max_num_seqs=64)), True),
    ):
        point = OperatingPoint(estimates=found.estimates, shape=LAW, limits=limits)
        assert point.model(setting).policy.padded == padded
    seen = assessed_window(window, LAW, Setting(policy=ASKED), CANNOT, None)
    assert seen.estimates.speed.value == pytest.approx(1.0, abs=1e-6)
