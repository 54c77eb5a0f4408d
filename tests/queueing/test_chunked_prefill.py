"""Chunked prefill: a step of a continuous engine computes a bounded number of tokens, and a prompt
that does not fit takes several.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

import kendall
from policies import parse_policy
from policies.text import SpecError
from queueing.distributions.token_distribution import parse_distribution
from queueing.latency.law import LatencyModel
from queueing.model import Model
from queueing.simulation.experiment import simulate_run
from queueing.simulation.fast import COLUMNS, SimulatedRun, is_compiled

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
