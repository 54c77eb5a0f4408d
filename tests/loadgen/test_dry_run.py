"""What `kendall sweep --dry-run` prints, at several widths, as kept."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from kendall.loadgen.sweep.dry_run import basis_of, plan_as_object, print_plan
from kendall.loadgen.sweep.plan import SweepPlan
from kendall.queueing.prediction import predict_model
from tests.golden_files import is_as_kept
from tests.kept_values import moved

LAW = "k1=0.0003,k2=0.001,k3=0.00002,k4=0.001"
SHORT: dict[str, Any] = {"policies": ("single", "capped:max_batch_size=8"), "num_prompts": 400}
PLANS: dict[str, SweepPlan] = {
    "loads": SweepPlan(loads=(0.3, 0.8), latency=LAW, **SHORT),
    "guessed": SweepPlan(loads=(0.5,), **SHORT),
    "limits": SweepPlan(
        request_rates=(20.0, 2000.0),
        max_output_tokens=(8, None),
        cell_limit=10.0,
        latency=LAW,
        **SHORT,
    ),
    "unstable": SweepPlan(
        loads=(0.5, 1.5), allow_unstable=True, cell_limit=1.0, latency=LAW, **SHORT
    ),
    "searches": SweepPlan(find_saturation=True, latency=LAW, **SHORT),
    "cells and searches": SweepPlan(loads=(0.5,), find_saturation=True, latency=LAW, **SHORT),
    "orders": SweepPlan(
        policies=("single", "continuous:max_batch_size=4"),
        orders=("fcfs", "spjf", "trail:c=0.8"),
        predictor="lognormal:sigma=0.5",
        loads=(0.8, 1.5),
        allow_unstable=True,
        num_prompts=400,
        latency=LAW,
    ),
    "whole batches": SweepPlan(
        policies=("fixed:batch_size=16,max_wait=30",), loads=(0.5,), duration=7.0, latency=LAW
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("width", [40, 64, 80, 120])
def test_a_dry_run_is_as_kept(width: int) -> None:
    to = io.StringIO()
    console = Console(file=to, width=width)
    for name, plan in PLANS.items():
        to.write(f"== {name}\n")
        print_plan(plan, console)
    assert is_as_kept(f"dry-run-{width}.txt", to.getvalue())


@pytest.mark.parametrize(("load", "times"), [(0.98, 0), (1.02, 1), (1.9, 1)])
def test_a_rate_that_the_engine_cannot_keep_is_not_run(load: float, times: int) -> None:
    stable = basis_of(PLANS["loads"]).model("single", None).largest_stable_rate
    plan = SweepPlan(
        policies=("single",), request_rates=(load * stable,), num_prompts=400, latency=LAW
    )
    to = io.StringIO()
    print_plan(plan, Console(file=to, width=120))
    assert to.getvalue().count("NOT RUN") == times


@pytest.mark.slow
def test_it_predicts_what_predict_says_and_the_ratio_to_the_order_of_arrival() -> None:
    plan = PLANS["orders"]
    cells = plan_as_object(plan)["cells"]
    by_policy = {cell["policy"]: cell["predicted"] for cell in cells if cell["load"] < 1}
    basis = basis_of(plan)
    for policy, plain in (
        ("single:order=spjf", "single"),
        ("continuous:max_batch_size=4,order=trail,c=0.8", "continuous:max_batch_size=4"),
    ):
        found = by_policy[policy]
        rate = next(cell["rate"] for cell in cells if cell["policy"] == policy)
        expected = predict_model(basis.model(policy, None), rate)
        like = "simulation" if expected.method == "simulation" else "auto"
        usual = predict_model(basis.model(plain, None), rate, like).queueing_delay.mean
        assert found["method"] == expected.method
        assert found["queueing_delay"] == pytest.approx(expected.queueing_delay.mean)
        assert found["sojourn_time"] == pytest.approx(expected.sojourn_time.mean)
        assert found["delay_ratio"] == pytest.approx(expected.queueing_delay.mean / usual)
        shorter = found["delay_ratio"] < 0.95
        assert shorter == (policy == "single:order=spjf"), "an interruption costs an admission"
    unstable = [cell["predicted"] for cell in cells if cell["load"] > 1]
    assert {each["queueing_delay"] for each in unstable} == {None}
    assert {each["delay_ratio"] for each in unstable} == {None}
    assert "predicted" not in plan_as_object(PLANS["loads"])["cells"][0]


def test_the_ratio_needs_no_cell_in_the_order_of_arrival() -> None:
    plan = SweepPlan(policies=("single:order=ljf",), loads=(0.5,), num_prompts=10, latency=LAW)
    (cell,) = plan_as_object(plan)["cells"]
    assert cell["predicted"]["delay_ratio"] == pytest.approx(1.0), "nothing is predicted"


@pytest.mark.slow
def test_an_order_that_is_simulated_is_compared_with_simulated_arrivals_in_order() -> None:
    """And not with a formula: at a low load the two methods differ by more than the order does."""
    policy = "continuous:max_batch_size=4"
    plan = SweepPlan(policies=(policy,), orders=("spjf:aging=0.02",), loads=(0.3,), latency=LAW)
    (cell,) = plan_as_object(plan)["cells"]
    basis = basis_of(plan)
    usual = predict_model(basis.model(policy, None), cell["rate"], "simulation")
    found = cell["predicted"]
    assert found["method"] == "simulation"
    assert found["delay_ratio"] == found["queueing_delay"] / usual.queueing_delay.mean
    assert found["delay_ratio"] == pytest.approx(1.0, abs=0.005), "nothing is predicted"


@pytest.mark.slow
def test_its_objects_are_as_kept() -> None:
    found = {name: json.loads(json.dumps(plan_as_object(plan))) for name, plan in PLANS.items()}
    assert moved("dry-run.json", {"plans": lambda: found}) == []
