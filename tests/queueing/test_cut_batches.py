"""Batches that their prompts cut: an engine computes all prompts of a batch in one step, of so many
tokens at most.
"""

import dataclasses

import numpy as np
import pytest

from kendall.queueing.control.assess import assess
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction import best_method, predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import run_given, simulate_run
from kendall.queueing.simulation.fast import Trace, is_compiled
from kendall.queueing.simulation.reference import Driver, SimulatedEngine
from tests.queueing.estimation_runs import seen
from tests.queueing.test_kernels import assert_same

LAW = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3, kp=5e-6, cv=0.12)
PROMPTS = parse_distribution("geometric:mean=300", 2_000)
TOKENS = 1_024
POLICIES = (
    "single",
    "dynamic",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=6",
    "fixed:batch_size=4",
    "fixed:batch_size=4,max_wait=0.02",
    "capped:max_batch_size=8,order=spjf",
    "fixed:batch_size=4,order=binned,bins=4",
)


def model(policy: str, tokens: int | None = TOKENS, servers: int = 1, **given: object) -> Queue:
    return Queue.read(
        policy,
        parse_distribution("lognormal:mu=2.5,sigma=0.7", 64),
        LAW,
        prompt_tokens=PROMPTS,
        max_num_seqs=32,
        servers=servers,
        step_tokens=tokens,
        **given,  # type: ignore[arg-type]
    )


@pytest.mark.thinned(9)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("calls", [None, "uniform:low=1,high=5"])
def test_the_kernels_cut_where_the_policies_do(
    policy: str, servers: int, calls: str | None
) -> None:
    given = {} if calls is None else {"sequences": parse_distribution(calls)}
    queue = model(policy, servers=servers, **given)
    assert is_compiled(queue)
    rate = 0.9 * queue.largest_stable_rate
    fast, slow = (
        simulate_run(queue, rate, 600, np.random.SeedSequence(5), generic=generic)
        for generic in (False, True)
    )
    assert_same(fast, slow)


@pytest.mark.parametrize("policy", ["dynamic", "capped:max_batch_size=8", "elastic"])
def test_no_batch_of_several_has_more(policy: str) -> None:
    run = simulate_run(
        queue := model(policy), queue.largest_stable_rate, 3_000, np.random.SeedSequence(1)
    )
    prompts = np.bincount(run.batch_id, _prompts(queue, 3_000))
    several = np.bincount(run.batch_id) > 1
    assert several.any()
    assert prompts[several].max() <= TOKENS
    assert prompts.max() > TOKENS  # one alone is served, however long


def _prompts(queue: Queue, count: int) -> np.ndarray:
    from kendall.queueing.simulation.fast import draw_trace

    rate = queue.largest_stable_rate
    return draw_trace(queue, rate, count, np.random.SeedSequence(1)).prompt_tokens


@pytest.mark.parametrize("policy", ["capped:max_batch_size=8", "elastic:max_batch_size=4"])
def test_the_largest_stable_rate_is_that_of_a_queue_that_never_ends(policy: str) -> None:
    queue, count = model(policy), 60_000
    rng = np.random.default_rng(3)
    outputs, prompts = (
        lengths.sample(rng, count) for lengths in (queue.requests.output_tokens, PROMPTS)
    )
    given = Trace(np.zeros(count), outputs, prompts, call_ends=np.full(count, count))
    run = run_given(queue, given, np.random.SeedSequence(2))
    assert queue.largest_stable_rate == pytest.approx(count / run.server_free_at.max(), rel=0.01)
    assert queue.largest_stable_rate < 0.9 * model(policy, None).largest_stable_rate


def test_where_it_binds_the_queue_is_simulated_and_where_it_cannot_a_formula_answers() -> None:
    queue = model("capped:max_batch_size=8")
    assert best_method(queue) == "simulation"
    assert "the prompts of a batch have 1,024 tokens at most" in " ".join(queue.assumptions)
    wide, free = (model("capped:max_batch_size=8", tokens) for tokens in (16_000, None))
    assert best_method(wide) == best_method(free) == "exact"
    rate = 0.7 * free.largest_stable_rate
    assert (
        predict_model(wide, rate).queueing_delay.mean
        == predict_model(free, rate).queueing_delay.mean
    )


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", ["capped:max_batch_size=8", "elastic:max_batch_size=8"])
def test_the_check_and_the_forecast_of_a_window_know_it(policy: str) -> None:
    queue = model(policy)
    from kendall.queueing.simulation.experiment import draw_jobs

    rate = 0.8 * queue.largest_stable_rate
    jobs, rngs = draw_jobs(queue, rate, 4_000, np.random.SeedSequence(7))
    engine = SimulatedEngine(LAW, max_batch_size=32, max_prompt_tokens=TOKENS)
    records = Driver(queue.policy, jobs, [engine.driven(0, rngs[0])]).run()
    shape = dataclasses.replace(LAW, cv=0.0)
    told, untold = (
        assess(
            seen(records, policy),
            shape,
            QueueLimits(engine=EngineBounds(max_num_seqs=32, batch_tokens=tokens)),
        )
        for tokens in (TOKENS, None)
    )
    check = told.compared.check
    assert check is not None
    assert abs(check.difference) <= check.half_width
    assert check.half_width < 0.05 * check.observed
    assert untold.compared.check is not None
    assert untold.compared.check.ratio > 1.2
    assert told.load.value == pytest.approx(0.8, rel=0.1)
    assert untold.load.value < 0.7
    assert told.prediction is not None
    assert told.prediction.method == "simulation"
