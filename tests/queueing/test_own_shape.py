"""A continuous engine whose steps, prompts and turnarounds are not slower alike: found from the
window, and predicted with.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.queueing.control.assess import Assessment, assess
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.estimates import Estimates
from kendall.queueing.estimation.speed.fitted_law import fitted_law
from kendall.queueing.estimation.speed.speed_history import SHAPE_KEPT, SpeedHistory
from kendall.queueing.estimation.window.snapshot import COLUMN, Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.json_form import json_object
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS
from kendall.queueing.simulation.fast import SimulatedRun, draw_trace, replay
from tests.queueing.estimation_windows import snapshot_of_run

LAW = LatencyModel(k1=0.0, k2=1.2e-3, k3=29e-6, k4=0.9e-3, kp=8e-6, turnaround=1e-3)
STEPS, PROMPTS, BEFORE = 1.4, 1.0, 3.0  # factors on the law
POLICY = parse_policy("continuous:max_batch_size=32")
COUNT = 20_000


def slower(steps: float = STEPS, prompts: float = PROMPTS, before: float = BEFORE) -> LatencyModel:
    return dataclasses.replace(
        LAW.at_speed(steps),
        kp=LAW.kp * prompts / steps,
        turnaround=LAW.turnaround * before / steps,
    )


def queue(law: LatencyModel, step_tokens: int | None = None) -> Queue:
    return Queue.read(
        POLICY,
        parse_distribution("geometric:mean=40", 512),
        law,
        prompt_tokens=parse_distribution("uniform:low=32,high=1024"),
        max_num_seqs=64,
        step_tokens=step_tokens,
    )


def window(model: Queue, load: float = 0.6, seed: int = 2) -> tuple[Snapshot, SimulatedRun]:
    rate = load * model.largest_stable_rate
    trace = draw_trace(model, rate, COUNT, np.random.SeedSequence(seed))
    run = replay(model, trace)
    return snapshot_of_run(run, model, trace.prompt_tokens, 512), run


def look(seen: Snapshot, step_tokens: int | None = None) -> Assessment:
    limits = QueueLimits(
        max_output_tokens=512, engine=EngineBounds(max_num_seqs=64, step_tokens=step_tokens)
    )
    return assess(seen, LAW, limits)


def first_token(found: Assessment) -> tuple[float, float]:
    """Mean and p95, seconds."""
    assert found.model is not None
    told = predict_model(found.model, found.estimates.arrival_rate.value, quantiles=True)
    assert told.time_to_first_token.p95 is not None
    return told.time_to_first_token.mean, told.time_to_first_token.p95


def observed(run: SimulatedRun) -> tuple[float, float]:
    times = run.first_token_at - run.arrived_at
    return float(times.mean()), float(np.quantile(times, 0.95))


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.4, 0.6, 0.8])
@pytest.mark.parametrize("prompts", [0.8, 1.0, 2.0])
@pytest.mark.parametrize("before", [0.5, 3.0])
def test_steps_prompts_and_turnarounds_are_told_apart(
    load: float, prompts: float, before: float
) -> None:
    seen, run = window(queue(slower(prompts=prompts, before=before)), load)
    found = look(seen)
    speed = found.estimates.speed.value
    assert speed == pytest.approx(STEPS, rel=0.03)
    assert found.estimates.prefill * speed == pytest.approx(prompts, rel=0.05)
    turnaround = (LAW.turnaround + found.estimates.admission) * speed
    # the intercept: a hair of each step and prompt is in it
    served = float((run.first_token_at - run.dispatched_at).mean())
    assert turnaround == pytest.approx(before * LAW.turnaround, abs=0.02 * served)
    assert any(note.startswith("steps take ") for note in found.estimates.notes)
    if load < 0.8:  # there this window's own mean is 5 to 10 % off its expectation
        assert abs(found.compared.error) < 0.05
        assert first_token(found) == pytest.approx(observed(run), rel=0.05)


def test_one_factor_on_everything_would_not_do() -> None:
    seen, run = window(queue(slower()))
    rows = seen.rows.copy()
    rows[:, COLUMN["first_token_at"]] = math.nan  # nothing tells them apart
    found = look(seen.having(rows))
    assert (found.estimates.prefill, found.estimates.admission) == (1.0, 0.0)
    mean, p95 = first_token(found)
    assert abs(mean / observed(run)[0] - 1) > 0.08 or abs(p95 / observed(run)[1] - 1) > 0.08


@pytest.mark.left_out
def test_an_engine_that_is_slower_alike_keeps_the_shape() -> None:
    kept = 0
    for seed in range(8):
        found = look(window(queue(slower(STEPS, STEPS, STEPS)), seed=seed)[0])
        kept += found.estimates.prefill == 1.0
        assert found.estimates.prefill == pytest.approx(1.0, abs=0.1)
    assert kept >= 6  # of 95 % intervals


def test_prompts_that_are_computed_in_parts() -> None:
    seen, run = window(queue(slower(), 256), 0.5)
    found = look(seen, 256)
    assert found.estimates.prefill * found.estimates.speed.value == pytest.approx(PROMPTS, rel=0.1)
    assert first_token(found) == pytest.approx(observed(run), rel=0.05)


def test_where_prompts_are_alike_the_time_before_the_first_step_takes_their_part() -> None:
    """The mean is right; nothing tells that it is not the prompts of others that take longer."""
    model = queue(slower(before=6.0)).but(
        prompt_tokens=parse_distribution("deterministic:value=500")
    )
    seen, run = window(model)
    found = look(seen)
    assert found.estimates.prefill == 1.0
    assert first_token(found)[0] == pytest.approx(observed(run)[0], rel=0.05)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"first_token_at": math.nan}, "no first token is known"),
        ({"preemptions": 1.0}, "waits are not told apart"),
    ],
)
def test_where_nothing_can_be_told_the_shape_stays(changed: dict[str, float], reason: str) -> None:
    seen = window(queue(slower()))[0]
    rows = seen.rows.copy()
    for name, value in changed.items():
        rows[:, COLUMN[name]] = value
    assert fitted_law(POLICY, seen.having(rows), LAW).law == LAW, reason


def test_where_there_is_nothing_to_tell_the_shape_stays() -> None:
    seen = window(queue(slower()))[0]
    assert fitted_law(parse_policy("capped:max_batch_size=8"), seen, LAW).law == LAW
    assert fitted_law(POLICY, seen.having(seen.rows[:150]), LAW).law == LAW


def test_steps_that_scatter_are_in_the_quantiles() -> None:
    """First tokens come later at random, by 10 ms on average."""
    seen, _ = window(queue(slower()))
    later = np.random.default_rng(4).exponential(10e-3, len(seen.rows))
    rows = seen.rows.copy()
    for name in ("first_token_at", "server_free_at", "released_at"):
        rows[:, COLUMN[name]] += later
    found = look(seen.having(rows))
    observed_times = rows[:, COLUMN["first_token_at"]] - rows[:, COLUMN["arrived_at"]]
    assert found.long_run is not None
    assert found.long_run.answered is not None
    told = found.long_run.answered.time_to_first_token
    assert told.mean == pytest.approx(float(observed_times.mean()), rel=0.04)
    for level, value in ((0.5, told.p50), (0.95, told.p95), (0.99, told.p99)):
        assert value == pytest.approx(float(np.quantile(observed_times, level)), rel=0.06)
    assert first_token(found)[1] < 0.93 * float(np.quantile(observed_times, 0.95))


def test_first_tokens_are_those_of_the_served_where_patience_runs_out() -> None:
    seen = window(queue(slower()), 0.9)[0]
    limits = QueueLimits(max_output_tokens=512, patience=0.01, engine=EngineBounds(max_num_seqs=64))
    found = assess(seen, LAW, limits)
    run = found.long_run
    assert run is not None
    assert run.prediction is not None
    assert run.prediction.loss_fraction > 0.01
    told = run.answered
    assert told is not None
    assert told.methods["time_to_first_token"] == "simulation"
    for level in LEVELS:
        waits, first, whole = (
            getattr(getattr(told, name), level)
            for name in ("served_queueing_delay", "time_to_first_token", "sojourn_time")
        )
        assert waits <= first <= whole
    assert told.sojourn_time.mean == run.prediction.sojourn_time.mean


def test_it_is_kept_for_a_while_unless_much_more_is_known() -> None:
    seen, history = window(queue(slower()))[0], SpeedHistory()
    first = history.fitted_law(POLICY, seen, LAW)

    def kept(**about: Any) -> bool:
        history._shape = (seen.epoch, seen.now, len(seen.rows), first)
        return history.fitted_law(POLICY, dataclasses.replace(seen, **about), LAW) is first

    assert kept()
    assert kept(now=seen.now + SHAPE_KEPT - 1)
    assert not kept(now=seen.now + SHAPE_KEPT)
    assert not kept(epoch=seen.epoch + 1)
    assert kept(rows=np.concatenate([seen.rows, seen.rows[: int(0.2 * len(seen.rows))]]))
    assert not kept(rows=np.concatenate([seen.rows, seen.rows[: int(0.4 * len(seen.rows))]]))
    found = assess(
        seen,
        LAW,
        QueueLimits(max_output_tokens=512, engine=EngineBounds(max_num_seqs=64)),
        history=history,
    )
    assert found.estimates.prefill == look(seen).estimates.prefill


def test_the_state_file_keeps_it() -> None:
    found = look(window(queue(slower()))[0]).estimates
    again = Estimates.from_json(json_object(found.saved()))
    assert (again.prefill, again.admission) == (found.prefill, found.admission)
    assert found.law(LAW).kp == LAW.kp * found.prefill
    older = json_object(found.saved())
    del older["prefill"], older["admission"]
    assert Estimates.from_json(older).law(LAW).kp == LAW.kp
