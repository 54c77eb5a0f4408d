"""Servers that prefill and decode, one phase of one request at a time (prefill_servers 0)."""

import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kendall
from kendall.policies.text import SpecError
from kendall.queueing.commands.cli import app
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import Quantiles
from kendall.queueing.simulation.experiment import run_trace, simulate_model
from kendall.queueing.simulation.fast import draw_trace
from tests.papers.scenario_paths import slow_phases

# no multiples of each other: no two events at one instant
LAW = LatencyModel(kp=1.00317e-3, k3=1.0193e-3, k4=8.8711e-3)
LENGTHS = {"output_tokens": "uniform:low=1,high=90", "prompt_tokens": "uniform:low=1,high=900"}
FIGURE = (
    "--prompt-tokens geometric:mean=500 --output-tokens geometric:mean=50 "
    "--latency k1=0,k2=0,k3=0,k4=0.01,kp=0.001 --disaggregated --prefill-servers 0"
)


def queue(policy: str, **limits: Any) -> Queue:
    given: dict[str, Any] = {"latency": LAW, "predictor": "exact", **LENGTHS, **limits}
    return Queue.read(policy, disaggregated=True, prefill_servers=0, **given)


def assert_meets(found: Quantiles, expected: float | None) -> None:
    assert expected is not None
    assert found.mean is not None
    assert found.standard_error is not None
    assert found.standard_error < 0.05 * expected
    assert abs(found.mean - expected) < 4 * found.standard_error


