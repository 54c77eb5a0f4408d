"""Chunked prefill: a step of a continuous engine computes a bounded number of tokens, and a prompt
that does not fit takes several.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

import kendall
from kendall.policies.text import SpecError
from kendall.queueing.commands.optimize_cli import app as optimize
from kendall.queueing.commands.plan_cli import app as plan
from kendall.queueing.control.assess import Assessment, assess
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.slots.prompt_parts import PromptParts
from kendall.queueing.models.slots.continuous import doubt, solve_continuous
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import draw_jobs, simulate_run
from kendall.queueing.simulation.fast import SimulatedRun, is_compiled
from kendall.queueing.simulation.reference import Driver, SimulatedEngine
from tests.queueing.estimation_runs import seen
from tests.queueing.test_kernels import assert_same

PLAIN = LatencyModel(k1=0.3e-3, k3=25e-6, k4=0.92e-3, kp=5e-6)
FULL = LatencyModel(k1=0.3e-3, k3=25e-6, k4=0.92e-3, kp=5e-6, turnaround=1.55e-3, speed=1.1)
FREE = LatencyModel(k1=0.0, k3=1e-3, k4=0.0)  # prompts take no time, but steps
LENGTHS = parse_distribution("lognormal:mu=2.5,sigma=0.7", 64)
PROMPTS = parse_distribution("lognormal:mu=4.5,sigma=1.0", 1000)
SLOTS = "continuous:max_batch_size=8"


def model(step_tokens: int | None, policy: str = SLOTS, **given: object) -> Queue:
    limits = {"prompt_tokens": PROMPTS, "step_tokens": step_tokens} | given
    lengths, law = limits.pop("output_tokens", LENGTHS), limits.pop("law", PLAIN)
    return Queue.read(policy, lengths, law, **limits)


def run(queue: Queue, load: float, *, generic: bool, count: int = 1200) -> SimulatedRun:
    rate = load * queue.largest_stable_rate
    return simulate_run(queue, rate, count, np.random.SeedSequence(5), generic=generic)


@pytest.mark.parametrize(
    "given", [{}, {"patience": 0.05}, {"servers": 3}, {"max_context_tokens": 3000}]
)
@pytest.mark.parametrize("law", [PLAIN, FULL, FREE], ids=["plain", "full", "free"])
@pytest.mark.parametrize("step_tokens", [9, 64, 500])
@pytest.mark.thinned(36)
def test_the_kernel_is_the_policys_own_sample_path(
    step_tokens: int, law: LatencyModel, given: dict[str, object]
) -> None:
    queue = model(step_tokens, law=law, **given)
    assert is_compiled(queue)
    for load in (0.5, 1.1):
        assert_same(run(queue, load, generic=False), run(queue, load, generic=True))


@pytest.mark.parametrize("order", ["spjf", "hrrn", "ljf,aging=0.01", "priority"])
def test_the_kernel_of_an_order_is_the_policys_own_sample_path(order: str) -> None:
    queue = model(64, f"{SLOTS},order={order}", law=FULL)
    assert is_compiled(queue)
    assert_same(run(queue, 0.9, generic=False), run(queue, 0.9, generic=True))


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("law", [PLAIN, FULL], ids=["plain", "full"])
def test_a_step_with_room_for_all_prompts_is_as_one_without_a_bound(
    law: LatencyModel, generic: bool
) -> None:
    unbounded, wide = model(None, law=law), model(8 * 1001, law=law)
    assert_same(*(run(queue, 0.9, generic=generic) for queue in (unbounded, wide)))


def test_a_bound_of_the_step_is_refused_where_it_cannot_be_kept() -> None:
    for policy, given, said in (
        ("continuous", {}, "for slots without a bound; expected at least as many tokens as slots"),
        (SLOTS, {"step_tokens": 7}, "step_tokens=7 for 8 slots; expected at least as many tokens"),
        (SLOTS, {"max_num_seqs": 4, "step_tokens": 3}, "step_tokens=3 for 4 slots"),
        (SLOTS, {"step_tokens": 2**53 + 1}, "expected at most 9,007,199,254,740,992, or no limit"),
    ):
        with pytest.raises(SpecError, match=re.escape(said)):
            model(**({"step_tokens": 64} | given), policy=policy)
    model(8)
    model(4, max_num_seqs=4)
    for policy, given in ((SLOTS, 1.5), (SLOTS, 2**70), ("single", 0)):
        with pytest.raises(SpecError, match="got step_tokens="):
            kendall.predict(policy, 1.0, "geometric:mean=16", "a=0.001,c=0", step_tokens=given)


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
    for load in (0.1, 0.25):
        rate = load * queue.largest_stable_rate
        found = solve_continuous(queue.slot_time, rate, slots)
        assert doubt(queue.slot_time, rate, slots, found) is None
        simulated = run(queue, load, generic=False, count=120_000).after(10_000)
        assert found.sojourn_time == pytest.approx(simulated.sojourn_time.mean(), rel=0.02)
        first = (simulated.first_token_at - simulated.arrived_at).mean()
        assert found.time_to_first_token == pytest.approx(first, rel=0.05)


@pytest.mark.slow
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
        SLOTS, rate, LONG, GPU, prompt_tokens=queue.requests.prompt_tokens, step_tokens=128
    )
    assert found.method == "simulation"
    simulated = run(queue, 0.5, generic=False, count=100_000)
    assert found.sojourn_time.mean == pytest.approx(simulated.sojourn_time.mean(), rel=0.05)
    assert doubt(queue.but(step_tokens=None).slot_time, rate, 8) is None


def saturated(queue: Queue) -> float:
    """Requests/s of an engine that always has some waiting."""
    found = run(queue, 3.0, generic=False, count=20_000).released_at
    return float(15_000 / (np.sort(found)[-1_000] - np.sort(found)[3_999]))


@pytest.mark.parametrize(
    ("slots", "outputs", "prompts"),
    [
        (64, "geometric:mean=40", "deterministic:value=16"),
        (64, "geometric:mean=200", "lognormal:mu=5,sigma=0.8"),
        (16, "geometric:mean=20", "uniform:low=1,high=40"),
        (128, "geometric:mean=200", "geometric:mean=200"),
    ],
)
def test_less_room_in_a_step_never_serves_more(slots: int, outputs: str, prompts: str) -> None:
    """Down to as many tokens as slots: T / (E[N] + E[P]) requests a step."""
    law = LatencyModel(k1=1e-3, k2=5e-3, k3=1e-4, k4=8e-3, kp=1e-6)
    sizes = (slots, slots + 1, slots * 5 // 4, slots * 3 // 2, slots * 2, slots * 8, None)
    rates = []
    for tokens in sizes:
        queue = model(
            tokens,
            f"continuous:max_batch_size={slots}",
            law=law,
            output_tokens=parse_distribution(outputs, 800),
            prompt_tokens=parse_distribution(prompts, 2000),
        )
        rates.append(queue.largest_stable_rate)
        assert rates[-1] == pytest.approx(saturated(queue), rel=0.05), tokens
    assert rates == sorted(rates)


def test_a_bound_that_does_not_bind_changes_no_formula() -> None:
    free, wide = model(None, law=FULL), model(10**9, law=FULL)
    for load in (0.3, 0.9):
        rate = load * free.largest_stable_rate
        found, same_as = (solve_continuous(each.slot_time, rate, 8) for each in (free, wide))
        assert found == same_as


def assessed(step_tokens: int | None, *, told: bool) -> tuple[Assessment, float, float]:
    """Of an engine with that bound, 6,000 requests; the mean sojourn and first token observed."""
    queue = model(step_tokens, law=GPU, output_tokens=LONG, prompt_tokens=PROMPTS, max_num_seqs=8)
    jobs, rngs = draw_jobs(queue, 0.6 * queue.largest_stable_rate, 6000, np.random.SeedSequence(3))
    engine = SimulatedEngine(GPU, max_batch_size=8, step_tokens=step_tokens or 2**62)
    records = Driver(queue.policy, jobs, [engine.driven(0, rngs[0])]).run()
    limits = QueueLimits(
        engine=EngineBounds(max_num_seqs=8, step_tokens=step_tokens if told else None)
    )
    firsts = [
        record.first_token_at - record.arrived_at
        for record in records
        if record.first_token_at is not None and record.arrived_at is not None
    ]
    sojourns = [record.sojourn_time or 0.0 for record in records]
    found = assess(seen(records, SLOTS), GPU, limits)
    return found, float(np.mean(sojourns)), float(np.mean(firsts))


@pytest.mark.thinned(3)
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
    assert found.estimates.prefill * found.estimates.speed.value > 1.02


GIVEN = (
    *("--output-tokens", "geometric:mean=40", "--max-output-tokens", "100"),
    *("--prompt-tokens", "geometric:mean=30", "--latency", "k1=1e-3,k2=5e-3,k3=1e-4,k4=8e-3"),
    *("--step-tokens", "16"),
)


def test_candidates_have_no_more_slots_than_a_step_has_tokens() -> None:
    policy = ("--policy", "continuous:max_batch_size=8")
    rate = ("--arrival-rate", "2", "--json")
    command = ["--target", "batch-size", *policy, *rate, *GIVEN]
    found = CliRunner().invoke(optimize, command)
    assert found.exit_code == 0, found.stderr
    sizes = [each["batch_size"] for each in json.loads(found.stdout)["curve"]]
    assert max(sizes) == 16
    command = ["--target", "policy", *policy, *rate, *GIVEN]
    found = CliRunner().invoke(optimize, command)
    assert found.exit_code == 0, found.stderr
    assert "single" in {each["policy"] for each in json.loads(found.stdout)["curve"]}


@pytest.mark.slow
def test_a_plan_leaves_out_slots_that_a_step_cannot_serve_and_says_so() -> None:
    command = ["--arrival-rate", "2", "--slo", "mean_sojourn_time<=5s", "--json", *GIVEN]
    command += ["--max-clipped-fraction", "0.99"]
    found = CliRunner().invoke(plan, [*command, "--max-num-seqs", "8,16,32,64"])
    assert found.exit_code == 0, found.stderr
    assert found.stderr == "kendall: left out: 32, 64 slots, more than the 16 tokens of a step\n"
    assert [each["max_num_seqs"] for each in json.loads(found.stdout)["options"]] == [8, 16]
    found = CliRunner().invoke(plan, [*command, "--max-num-seqs", "32,64"])
    assert isinstance(found.exception, SpecError)
    assert str(found.exception).startswith(
        "got --step-tokens 16 with --max-num-seqs 32,64; expected at least as many tokens as slots"
    )


@pytest.mark.parametrize("room", [1, 2, 7, 16, 39, 40, 41, 500])
@pytest.mark.parametrize("text", ["uniform:low=1,high=40", "geometric:mean=30"])
def test_parts_of_prompts_by_hand(text: str, room: int) -> None:
    prompts = parse_distribution(text, 300)
    counts = np.arange(len(prompts.pmf))
    whole, rest = np.divmod(counts, room)
    further = (whole + (rest > 0)).clip(1) @ prompts.pmf - 1
    squares = (whole * room**2 + rest**2) @ prompts.pmf
    left = (counts / room * (counts / room - 1).clip(0)) @ prompts.pmf
    found = PromptParts(PLAIN, prompts, 64, 10.0)._alone(room)
    assert found == pytest.approx((further, squares, left), abs=1e-9)
