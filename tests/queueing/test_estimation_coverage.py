"""The estimators' 95 % intervals cover the truth in 88 % or more of 200 runs, under every
policy, and are not merely wide.
"""

from __future__ import annotations

import numpy as np
import pytest

from policies import parse_policy
from queueing.distributions.token_distribution import parse_distribution
from queueing.estimation.estimates import estimate
from queueing.estimation.speed.batch_times import SLOT_ERROR
from queueing.latency.law import parse_law
from queueing.model import Model
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


def model_of(policy: str) -> Model:
    return Model(
        policy=parse_policy(policy), output_tokens=LENGTHS, law=LAW.at_speed(SPEED), max_num_seqs=16
    )


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


@pytest.mark.parametrize("turnaround", [0.0, 0.0015, 0.003])
@pytest.mark.parametrize("slots", [2, 8])
def test_the_speed_of_slots_is_right_within_what_is_stated(slots: int, turnaround: float) -> None:
    """Who waited for a slot enters in step with the engine, turnarounds take as much longer as
    steps: neither looks like another speed.
    """
    shape = parse_law(f"k1=0.0003,k2=0,k3=0.00002,k4=0.0012,turnaround={turnaround}")
    for load in (0.3, 0.9):
        model = Model(
            policy=parse_policy(f"continuous:max_batch_size={slots}"),
            output_tokens=LENGTHS,
            law=shape.at_speed(SPEED),
        )
        found = estimate(window_of(model, load, 20_000, 3), model.policy, shape).speed
        assert abs(found.value / SPEED - 1) < SLOT_ERROR
        assert found.covers(SPEED)


@pytest.mark.parametrize("slots", [4, 12])
@pytest.mark.parametrize(
    "sequences", ["deterministic:value=2", "deterministic:value=4", "uniform:low=1,high=8"]
)
def test_sequences_that_enter_an_idle_engine_together_do_not_wait_for_each_other(
    slots: int, sequences: str
) -> None:
    shape = parse_law("k1=0.0003,k2=0,k3=0.00002,k4=0.0012,turnaround=0.0015")
    policy, law = parse_policy(f"continuous:max_batch_size={slots}"), shape.at_speed(SPEED)
    model = Model(
        policy=policy, output_tokens=LENGTHS, law=law, sequences=parse_distribution(sequences)
    )
    for load in (0.3, 0.75):
        found = estimate(window_of(model, load, 20_000, 3), policy, shape).speed
        assert abs(found.value / SPEED - 1) < SLOT_ERROR
        assert found.covers(SPEED)


def test_a_window_from_arrays_is_that_of_the_records() -> None:
    """Same trace through the policy object's simulator, whose records the gateway equals, and
    through the compiled one.
    """
    from queueing.simulation.experiment import draw_jobs
    from queueing.simulation.reference import SimulatedEngine, simulate_trace
    from tests.queueing.estimation_runs import seen

    for policy in ("capped:max_batch_size=8", "continuous:max_batch_size=4"):
        model = model_of(policy)
        jobs, residuals = draw_jobs(
            model, 0.6 * model.largest_stable_rate, 1500, np.random.SeedSequence(3)
        )
        engine = SimulatedEngine(model.law, max_batch_size=16)
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
