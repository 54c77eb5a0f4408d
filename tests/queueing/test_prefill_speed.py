"""Prompts that are not as slow as all else: found from the window, and predicted with."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from policies import parse_policy
from queueing.distributions.token_distribution import parse_distribution
from queueing.estimation.assess import Assessment, Limits, assess
from queueing.estimation.estimates import Estimates
from queueing.estimation.speed.prefill_speed import own_prefill, prompt_token
from queueing.estimation.window.snapshot import COLUMN, Snapshot
from queueing.latency.law import LatencyModel
from queueing.model import Model
from queueing.prediction import predict_model
from queueing.simulation.fast import SimulatedRun, draw_trace, replay
from tests.queueing.estimation_windows import snapshot_of_run

LAW = LatencyModel(k1=0.0, k2=1.2e-3, k3=29e-6, k4=0.9e-3, kp=8e-6, turnaround=0.5e-3)
STEPS, PROMPTS = 1.4, 1.0  # factors on the law
POLICY = parse_policy("continuous:max_batch_size=32")
COUNT = 20_000


def slower(steps: float = STEPS, prompts: float = PROMPTS) -> LatencyModel:
    return dataclasses.replace(LAW.at_speed(steps), kp=LAW.kp * prompts / steps)


def queue(law: LatencyModel) -> Model:
    return Model(
        policy=POLICY,
        output_tokens=parse_distribution("geometric:mean=40", 512),
        prompt_tokens=parse_distribution("uniform:low=32,high=1024"),
        law=law,
        max_num_seqs=64,
    )


def window(law: LatencyModel, load: float = 0.6, seed: int = 2) -> tuple[Snapshot, SimulatedRun]:
    model = queue(law)
    rate = load * model.largest_stable_rate
    trace = draw_trace(model, rate, COUNT, np.random.SeedSequence(seed))
    run = replay(model, trace)
    return snapshot_of_run(run, model, trace.prompt_tokens, 512), run


def look(seen: Snapshot) -> Assessment:
    return assess(seen, LAW, Limits(max_output_tokens=512, max_num_seqs=64))


def p95_of_first_token(found: Assessment) -> float:
    assert found.model is not None
    told = predict_model(found.model, found.estimates.arrival_rate.value, quantiles=True)
    assert told.time_to_first_token.p95 is not None
    return told.time_to_first_token.p95


def test_steps_that_are_slower_than_prompts_are_told_apart() -> None:
    seen, run = window(slower())
    found = look(seen)
    speed = found.estimates.speed.value
    assert speed == pytest.approx(STEPS, rel=0.03)
    assert found.estimates.prefill * speed == pytest.approx(PROMPTS, rel=0.05)
    (said,) = (note for note in found.estimates.notes if "prompts take" in note)
    assert said.endswith(f"all else {speed:.2f} times")
    assert abs(found.compared.error) < 0.05
    observed = float(np.quantile(run.first_token_at - run.arrived_at, 0.95))
    assert p95_of_first_token(found) == pytest.approx(observed, rel=0.05)


def test_one_factor_on_everything_would_not_do() -> None:
    seen, run = window(slower())
    rows = seen.rows.copy()
    rows[:, COLUMN["first_token_at"]] = math.nan  # nothing tells them apart
    found = look(seen.having(rows))
    assert found.estimates.prefill == 1.0
    observed = float(np.quantile(run.first_token_at - run.arrived_at, 0.95))
    assert p95_of_first_token(found) > 1.08 * observed


def test_an_engine_that_is_slower_alike_keeps_the_shape() -> None:
    kept = 0
    for seed in range(8):
        found = look(window(slower(STEPS, STEPS), seed=seed)[0])
        kept += found.estimates.prefill == 1.0
        assert found.estimates.prefill == pytest.approx(1.0, abs=0.1)
    assert kept >= 6  # of 95 % intervals


def test_the_slope_is_kp_whatever_the_load() -> None:
    for load in (0.3, 0.8):
        found = prompt_token(window(slower(1.7, 0.8), load)[0])
        assert found.covers(0.8 * LAW.kp) or abs(found.value / (0.8 * LAW.kp) - 1) < 0.05
        assert found.relative < 0.1


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"first_token_at": math.nan}, "no first token is known"),
        ({"prompt_tokens": 500.0}, "prompts are alike"),
        ({"preemptions": 1.0}, "waits are not told apart"),
    ],
)
def test_where_nothing_can_be_told_the_shape_stays(changed: dict[str, float], reason: str) -> None:
    seen = window(slower())[0]
    rows = seen.rows.copy()
    for name, value in changed.items():
        rows[:, COLUMN[name]] = value
    assert own_prefill(POLICY, seen.having(rows), LAW) == LAW, reason
    assert own_prefill(parse_policy("capped:max_batch_size=8"), seen, LAW) == LAW
    bare = dataclasses.replace(LAW, kp=0.0)
    assert own_prefill(POLICY, seen, bare) == bare
    few = seen.having(seen.rows[:150])
    assert own_prefill(POLICY, few, LAW) == LAW


def test_the_state_file_keeps_it() -> None:
    found = look(window(slower())[0]).estimates
    assert Estimates.from_dict(found.to_dict()).prefill == found.prefill
    assert found.law(LAW).kp == LAW.kp * found.prefill
    older = found.to_dict()
    del older["prefill"]
    assert Estimates.from_dict(older).prefill == 1.0