def run(command: str, policy: str, more: str) -> Any:
    given = [command, "--policy", policy, *FIGURE.split(), *more.split()]
    result = CliRunner().invoke(app, [*given, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("transfer", [None, "setup=10ms,token=0.7071ms"])
@pytest.mark.parametrize(
    "order",
    [
        "fcfs",
        "prefill-first",
        "spjf",
        "spjf,aging=0.01",
        "spjf,by=service",
        "spjf,by=service,prompt_weight=2",
    ],
)
def test_a_path_is_that_of_one_event_after_the_other(
    order: str, transfer: str | None, servers: int
) -> None:
    model = queue(f"single:order={order}", servers=servers, kv_transfer=transfer)
    rate = 0.85 * model.largest_stable_rate
    trace = draw_trace(model, rate, 400, np.random.SeedSequence(3))
    prompts, outputs = trace.prompt_tokens, trace.output_tokens
    seconds = np.array([LAW.kp * prompts, LAW.step(1) * outputs])
    none = np.zeros_like(seconds)
    ranks = {
        "fcfs": none,
        "prefill-first": none + np.array([[0], [1]]),
        "spjf": none + outputs,
        "spjf,aging=0.01": none + trace.arrived_at + 0.01 * outputs,
        "spjf,by=service": seconds,
        "spjf,by=service,prompt_weight=2": np.array([outputs + 2 * prompts, outputs]),
    }[order]
    moves = np.zeros(400) if transfer is None else 0.01 + 0.7071e-3 * prompts
    found = run_trace(model, trace)
    expected = slow_phases(trace.arrived_at, seconds, ranks, servers, moves=moves)
    ends = (*(station.released_at for station in found.stations), found.released_at)
    for mine, theirs in zip(ends, (*expected, expected[1]), strict=True):
        assert mine == pytest.approx(np.array(theirs), rel=1e-12)


@pytest.mark.thinned(9)
@pytest.mark.parametrize("order", ["fcfs", "prefill-first"])
@pytest.mark.parametrize("load", [0.4, 0.8])
@pytest.mark.parametrize(
    "law", ["k1=0,k2=0.03,k3=1e-3,k4=9e-3,kp=1e-3", "k1=0,k2=0.5,k3=0,k4=0.01,cv=0.7"]
)
def test_on_one_server_the_means_are_exact(law: str, load: float, order: str) -> None:
    model = queue(f"single:order={order}", latency=law)
    rate = load * model.largest_stable_rate
    answer = predict_model(model, rate, "exact")
    found = simulate_model(model, rate, num_requests=400_000, seed=4)
    assert answer.model == "M/G/1 with feedback"
    assert answer.utilisation == pytest.approx(load)
    for name in ("queueing_delay", "sojourn_time", "time_to_first_token", "service_time"):
        assert_meets(getattr(found, name), getattr(answer, name).mean)
    for mine, theirs in zip(found.stations, answer.stations, strict=True):
        assert mine.load == pytest.approx(theirs.load, rel=0.01)
        if theirs.queueing_delay.mean:
            assert_meets(mine.queueing_delay, theirs.queueing_delay.mean)


def test_first_come_first_served_is_the_queue_of_whole_requests() -> None:
    """A request whose prefill has ended is the next in the queue: its decode starts at once."""
    pooled = queue("single", servers=2)
    whole = Queue.read("single", **LENGTHS, latency=LAW, servers=2)
    rate = 0.8 * whole.largest_stable_rate
    assert pooled.largest_stable_rate == pytest.approx(whole.largest_stable_rate)
    mine, theirs = (
        run_trace(model, draw_trace(model, rate, 900, np.random.SeedSequence(5)))
        for model in (pooled, whole)
    )
    assert mine.released_at == pytest.approx(theirs.released_at, rel=1e-12)
    assert mine.first_token_at == pytest.approx(theirs.first_token_at, rel=1e-12)
    one = pooled.but(servers=1)
    answers = (predict_model(model, rate / 2, "exact") for model in (one, whole.but(servers=1)))
    first, second = (answer.sojourn_time.mean for answer in answers)
    assert first == pytest.approx(second, rel=1e-5)


@pytest.mark.parametrize("command", ["predict", "simulate"])
def test_two_pooled_servers_have_the_numbers_of_the_figure(command: str) -> None:
    """slides-phases at load 0.8: prefilled after 0.7936 (0.0026) s, over after 3.316 (0.039) s."""
    more = "--servers 2 --arrival-rate 1.6"
    found = run(command, "single:order=prefill-first", more)
    found = found.get("prediction", found)
    sojourn, (prefill, _) = found["sojourn_time"], found["stations"]
    assert abs(sojourn["mean"] - 3.316) < 4 * np.hypot(sojourn["standard_error"], 0.039)
    delay = prefill["queueing_delay"]
    assert abs(delay["mean"] + 0.5 - 0.7936) < 4 * np.hypot(delay["standard_error"], 0.0026)
    assert found["model"] == "M/G/2 with feedback"


@pytest.mark.parametrize("stations", [{}, {"disaggregated": True}])
def test_elsewhere_prefill_first_is_first_come_first_served(stations: dict[str, Any]) -> None:
    given: dict[str, Any] = {**LENGTHS, "latency": str(LAW), **stations}
    first, usual = (
        kendall.simulate(policy, 1.0, num_requests=5000, **given)
        for policy in ("single:order=prefill-first", "single")
    )
    assert first.sojourn_time.mean == pytest.approx(usual.sojourn_time.mean, rel=1e-9)
    assert any("nothing waits between prefill and decode" in text for text in first.assumptions)


@pytest.mark.parametrize(
    ("policy", "limits", "message"),
    [
        ("continuous:max_batch_size=4", {}, "for prefill_servers=0; expected single: servers"),
        ("single:order=sprpt", {}, "got order sprpt for prefill_servers=0; expected one that"),
        ("single:order=vtc", {}, "got order vtc for prefill_servers=0"),
        ("single:order=hrrn", {}, "got order hrrn for prefill_servers=0"),
        ("single", {"disaggregated": False}, "got prefill_servers=0 for servers that prefill and"),
        ("single:order=prefill-first,aging=1", {}, "got aging for order prefill-first"),
    ],
)
def test_what_cannot_be_is_refused(policy: str, limits: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"disaggregated": True, "prefill_servers": 0, "latency": LAW, **LENGTHS}
    with pytest.raises(SpecError, match=message):
        Queue.read(policy, **{**given, **limits})
