"""Servers with a queue each, to the fewest requests: the compiled replay gives the sample path of
the generic simulator, which drives a policy object for each server, to the last bit.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kendall.policies import parse_policy
from kendall.policies.core import Request
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction import predict_model
from kendall.queueing.predictors.predictor_text import parse_predictor
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import driven_run, simulate_model, simulate_run
from kendall.queueing.simulation.fast import Trace, is_compiled, replay
from kendall.queueing.simulation.reference import Job
from tests.queueing.made import made_queue
from tests.queueing.test_kernels import (
    FULL,
    INSTANTS,
    LENGTHS,
    NOISY,
    PLAIN,
    PROMPTS,
    WHOLE,
    assert_same,
    both,
)

FIRST_COME = (
    "single",
    "dynamic",
    "capped:max_batch_size=5",
    "fixed:batch_size=4",
    "fixed:batch_size=4,max_wait=0.02",
    "elastic",
    "elastic:max_batch_size=5",
    "continuous:max_batch_size=4",
)
ORDERED = (
    "single:order=spjf",
    "capped:max_batch_size=5,order=ljf,aging=0.002",
    "capped:max_batch_size=5,order=binned,bins=3",
    "fixed:batch_size=4,max_wait=0.05,order=binned,bins=3",
    "elastic:max_batch_size=5,order=hrrn",
    "continuous:max_batch_size=4,order=threshold,threshold=12",
    "continuous:max_batch_size=4,order=hrrn",
)


def routed(policy: str, law: LatencyModel = FULL, servers: int = 3, **limits: object) -> Queue:
    given: dict[str, object] = {
        "policy": parse_policy(policy),
        "output_tokens": LENGTHS,
        "law": law,
        "servers": servers,
        "routing": "least_requests",
        "max_num_seqs": 32,
        "prompt_tokens": PROMPTS,
        "predictor": parse_predictor("lognormal:sigma=0.5"),
    }
    return made_queue(**{**given, **limits})  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [*FIRST_COME, *ORDERED])
@pytest.mark.thinned(15)
def test_a_replay_is_the_sample_path_of_the_policies_side_by_side(policy: str) -> None:
    for servers, patience in ((2, None), (3, 0.05), (5, None)):
        queue = routed(policy, servers=servers, patience=patience)
        assert is_compiled(queue)
        fast, slow = both(queue, 0.9 * queue.largest_stable_rate, 1000)
        assert_same(fast, slow)
        assert len(np.unique(fast.server_id[~fast.lost])) == servers


@pytest.mark.parametrize(
    "policy", ["single", "capped:max_batch_size=3", "continuous:max_batch_size=4,order=spjf"]
)
def test_two_servers_by_chance_are_the_same_for_both(policy: str) -> None:
    for sequences in (None, parse_distribution("geometric:mean=3")):
        limits = {"routing": "power_of_two", "patience": 0.5, "sequences": sequences}
        queue = routed(policy, servers=5, **limits)
        assert is_compiled(queue)
        fast, slow = both(queue, 0.9 * queue.largest_stable_rate, 1000)
        assert_same(fast, slow)
        assert len(np.unique(fast.server_id[~fast.lost])) == 5


@pytest.mark.parametrize("requests", [1, 2, 3, 7])
@pytest.mark.parametrize("policy", FIRST_COME)
def test_a_trace_of_few_requests(policy: str, requests: int) -> None:
    """The queues close together, also those whose last request came long before."""
    queue = routed(policy, NOISY)
    assert_same(*both(queue, 0.9 * queue.largest_stable_rate, requests))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", FIRST_COME)
def test_the_sequences_of_a_call_join_one_queue(policy: str) -> None:
    for patience in (None, 0.05):
        calls = parse_distribution("geometric:mean=3")
        queue = routed(policy, sequences=calls, patience=patience)
        assert_same(*both(queue, 0.9 * queue.largest_stable_rate, 1000))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("order", ["fcfs", "spjf", "hrrn"])
@pytest.mark.parametrize("routing", ["central", "least_requests", "power_of_two"])
def test_with_memory_that_binds(order: str, routing: str) -> None:
    """The first request in the order waits until it fits; no other overtakes it."""
    policy = f"continuous:max_batch_size=6,order={order}"
    queue = routed(policy, routing=routing, max_context_tokens=400)
    assert is_compiled(queue)
    assert_same(*both(queue, 0.9 * queue.largest_stable_rate, 1000))


def test_with_steps_of_few_tokens() -> None:
    queue = routed("continuous:max_batch_size=4", step_tokens=24)
    assert_same(*both(queue, 0.9 * queue.largest_stable_rate, 1000))


@pytest.mark.slow
@pytest.mark.parametrize("patience", [None, 0.05])
@pytest.mark.parametrize("servers", [2, 3, 8])
@pytest.mark.parametrize("law", [PLAIN, FULL, NOISY], ids=["plain", "full", "noisy"])
@pytest.mark.parametrize("policy", [*FIRST_COME, *ORDERED])
def test_a_replay_is_the_sample_path_throughout(
    policy: str, law: LatencyModel, servers: int, patience: float | None
) -> None:
    queue = routed(policy, law, servers, patience=patience)
    for load in (0.2, 0.6, 0.95, 1.2):
        assert_same(*both(queue, load * queue.largest_stable_rate, 2000))


@pytest.mark.parametrize("policy", FIRST_COME)
@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 2)), min_size=5, max_size=40
    ),
    law=st.sampled_from(WHOLE),
    limits=st.sampled_from([(2, None), (2, 3.0), (3, None)]),
)
@pytest.mark.thinned(4)
def test_ties_are_broken_as_the_router_breaks_them(
    policy: str,
    steps: list[tuple[int, int, int]],
    law: LatencyModel,
    limits: tuple[int, float | None],
) -> None:
    """Whole seconds everywhere: a call is sent before anything else happens in its instant."""
    servers, patience = limits
    queue = routed(policy.replace("0.02", "2"), law, servers, patience=patience)
    arrived = np.cumsum([float(gap) for gap, _, _ in steps])
    lengths, prompts = (np.array([step[i] for step in steps]) for i in (1, 2))
    fast = replay(queue, Trace(arrived, lengths, prompts, np.random.default_rng(0).spawn(servers)))
    limit = math.inf if patience is None else patience
    jobs = [
        Job(Request(str(i), at, int(prompts[i]), 64, deadline=at + limit), int(lengths[i]))
        for i, at in enumerate(arrived.tolist())
    ]
    slow = driven_run(queue, jobs, np.random.default_rng(0).spawn(servers))
    assert np.array_equal(fast.lost, slow.lost)
    kept = ~fast.lost
    for name in (*INSTANTS, "batch_size", "server_id"):
        assert np.array_equal(getattr(fast, name)[kept], getattr(slow, name)[kept]), name


def test_a_request_whose_answer_has_left_counts_no_more() -> None:
    """Of an unpadded batch of three on server 0 two have left; server 1 has two."""
    law = LatencyModel(k4=1.0)
    queue = routed("elastic:max_batch_size=3", law, 2, prompt_tokens=None)
    arrived = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 4.5])
    lengths = np.array([1, 2, 1, 9, 1, 9, 9, 1])
    trace = Trace(arrived, lengths, np.zeros(8, np.int64), np.random.default_rng(0).spawn(2))
    run = replay(queue, trace)
    assert run.batch_size[:-1].tolist() == [1, 1, 3, 2, 3, 2, 3]
    assert run.server_id.tolist() == [0, 1, 0, 1, 0, 1, 0, 0]
    jobs = [
        Job(Request(str(i), at, 0, 64), int(lengths[i])) for i, at in enumerate(arrived.tolist())
    ]
    assert_same(run, driven_run(queue, jobs, np.random.default_rng(0).spawn(2)))


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "load"), [(4, 0.9), (8, 0.9)])
def test_a_prediction_of_join_the_shortest_queue_has_a_small_error(
    servers: int, load: float
) -> None:
    """Exponential services: the mean number of requests by simulation of the Markov chain."""
    queue = Queue.read(
        "single",
        "geometric:mean=500",
        "k1=0,k2=0,k3=0,k4=0.002",
        servers=servers,
        routing="least_requests",
    )
    rate = load * queue.largest_stable_rate
    found = predict_model(queue, rate).queueing_delay
    assert found.mean is not None
    assert found.standard_error is not None
    assert found.standard_error < 0.03 * found.mean
    mean, error = _shortest_of(servers, load)
    assert error < 0.03 * mean
    assert found.mean == pytest.approx(mean, abs=4 * math.hypot(error, found.standard_error))


def _shortest_of(servers: int, load: float, events: int = 1_500_000) -> tuple[float, float]:
    """Mean delay of M/M/1 queues of mean service 1 s behind join-the-shortest-queue, and its
    standard error, by uniformisation of its Markov chain: nothing of the simulators is used.
    """
    rng = np.random.default_rng(11)
    arrives = rng.random(events) < load / (1 + load)
    places = rng.integers(servers, size=events).tolist()
    held, waiting, counts = [0] * servers, 0, np.empty(events)
    last = 0
    for number, (arrival, place) in enumerate(zip(arrives.tolist(), places, strict=True)):
        if arrival:
            turns = [(last + turn) % servers for turn in range(1, servers + 1)]
            last = min(turns, key=held.__getitem__)
            held[last] += 1
            waiting += held[last] > 1
        elif held[place]:
            waiting -= held[place] > 1
            held[place] -= 1
        counts[number] = waiting
    batches = counts[events // 10 :].reshape(-1, events // 20).mean(axis=1) / (load * servers)
    return float(batches.mean()), float(batches.std(ddof=1) / math.sqrt(len(batches)))


def test_batches_of_several_servers_are_counted_once_each() -> None:
    """Each server numbers its own from 0; their mean size is that of all of them."""
    queue = routed("capped:max_batch_size=4", PLAIN, prompt_tokens=None)
    rate = 0.7 * queue.largest_stable_rate
    run = simulate_run(queue, rate, 4000, np.random.SeedSequence(2), generic=True)
    starts = set(zip(run.server_id.tolist(), run.dispatched_at.tolist(), strict=True))
    assert len(np.unique(run.batch_id)) == len(starts)
    found = simulate_model(queue, rate, num_requests=4000, seed=2).batch_size.mean
    assert found == pytest.approx(4000 / len(starts), rel=0.03)
