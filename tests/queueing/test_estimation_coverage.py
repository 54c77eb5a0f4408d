"""The estimators' 95 % intervals cover the truth in 88 % or more of 200 runs, under every
policy, and are not merely wide.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.estimation.estimates import estimate
from kendall.queueing.estimation.speed.batch_times import SLOT_ERROR
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.json_form import json_object
from kendall.queueing.latency.law import parse_law
from kendall.queueing.queue import Queue
from tests.queueing.estimation_runs import LAW, LENGTHS
from tests.queueing.estimation_windows import window_of

RUNS = 200
SPEED = 1.3
POLICIES = (
    "single",
    "dynamic",
    "fixed:batch_size=4",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
    "continuous:max_batch_size=4",
)
COUNT = 2000  # requests of a run


def model_of(policy: str) -> Queue:
    return Queue.read(policy, LENGTHS, LAW.at_speed(SPEED), max_num_seqs=16)


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.75])
@pytest.mark.parametrize("policy", POLICIES)
def test_rate_length_speed_and_residual_of_every_policy(policy: str, load: float) -> None:
    model = model_of(policy)
    covered = dict.fromkeys(("rate", "length", "speed", "cv"), 0)
    widths = []
    for seed in range(RUNS):
        found = estimate(window_of(model, load, COUNT, seed), model.policy, LAW)
        covered["rate"] += found.arrival_rate.covers(load * model.largest_stable_rate)
        covered["length"] += found.output_tokens.mean(32).covers(LENGTHS.mean)
        covered["speed"] += found.speed.covers(SPEED)
        covered["cv"] += found.cv.covers(
            0.0 if model.policy.joins_running else LAW.cv
        )  # a slot engine's steps have no residual
        widths += [
            (
                found.arrival_rate.relative,
                found.output_tokens.mean(32).relative,
                found.speed.relative,
            )
        ]
    assert min(covered.values()) >= 0.88 * RUNS, covered
    rate, length, speed = np.mean(widths, axis=0)
    assert rate < 0.06  # an interval that covers everything says nothing
    assert length < 0.04
    assert speed < 0.04


@pytest.mark.thinned(3)
@pytest.mark.parametrize("turnaround", [0.0, 0.0015, 0.003])
@pytest.mark.parametrize("slots", [2, 8])
def test_the_speed_of_slots_is_right_within_what_is_stated(slots: int, turnaround: float) -> None:
    """Who waited for a slot enters in step with the engine, turnarounds take as much longer as
    steps: neither looks like another speed.
    """
    shape = parse_law(f"k1=0.0003,k2=0,k3=0.00002,k4=0.0012,turnaround={turnaround}")
    for load in (0.3, 0.9):
        model = Queue.read(f"continuous:max_batch_size={slots}", LENGTHS, shape.at_speed(SPEED))
        found = estimate(window_of(model, load, 20_000, 3), model.policy, shape).speed
        assert abs(found.value / SPEED - 1) < SLOT_ERROR
        assert found.covers(SPEED)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("slots", [4, 12])
@pytest.mark.parametrize(
    "sequences", ["deterministic:value=2", "deterministic:value=4", "uniform:low=1,high=8"]
)
def test_sequences_that_enter_an_idle_engine_together_do_not_wait_for_each_other(
    slots: int, sequences: str
) -> None:
    shape = parse_law("k1=0.0003,k2=0,k3=0.00002,k4=0.0012,turnaround=0.0015")
    policy, law = parse_policy(f"continuous:max_batch_size={slots}"), shape.at_speed(SPEED)
    model = Queue.read(policy, LENGTHS, law, sequences=parse_distribution(sequences))
    for load in (0.3, 0.75):
        found = estimate(window_of(model, load, 20_000, 3), policy, shape).speed
        assert abs(found.value / SPEED - 1) < SLOT_ERROR
        assert found.covers(SPEED)


def test_a_window_from_arrays_is_that_of_the_records() -> None:
    """Same trace through the policy object's simulator, whose records the gateway equals, and
    through the compiled one.
    """
    from kendall.queueing.simulation.experiment import draw_jobs
    from kendall.queueing.simulation.reference import SimulatedEngine, simulate_trace
    from tests.queueing.estimation_runs import seen

    for policy in ("capped:max_batch_size=8", "continuous:max_batch_size=4"):
        model = model_of(policy)
        jobs, residuals = draw_jobs(
            model, 0.6 * model.largest_stable_rate, 1500, np.random.SeedSequence(3)
        )
        engine = SimulatedEngine(model.engine.law, max_batch_size=16)
        records = simulate_trace(model.policy, jobs, engine, residuals)
        found = [
            estimate(each, model.policy, LAW)
            for each in (seen(records, policy), window_of(model, 0.6, 1500, 3))
        ]
        for name in ("arrival_rate", "speed", "cv"):
            one, other = (getattr(each, name) for each in found)
            assert (one.value, one.low, one.high) == pytest.approx(
                (other.value, other.low, other.high), rel=1e-9
            )
        assert found[0].count == found[1].count


def warped(seen: Snapshot, seed: int, sigma: float, tau: float) -> Snapshot:
    """The same on an engine whose log speed is an Ornstein-Uhlenbeck process of mean speed 1: all
    instants on a clock that goes at that speed.
    """
    step = tau / 20
    number = int(np.nanmax(seen.rows[:, :4]) / step) + 2
    rng, decay = np.random.default_rng(seed), math.exp(-1 / 20)
    walk = np.empty(number)
    walk[0] = rng.normal()
    for i, shock in enumerate(math.sqrt(1 - decay**2) * rng.normal(size=number - 1)):
        walk[i + 1] = decay * walk[i] + shock
    clock = np.cumsum(np.append(0.0, np.exp(sigma * walk - sigma**2 / 2))) * step
    rows = seen.rows.copy()
    rows[:, :4] = np.interp(rows[:, :4], step * np.arange(number + 1), clock)
    return dataclasses.replace(seen, rows=rows)


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 0.85])
@pytest.mark.parametrize("slots", [16, 64])
def test_the_speed_of_many_slots_is_known_of_thirty_requests_a_slot(
    slots: int, load: float
) -> None:
    policy = parse_policy(f"continuous:max_batch_size={slots}")
    shape = parse_law("k1=0.001,k2=0,k3=0.0002,k4=0.02")
    lengths = parse_distribution("geometric:mean=60")
    model = Queue.read(policy, lengths, shape.at_speed(SPEED))
    covered, widths = 0, []
    for seed in range(100):
        seen = warped(window_of(model, load, 30 * slots, seed), seed, 0.15, 1.0)
        found = estimate(seen, policy, shape).speed
        covered += found.covers(SPEED)
        widths.append(found.relative)
    assert covered >= 88
    assert np.median(widths) < 0.1
    assert np.isfinite(widths).mean() > 0.9


@pytest.mark.parametrize(("requests", "known"), [(20, None), (300, False), (1800, True)])
def test_fewer_requests_give_the_speed_of_slots_without_an_interval(
    requests: int, known: bool | None
) -> None:
    """At 64 slots; the prediction takes it, rather than that of the calibration."""
    policy = parse_policy("continuous:max_batch_size=64")
    shape = parse_law("k1=0.001,k2=0,k3=0.0002,k4=0.02")
    lengths = parse_distribution("uniform:low=20,high=60")
    model = Queue.read(policy, lengths, shape.at_speed(SPEED))
    found = estimate(window_of(model, 0.5, requests, 3), policy, shape)
    assert found.speed.known is bool(known)
    used = found.law(shape).speed
    assert used == (shape.speed if known is None else pytest.approx(SPEED, rel=2 * SLOT_ERROR))
    plain = json_object(found.saved())["speed"]
    assert (plain["value"] is None) == (known is None)
    assert (plain["low"] is None) == (not known)
