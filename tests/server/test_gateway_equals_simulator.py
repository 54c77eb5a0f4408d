"""The gateway on virtual time and the simulator are two drivers of the same policy: same
batches, same instants.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

import kendall
from kendall.policies import Request, parse_policy
from kendall.queueing.arrivals.traces import read_trace
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import parse_law
from kendall.queueing.measurement.record import Record
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.fast import Trace
from kendall.queueing.simulation.fast import replay as replay_compiled
from kendall.server.admission.settings import OverloadSettings
from tests.server.asgi import Call, completion, running
from tests.server.harness import driven_by_both, replay
from tests.virtual_time import run_virtual

LAW = parse_law("k1=0.25e-3,k2=2e-3,k3=25e-6,k4=0.9e-3,kp=1e-5,cv=0.1,turnaround=1.5e-3")
POLICIES = {
    "single": 40.0,
    "dynamic": 120.0,
    "fixed:batch_size=4": 90.0,
    "fixed:batch_size=4,max_wait=0.02": 60.0,
    "capped:max_batch_size=8": 120.0,
    "elastic": 120.0,
    "elastic:max_batch_size=3": 80.0,
    "continuous:max_batch_size=4": 120.0,
}
COUNT = 2000
COMPARED = ("outcome", "policy", "server_id", "batch_id", "batch_size")
INSTANTS = (
    "dispatched_at",
    "released_at",
    "server_free_at",
    "queueing_delay",
    "service_time",
    "sojourn_time",
    "batch_forming_delay",
)


def trace(rate: float, seed: int) -> list[tuple[Request, int]]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, COUNT))
    lengths, prompts = rng.integers(1, 33, COUNT), rng.integers(4, 60, COUNT)
    return [
        (
            Request(
                id=str(index), arrived_at=float(at), prompt_tokens=int(prompt), max_output_tokens=64
            ),
            int(length),
        )
        for index, (at, length, prompt) in enumerate(zip(arrivals, lengths, prompts, strict=True))
    ]


def both(
    policy: str, rate: float, *, servers: int = 1, law: str | None = None, **options: object
) -> tuple[list[Record], list[Record]]:
    used = parse_law(law) if law else LAW
    return driven_by_both(policy, trace(rate, seed=7), used, servers=servers, **options)


def assert_equal(live: list[Record], simulated: list[Record]) -> None:
    assert len(live) == len(simulated) == COUNT
    by_id = {record.request_id: record for record in simulated}
    for mine in live:
        other = by_id[mine.request_id]
        for name in COMPARED:
            assert getattr(mine, name) == getattr(other, name), (name, mine, other)
        for name in INSTANTS if mine.outcome == "completed" else ("dispatched_at",):
            a, b = getattr(mine, name), getattr(other, name)
            assert (a is None) == (b is None), (name, mine, other)
            assert a is None or abs(a - b) <= 1e-9, (name, mine, other)


@pytest.mark.thinned(8)
@pytest.mark.parametrize("policy", POLICIES)
def test_same_batches_at_the_same_instants(policy: str) -> None:
    live, simulated = both(policy, POLICIES[policy])
    assert_equal(live, simulated)
    assert {record.outcome for record in live} == {"completed"}
    assert sum(record.queueing_delay > 0 for record in live) > COUNT / 10, (
        "nothing waited: the trace tests nothing"
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.thinned(4)
def test_same_with_cancellations_and_switches(policy: str) -> None:
    rate = POLICIES[policy]
    rng = np.random.default_rng(11)
    jobs = trace(rate, seed=7)
    chosen = rng.choice(COUNT, COUNT // 10, replace=False)
    cancellations = {
        jobs[i][0].id: jobs[i][0].arrived_at + float(rng.exponential(0.02)) for i in chosen
    }
    others = [*POLICIES, policy]
    span = jobs[-1][0].arrived_at
    switches = [
        (float(at), parse_policy(others[i % len(others)]))
        for i, at in enumerate(rng.uniform(0, span, 40))
    ]
    live, simulated = both(
        policy,
        rate,
        cancellations=cancellations,
        switches=sorted(switches, key=lambda pair: pair[0]),
    )
    assert_equal(live, simulated)
    assert sum(record.outcome == "cancelled" for record in live) > COUNT / 50
    assert len({record.policy for record in live}) > 5


@pytest.mark.parametrize("order", ["", ",order=sprpt", ",order=vtc"])
@pytest.mark.parametrize("step_tokens", [9, 40])
@pytest.mark.thinned(12)
def test_same_where_long_prompts_take_several_steps(step_tokens: int, order: str) -> None:
    """With cancellations, and deaths of the engine."""
    jobs, policy = trace(60.0, seed=7), f"continuous:max_batch_size=4{order}"
    span = jobs[-1][0].arrived_at
    cancellations = {job.id: job.arrived_at + 0.03 for job, _ in jobs[::20]}
    live, simulated = both(
        policy,
        60.0,
        step_tokens=step_tokens,
        cancellations=cancellations,
        deaths=[(span / 3, 0.5), (span / 2, 1.0)],
    )
    assert_equal(live, simulated)
    assert {record.outcome for record in live} == {"completed", "cancelled"}
    assert sum(record.interruptions > 0 for record in live) > 4


def test_same_on_two_servers() -> None:
    assert_equal(*both("capped:max_batch_size=4", 150.0, servers=2))


def test_same_without_turnaround() -> None:
    assert_equal(
        *both("continuous:max_batch_size=4", 120.0, law="k1=0.25e-3,k2=2e-3,k3=25e-6,k4=0.9e-3")
    )


@pytest.mark.parametrize(
    "policy", ["single", "capped:max_batch_size=8", "fixed:batch_size=4", "continuous"]
)
def test_a_recorded_trace_is_predicted_as_the_gateway_serves_it(policy: str) -> None:
    """`kendall predict --trace`, and the batcher on the emulated engine, request by request."""
    path = Path(__file__).parent.parent / "loadgen" / "samples" / "azure_2023.csv"
    law, table = "k1=0.02,k2=0.05,k3=1e-4,k4=9e-3,kp=1e-4", read_trace(path)
    rows = zip(
        table.intended_at.tolist(),
        table.prompt_tokens.tolist(),
        table.output_tokens.tolist(),
        strict=True,
    )
    jobs = [
        (Request(str(i), at, prompt, 10**4), output) for i, (at, prompt, output) in enumerate(rows)
    ]
    live, _ = driven_by_both(policy, jobs, parse_law(law))
    predicted = kendall.predict(policy, latency=law, trace=path, max_num_seqs=64)
    first = [record.first_token_at - record.arrived_at for record in live]
    for found, values in (
        (predicted.time_to_first_token, first),
        (predicted.sojourn_time, [record.sojourn_time for record in live]),
        (predicted.queueing_delay, [record.queueing_delay for record in live]),
    ):
        assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
        assert found.p99 == pytest.approx(np.quantile(values, 0.99), abs=1e-9)
    assert predicted.time_to_first_token.p99 > 0.2


@pytest.mark.parametrize("servers", [1, 3])
def test_same_where_the_kv_memory_binds_in_the_gateway_and_in_the_compiled_simulator(
    servers: int,
) -> None:
    """Each holds its prompt and 64 tokens of 400: three to five requests, of eight slots."""
    policy, memory = parse_policy("continuous:max_batch_size=8"), 400
    law = parse_law("k1=0.25e-3,k2=2e-3,k3=25e-6,k4=0.9e-3,kp=1e-5,turnaround=1.5e-3")
    model = Queue.read(
        policy,
        parse_distribution("uniform:low=1,high=64"),
        law,
        prompt_tokens=parse_distribution("uniform:low=4,high=59"),
        servers=servers,
        max_context_tokens=memory,
    )
    jobs = trace(1.8 * model.largest_stable_rate, seed=7)  # answers are half as long as the limit
    live = run_virtual(replay(policy, jobs, law, servers=servers, kv_cache_tokens=memory))
    found = replay_compiled(
        model,
        Trace(
            np.array([request.arrived_at for request, _ in jobs]),
            np.array([tokens for _, tokens in jobs]),
            np.array([request.prompt_tokens for request, _ in jobs]),
            np.random.default_rng(0).spawn(servers),
        ),
    )
    assert len(live) == COUNT
    for record in live:
        place = int(record.request_id)
        for name in ("dispatched_at", "released_at", "server_free_at"):
            assert abs(getattr(found, name)[place] - getattr(record, name)) <= 1e-9, name
        assert (found.server_id[place], found.batch_id[place], found.batch_size[place]) == (
            record.server_id,
            record.batch_id,
            record.batch_size,
        )
    sizes = [record.batch_size or 0 for record in live]
    assert max(sizes) < 8, "the memory binds before the slots"
    assert sum((record.queueing_delay or 0) > 0.01 for record in live) > COUNT / 10


@pytest.mark.parametrize("most", [3, 8])
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "fixed:batch_size=4"])
@pytest.mark.thinned(8)
def test_the_gateway_rejects_those_that_the_simulator_rejects(policy: str, most: int) -> None:
    """`--max-num-queued-reqs` of `kendall serve` and of `kendall predict`, call by call."""
    law = "k1=0.25e-3,k2=2e-3,k3=25e-6,k4=0.9e-3"
    jobs = trace(3 * POLICIES[policy], seed=7)[:300]

    async def live() -> list[bool]:
        settings = OverloadSettings(max_num_queued_reqs=most)
        async with running(policy, law=law, overload=settings) as (app, _):
            began, calls = asyncio.get_running_loop().time(), []
            for request, tokens in jobs:
                now = asyncio.get_running_loop().time()
                await asyncio.sleep(began + request.arrived_at - now)
                body = completion(max_tokens=tokens)
                calls.append(Call(app, "POST", "/v1/completions", body))
            for made in calls:
                await made.task
            return [made.status == 429 for made in calls]

    rejected = run_virtual(live())
    model = Queue.read(policy, "uniform:low=1,high=64", law, max_num_queued_reqs=most)
    given = Trace(
        np.array([request.arrived_at for request, _ in jobs]),
        np.array([tokens for _, tokens in jobs]),
        np.zeros(len(jobs), dtype=np.int64),
        np.random.default_rng(0).spawn(1),
    )
    assert replay_compiled(model, given).rejected.tolist() == rejected
    assert 20 < sum(rejected) < 280
