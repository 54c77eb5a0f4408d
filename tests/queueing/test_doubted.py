"""An approximation that may be off by more than 5 % is named as in doubt, and `auto` simulates in
its place; orders have quantiles, by simulation.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from typer.testing import CliRunner

from kendall.queueing.commands import cli
from kendall.queueing.prediction import predict_model
from kendall.queueing.prediction.steady_state import doubt_of
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS
from kendall.queueing.simulation.experiment import simulate_model

LAW = "k1=1e-3,k2=4e-3,k3=1e-4,k4=2e-3"
LENGTHS = "geometric:mean=20"
VARIED = "lognormal:mu=3,sigma=1.2"
SPJF = {"predictor": "exact"}
DOUBTED: list[tuple[str, str, float, dict[str, Any], str]] = [
    ("single", "uniform:low=1,high=4", 0.8, {"disaggregated": True}, "the decode delay"),
    ("single:order=spjf", LENGTHS, 0.8, {"servers": 4, **SPJF}, "the order's delay on 4 servers"),
    ("single:order=ljf", LENGTHS, 0.7, {"servers": 8, **SPJF}, "the order's delay on 8 servers"),
    ("continuous:max_batch_size=4,order=spjf", LENGTHS, 0.85, SPJF, "the order's delay on 4"),
    ("single", VARIED, 0.5, {"servers": 2, "max_output_tokens": 4000}, "services of a squared"),
    ("single", VARIED, 0.8, {"servers": 10, "max_output_tokens": 4000}, "services of a squared"),
]


def at(policy: str, lengths: str, load: float, limits: dict[str, Any]) -> tuple[Queue, float]:
    model = Queue.read(policy, lengths, LAW, **limits)
    return model, load * model.largest_stable_rate


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "lengths", "load", "limits", "reason"), DOUBTED)
def test_auto_simulates_what_is_in_doubt(
    policy: str, lengths: str, load: float, limits: dict[str, Any], reason: str
) -> None:
    model, rate = at(policy, lengths, load, limits)
    formula = predict_model(model, rate, "approximation")
    doubt = doubt_of(formula)
    assert doubt is not None
    assert doubt.startswith(f"approximation in doubt: {reason}")
    found = predict_model(model, rate, quantiles=True)
    assert found.method == "simulation"
    assert found.fallback == f"simulation, not {doubt}"
    truth = simulate_model(model, rate, num_requests=150_000, replications=8, seed=7)
    delay, own = truth.queueing_delay, found.queueing_delay.standard_error
    assert delay.standard_error is not None
    assert own is not None
    assert delay.standard_error < 0.05 * (delay.mean or 0)
    error = math.hypot(delay.standard_error, own)
    assert found.queueing_delay.mean == pytest.approx(delay.mean, abs=4 * error)
    rough = predict_model(model, rate)
    assert rough.method == "simulation"
    assert rough.queueing_delay.mean == pytest.approx(found.queueing_delay.mean, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "lengths", "load", "limits"),
    [
        ("single", LENGTHS, 0.8, {"servers": 4}),
        ("single", VARIED, 0.95, {"servers": 2, "max_output_tokens": 4000}),
        ("continuous:max_batch_size=8", LENGTHS, 0.9, {}),
        ("single:order=threshold,threshold=60", LENGTHS, 0.5, {"servers": 2, **SPJF}),
    ],
)
def test_what_is_not_in_doubt_is_within_5_per_cent(
    policy: str, lengths: str, load: float, limits: dict[str, Any]
) -> None:
    model, rate = at(policy, lengths, load, limits)
    found = predict_model(model, rate, quantiles=True)
    assert found.method == "approximation"
    assert doubt_of(found) is None
    truth = simulate_model(model, rate, num_requests=150_000, replications=8, seed=7)
    delay = truth.queueing_delay
    assert delay.standard_error is not None
    noise = 3 * delay.standard_error
    assert found.queueing_delay.mean == pytest.approx(
        delay.mean, abs=0.05 * (delay.mean or 0) + noise
    )
    assert found.methods["queueing_delay"] == "simulation", "its quantiles"
    assert found.queueing_delay.p99 == pytest.approx(delay.p99, rel=0.1)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("order", ["spjf", "ljf", "threshold,threshold=20", "spjf,aging=0.5"])
def test_an_order_has_quantiles_by_simulation(order: str) -> None:
    model, rate = at(f"single:order={order}", LENGTHS, 0.8, SPJF)
    found = predict_model(model, rate, quantiles=True)
    truth = simulate_model(model, rate, num_requests=400_000, seed=3)
    for name in ("queueing_delay", "sojourn_time", "time_to_first_token"):
        quantiles, simulated = getattr(found, name), getattr(truth, name)
        for level in ("p90", "p95", "p99"):
            expected = getattr(simulated, level)
            assert getattr(quantiles, level) == pytest.approx(expected, rel=0.1)
    if "aging" not in order:  # whose means have a formula
        assert found.method == "exact"
        assert found.fallback == (
            "exact means, but quantiles from a simulation of 300,000 requests: no formula covers "
            "their law under this order"
        )


def test_an_order_that_interrupts_has_them_too() -> None:
    model, rate = at("single:order=sprpt", LENGTHS, 0.5, SPJF)
    found = predict_model(model, rate, quantiles=True)
    assert found.method == "approximation"
    assert all(getattr(found.sojourn_time, level) is not None for level in LEVELS)
    assert found.queueing_delay.p99 is not None
    assert "quantiles from a simulation of 1,000,000" in (found.fallback or "")


def test_the_command_prints_them() -> None:
    given = ["--policy", "single:order=spjf", "--predictor", "exact", "--arrival-rate", "15"]
    given += ["--output-tokens", LENGTHS, "--latency", LAW, "--json"]
    found = json.loads(CliRunner().invoke(cli.app, ["predict", *given]).stdout)
    assert found["method"] == "exact"
    assert found["methods"]["queueing_delay"] == "simulation"
    assert found["queueing_delay"]["p99"] > found["queueing_delay"]["p90"] > 0
    exact = json.loads(CliRunner().invoke(cli.app, ["predict", *given, "--method", "exact"]).stdout)
    assert exact["queueing_delay"]["mean"] == found["queueing_delay"]["mean"]
    assert exact["queueing_delay"]["p99"] is None


def test_a_simulation_in_place_of_a_formula_has_what_the_law_alone_says() -> None:
    """The time between tokens of a decode server."""
    model, rate = at("single", LENGTHS, 0.5, {"disaggregated": True, "prompt_tokens": LENGTHS})
    doubted = predict_model(model, rate, "approximation")
    assert any(text.startswith("approximation in doubt") for text in doubted.assumptions)
    found = predict_model(model, rate)
    assert found.method == "simulation"
    assert found.inter_token_latency.mean == pytest.approx(model.engine.law.step(1), rel=1e-3)
