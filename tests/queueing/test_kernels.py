"""The compiled replays give the sample paths of the generic simulator, which drives the policy objects, to the last bit."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import parse_policy
from policies.core import Request
from queueing.distributions import parse_distribution
from queueing.experiment import simulate_run
from queueing.fast_simulation import SimulatedRun, Trace, draw_trace, replay
from queueing.latency import LatencyModel
from queueing.model import Model
from queueing.simulation import Job, simulate_trace

POLICIES = (
    "single",
    "dynamic",
    "capped:max_batch_size=8",
    "fixed:batch_size=4",
    "fixed:batch_size=4,max_wait=0.02",
    "elastic",
    "elastic:max_batch_size=5",
    "continuous:max_batch_size=4",
    "continuous:max_batch_size=16",
)
PLAIN = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3)
FULL = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3, kp=5e-6, cv=0.12, turnaround=1.55e-3, speed=1.1)
INSTANTS = ("dispatched_at", "released_at", "first_token_at", "server_free_at")
LENGTHS = parse_distribution("lognormal:mu=2.5,sigma=0.7", 64)
PROMPTS = parse_distribution("uniform:low=10,high=50")


def model(policy: str, law: LatencyModel, servers: int = 1, patience: float | None = None) -> Model:
    return Model(
        policy=parse_policy(policy),
        output_tokens=LENGTHS,
        law=law,
        servers=servers,
        patience=patience,
        max_num_seqs=32,
        prompt_tokens=PROMPTS,
    )


def assert_same(fast: SimulatedRun, slow: SimulatedRun) -> None:
    assert np.array_equal(fast.lost, slow.lost)
    for name in INSTANTS:
        assert np.array_equal(getattr(fast, name), getattr(slow, name), equal_nan=True), name
    kept = ~fast.lost
    for name in ("server_id", "batch_id", "batch_size"):
        assert np.array_equal(getattr(fast, name)[kept], getattr(slow, name)[kept]), name


@pytest.mark.parametrize("patience", [None, 0.05])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("law", [PLAIN, FULL], ids=["plain", "full"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_is_the_policys_own_sample_path(policy: str, law: LatencyModel, servers: int, patience: float | None) -> None:
    queue, stream = model(policy, law, servers, patience), np.random.SeedSequence(5)
    for load in (0.5, 0.9):
        rate = load * queue.largest_stable_rate
        fast = simulate_run(queue, rate, 1500, stream.spawn(1)[0])
        stream = np.random.SeedSequence(5)
        slow = simulate_run(queue, rate, 1500, stream.spawn(1)[0], generic=True)
        stream = np.random.SeedSequence(5)
        assert_same(fast, slow)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(POLICIES),
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=25),
    st.integers(1, 2),
    st.sampled_from([None, 3.0]),
)
def test_ties_are_broken_as_the_driver_breaks_them(policy: str, steps: list[tuple[int, int]], servers: int, patience: float | None) -> None:
    """Whole seconds everywhere: arrivals, completions and ends of patience fall on one instant."""
    law = LatencyModel(k1=1.0, k2=1.0, k3=0.0, k4=1.0)
    queue = model(policy.replace("0.02", "2"), law, servers, patience)
    arrived = np.cumsum([float(gap) for gap, _ in steps])
    lengths = np.array([length for _, length in steps], dtype=np.int64)
    trace = Trace(arrived, lengths, np.zeros(len(steps), dtype=np.int64), [np.random.default_rng(s) for s in range(servers)])
    fast = replay(queue, trace)
    limit = math.inf if patience is None else patience
    jobs = [
        Job(Request(id=str(i), arrived_at=at, prompt_tokens=0, max_output_tokens=64, deadline=at + limit), int(lengths[i]))
        for i, at in enumerate(arrived.tolist())
    ]
    records = simulate_trace(queue.policy, jobs, law, trace.residuals, servers=servers, max_batch_size=32)
    for record in records:
        i = int(record.request_id)
        assert fast.lost[i] == (record.outcome == "abandoned")
        if not fast.lost[i]:
            assert (fast.dispatched_at[i], fast.released_at[i]) == (record.dispatched_at, record.released_at)
            assert (fast.server_id[i], fast.batch_size[i]) == (record.server_id, record.batch_size)


def test_one_seed_gives_the_same_trace_under_every_policy() -> None:
    """Common random numbers: also when the policies differ in what they draw residuals for."""
    traces = [draw_trace(model(policy, FULL), 50.0, 500, np.random.SeedSequence(3)) for policy in POLICIES]
    for trace in traces[1:]:
        assert np.array_equal(trace.arrived_at, traces[0].arrived_at)
        assert np.array_equal(trace.output_tokens, traces[0].output_tokens)


def test_the_guide_table_draws_what_inversion_draws() -> None:
    for text in ("geometric:mean=20", "deterministic:value=7", "lognormal:mu=3,sigma=1.5", "uniform:low=1,high=5000"):
        law = parse_distribution(text, 20_000)
        queue = Model(policy=parse_policy("single"), output_tokens=law, law=PLAIN)
        trace = draw_trace(queue, 1.0, 20_000, np.random.SeedSequence(8))
        rng = np.random.default_rng(np.random.SeedSequence(8).spawn(4)[1])
        assert np.array_equal(trace.output_tokens, law.sample(rng, 20_000))


def test_every_request_waits_for_service_or_is_lost_and_none_is_served_twice() -> None:
    run = simulate_run(model("capped:max_batch_size=8", FULL, 2, 0.05), 400.0, 5000, np.random.SeedSequence(2))
    kept = ~run.lost
    assert 0 < run.lost.sum() < 5000
    assert (run.queueing_delay[kept] >= 0).all()
    assert (run.queueing_delay[kept] < 0.05 + 1e-12).all()
    _, counts = np.unique(run.batch_id[kept], return_counts=True)
    assert counts.sum() == kept.sum()
    assert counts.max() <= 8
