"""The compiled replays give the sample paths of the generic simulator, which drives the policy
objects, to the last bit.
"""

import dataclasses
import math
import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kendall.policies.core import Request
from kendall.policies.immediate import Capped
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import draw_jobs, simulate_model, simulate_run
from kendall.queueing.simulation.fast import SimulatedRun, Trace, draw_trace, is_compiled, replay
from kendall.queueing.simulation.reference import Job, SimulatedEngine, simulate_trace

POLICIES = (
    "single",
    "dynamic",
    "capped:max_batch_size=8",
    "fixed:batch_size=2",
    "fixed:batch_size=4",
    "fixed:batch_size=4,max_wait=0.02",
    "elastic",
    "elastic:max_batch_size=5",
    "capped:max_batch_size=1",
    "fixed:batch_size=1",
    "fixed:batch_size=50",  # more than the engine takes
    "continuous:max_batch_size=1",
    "continuous:max_batch_size=4",
    "continuous:max_batch_size=16",
)
PLAIN = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3)
FULL = LatencyModel(
    k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3, kp=5e-6, cv=0.12, turnaround=1.55e-3, speed=1.1
)
NOISY = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3, cv=1.5, speed=0.7)
FITTED = LatencyModel(k1=0.6e-3, k2=-0.5e-3, k3=25e-6, k4=0.92e-3, kp=1e-6)
WHOLE = (  # seconds
    LatencyModel(k1=1.0, k2=1.0, k3=0.0, k4=1.0),
    LatencyModel(k1=0.0, k2=0.0, k3=1.0, k4=0.0, kp=1.0, turnaround=1.0),
    LatencyModel(k1=1.0, k2=0.0, k3=0.0, k4=1.0, turnaround=2.0, speed=2.0),
)
INSTANTS = ("dispatched_at", "released_at", "first_token_at", "server_free_at")
LENGTHS = parse_distribution("lognormal:mu=2.5,sigma=0.7", 64)
PROMPTS = parse_distribution("uniform:low=10,high=50")


def model(policy: str, law: LatencyModel, servers: int = 1, patience: float | None = None) -> Queue:
    return Queue.read(
        policy,
        LENGTHS,
        law,
        patience=patience,
        prompt_tokens=PROMPTS,
        servers=servers,
        max_num_seqs=32,
    )


def assert_same(fast: SimulatedRun, slow: SimulatedRun) -> None:
    assert np.array_equal(fast.lost, slow.lost)
    for name in INSTANTS:
        assert np.array_equal(getattr(fast, name), getattr(slow, name), equal_nan=True), name
    kept = ~fast.lost
    for name in ("server_id", "batch_id", "batch_size"):
        assert np.array_equal(getattr(fast, name)[kept], getattr(slow, name)[kept]), name
    if fast.gaps is not None and slow.gaps is not None:
        assert np.array_equal(fast.gaps.seconds, slow.gaps.seconds)
        assert np.array_equal(fast.gaps.times, slow.gaps.times)


def both(
    queue: Queue, rate: float, requests: int, seed: int = 5
) -> tuple[SimulatedRun, SimulatedRun]:
    fast, slow = (
        simulate_run(queue, rate, requests, np.random.SeedSequence(seed), generic=generic)
        for generic in (False, True)
    )
    return fast, slow


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.thinned(15)
def test_a_replay_is_the_policys_own_sample_path(policy: str) -> None:
    for servers, patience in ((1, None), (1, 0.05), (2, 0.05)):
        queue = model(policy, FULL, servers, patience)
        assert is_compiled(queue)
        assert_same(*both(queue, 0.9 * queue.largest_stable_rate, 2000))


