"""Simulated quantiles have standard errors that say how far they are off."""

from __future__ import annotations

import json
import math

import numpy as np
from typer.testing import CliRunner

from kendall.queueing.commands.cli import app
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS
from kendall.queueing.simulation.experiment import simulate_model, simulate_steady_state
from kendall.queueing.simulation.simulated_means import summary_of_runs

SEEDS = 40
LAW = "k1=0.002,k2=0,k3=0.001,k4=0.01"
SLOTS = Queue.read("continuous:max_batch_size=4", "geometric:mean=20", LAW)


def test_over_many_seeds_quantiles_scatter_about_the_exact_ones_as_their_errors_say() -> None:
    """M/G/1 at load 0.6; also of a quantile at which nobody waits, which has no error."""
    model = Queue.read("single", "geometric:mean=20", "a=0.01,c=0.05")
    rate = 0.6 * model.largest_stable_rate
    exact = predict_model(model, rate).sojourn_time
    found = [
        simulate_model(model, rate, num_requests=30_000, seed=seed).sojourn_time
        for seed in range(SEEDS)
    ]
    for level in LEVELS:
        known = exact.value(level)
        assert known is not None
        off = [((each.value(level) or 0.0) - known) / each.errors[level] for each in found]
        assert 0.6 < math.sqrt(float(np.mean(np.square(off)))) < 1.5, level
    idle = simulate_model(model, 0.1 * model.largest_stable_rate, num_requests=30_000)
    assert (idle.queueing_delay.p50, idle.queueing_delay.errors["p50"]) == (0.0, 0.0)


def test_quantiles_of_a_continuous_engine_are_off_by_what_their_errors_say() -> None:
    """With a control variate, beside a longer run of other requests."""
    rate = 0.85 * SLOTS.largest_stable_rate
    found = simulate_steady_state(SLOTS, rate, 100_000).sojourn_time
    longer = simulate_model(SLOTS, rate, num_requests=1_000_000, seed=7).sojourn_time
    for level in LEVELS:
        value, other = found.value(level), longer.value(level)
        assert value is not None
        assert other is not None
        assert 0 < found.errors[level] < 0.1 * value
        assert abs(value - other) < 4 * math.hypot(found.errors[level], longer.errors[level])


def test_replications_that_differ_have_errors_by_their_differences() -> None:
    runs = [np.full(1000, value) + np.linspace(0, 0.1, 1000) for value in (1.0, 1.0, 5.0, 5.0)]
    found = summary_of_runs(runs)
    assert found.errors["p90"] < 0.1 < found.errors["p50"]


def test_predict_and_simulate_say_them() -> None:
    given = ["--policy", "continuous:max_batch_size=4", "--arrival-rate", "10"]
    given += ["--output-tokens", "geometric:mean=20", "--latency", LAW]
    for command, more in (("predict", []), ("simulate", ["--num-requests", "20000"])):
        plain = CliRunner().invoke(app, [command, *given, *more, "--json"])
        errors = json.loads(plain.stdout)["standard_errors"]["sojourn_time"]
        assert all(errors[level] > 0 for level in LEVELS)
        table = CliRunner().invoke(app, [command, *given, *more]).stdout
        assert "std. error" in table
    exact = CliRunner().invoke(app, ["predict", *given[2:], "--policy", "single", "--json"])
    assert "standard_errors" not in json.loads(exact.stdout)
