"""Servers of one queue that are not equally fast: compiled, event by event, and by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from kendall.policies.text import SpecError
from kendall.queueing.commands.cli import app
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import parse_law
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation import fast
from kendall.queueing.simulation.experiment import draw_jobs, driven_run, simulate_model

LAW = parse_law("k1=0.25e-3,k2=2e-3,k3=25e-6,k4=0.9e-3,kp=1e-5,cv=0.1,turnaround=1.5e-3")
LENGTHS = parse_distribution("uniform:low=1,high=63")
SPEEDS = (1.0, 1.7, 0.8)
POLICIES = (
    *("single", "dynamic", "fixed:batch_size=4,max_wait=0.02", "capped:max_batch_size=4"),
    *("elastic:max_batch_size=3", "continuous:max_batch_size=4"),
    *("single:order=spjf", "capped:max_batch_size=4,order=spjf"),
    "continuous:max_batch_size=4,order=spjf",
)


def model_of(policy: str, **limits: object) -> Queue:
    return Queue.read(policy, LENGTHS, LAW, **({"server_speeds": SPEEDS} | limits))  # type: ignore[arg-type]


@pytest.mark.thinned(5)
@pytest.mark.parametrize("policy", POLICIES)
def test_compiled_and_event_by_event_to_the_last_bit(policy: str) -> None:
    model = model_of(policy)
    rate, stream = 0.8 * model.largest_stable_rate, np.random.SeedSequence(4)
    assert fast.is_compiled(model)
    compiled = fast.replay(model, fast.draw_trace(model, rate, 3000, stream))
    events = driven_run(model, *draw_jobs(model, rate, 3000, np.random.SeedSequence(4)))
    for name in ("dispatched_at", "released_at", "server_id", "batch_size"):
        np.testing.assert_array_equal(getattr(compiled, name), getattr(events, name), name)
    assert set(compiled.server_id.tolist()) == {0, 1, 2}


def test_each_takes_as_much_longer_as_it_is_slower() -> None:
    model = model_of("single")
    trace = fast.draw_trace(model, model.largest_stable_rate / 2, 6000, np.random.SeedSequence(4))
    run = fast.replay(model, trace)
    took = [
        np.mean((run.server_free_at - run.dispatched_at)[run.server_id == server])
        for server in range(3)
    ]
    assert took / took[0] == pytest.approx(SPEEDS, rel=0.08)


@pytest.mark.parametrize("load", [0.4, 0.8])
def test_two_servers_with_exponential_services_by_hand(load: float) -> None:
    """M/M/2 with unequal rates, the fast one first (Gumbel 1960): states 0, fast busy, slow busy,
    then by number.
    """
    fast_rate, slow_rate = 1.0, 0.5
    arrivals = load * (fast_rate + slow_rate)
    both = fast_rate + slow_rate
    # balance of 0, F, S; every number from 2 on is `load` times the one before
    matrix = np.array(
        [
            [arrivals, -fast_rate, -slow_rate, 0.0],
            [-arrivals, arrivals + fast_rate, 0.0, -slow_rate],
            [0.0, 0.0, arrivals + slow_rate, -fast_rate],
            [1.0, 1.0, 1.0, 1 / (1 - load)],
        ]
    )
    two = np.linalg.solve(matrix, [0.0, 0.0, 0.0, 1.0])[3]
    waiting = two * load / (1 - load) ** 2
    assert two * both == pytest.approx(
        arrivals * (np.linalg.solve(matrix, [0, 0, 0, 1.0])[1:3].sum())
    )
    mean = 400.0
    model = Queue.read(
        "single",
        parse_distribution(f"geometric:mean={mean}"),
        f"k1=0,k2=0,k3=0,k4={1 / mean}",
        server_speeds=[1.0, 2.0],
    )
    assert model.load(arrivals) == pytest.approx(load)
    found = simulate_model(model, arrivals, num_requests=2_000_000).queueing_delay
    assert found.mean == pytest.approx(waiting / arrivals, rel=0.02)


def test_equal_speeds_are_a_law_of_that_speed() -> None:
    model, alike = (
        model_of("single", server_speeds="1.5,1.5"),
        model_of("single", server_speeds=None),
    )
    assert (model.engine.servers, model.engine.server_speeds, model.engine.law.speed) == (
        2,
        (),
        1.5,
    )
    assert model.largest_stable_rate == pytest.approx(2 * alike.largest_stable_rate / 1.5)
    assert "approximation" in predict_model(model, 0.5 * model.largest_stable_rate).method


def test_different_speeds_are_simulated_and_said() -> None:
    model = model_of("single")
    assert model.largest_stable_rate == pytest.approx(
        sum(1 / speed for speed in SPEEDS)
        * model_of("single", server_speeds=None).largest_stable_rate
    )
    found = predict_model(model, 0.6 * model.largest_stable_rate)
    assert found.method == "simulation"
    assert "3 servers of different speed" in " ".join(found.assumptions)
    assert "service times obey the latency law, times 1, 1.7, 0.8 by server" in found.assumptions


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"server_speeds": "1,x"}, "got server_speeds='1,x'; expected a number > 0 for each"),
        ({"server_speeds": [1.0, 0.0]}, "expected a number > 0 for each server"),
        ({"server_speeds": []}, "expected a number > 0 for each server"),
        ({"server_speeds": 2}, "expected a number > 0 for each server"),
        ({"servers": 2}, "got servers=2 and 3 server speeds; expected a speed for each server"),
        ({"routing": "random"}, "got server_speeds and routing=random; expected one queue"),
        ({"disaggregated": True}, "got server_speeds and disaggregated"),
    ],
)
def test_what_it_cannot_be_is_said(limits: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("(", r"\(")):
        model_of("single", **limits)


def test_the_command_line_takes_it() -> None:
    asked = [
        *("predict", "--policy", "single", "--server-speeds", "1,2", "--arrival-rate", "1"),
        *("--output-tokens", "deterministic:value=10", "--latency", "k1=0,k2=0,k3=0,k4=0.1"),
        "--json",
    ]
    found = json.loads(CliRunner().invoke(app, asked).stdout)
    assert found["load"] == pytest.approx(1 / 1.5)
    assert found["method"] == "simulation"
