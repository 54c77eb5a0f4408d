"""Chunked prefill: a step of a continuous engine computes a bounded number of tokens, and a prompt
that does not fit takes several.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import kendall
from policies import parse_policy
from policies.text import SpecError
from queueing.distributions.token_distribution import parse_distribution
from queueing.estimation.assess import Assessment, Limits, assess
from queueing.latency.law import LatencyModel
from queueing.model import Model
from queueing.models.slots.continuous import doubt, solve_continuous
from queueing.simulation.experiment import draw_jobs, simulate_run
from queueing.simulation.fast import COLUMNS, SimulatedRun, is_compiled
from queueing.simulation.reference import Driver, SimulatedEngine
from tests.queueing.estimation_runs import seen

PLAIN = LatencyModel(k1=0.3e-3, k3=25e-6, k4=0.92e-3, kp=5e-6)
FULL = LatencyModel(k1=0.3e-3, k3=25e-6, k4=0.92e-3, kp=5e-6, turnaround=1.55e-3, speed=1.1)
FREE = LatencyModel(k1=0.0, k3=1e-3, k4=0.0)  # prompts take no time, but steps
LENGTHS = parse_distribution("lognormal:mu=2.5,sigma=0.7", 64)
PROMPTS = parse_distribution("lognormal:mu=4.5,sigma=1.0", 1000)
SLOTS = "continuous:max_batch_size=8"


def model(step_tokens: int | None, policy: str = SLOTS, **given: object) -> Model:
    limits = {"law": PLAIN, "output_tokens": LENGTHS, "prompt_tokens": PROMPTS} | given
    return Model(policy=parse_policy(policy), step_tokens=step_tokens, **limits)


def run(queue: Model, load: float, *, generic: bool, count: int = 1200) -> SimulatedRun:
    rate = load * queue.largest_stable_rate
    return simulate_run(queue, rate, count, np.random.SeedSequence(5), generic=generic)


def same(found: SimulatedRun, expected: SimulatedRun) -> bool:
    return np.array_equal(found.lost, expected.lost) and all(
        np.array_equal(getattr(found, name)[~found.lost], getattr(expected, name)[~expected.lost])
        for name in COLUMNS
    )


@pytest.mark.parametrize(
    "given", [{}, {"patience": 0.05}, {"servers": 3}, {"max_context_tokens": 3000}]
)
@pytest.mark.parametrize("law", [PLAIN, FULL, FREE], ids=["plain", "full", "free"])
@pytest.mark.parametrize("step_tokens", [9, 64, 500])
def test_the_kernel_is_the_policys_own_sample_path(
    step_tokens: int, law: LatencyModel, given: dict[str, object]
) -> None:
    queue = model(step_tokens, law=law, **given)
    assert is_compiled(queue)
    for load in (0.5, 1.1):
        assert same(run(queue, load, generic=False), run(queue, load, generic=True))


@pytest.mark.parametrize("order", ["spjf", "hrrn", "ljf,aging=0.01", "priority"])
def test_the_kernel_of_an_order_is_the_policys_own_sample_path(order: str) -> None:
    queue = model(64, f"{SLOTS},order={order}", law=FULL)
    assert is_compiled(queue)
    assert same(run(queue, 0.9, generic=False), run(queue, 0.9, generic=True))


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("law", [PLAIN, FULL], ids=["plain", "full"])
def test_a_step_with_room_for_all_prompts_is_as_one_without_a_bound(
    law: LatencyModel, generic: bool
) -> None:
    unbounded, wide = model(None, law=law), model(8 * 1001, law=law)
    assert same(*(run(queue, 0.9, generic=generic) for queue in (unbounded, wide)))


def test_a_bound_of_the_step_is_refused_where_it_says_nothing() -> None:
    for policy, given, said in (
        ("dynamic", {}, "for policy dynamic; expected policy continuous"),
        ("continuous", {}, "for slots without a bound; expected more tokens than slots"),
        (SLOTS, {"step_tokens": 8}, "step_tokens=8 for 8 slots; expected more tokens than slots"),
        (SLOTS, {"max_num_seqs": 4, "step_tokens": 4}, "step_tokens=4 for 4 slots"),
    ):
        with pytest.raises(SpecError, match=re.escape(said)):
            model(**({"step_tokens": 64} | given), policy=policy)
    model(9)
    model(5, max_num_seqs=4)
    with pytest.raises(SpecError, match=r"got step_tokens=1\.5; expected a whole number"):
        kendall.predict(SLOTS, 1.0, "geometric:mean=16", "a=0.001,c=0", step_tokens=1.5)


LONG = parse_distribution("lognormal:mu=4,sigma=0.8", 600)
GPU = LatencyModel(k1=0.3e-3, k3=30e-6, k4=8e-3, kp=2.5e-5)


@pytest.mark.parametrize(
    ("slots", "step_tokens", "prompts"),
    [
        (8, 512, "lognormal:mu=6,sigma=1.0"),
        (8, 2048, "lognormal:mu=6,sigma=1.0"),
        (64, 2048, "lognormal:mu=6,sigma=1.0"),
        (8, 128, "geometric:mean=100"),
        (64, 512, "geometric:mean=100"),
    ],
)
def test_the_formula_is_near_simulation_where_it_has_no_doubt(
    slots: int, step_tokens: int, prompts: str
) -> None:
    queue = model(
        step_tokens,
        f"continuous:max_batch_size={slots}",
        law=GPU,
        output_tokens=LONG,
        prompt_tokens=parse_distribution(prompts, 8000),
    )
    for load in (0.3, 0.5):
        rate = load * queue.largest_stable_rate
        found = solve_continuous(queue.slot_time, rate, slots)
        assert doubt(queue.slot_time, rate, slots, found) is None
        simulated = run(queue, load, generic=False, count=120_000).after(10_000)
        assert found.sojourn_time == pytest.approx(simulated.sojourn_time.mean(), rel=0.03)
        first = (simulated.first_token_at - simulated.arrived_at).mean()
        assert found.time_to_first_token == pytest.approx(first, rel=0.08)


def test_where_prompts_wait_for_each_other_the_formula_is_in_doubt_and_simulation_answers() -> None:
    queue = model(
        128,
        law=GPU,
        output_tokens=LONG,
        prompt_tokens=parse_distribution("uniform:low=1000,high=8000"),
    )
    rate = 0.5 * queue.largest_stable_rate
    said = doubt(queue.slot_time, rate, 8)
    assert said is not None
    assert said.startswith("prompts fill the engine's steps for 4")
    found = kendall.predict(
        SLOTS, rate, LONG, GPU, prompt_tokens=queue.prompt_tokens, step_tokens=128
    )
    assert found.method == "simulation"
    simulated = run(queue, 0.5, generic=False, count=100_000)
    assert found.sojourn_time.mean == pytest.approx(simulated.sojourn_time.mean(), rel=0.05)
    assert doubt(replace(queue, step_tokens=None).slot_time, rate, 8) is None


def test_prompts_bound_the_rate_where_steps_have_little_room() -> None:
    """T / (E[N] + E[P]) requests a step, full steps one after the other."""
    prompts = parse_distribution("deterministic:value=4000")
    queue = model(
        128, "continuous:max_batch_size=64", law=GPU, output_tokens=LONG, prompt_tokens=prompts
    )
    each = 128 / (LONG.mean + 4000)
    step = GPU.step(LONG.mean * each) + GPU.admission(each, 4000 * each)
    assert queue.largest_stable_rate == pytest.approx(each / step, rel=0.03)
    held, broken = (
        np.polyfit(np.arange(4000), run(queue, load, generic=False, count=4000).sojourn_time, 1)[0]
        for load in (0.9, 1.1)
    )
    assert held < 0.1 * broken


def assessed(step_tokens: int | None, *, told: bool) -> tuple[Assessment, float, float]:
    """Of an engine with that bound, 6,000 requests; the mean sojourn and first token observed."""
    queue = model(step_tokens, law=GPU, output_tokens=LONG, prompt_tokens=PROMPTS, max_num_seqs=8)
    jobs, rngs = draw_jobs(queue, 0.6 * queue.largest_stable_rate, 6000, np.random.SeedSequence(3))
    engine = SimulatedEngine(GPU, max_batch_size=8, step_tokens=step_tokens or 2**62)
    records = Driver(queue.policy, jobs, [engine.driven(0, rngs[0])]).run()
    limits = Limits(max_num_seqs=8, step_tokens=step_tokens if told else None)
    firsts = [
        record.first_token_at - record.arrived_at
        for record in records
        if record.first_token_at is not None and record.arrived_at is not None
    ]
    sojourns = [record.sojourn_time or 0.0 for record in records]
    found = assess(seen(records, SLOTS), GPU, limits)
    return found, float(np.mean(sojourns)), float(np.mean(firsts))


@pytest.mark.parametrize("step_tokens", [64, 256, None])
def test_the_live_model_knows_the_speed_and_the_first_token_of_an_engine_with_chunked_prefill(
    step_tokens: int | None,
) -> None:
    found, sojourn, first = assessed(step_tokens, told=True)
    assert found.estimates.speed.value == pytest.approx(1.0, abs=0.02)
    assert found.prediction is not None
    assert found.prediction.sojourn_time.mean == pytest.approx(sojourn, rel=0.05)
    assert found.prediction.time_to_first_token.mean == pytest.approx(first, rel=0.1)


def test_without_the_bound_the_live_model_finds_a_slow_engine() -> None:
    found, _, _ = assessed(64, told=False)
    assert found.estimates.speed.value > 1.02
