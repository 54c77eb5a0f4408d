"""Laws without time per token: batches of one duration, and servers that compute prompts only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel, parse_law
from kendall.queueing.models.as_published import fixed_batch_delay
from kendall.queueing.models.mm1 import md1
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_model, simulate_run
from kendall.server.engines.emulated import EmulatedEngine

CONSTANT = "k1=0,k2=1,k3=0,k4=0"
PREFILL = "k1=0,k2=0,k3=0,k4=0,kp=0.01"
LENGTHS = "geometric:mean=20"
PROMPTS = "uniform:low=50,high=150"


def predicted(policy: str, law: str, rate: float, **limits: Any):
    return predict_model(Queue.read(policy, LENGTHS, law, **limits), rate)


@pytest.mark.parametrize("law", [CONSTANT, "a=0,c=1"])
def test_a_constant_service_is_m_d_1(law: str) -> None:
    found, exact = predicted("single", law, 0.7), md1(0.7, 1.0)
    assert found.method == "exact"
    assert found.queueing_delay.mean == pytest.approx(exact.mean_delay, rel=1e-12)
    assert found.sojourn_time.mean == pytest.approx(exact.mean_delay + 1, rel=1e-12)
    assert found.inter_token_latency.mean == 0
    assert found.time_to_first_token.mean == pytest.approx(found.sojourn_time.mean)


@pytest.mark.parametrize(("size", "rate"), [(2, 1.5), (8, 6.0), (16, 8.0)])
def test_batches_of_one_duration_are_m_d_b_1(size: int, rate: float) -> None:
    """Bailey's queue at departures (Yang's Eq. 25, with all its roots), less H, with the forming
    of a batch.
    """
    found = predicted(f"fixed:batch_size={size}", CONSTANT, rate)
    assert found.method == "exact"
    roots = fixed_batch_delay(rate, 1.0, size, terms=400)
    expected = roots - 1 + (size - 1) / (2 * rate)
    assert found.queueing_delay.mean == pytest.approx(expected, rel=1e-9)
    near = predicted(f"fixed:batch_size={size}", "k1=0,k2=1,k3=0,k4=1e-9", rate)
    assert found.queueing_delay.mean == pytest.approx(near.queueing_delay.mean, rel=1e-6)


def test_a_server_that_takes_all_that_waits_has_no_largest_rate() -> None:
    """M/D^[1,inf]/1 at a rate at which it never idles: half a batch's duration."""
    found = predicted("dynamic", CONSTANT, 50.0)
    assert (found.method, found.load) == ("exact", 0.0)
    assert found.queueing_delay.mean == pytest.approx(0.5, rel=1e-9)
    assert found.batch_size.mean == pytest.approx(50.0, rel=1e-9)


def test_a_prefill_server_is_m_g_1_of_the_prompts() -> None:
    found = predicted("single", PREFILL, 0.7, prompt_tokens=PROMPTS)
    second = 1e-4 * parse_distribution(PROMPTS).moment(2)
    assert found.method == "exact"
    assert found.queueing_delay.mean == pytest.approx(0.7 * second / (2 * 0.3), rel=1e-9)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("policy", "law", "rate", "limits"),
    [
        ("fixed:batch_size=8", CONSTANT, 6.0, {}),
        ("capped:max_batch_size=8", CONSTANT, 6.0, {}),
        ("elastic:max_batch_size=4", f"{CONSTANT},cv=0.5", 2.5, {}),
        ("dynamic", f"{CONSTANT},stall_share=0.1,stall=0.5", 3.0, {}),
        ("dynamic", CONSTANT, 5.0, {"sequences": "uniform:low=1,high=3"}),
        ("single", PREFILL, 0.7, {"prompt_tokens": PROMPTS}),
        ("capped:max_batch_size=4", PREFILL, 0.7, {"prompt_tokens": PROMPTS, "pad_prompts": True}),
    ],
)
def test_they_wait_as_simulated(policy: str, law: str, rate: float, limits: dict[str, Any]) -> None:
    model = Queue.read(policy, LENGTHS, law, **limits)
    found = predict_model(model, rate)
    assert found.method == "exact"
    drawn = simulate_model(model, rate, num_requests=60_000, replications=10, seed=2)
    for name in ("queueing_delay", "sojourn_time"):
        simulated = getattr(drawn, name)
        assert simulated.standard_error < 0.05 * simulated.mean
        assert getattr(found, name).mean == pytest.approx(
            simulated.mean, abs=4 * simulated.standard_error
        )


@pytest.mark.thinned(3)
@pytest.mark.parametrize("law", [CONSTANT, PREFILL, "k1=0.2,k2=0.1,k3=0,k4=0,kp=0.01,cv=0.4"])
@pytest.mark.parametrize(
    "policy",
    [
        "single",
        "elastic",
        "fixed:batch_size=3,max_wait=0.5",
        "capped:max_batch_size=4,order=spjf",
        "single:order=sprpt",
    ],
)
def test_both_simulators_have_one_path(policy: str, law: str) -> None:
    limits: dict[str, Any] = {"prompt_tokens": PROMPTS, "predictor": "exact"}
    model = Queue.read(policy, LENGTHS, law, **limits)
    rate = min(0.6 * model.largest_stable_rate, 3.0)
    fast, slow = (
        simulate_run(model, rate, 400, np.random.SeedSequence(4), generic=generic)
        for generic in (False, True)
    )
    assert np.array_equal(fast.dispatched_at, slow.dispatched_at)
    assert np.array_equal(fast.released_at, slow.released_at)
    assert math.isfinite(float(fast.released_at[-1]))


def test_an_order_by_length_is_simulated_where_lengths_take_no_time() -> None:
    found = predicted("single:order=spjf", CONSTANT, 0.7, predictor="exact")
    assert found.method == "simulation"
    delay, exact = found.queueing_delay, md1(0.7, 1.0).mean_delay
    assert delay.mean == pytest.approx(exact, abs=4 * (delay.standard_error or 0) + 1e-9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy": "continuous:max_batch_size=4", "latency": CONSTANT}, "got k3=0, k4=0 in the"),
        ({"policy": "single", "latency": PREFILL}, "takes 0 s; expected more than 0 s"),
    ],
)
def test_what_takes_no_time_is_refused(given: dict[str, str], message: str) -> None:
    model = Queue.read(given["policy"], LENGTHS, given["latency"])
    with pytest.raises(SpecError, match=message):
        predict_model(model, 1.0)


def test_laws_and_engines_without_any_step_are_refused() -> None:
    with pytest.raises(SpecError, match="got k1=k2=k3=k4=kp=0 in a latency law"):
        LatencyModel()
    with pytest.raises(SpecError, match="by which a request takes no time"):
        parse_law("a=0,c=0")
    with pytest.raises(SpecError, match="of the emulated engine, which makes tokens step by step"):
        EmulatedEngine(parse_law(CONSTANT))
    with pytest.raises(SpecError, match="decode takes no time"):
        predicted("single", CONSTANT, 0.5, disaggregated=True)
