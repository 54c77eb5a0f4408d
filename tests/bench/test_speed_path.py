"""The speed second by second, the band stated before a cell, and what changes of the speed within a cell do to its mean delay."""

from __future__ import annotations

import numpy as np
import pytest

from bench.live.speed_path import STEADY, LoadedQueue, speed_path
from policies import parse_policy
from queueing.distributions import parse_distribution
from queueing.estimation.batch_times import BatchTimes
from queueing.experiment import simulate_run
from queueing.latency import parse_law
from queueing.model import Model
from queueing.prediction import predict_model

LAW = parse_law("k1=0.0003,k2=0.0044,k3=0.00013,k4=0.0035,kp=0.00005")
POLICIES = ("single", "dynamic", "fixed:batch_size=4", "capped:max_batch_size=8", "elastic:max_batch_size=8")


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


def test_a_slow_second_makes_the_batches_slow_that_begin_in_it() -> None:
    loaded = queue("single", 0.2)
    path = np.array([1.0, 3.0])
    arrived_at, starts = loaded.simulate(path, 0.0, 4000, np.random.SeedSequence(1))
    shifted = loaded.simulate(path, 1.0, 4000, np.random.SeedSequence(1))[1]
    trace = simulate_run(loaded.model, loaded.rate, 4000, np.random.SeedSequence(1))
    lawful = trace.released_at - trace.dispatched_at
    busy = np.flatnonzero(starts[1:] > arrived_at[1:])  # whose start is the end of the one before
    assert busy.size > 100
    level = path[(starts[busy] // 1).astype(int) % 2]
    assert starts[busy + 1] - starts[busy] == pytest.approx(level * lawful[busy], rel=1e-6)
    assert not np.allclose(starts, shifted)


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
    steady, wandering = loaded.stated_band([], 120.0, 10.0, 1), loaded.stated_band(path, 120.0, 10.0, 1)
    assert wandering.half_width > 1.3 * steady.half_width
    assert wandering.mean > 1.05 * steady.mean


def test_nineteen_of_twenty_windows_lie_in_the_band() -> None:
    loaded = queue("elastic:max_batch_size=8", 0.6)
    path = np.exp(0.2 * np.sin(np.arange(300) / 5)).tolist()
    band = loaded.stated_band(path, 100.0, 5.0, 1)
    others = [loaded.stated_band(path, 100.0, 5.0, seed) for seed in range(2, 5)]
    assert all(each.low == pytest.approx(band.low, rel=0.15) and each.high == pytest.approx(band.high, rel=0.15) for each in others)


def test_changes_of_the_speed_lengthen_the_mean_delay() -> None:
    """A speed that changes much slower than the queue forgets: the mean over the speeds of the steady states."""
    loaded = queue("capped:max_batch_size=8", 0.7)
    path = [0.9] * 400 + [1.1] * 400
    means = []
    for speed in (0.9, 1.1):
        model = Model(policy=loaded.model.policy, output_tokens=loaded.model.output_tokens, law=LAW.at_speed(speed),
                      prompt_tokens=loaded.model.prompt_tokens, max_num_seqs=16)  # fmt: skip
        means.append(predict_model(model, loaded.rate).queueing_delay.mean)
    steady = predict_model(loaded.model, loaded.rate).queueing_delay.mean
    assert loaded.lengthened(path, 0.0) == pytest.approx(np.mean(means) / steady, rel=0.04)
    assert loaded.lengthened([1.3] * 100, 0.0) == pytest.approx(1.0, abs=1e-9), "a constant speed is that of the model"
    assert loaded.lengthened([], 0.0) is None


def test_a_continuous_engine_has_no_batches() -> None:
    model = Model.read("continuous:max_batch_size=4", "deterministic:value=4", LAW)
    assert LoadedQueue.of(model, 1.0) is None
    assert parse_policy("single").joins_running is False


def test_the_path_is_measured_over_lawful_time_second_by_second() -> None:
    at = np.array([10.0, 10.4, 11.1, 13.9])
    ones = np.ones(4)
    times = BatchTimes(at, np.array([0.2, 0.4, 0.5, 0.1]), np.array([0.1, 0.2, 0.5, 0.2]), ones, ones, ones)
    assert speed_path(times) == pytest.approx([2.0, 1.0, 1.0, 0.5])
    assert speed_path(times.part(np.zeros(4, dtype=bool))) == []