@pytest.mark.parametrize("requests", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_trace_of_few_requests(policy: str, requests: int) -> None:
    queue = model(policy, NOISY)
    assert_same(*both(queue, 0.9 * queue.largest_stable_rate, requests))


def test_who_comes_just_after_the_end_of_a_step_enters_with_the_end_of_the_next() -> None:
    """The next float after it: of some steps the quotient by their length is a whole number."""
    law, rngs = LatencyModel(k4=0.1), [np.random.default_rng(0)]
    queue = Queue.read("continuous:max_batch_size=2", LENGTHS, law)
    for step in range(1, 40):
        at = math.nextafter(0.1 + (step - 1) * 0.1, math.inf)
        lengths, prompts = np.array([60, 1]), np.ones(2, dtype=np.int64)
        fast = replay(queue, Trace(np.array([0.0, at]), lengths, prompts, rngs))
        jobs = [Job(Request("0", 0.0, 1, 64), 60), Job(Request("1", at, 1, 64), 1)]
        slow = {
            int(record.request_id): record.released_at
            for record in simulate_trace(queue.policy, jobs, SimulatedEngine(law), rngs)
        }
        assert fast.released_at.tolist() == [slow[0], slow[1]]
        assert slow[1] == pytest.approx(0.1 * (step + 2))


@pytest.mark.slow
@pytest.mark.parametrize("patience", [None, 0.05])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize(
    "law", [PLAIN, FULL, NOISY, FITTED], ids=["plain", "full", "noisy", "fitted"]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_is_the_policys_own_sample_path_throughout(
    policy: str, law: LatencyModel, servers: int, patience: float | None
) -> None:
    """Light to overloaded, residuals of every kind, prompts that cost, a law with a negative
    intercept.
    """
    queue = model(policy, law, servers, patience)
    assert is_compiled(queue)
    for load in (0.2, 0.6, 0.95, 1.2):
        assert_same(*both(queue, load * queue.largest_stable_rate, 2000))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", ["single", "capped:max_batch_size=5", "fixed:batch_size=4"])
def test_and_where_a_batch_is_over_in_the_instant_it_began(policy: str) -> None:
    """A residual of 1e-20: the next batch pays for its own members only."""
    law = dataclasses.replace(PLAIN, cv=3.0)
    for seed in range(4):
        assert_same(*both(model(policy, law), 30.0, 1500, seed))


def test_without_a_folder_for_compiled_code_there_is_an_answer_all_the_same() -> None:
    code = (
        "from kendall import simulate; "
        "print(simulate('single', 1, 'deterministic:value=3', 'a=0.01,c=0', num_requests=40).load)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"NUMBA_CACHE_DIR": "/proc/none"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (found.returncode, found.stdout) == (0, "0.03\n"), found.stderr


def test_without_any_bound_the_batch_is_the_whole_queue() -> None:
    for policy in ("dynamic", "elastic"):
        queue = Queue.read(policy, LENGTHS, PLAIN)
        assert_same(*both(queue, 200.0, 3000))


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=80)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 2)), min_size=5, max_size=40
    ),
    law=st.sampled_from(WHOLE),
    limits=st.sampled_from([(1, None), (1, 2.0), (1, 4.0), (2, None), (2, 3.0), (3, None)]),
)
@pytest.mark.thinned(15)
def test_ties_are_broken_as_the_driver_breaks_them(
    policy: str,
    steps: list[tuple[int, int, int]],
    law: LatencyModel,
    limits: tuple[int, float | None],
) -> None:
    """Whole seconds everywhere: arrivals, completions, entries, timers and ends of patience fall
    on one instant.
    """
    servers, patience = limits
    queue = model(policy.replace("0.02", "2"), law, servers, patience)
    arrived, lengths, prompts = (
        np.cumsum([float(gap) for gap, _, _ in steps]),
        *(np.array([step[i] for step in steps]) for i in (1, 2)),
    )
    fast = replay(queue, Trace(arrived, lengths, prompts, np.random.default_rng(0).spawn(servers)))
    limit = math.inf if patience is None else patience
    jobs = [
        Job(
            Request(
                id=str(i),
                arrived_at=at,
                prompt_tokens=int(prompts[i]),
                max_output_tokens=64,
                deadline=at + limit,
            ),
            int(lengths[i]),
        )
        for i, at in enumerate(arrived.tolist())
    ]
    records = simulate_trace(
        queue.policy,
        jobs,
        SimulatedEngine(law, max_batch_size=32),
        np.random.default_rng(0).spawn(servers),
    )
    assert len(records) == len(jobs)
    for record in records:
        i = int(record.request_id)
        assert fast.lost[i] == (record.outcome == "abandoned")
        if not fast.lost[i]:
            for name in (*INSTANTS, "server_id", "batch_id", "batch_size"):
                assert getattr(fast, name)[i] == getattr(record, name), name


