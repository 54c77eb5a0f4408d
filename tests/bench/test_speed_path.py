"""The speed second by second, the band stated before a cell, and what changes of the speed
within a cell do to its mean delay.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.live.speed_path import STEADY, LoadedQueue, speed_path
from policies import parse_policy
from queueing.distributions.token_distribution import parse_distribution
from queueing.estimation.speed.batch_times import BatchTimes
from queueing.latency.law import parse_law
from queueing.model import Model
from queueing.prediction import predict_model
from queueing.simulation.experiment import simulate_run

LAW = parse_law("k1=0.0003,k2=0.0044,k3=0.00013,k4=0.0035,kp=0.00005")
POLICIES = (
    "single",
    "dynamic",
    "fixed:batch_size=4",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
)


def queue(policy: str, load: float, sequences: str | None = None, cv: float = 0.0) -> LoadedQueue:
    model = Model.read(
        policy,
        parse_distribution("geometric:mean=16", 200),
        parse_law(f"{LAW},cv={cv}") if cv else LAW,
        prompt_tokens="deterministic:value=32",
        max_num_seqs=16,
        sequences=sequences,
    )
    found = LoadedQueue.of(model, load * model.largest_stable_rate)
    assert found is not None
    return found


@pytest.mark.parametrize("sequences", [None, "uniform:low=1,high=3"])
@pytest.mark.parametrize("policy", POLICIES)
def test_at_a_constant_speed_it_is_the_simulator(policy: str, sequences: str | None) -> None:
    loaded = queue(policy, 0.7, sequences)
    arrived_at, starts = loaded.simulate(STEADY, 0.0, 5000, np.random.SeedSequence(3))
    run = simulate_run(loaded.model, loaded.rate, 5000, np.random.SeedSequence(3))
    assert arrived_at == pytest.approx(run.arrived_at, abs=1e-9)
    assert starts == pytest.approx(run.dispatched_at, abs=1e-9)


def test_the_engines_clock_goes_slower_in_a_slow_second() -> None:
    """From the start of a busy request to the next the integral of 1 / level is the lawful time
    of its service.
    """
    loaded, levels = queue("single", 0.2), np.array([1.0, 3.0, 0.5])
    run = loaded.run(levels, 1.25, 4000, np.random.SeedSequence(1))
    lawful = simulate_run(loaded.model, loaded.rate, 4000, np.random.SeedSequence(1))
    fine = 1e-3
    clock = np.concatenate(
        [[0.0], np.cumsum(fine / levels[(np.arange(0, 100_000) * fine + 1e-9).astype(int) % 3])]
    )
    mine = run.released_at < 90.0
    assert mine.sum() > 200
    done = np.interp(
        [run.dispatched_at[mine] + 1.25, run.released_at[mine] + 1.25],
        np.arange(clock.size) * fine,
        clock,
    )
    assert done[1] - done[0] == pytest.approx(
        (lawful.released_at - lawful.dispatched_at)[mine], abs=1e-6
    )


def test_without_a_path_the_band_counts_arrivals_and_lengths_alone() -> None:
    loaded = queue("capped:max_batch_size=8", 0.75)
    exact = predict_model(loaded.model, loaded.rate).queueing_delay.mean
    assert exact is not None
    short, long = loaded.stated_band([], 60.0, 10.0, 1), loaded.stated_band([], 960.0, 10.0, 1)
    assert short.low < exact < short.high
    assert long.low < exact < long.high
    assert long.half_width == pytest.approx(short.half_width / 4, rel=0.3)


def test_the_band_of_a_wandering_engine_is_wider_and_lies_higher() -> None:
    loaded = queue("capped:max_batch_size=8", 0.75)
    rng, level, path = np.random.default_rng(1), 0.0, []
    for _ in range(1000):
        level = 0.9 * level + 0.06 * rng.normal()
        path.append(float(np.exp(level)))
    steady, wandering = (
        loaded.stated_band([], 120.0, 10.0, 1),
        loaded.stated_band(path, 120.0, 10.0, 1),
    )
    assert wandering.half_width > 1.3 * steady.half_width
    assert wandering.mean > 1.05 * steady.mean


def test_nineteen_of_twenty_windows_lie_in_the_band() -> None:
    """Of windows that run along the path that the band was stated for, from anywhere in it."""
    loaded, seconds, settle = queue("elastic:max_batch_size=8", 0.6), 100.0, 5.0
    path = np.exp(0.2 * np.sin(np.arange(300) / 5))
    band = loaded.stated_band(path.tolist(), seconds, settle, 1)
    count, inside = round(loaded.rate * (seconds + settle)), 0
    for number in range(400):
        offset = float(np.random.default_rng((2, number)).uniform(0, path.size))
        arrived_at, starts = loaded.simulate(
            path, offset, count, np.random.SeedSequence((3, number))
        )
        kept = arrived_at > settle
        inside += band.low <= float(np.mean((starts - arrived_at)[kept])) <= band.high
    assert 0.91 * 400 <= inside <= 0.985 * 400


def test_along_a_slow_path_the_mean_is_that_over_the_steady_states() -> None:
    """A speed that changes much slower than the queue forgets."""
    loaded = queue("capped:max_batch_size=8", 0.7)
    means = []
    for speed in (0.9, 1.1):
        model = dataclasses.replace(loaded.model, law=LAW.at_speed(speed))
        means.append(predict_model(model, loaded.rate).queueing_delay.mean)
    assert loaded.at_speeds([0.9] * 400 + [1.1] * 400) == pytest.approx(np.mean(means), rel=0.04)
    assert loaded.at_speeds([]) is None


def test_a_continuous_engine_has_no_batches() -> None:
    model = Model.read("continuous:max_batch_size=4", "deterministic:value=4", LAW)
    assert LoadedQueue.of(model, 1.0) is None
    assert parse_policy("single").joins_running is False


def test_the_path_is_time_over_lawful_time_second_by_second() -> None:
    at = np.array([10.0, 10.4, 11.1, 13.8])
    ones = np.ones(4)
    times = BatchTimes(
        at, np.array([0.2, 0.4, 0.5, 0.1]), np.array([0.1, 0.2, 0.5, 0.2]), ones, ones, ones
    )
    assert speed_path(times) == pytest.approx([2.0, 1.0, 1.0, 0.5])
    assert speed_path(times.part(np.zeros(4, dtype=bool))) == []


def test_a_stall_fills_the_blocks_that_it_lasted_and_no_more() -> None:
    at, ones = np.array([0.0, 3.5, 4.0]), np.ones(3)
    times = BatchTimes(at, np.array([3.5, 0.5, 0.5]), np.array([0.35, 0.5, 0.5]), ones, ones, ones)
    assert speed_path(times) == pytest.approx([10.0, 10.0, 10.0, 1 / 0.55, 1.0])


def test_the_path_of_a_run_is_the_path_that_it_ran_along() -> None:
    loaded, levels = queue("dynamic", 0.8), np.array([1.0, 1.0, 2.0, 1.0, 0.7, 1.0])
    run = loaded.run(levels, 0.0, 20_000, np.random.SeedSequence(1), width=5.0)
    first = np.flatnonzero(np.diff(run.batch_id, prepend=-1))
    lawful = simulate_run(loaded.model, loaded.rate, 20_000, np.random.SeedSequence(1))
    assert lawful.dispatched_at[0] == run.dispatched_at[0]
    at, measured, ones = (
        run.dispatched_at[first],
        (run.released_at - run.dispatched_at)[first],
        np.ones(first.size),
    )
    longest = np.maximum.reduceat(run.output_tokens, first)
    size = run.batch_size[first]
    fitted = LAW.k1 * size + LAW.k2 + LAW.kp * 32 * size + (LAW.k3 * size + LAW.k4) * longest
    found = speed_path(BatchTimes(at, measured, fitted, ones, ones, ones), 5.0)
    assert (
        np.median(np.abs(np.array(found[1:-1]) / levels[np.arange(1, len(found) - 1) % 6] - 1))
        < 0.1
    )
