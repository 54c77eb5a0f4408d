"""Servers with a queue each, behind a load balancer: predicted as one of them where their arrivals
do not depend on one another, simulated side by side where they do.
"""

import itertools
import json
from collections.abc import Callable

import numpy as np
import pytest
from typer.testing import CliRunner

from kendall.policies.text import SpecError
from kendall.queueing.commands.cli import app
from kendall.queueing.description.parts import ROUTINGS
from kendall.queueing.distributions.token_distribution import Vector, parse_distribution
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import (
    draw_jobs,
    run_given,
    run_trace,
    simulate_model,
)
from kendall.queueing.simulation.fast import Trace, draw_choices
from kendall.queueing.simulation.reference import SimulatedEngine, simulate_trace
from kendall.queueing.simulation.scenarios.routed import FewestRequests, Router, simulate_routed
from kendall.queueing.simulation.simulated_means import mean_of_runs

LAW = "k1=0.25e-3,k2=2e-3,k3=25e-6,k4=0.9e-3"
LENGTHS = parse_distribution("uniform:low=1,high=63")
SERVERS, LOAD, REQUESTS = 3, 0.7, 30_000
POLICIES = ("single", "dynamic", "capped:max_batch_size=4", "fixed:batch_size=3,max_wait=0.05")


def routed(policy: str, routing: str, servers: int = SERVERS, **limits: object) -> Queue:
    return Queue.read(policy, LENGTHS, LAW, servers=servers, routing=routing, **limits)  # type: ignore[arg-type]


def delays(model: Queue, rate: float, router: Router, requests: int = REQUESTS) -> Vector:
    """Of all requests in order of arrival, without the first tenth."""
    jobs, rngs = draw_jobs(model, rate, requests, np.random.SeedSequence(5))
    engine = SimulatedEngine(model.engine.law)
    records = simulate_routed(model.policy, jobs, engine, rngs, router)
    by_id = {record.request_id: record.queueing_delay for record in records}
    found = np.array([by_id[job.request.id] for job in jobs], dtype=float)
    return found[requests // 10 :]


def by_chance() -> Router:
    rng = np.random.default_rng(9)
    return lambda held: int(rng.integers(len(held)))


def in_turn() -> Router:
    turn = itertools.cycle(range(SERVERS))
    return lambda _: next(turn)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("routing", "router"), [("random", by_chance), ("round_robin", in_turn)], ids=ROUTINGS[1:3]
)
def test_the_answer_is_that_of_servers_simulated_side_by_side(
    policy: str, routing: str, router: Callable[[], Router]
) -> None:
    """Not for single in turn, whose formula is an approximation: its simulation here."""
    model = routed(policy, routing)
    rate = LOAD * model.largest_stable_rate
    mean, error = mean_of_runs([delays(model, rate, router())])
    assert mean is not None
    assert error is not None
    if "approximation" in predict_model(model, rate).method:
        answer = simulate_model(model, rate, num_requests=REQUESTS, replications=4)
    else:
        answer = predict_model(model, rate)
    predicted, own_error = answer.queueing_delay.mean, answer.queueing_delay.standard_error
    assert predicted is not None
    assert mean == pytest.approx(predicted, abs=4 * float(np.hypot(error, own_error or 0.0)))
    assert error < 0.05 * mean, "too few requests to tell"


@pytest.mark.parametrize("policy", [*POLICIES[:3], "continuous:max_batch_size=4"])
def test_a_request_sent_by_chance_waits_as_at_one_server_with_its_share(policy: str) -> None:
    model, alone = routed(policy, "random"), routed(policy, "central", servers=1)
    rate = 0.5 * model.largest_stable_rate
    found, one = predict_model(model, rate), predict_model(alone, rate / SERVERS)
    assert found.queueing_delay == one.queueing_delay
    assert found.load == pytest.approx(one.load) == pytest.approx(0.5)
    assert found.model == f"{SERVERS} queues {one.model}"
    assert found.assumptions[:2] == (
        "Poisson arrivals at a constant rate",
        f"{SERVERS} servers with a queue each; requests join one by chance",
    )


