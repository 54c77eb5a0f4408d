"""Quantiles far out and near saturation, where a simulation is too short to have them."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from scipy.optimize import brentq
from typer.testing import CliRunner

from kendall.queueing.choosing.objective import levels_of, parse_slos
from kendall.queueing.commands.optimize_cli import app
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction import predict_durations, predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS, Quantiles

SIZE, SECONDS = 8, 0.032
FAR = {"p99.9": 0.999, "p99.99": 0.9999}


def constant_batches(load: float) -> tuple[Queue, float]:
    """Batches of 1 to 8 that take the same time each: the law of the delay is geometric far out."""
    policy, lengths = f"capped:max_batch_size={SIZE}", "deterministic:value=16"
    model = Queue.read(policy, lengths, LatencyModel(k1=0.0, k2=SECONDS, k3=0.0, k4=0.0))
    return model.with_quantiles(FAR), load * SIZE / SECONDS


def decay(rate: float) -> float:
    """The root of e^{theta D} = (1 + theta / lam)^B: P(W > t) falls as e^{-theta t}."""

    def excess(theta: float) -> float:
        return theta * SECONDS - SIZE * math.log1p(theta / rate)

    return float(brentq(excess, 1e-6 * rate, 20 * rate))


def numbers(found: Quantiles) -> dict[str, float]:
    known = {name: found.value(name) for name in (*LEVELS, *FAR)}
    assert None not in known.values()
    return {name: float(value) for name, value in known.items() if value is not None}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("load", [0.5, 0.9, 0.99, 0.999])
def test_of_constant_batches_fall_by_the_root_of_their_equation(load: float) -> None:
    model, rate = constant_batches(load)
    found = predict_model(model, rate)
    assert "queueing_delay" not in found.methods, "a formula's"
    delay, mean = numbers(found.queueing_delay), found.queueing_delay.mean or 0.0
    step = math.log(10) / decay(rate)
    assert delay["p99.99"] - delay["p99.9"] == pytest.approx(step, rel=0.01)
    if load > 0.99:  # nearly exponential: the mean checks the constant before it
        assert delay["p99.99"] == pytest.approx(mean * math.log(1e4), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 0.99, 0.999])
def test_durations_that_are_simulated_follow_the_delay_whose_law_is_known(load: float) -> None:
    """The sojourn is the delay and a constant; a simulation of 300,000 requests alone is at load
    0.999 seven times too short.
    """
    model, rate = constant_batches(load)
    found = predict_durations(model, rate, ["sojourn_time", "time_to_first_token"])
    delay, sojourn = numbers(found.queueing_delay), numbers(found.sojourn_time)
    for name in delay:
        assert sojourn[name] == pytest.approx(delay[name] + SECONDS, rel=0.02), name
        assert sojourn[name] > delay[name]


@pytest.mark.slow
def test_the_largest_rate_with_a_far_quantile_is_below_that_with_a_nearer_one() -> None:
    """Asked for p99.99, the search took p99 from the same simulation too and went to load 0.999."""
    model, _ = constant_batches(0.5)
    slo = parse_slos("p99.99_queueing_delay=2.3s")["slo"]
    model = model.with_quantiles(levels_of([slo]))
    values = {
        load: slo.value(predict_model(model, load * SIZE / SECONDS)) for load in (0.98, 0.99, 0.999)
    }
    assert values[0.98] < 2.3 < values[0.999]
    assert sorted(values.values()) == list(values.values())


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["capped:max_batch_size=8", "elastic:max_batch_size=8"])
def test_a_search_for_a_rate_by_a_far_quantile_of_the_sojourn_follows_a_smooth_curve(
    policy: str,
) -> None:
    """It fell and rose by 20 % from one rate to the next, and rates that keep the SLO were left."""
    found = CliRunner().invoke(
        app,
        [
            *("--json", "--target", "arrival-rate", "--policy", policy),
            *("--latency", "k1=0.0003,k2=0.0014,k3=0.0001,k4=0.0012"),
            *("--output-tokens", "uniform:low=8,high=24"),
            *("--slo", "p99.99_sojourn_time=200ms"),
        ],
    )
    said = json.loads(found.stdout)
    curve = [(each["arrival_rate"], each["p99.99_sojourn_time"]) for each in said["curve"]]
    values = [value for _, value in curve]
    assert all(after > 0.99 * before for before, after in itertools.pairwise(values))
    kept = max(rate for rate, value in curve if value <= 0.2)
    assert said["best"]["arrival_rate"] == pytest.approx(kept, rel=0.005)


def test_a_quantile_that_is_exact_stays_where_a_farther_one_is_simulated() -> None:
    """And has no error. Under a heavy tail only the nearer quantiles are exact."""
    model = Queue.read(
        "dynamic",
        "pareto:alpha=2.6,minimum=4",
        LatencyModel(k1=0.0, k2=0.002, k3=0.0, k4=0.001),
        max_num_seqs=4,
        max_output_tokens=4_000,
    )
    plain, far = predict_model(model, 20.0), predict_model(model.with_quantiles(FAR), 20.0)
    for name in ("queueing_delay", "sojourn_time"):
        one, other = getattr(plain, name), getattr(far, name)
        assert {level: other.value(level) for level in LEVELS} == {
            level: one.value(level) for level in LEVELS
        }
        assert not other.errors.keys() & LEVELS.keys() or name in plain.methods
