"""Prompts padded to the longest of their batch (Yang et al., Eq. 17 and 18): moments, laws,
predictions against the simulator.
"""

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kendall.policies.text import SpecError
from kendall.queueing.commands.cli import app
from kendall.queueing.commands.optimize_cli import app as optimize_app
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.latency.batch_time import BatchTime
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service import Member, ServiceProcess
from kendall.queueing.models.as_published import psi
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_model, simulate_run

LAW = "k1=1e-3,k2=4e-3,k3=1e-4,k4=1e-3,kp=5e-5"
OUTPUT, PROMPTS = "uniform:low=8,high=24", "geometric:mean=60"
FEW = TokenDistribution(
    np.array([0.0, 0.5, 0.0, 0.0, 0.3, 0.0, 0.2])
)  # prompts of 1, 4 and 6 tokens
SHORT = parse_distribution("uniform:low=1,high=3")


def padded(policy: str, prompts: str = PROMPTS, law: str = LAW, **limits: Any) -> Queue:
    return Queue.read(policy, OUTPUT, law, prompt_tokens=prompts, pad_prompts=True, **limits)


def service_times(
    law: LatencyModel, b: int, *, outputs_padded: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Every batch of b prompts of FEW and b outputs of SHORT: its service time and its
    probability.
    """
    values, weights = [], []
    for prompts in itertools.product(np.flatnonzero(FEW.pmf), repeat=b):
        for outputs in itertools.product(range(1, 4), repeat=b):
            setup = law.k1 * b + law.k2 + law.kp * b * max(prompts)
            work = (
                (law.k3 * b + law.k4) * max(outputs)
                if outputs_padded
                else law.k3 * sum(outputs) + law.k4 * max(outputs)
            )
            values.append(setup + work)
            weights.append(
                math.prod(FEW.pmf[p] for p in prompts) * math.prod(SHORT.pmf[o] for o in outputs)
            )
    return np.array(values), np.array(weights)


def test_padding_without_a_cost_per_prompt_token_says_that_it_changes_nothing() -> None:
    free = padded("dynamic", law="k1=1e-3,k2=4e-3,k3=1e-4,k4=1e-3").assumptions
    assert any("padded prompts change nothing: the latency law has no kp" in line for line in free)
    assert not any("kp b max(prompt)" in line for line in free)
    assert any("kp b max(prompt)" in line for line in padded("dynamic").assumptions)


@pytest.mark.parametrize("outputs_padded", [True, False])
@pytest.mark.parametrize("b", [1, 2, 3])
def test_moments_and_arrivals_are_those_of_all_batches_enumerated(
    b: int, outputs_padded: bool
) -> None:
    law = LatencyModel(k1=0.02, k2=0.1, k3=0.01, k4=0.05, kp=0.03)
    time = BatchTime(law, SHORT, FEW, outputs_padded, pad_prompts=True)
    values, weights = service_times(law, b, outputs_padded=outputs_padded)
    assert time.mean(b) == pytest.approx(values @ weights, rel=1e-12)
    assert time.second_moment(b) == pytest.approx(values**2 @ weights, rel=1e-12)
    rate, count = 3.0, 8
    expected = [
        float(weights @ (np.exp(-rate * values) * (rate * values) ** j)) / math.factorial(j)
        for j in range(count)
    ]
    assert time.table(3).arrivals(rate, count)[b - 1] == pytest.approx(expected, abs=1e-9)
    if outputs_padded:
        prompts = b * FEW.maximum(b).mean
        assert time.mean(b) == pytest.approx(law.padded(b, SHORT.maximum(b).mean, prompts))


CELLS = [
    ("capped:max_batch_size=8", LAW, {}, 0.3),
    ("capped:max_batch_size=8", LAW + ",cv=0.3", {}, 0.85),
    ("elastic:max_batch_size=8", LAW + ",cv=0.1", {}, 0.6),
    ("dynamic", LAW, {}, 0.7),
    ("fixed:batch_size=4", LAW + ",stall_share=0.05,stall=0.1", {}, 0.7),
    ("capped:max_batch_size=4", LAW, {"sequences": "uniform:low=1,high=3"}, 0.6),
]


@pytest.mark.parametrize(("policy", "law", "limits", "load"), CELLS)
@pytest.mark.thinned(12)
def test_the_exact_answer_meets_the_simulator(
    policy: str, law: str, limits: dict[str, Any], load: float
) -> None:
    """Means within 4 standard errors, which are at most 3 % of the delay; p99 within 5 %."""
    prompts = "uniform:low=1,high=200" if policy == "dynamic" else PROMPTS
    model = padded(policy, prompts, law, **limits)
    rate = load * model.largest_stable_rate
    exact, simulated = (
        predict_model(model, rate),
        simulate_model(model, rate, num_requests=1_000_000, seed=5),
    )
    assert exact.method == "exact"
    for name in ("queueing_delay", "sojourn_time", "time_to_first_token", "batch_size"):
        ours, drawn = getattr(exact, name), getattr(simulated, name)
        assert drawn.standard_error < 0.03 * drawn.mean
        assert ours.mean == pytest.approx(drawn.mean, abs=4 * drawn.standard_error)
    assert exact.queueing_delay.p99 == pytest.approx(simulated.queueing_delay.p99, rel=0.05)


@pytest.mark.parametrize(
    "policy", ["capped:max_batch_size=6", "elastic:max_batch_size=6", "fixed:batch_size=3"]
)
def test_prompts_of_one_length_have_no_padding(policy: str) -> None:
    same = "deterministic:value=50"
    plain = Queue.read(policy, OUTPUT, LAW, prompt_tokens=same)
    rate = 0.7 * plain.largest_stable_rate
    delays = [predict_model(model, rate).queueing_delay for model in (plain, padded(policy, same))]
    assert delays[0].mean == pytest.approx(delays[1].mean, rel=1e-9)
    assert delays[0].p99 == pytest.approx(delays[1].p99, rel=1e-6)


@pytest.mark.parametrize(
    "policy", ["single", "capped:max_batch_size=1", "continuous:max_batch_size=4"]
)
def test_a_batch_of_one_and_a_continuous_engine_pad_nothing(policy: str) -> None:
    plain, model = Queue.read(policy, OUTPUT, LAW, prompt_tokens=PROMPTS), padded(policy)
    rate = 0.6 * plain.largest_stable_rate
    assert model.largest_stable_rate == plain.largest_stable_rate
    assert predict_model(model, rate).queueing_delay == predict_model(plain, rate).queueing_delay


def test_padding_lowers_the_rate_that_can_be_served() -> None:
    plain = Queue.read("capped:max_batch_size=8", OUTPUT, LAW, prompt_tokens=PROMPTS)
    harmonic = sum(1 / k for k in range(1, 9))
    assert padded("capped:max_batch_size=8").largest_stable_rate < plain.largest_stable_rate
    uniform = parse_distribution("uniform:low=0,high=100000")
    assert uniform.maximum(8).mean == pytest.approx(100000 * 8 / 9, rel=1e-4)  # Eq. 17
    assert parse_distribution("exponential:mean=5000").maximum(8).mean == pytest.approx(
        5000 * harmonic, rel=1e-3
    )


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "policy",
    ["capped:max_batch_size=4", "elastic:max_batch_size=4", "fixed:batch_size=3", "dynamic"],
)
@pytest.mark.parametrize("servers", [1, 2])
def test_the_compiled_simulator_pads_as_the_generic_one(policy: str, servers: int) -> None:
    model = padded(policy, "uniform:low=1,high=200", LAW + ",cv=0.2", servers=servers)
    rate = 0.7 * model.largest_stable_rate
    fast, generic = (
        simulate_run(model, rate, 400, np.random.SeedSequence(3), generic=kind)
        for kind in (False, True)
    )
    assert np.array_equal(fast.released_at, generic.released_at)
    assert np.array_equal(fast.first_token_at, generic.first_token_at)


def test_an_engine_pays_for_the_longest_prompt_once_for_each_member() -> None:
    law = LatencyModel(k1=1.0, k2=2.0, k4=0.5, kp=0.01)
    for pads, tokens in ((True, 2 * 30), (False, 40)):
        engine = ServiceProcess(law, np.random.default_rng(0), pad_prompts=pads)
        engine.admit(0.0, [Member("a", 10, 2), Member("b", 30, 1)], padded=True, joining=False)
        assert engine.next_step_at() == pytest.approx(2 * 1.0 + 2.0 + 0.01 * tokens + 0.5)


@pytest.mark.parametrize("load", [0.1, 0.4, 0.8])
def test_the_bound_of_eq_16_takes_the_longest_prompt(load: float) -> None:
    model = padded("dynamic", "uniform:low=1,high=200")
    rate = load * model.largest_stable_rate
    bound = predict_model(model, rate, "bound").queueing_delay.mean
    assert bound == pytest.approx(psi(rate, 1e-3 + 5e-5 * 200 + 1e-4 * 24, 4e-3 + 1e-3 * 24))
    delay = predict_model(model, rate, "exact").queueing_delay.mean
    assert delay is not None
    assert bound is not None
    assert delay < bound


COMMAND = ("--output-tokens", OUTPUT, "--latency", LAW, "--prompt-tokens", PROMPTS)


@pytest.mark.parametrize("command", ["predict", "simulate"])
def test_the_commands_pad_prompts(command: str) -> None:
    asked = (
        command,
        "--policy",
        "capped:max_batch_size=8",
        "--arrival-rate",
        "60",
        *COMMAND,
        "--json",
    )
    plain, longer = (
        json.loads(CliRunner().invoke(app, [*asked, *flag]).stdout)
        for flag in ((), ("--pad-prompts",))
    )
    assert longer["queueing_delay"]["mean"] > plain["queueing_delay"]["mean"]
    assert any("padded to its longest" in line for line in longer["assumptions"])
    assert not any("padded to its longest" in line for line in plain["assumptions"])


def test_optimize_pads_prompts() -> None:
    asked = (
        "--target",
        "batch-size",
        "--policy",
        "capped:max_batch_size=8",
        "--objective",
        "throughput",
        "--largest",
        "8",
        *COMMAND,
        "--json",
    )
    plain, longer = (
        json.loads(CliRunner().invoke(optimize_app, [*asked, *flag]).stdout)["curve"]
        for flag in ((), ("--pad-prompts",))
    )
    assert longer[0]["largest_stable_rate"] == pytest.approx(
        plain[0]["largest_stable_rate"]
    )  # a batch of one
    assert longer[-1]["largest_stable_rate"] < plain[-1]["largest_stable_rate"]


def test_padding_needs_the_lengths_of_prompts() -> None:
    with pytest.raises(SpecError, match="got pad_prompts without prompt_tokens"):
        Queue.read("single", OUTPUT, LAW, pad_prompts=True)