@pytest.mark.slow
def test_what_a_load_balancer_costs_falls_with_what_it_knows() -> None:
    """On the same requests: by chance, in turn, to the fewest, one queue."""
    model = routed("single", "least_requests")
    rate = LOAD * model.largest_stable_rate
    means = [
        delays(model, rate, router).mean() for router in (by_chance(), in_turn(), FewestRequests())
    ]
    jobs, rngs = draw_jobs(model, rate, REQUESTS, np.random.SeedSequence(5))
    records = simulate_trace(model.policy, jobs, SimulatedEngine(model.engine.law), rngs)
    central = np.mean([record.queueing_delay for record in records])
    assert means == sorted(means, reverse=True)
    assert means[0] > 3 * means[2], "by chance, some servers idle while others have queues"
    assert means[2] > 1.03 * central, "a request that has joined a queue stays there"
    simulated = simulate_model(model, rate, num_requests=REQUESTS).queueing_delay
    assert simulated.mean == pytest.approx(means[2], rel=0.15)


@pytest.mark.parametrize("policy", [*POLICIES, "single:order=ljf"])
def test_one_server_has_one_queue(policy: str) -> None:
    model = routed(policy, "least_requests", servers=1)
    jobs, rngs = draw_jobs(model, LOAD * model.largest_stable_rate, 400, np.random.SeedSequence(3))
    engine = SimulatedEngine(model.engine.law)
    alone = simulate_trace(model.policy, jobs, engine, rngs)
    assert simulate_routed(model.policy, jobs, engine, rngs, FewestRequests()) == alone
    assert not model.engine.has_queues
    assert model.name == routed(policy, "central", servers=1).name


def test_the_sequences_of_a_call_stay_together() -> None:
    model = routed("capped:max_batch_size=8", "least_requests", sequences="uniform:low=1,high=4")
    jobs, rngs = draw_jobs(model, 20.0, 500, np.random.SeedSequence(1))
    records = simulate_routed(
        model.policy, jobs, SimulatedEngine(model.engine.law), rngs, FewestRequests()
    )
    servers: dict[str, set[int | None]] = {}
    for record in records:
        servers.setdefault(record.request_id.split("-")[0], set()).add(record.server_id)
    assert {len(each) for each in servers.values()} == {1}
    assert len(set.union(*servers.values())) == SERVERS
    assert len(records) == 500


def test_of_equal_servers_the_next_one_is_chosen() -> None:
    fewest = FewestRequests()
    assert [fewest(held) for held in ([0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 0, 0])] == [
        0,
        1,
        2,
        0,
        1,
    ]
    assert FewestRequests()([3, 2, 2]) == 1


def test_a_full_load_balancer_is_simulated_and_says_so() -> None:
    model = routed("dynamic", "least_requests")
    found = predict_model(model, 0.5 * model.largest_stable_rate)
    assert found.method == "simulation"
    assert "with 3 servers with a queue each" in (found.fallback or "")
    assert "requests join the one with the fewest requests" in found.assumptions[1]


