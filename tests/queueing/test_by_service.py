"""`by=service`: orders by predicted length that count the prompt too."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kendall.policies.core import Request
from kendall.policies.ordered import order_of
from kendall.policies.text import SpecError, format_policy, parse_policy
from kendall.queueing.prediction import methods
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_run
from kendall.queueing.simulation.fast import is_compiled

LAW = "k1=0,k2=0.01,k3=0.002,k4=0.008,kp=0.001"
LIMITS = {
    "prompt_tokens": "geometric:mean=500",
    "predictor": "lognormal:sigma=0.5",
    "max_output_tokens": 400,
}


def queue(policy: str, **limits: object) -> Queue:
    return Queue.read(policy, "geometric:mean=50", LAW, **(LIMITS | limits))  # type: ignore[arg-type]


def request(prompt: int, predicted: float) -> Request:
    return Request(
        id="",
        arrived_at=5.0,
        prompt_tokens=prompt,
        max_output_tokens=400,
        predicted_output_tokens=predicted,
    )


@pytest.mark.parametrize(
    ("policy", "weight"),
    [
        ("single", 0.001 / 0.01),  # kp over k3 + k4
        ("continuous:max_batch_size=4", 0.001 / ((4 * 0.002 + 0.008) / 4)),
        ("capped:max_batch_size=2", 0.001 / ((2 * 0.002 + 0.008) / 2)),
    ],
)
def test_a_prompt_token_counts_as_its_time_over_that_of_a_token_in_a_full_batch(
    policy: str, weight: float
) -> None:
    model = queue(f"{policy}{',' if ':' in policy else ':'}order=spjf,by=service")
    order = order_of(model.policy)
    assert order.rank(request(300, 20.0), 0) == pytest.approx(20 + 300 * weight)
    assert f"a token of the prompt counts as {weight:.3g} of the answer" in str(model.assumptions)
    assert format_policy(model.policy).endswith("order=spjf,by=service"), "the text is as asked"
    assert model.clipped_at(100).text == model.text


def test_a_weight_of_the_operator_is_not_that_of_the_law() -> None:
    order = order_of(queue("single:order=ljf,by=service,prompt_weight=3").policy)
    assert order.rank(request(2, 10.0), 0) == -(10 + 3 * 2)


def test_by_tokens_a_prompt_does_not_count() -> None:
    for text in ("single:order=spjf", "single:order=spjf,by=tokens"):
        assert order_of(queue(text).policy).rank(request(300, 20.0), 0) == 20


def test_a_prompt_that_is_computed_does_not_count_any_more() -> None:
    order = order_of(queue("single:order=sprpt,by=service,prompt_weight=1").policy)
    assert [order.rank(request(30, 20.0), made) for made in (0, 1, 5)] == [50, 19, 15]


def test_memory_is_the_tokens_held_in_each_step() -> None:
    order = order_of(queue("single:order=ljf,by=memory").policy)
    steps = [300 + made for made in range(1, 21)]
    assert order.rank(request(300, 20.0), 0) == -sum(steps)


def test_a_law_without_steps_or_prompts_leaves_the_order_by_tokens() -> None:
    for law in ("k1=0.1,k2=1,k3=0,k4=0", "k1=0,k2=0,k3=0.001,k4=0.01"):
        model = Queue.read("single:order=spjf,by=service", "geometric:mean=50", law)
        assert order_of(model.policy).rank(request(300, 20.0), 0) == 20


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    "policy",
    [
        "single:order=spjf,by=service",
        "continuous:max_batch_size=3,order=ljf,by=service",
        "capped:max_batch_size=3,order=spjf,by=service,prompt_weight=0.3",
        "single:order=ljf,by=memory",
        "continuous:max_batch_size=3,order=spjf,by=memory,aging=1ms",
    ],
)
def test_compiled_code_serves_in_the_order_of_the_policy(policy: str) -> None:
    model = queue(policy)
    assert is_compiled(model)
    rate = 0.8 * model.largest_stable_rate
    runs = [
        simulate_run(model, rate, 3000, np.random.SeedSequence(4), generic=generic)
        for generic in (False, True)
    ]
    assert np.array_equal(runs[0].dispatched_at, runs[1].dispatched_at)
    by_tokens = queue(re.sub(r"by=\w+(,prompt_weight=0.3)?", "by=tokens", policy))
    other = simulate_run(by_tokens, rate, 3000, np.random.SeedSequence(4))
    assert not np.array_equal(runs[0].dispatched_at, other.dispatched_at)


def test_where_prompts_are_the_work_it_waits_less_than_by_tokens() -> None:
    """The same 100,000 requests under three orders."""
    found = {}
    for order in ("fcfs", "spjf", "spjf,by=service"):
        model = queue(f"single:order={order}", predictor="exact")
        run = simulate_run(
            model, 0.8 * model.largest_stable_rate, 100_000, np.random.SeedSequence(1)
        )
        found[order] = run.queueing_delay.mean()
    assert found["spjf,by=service"] < 0.9 * found["spjf"] < 0.9 * found["fcfs"]


def test_the_analysis_of_orders_has_none_with_prompts() -> None:
    assert methods(queue("single:order=spjf,by=service", predictor="exact"))[0] == "simulation"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("spjf,by=work", "got by=work; expected tokens, memory or service"),
        ("sprpt,by=memory", "got by=memory; expected tokens, residual or service"),
        ("srpt-b,by=residual", "got by=residual; expected tokens or service"),
        ("spjf,prompt_weight=1", "got prompt_weight=1 with by=tokens; expected by=service"),
        ("spjf,by=service,prompt_weight=-1", "got prompt_weight=-1; expected a finite number >= 0"),
        ("fcfs,by=service", "got by for order fcfs"),
        ("boost,gamma=1,token_time=1,by=service", "got by for order boost"),
    ],
)
def test_texts_that_make_no_sense_are_refused(text: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_policy(f"single:order={text}")
    assert said in str(error.value)
