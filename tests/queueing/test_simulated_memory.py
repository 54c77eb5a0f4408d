"""Bounded KV memory in the event simulator: what those in service may yet hold, prompt + limit, is
within the server's bound at every instant, with requests that are preempted and continued.
"""

import numpy as np
import pytest

import kendall
from kendall.policies import Request, parse_policy
from kendall.policies.core import Preempt
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.record import Record
from kendall.queueing.simulation import reference
from kendall.queueing.simulation.reference import Job, SimulatedEngine, simulate_trace

SECOND = LatencyModel(k4=1.0)
ORDERS = (
    "fcfs",
    "spjf",
    "sprpt",
    "pspjf",
    "trail",
    "threshold-preemptive,threshold=8",
    "mlfq",
    "fb",
)


def job(name: str, at: float, prompt: int, limit: int, length: int) -> Job:
    request = Request(
        id=name,
        arrived_at=at,
        prompt_tokens=prompt,
        max_output_tokens=limit,
        predicted_output_tokens=float(length),
    )
    return Job(request, length)


def run(policy: str, jobs: list[Job], memory: int, servers: int = 1) -> dict[str, Record]:
    engine = SimulatedEngine(SECOND, max_context_tokens=memory)
    rngs = np.random.default_rng(0).spawn(servers)
    records = simulate_trace(parse_policy(policy), jobs, engine, rngs)
    return {record.request_id: record for record in records}


def test_a_request_is_preempted_for_its_memory_and_waits_until_the_memory_is_free():
    """Three slots, 30 tokens. At 2.5 s `c` (20 tokens) has a slot but no memory: `a` (20) goes."""
    jobs = [job("a", 0, 4, 16, 10), job("b", 0, 4, 6, 6), job("c", 2.5, 4, 16, 3)]
    found = run("continuous:max_batch_size=3,order=sprpt", jobs, 30)
    assert {name: record.preemptions for name, record in found.items()} == {"a": 1, "b": 0, "c": 0}
    assert found["b"].released_at == 7
    assert found["c"].released_at == 6  # it enters at 3
    assert found["a"].dispatched_at == 6  # not before: b and c hold all 30
    assert found["a"].released_at == 6 + 8
    assert found["a"].queueing_delay == 6 - 2.5


@pytest.mark.parametrize(("memory", "preempted"), [(50, 0), (49, 1)])
def test_nobody_is_preempted_where_the_memory_suffices_to_the_token(memory, preempted):
    jobs = [job("a", 0, 4, 16, 10), job("b", 0, 4, 6, 6), job("c", 2.5, 4, 16, 3)]
    found = run("continuous:max_batch_size=3,order=sprpt", jobs, memory)
    assert found["a"].preemptions == preempted


def test_a_resumed_request_holds_its_prompt_and_its_limit_as_before():
    """Tokens that it has made are within its limit: with two of them `a` fits beside `d` again."""
    jobs = [job("a", 0, 4, 16, 10), job("c", 2.5, 4, 16, 3), job("d", 3.5, 2, 8, 8)]
    found = run("continuous:max_batch_size=2,order=sprpt", jobs, 30)
    assert found["a"].preemptions == 1
    assert found["c"].released_at == 5.5
    assert found["a"].dispatched_at == 5.5  # a and d hold 20 + 10
    assert found["a"].released_at == 5.5 + 8
    assert found["d"].dispatched_at == 5.5  # behind a, which had no memory at 3.5
    tighter = run("continuous:max_batch_size=2,order=sprpt", jobs, 29)
    assert tighter["d"].dispatched_at == tighter["a"].released_at == 13.5


@pytest.mark.thinned(18)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_the_bound_holds_after_every_decision(order, servers, monkeypatch):
    memory, seen, forced = 120, [], []
    carried_out = reference.Driver._dispatch
    preempt = reference.Driver._preempt

    def held(engine):
        return sum(
            each.request.prompt_tokens + each.request.max_output_tokens
            for each in engine.in_service
        )

    def dispatch(driver, decision, now):
        carried_out(driver, decision, now)
        engine = driver.engines[decision.server_id]
        assert held(engine) <= memory or len(engine.in_service) == 1
        seen.append(held(engine))

    def interrupted(driver, decision: Preempt, now):
        engine = driver.running[decision.request_ids[0]][0]
        forced.append(len(engine.in_service) < 5)  # a slot was free, memory was not
        preempt(driver, decision, now)

    monkeypatch.setattr(reference.Driver, "_dispatch", dispatch)
    monkeypatch.setattr(reference.Driver, "_preempt", interrupted)
    rng = np.random.default_rng(7)
    lengths = rng.integers(1, 40, 300)
    arrived_at = np.cumsum(rng.exponential(7.0 / servers, 300))
    jobs = [
        job(str(i), float(at), int(rng.integers(1, 30)), 40, int(length))
        for i, (at, length) in enumerate(zip(arrived_at, lengths, strict=True))
    ]
    found = run(f"continuous:max_batch_size=5,order={order}", jobs, memory, servers)
    assert [found[str(i)].output_tokens for i in range(300)] == lengths.tolist()
    assert max(seen) > 0.9 * memory
    preemptive = parse_policy(f"continuous:order={order}").ranking.preemptive
    assert any(forced) == preemptive


def test_a_request_beyond_the_memory_runs_alone_and_is_not_joined():
    jobs = [job("big", 0, 50, 60, 4), job("small", 1.5, 1, 1, 1)]
    for order, delay in (("fcfs", 2.5), ("pspjf", 0.0)):
        found = run(f"continuous:max_batch_size=4,order={order}", jobs, 100)
        assert found["small"].queueing_delay == delay
        assert found["big"].preemptions == (order == "pspjf")
        assert found["big"].outcome == "completed"


def test_a_request_that_ends_with_another_is_not_preempted_for_the_memory() -> None:
    """Several answers end in one step, one later than predicted; what the first leaves is too
    little for the next request.
    """
    found = kendall.simulate(
        "continuous:max_batch_size=16,order=sprpt",
        arrival_rate=44.0,
        output_tokens="lognormal:mu=3.17805,sigma=1",
        max_output_tokens=200,
        prompt_tokens="uniform:low=16,high=400",
        latency="k1=0.00012,k2=0.0017,k3=0.00003,k4=0.0015,kp=0.000013,kr=0.0003,turnaround=0.0015",
        max_context_tokens=1632,
        reserved_tokens=200,
        predictor="lognormal:sigma=1",
        num_requests=5000,
    )
    assert found.loss_fraction == 0.0