@pytest.mark.parametrize("cv", [0.05, 0.5, 1.0, 1.5, 3.0])
def test_residuals_drawn_in_one_block_are_those_drawn_batch_by_batch(cv: float) -> None:
    law = LatencyModel(k4=1.0, cv=cv)
    queue = Queue.read("single", parse_distribution("deterministic:value=1"), law)
    run = replay(
        queue,
        Trace(
            np.arange(500) * 1e9,
            np.ones(500, dtype=np.int64),
            np.zeros(500, dtype=np.int64),
            [np.random.default_rng(7)],
        ),
    )
    rng = np.random.default_rng(7)
    assert (run.released_at == [at + law.residual(rng) for at in run.arrived_at.tolist()]).all()


@pytest.mark.parametrize("requests", [1, 16_383, 16_384, 16_385, 40_000])
def test_a_trace_drawn_in_blocks_is_that_of_the_generic_simulator(requests: int) -> None:
    queue = model("single", FULL)
    trace = draw_trace(queue, 30.0, requests, np.random.SeedSequence(11))
    jobs, _ = draw_jobs(queue, 30.0, requests, np.random.SeedSequence(11))
    assert trace.arrived_at.tolist() == [job.request.arrived_at for job in jobs]
    assert trace.output_tokens.tolist() == [job.output_tokens for job in jobs]
    assert trace.prompt_tokens.tolist() == [job.request.prompt_tokens for job in jobs]


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "policy",
    [
        "single",
        "capped:max_batch_size=8",
        "elastic:max_batch_size=5",
        "continuous:max_batch_size=4",
    ],
)
def test_a_prediction_does_not_depend_on_the_simulator(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = model(policy, FULL, 2, 0.2)
    rate = 0.8 * queue.largest_stable_rate
    fast = simulate_model(queue, rate, num_requests=5000)  # of which a tenth is enough to warm up
    monkeypatch.setattr("kendall.queueing.simulation.fast.is_compiled", lambda _: False)
    assert simulate_model(queue, rate, num_requests=5000) == fast


@dataclass(frozen=True)
class Own(Capped):
    """A policy that the kernels do not know, though it is of a kind that they know."""


def test_what_the_kernels_do_not_cover_goes_to_the_generic_simulator() -> None:
    """A policy of one's own; a law under which a batch may end before it began; a continuous
    engine with any number of slots.
    """
    backwards = LatencyModel(k1=0.0, k2=-2.0, k3=0.0, k4=1.0)
    own = model("capped:max_batch_size=4", PLAIN).but(policy=Own(max_batch_size=4))
    assert not is_compiled(own)
    assert not is_compiled(model("elastic", backwards))
    assert not is_compiled(Queue.read("continuous", LENGTHS, PLAIN))
    run = simulate_run(own, 50.0, 200, np.random.SeedSequence(1))
    assert_same(
        run,
        simulate_run(model("capped:max_batch_size=4", PLAIN), 50.0, 200, np.random.SeedSequence(1)),
    )


def test_prediction_does_not_load_the_compiler() -> None:
    """numba takes a second to import; only a simulation may."""
    code = (
        "import sys, kendall.queueing.prediction, kendall.queueing.simulation.experiment; "
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode == 0


def test_one_seed_gives_the_same_trace_under_every_policy() -> None:
    """Common random numbers: also when the policies differ in what they draw residuals for."""
    traces = [
        draw_trace(model(policy, FULL), 50.0, 500, np.random.SeedSequence(3)) for policy in POLICIES
    ]
    for trace in traces[1:]:
        assert np.array_equal(trace.arrived_at, traces[0].arrived_at)
        assert np.array_equal(trace.output_tokens, traces[0].output_tokens)


def test_the_guide_table_draws_what_inversion_draws() -> None:
    for text in (
        "geometric:mean=20",
        "deterministic:value=7",
        "lognormal:mu=3,sigma=1.5",
        "uniform:low=1,high=5000",
    ):
        law = parse_distribution(text, 20_000)
        queue = Queue.read("single", law, PLAIN)
        trace = draw_trace(queue, 1.0, 20_000, np.random.SeedSequence(8))
        rng = np.random.default_rng(np.random.SeedSequence(8).spawn(4)[1])
        assert np.array_equal(trace.output_tokens, law.sample(rng, 20_000))


def test_every_request_waits_for_service_or_is_lost_and_none_is_served_twice() -> None:
    run = simulate_run(
        model("capped:max_batch_size=8", FULL, 2, 0.05), 400.0, 5000, np.random.SeedSequence(2)
    )
    kept = ~run.lost
    assert 0 < run.lost.sum() < 5000
    assert (run.queueing_delay[kept] >= 0).all()
    assert (run.queueing_delay[kept] < 0.05 + 1e-12).all()
    _, counts = np.unique(run.batch_id[kept], return_counts=True)
    assert counts.sum() == kept.sum()
    assert counts.max() <= 8


@pytest.mark.parametrize(
    ("law", "batches", "slots"),
    [
        # a batch of one token takes half a second
        (LatencyModel(k1=1.0, k2=-1.5, k3=0.0, k4=1.0), True, True),
        # here none, and here less
        (LatencyModel(k1=1.0, k2=-2.0, k3=0.0, k4=1.0), True, False),
        (LatencyModel(k1=1.0, k2=-2.1, k3=0.0, k4=1.0), False, False),
        (LatencyModel(k1=-0.5, k2=2.0, k3=0.5, k4=1.0), True, True),
        # a larger batch would be sooner over
        (LatencyModel(k1=-0.6, k2=2.0, k3=0.5, k4=1.0), False, False),
        (LatencyModel(k1=1.0, k2=9.0, k3=0.0, k4=1.0, kp=-1e-6), False, False),
        (LatencyModel(k1=0.0, k2=0.0, k3=0.0, k4=1.0), True, True),
        # slots do not pay k2
        (LatencyModel(k1=-0.5, k2=1.0, k3=0.5, k4=0.0), True, False),
    ],
)
def test_kernels_cover_laws_under_which_no_batch_ends_before_it_begins_and_slots_take_time(
    law: LatencyModel, batches: bool, slots: bool
) -> None:
    assert is_compiled(model("capped:max_batch_size=4", law)) == batches
    assert is_compiled(model("continuous:max_batch_size=4", law)) == slots


@pytest.mark.parametrize(("slots", "compiled"), [(4096, True), (4097, False)])
def test_kernels_cover_some_thousand_slots(slots: int, compiled: bool) -> None:
    queue = Queue.read(f"continuous:max_batch_size={slots}", LENGTHS, PLAIN)
    assert is_compiled(queue) == compiled


@pytest.mark.parametrize(
    ("policy", "compiled"),
    [
        ("single", True),
        ("single:order=spjf", True),
        ("single:order=sprpt", True),
        ("continuous:max_batch_size=4,order=spjf", True),
        ("continuous:max_batch_size=4,order=sprpt", True),
        ("continuous:max_batch_size=4,order=sprpt,by=service,prompt_weight=0.5", False),
    ],
)
def test_kernels_cover_orders_that_interrupt_by_tokens(policy: str, compiled: bool) -> None:
    assert is_compiled(model(policy, PLAIN)) == compiled


@pytest.mark.parametrize(
    "policy", ["single", "capped:max_batch_size=4", "elastic:max_batch_size=4"]
)
def test_what_is_left_of_a_run_after_its_first_requests(policy: str) -> None:
    run = simulate_run(model(policy, PLAIN), 30.0, 300, np.random.SeedSequence(1))
    later = run.after(100)
    for name in (
        *INSTANTS,
        "arrived_at",
        "output_tokens",
        "batch_id",
        "batch_size",
        "server_id",
        "queueing_delay",
        "sojourn_time",
        "lost",
    ):
        assert getattr(later, name).tolist() == getattr(run, name)[100:].tolist(), name
    assert (run.queueing_delay == run.dispatched_at - run.arrived_at).all()
    assert (run.sojourn_time == run.released_at - run.arrived_at).all()
    assert run.batch_id[0] == 0