def test_the_command_line_takes_it() -> None:
    arguments = ["--policy", "single", "--arrival-rate", "20", "--output-tokens"]
    arguments += ["deterministic:value=32", "--latency", LAW, "--servers", "4", "--json"]
    found = [
        json.loads(
            CliRunner()
            .invoke(app, ["predict", *arguments, "--routing", routing], catch_exceptions=False)
            .stdout
        )
        for routing in ("central", "random")
    ]
    assert found[1]["model"] == "4 queues M/G/1"
    assert found[1]["queueing_delay"]["mean"] > 2 * found[0]["queueing_delay"]["mean"]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"routing": "fewest"},
            "got routing='fewest'; expected central, random, round_robin, least",
        ),
        (
            {"routing": "random", "arrival_scv": 2.0},
            "got routing=random and arrival_scv=2; expected Poisson arrivals",
        ),
        (
            {"routing": "least_requests", "servers": 65},
            "got routing=least_requests to 65 servers; expected at most 64",
        ),
        ({"routing": "random", "servers": 1, "disaggregated": True}, "got routing=random and disa"),
    ],
)
def test_what_it_cannot_be_is_said(limits: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Queue.read("single", LENGTHS, LAW, **({"servers": 3} | limits))  # type: ignore[arg-type]


def test_in_turn_each_server_sees_gaps_of_a_share_of_the_variance() -> None:
    one = routed("single", "round_robin").one_of_several
    assert one is not None
    assert (one.engine.servers, one.engine.routing, one.arrivals.scv) == (1, "central", 1 / SERVERS)
    assert routed("single", "central").one_of_several is None
    assert routed("single", "random", servers=1).one_of_several is None


def test_two_choices_are_nearly_as_good_as_all_and_as_the_limit_of_many_queues_says() -> None:
    """E[T] = sum_i rho^(2^i - 2) services, for a number of servers without end (Mitzenmacher
    2001).
    """
    law, load = "k1=0,k2=0,k3=0,k4=0.001", 0.7
    means = {}
    for routing in ("random", "power_of_two", "least_requests"):
        model = Queue.read("single", "exponential:mean=1000", law, servers=64, routing=routing)
        if routing == "random":
            means[routing] = predict_model(model, load * 64).sojourn_time.mean
            continue
        runs = [
            simulate_model(model, load * 64, num_requests=40_000, seed=seed) for seed in range(4)
        ]
        means[routing] = float(np.mean([run.sojourn_time.mean for run in runs]))
    limit = sum(load ** (2**place - 2) for place in range(1, 20))
    assert means["power_of_two"] == pytest.approx(limit, rel=0.04)
    assert means["least_requests"] < means["power_of_two"] < 0.6 * means["random"]


@pytest.mark.parametrize("calls", [True, False])
def test_a_given_run_is_split_over_servers_in_turn_each_alone(calls: bool) -> None:
    """Of every call of four each of two servers has two."""
    model = routed("capped:max_batch_size=3", "round_robin", servers=2)
    one, rng = model.one_of_several, np.random.default_rng(1)
    assert one is not None
    instants = np.cumsum(rng.exponential(0.02, 100))
    arrived = np.repeat(instants, 4) if calls else np.sort(rng.uniform(0, 5, 400))
    lengths, none = rng.integers(1, 60, 400), np.zeros(400, np.int64)
    ends = np.arange(400) // 4 * 4 + 4 if calls else np.empty(0, np.int64)
    seed = np.random.SeedSequence(1)
    found = run_given(model, Trace(arrived, lengths, none, call_ends=ends), seed)
    batches = 0
    for server in range(2):
        own = np.arange(400) % 2 == server
        part = Trace(
            arrived[own],
            lengths[own],
            none[own],
            [rng],
            call_ends=ends[own] // 2 if calls else ends,
        )
        alone = run_trace(one, part)
        for name in ("dispatched_at", "first_token_at", "released_at", "batch_size"):
            assert getattr(found, name)[own].tolist() == getattr(alone, name).tolist(), name
        assert (found.batch_id[own] == alone.batch_id + batches).all()
        assert (found.server_id[own] == server).all()
        batches += int(alone.batch_id.max()) + 1


@pytest.mark.parametrize(
    ("servers", "routing", "drawn"),
    [(3, "power_of_two", True), (1, "power_of_two", False), (3, "random", False)],
)
def test_the_two_servers_of_a_call_are_any_two(servers: int, routing: str, drawn: bool) -> None:
    model = routed("single", routing, servers, sequences="deterministic:value=2")
    choices = draw_choices(model, np.full(6000, 2), np.random.SeedSequence(1))
    assert choices.shape == ((12_000, 2) if drawn else (0, 2))
    assert (choices[::2] == choices[1::2]).all()
    pairs, times = np.unique(choices[::2], axis=0, return_counts=True)
    assert pairs.tolist() == [[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]] * drawn
    assert all(abs(count - 1000) < 4 * np.sqrt(1000 * 5 / 6) for count in times)


def test_two_choices_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    model = routed("single", "power_of_two")
    rate = 0.8 * model.largest_stable_rate
    runs = [simulate_model(model, rate, num_requests=2000, seed=seed) for seed in (1, 1, 2)]
    means = [run.queueing_delay.mean for run in runs]
    assert means[0] == means[1] != means[2]
    assert "join the one with fewer requests of two by chance" in runs[0].assumptions[1]
    assert not routed("single", "power_of_two", servers=1).engine.has_queues
