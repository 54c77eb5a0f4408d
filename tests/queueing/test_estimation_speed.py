"""The speed, its scatter, wander, steps and stalls are told apart, with the law's shape given."""

from __future__ import annotations

import math

import numpy as np
import pytest

from policies import parse_policy
from queueing.estimation.batch_times import BatchTimes, batch_times
from queueing.estimation.engine_assumptions import constant_speed, law_shape, no_stalls
from queueing.estimation.estimates import estimate
from queueing.estimation.speed_change import speed_change
from queueing.estimation.speed_process import residual_cv, speed, stalls
from queueing.estimation.wander import wander
from queueing.experiment import draw_jobs
from queueing.latency import LatencyModel
from queueing.model import Model
from queueing.record import Record
from queueing.simulation import simulate_trace
from tests.queueing.estimation_runs import LAW, LENGTHS, Engine, poisson, seen, serve

RUNS = 200
SLOWER = LAW.at_speed(1.3)


def simulated(policy: str, load: float, count: int, seed: int, law: LatencyModel = SLOWER) -> list[Record]:
    """A run of the simulator that drives the policy objects."""
    model = Model(policy=parse_policy(policy), output_tokens=LENGTHS, law=law, max_num_seqs=64)
    jobs, residuals = draw_jobs(model, load * model.largest_stable_rate, count, np.random.SeedSequence(seed))
    return simulate_trace(model.policy, jobs, law, residuals, max_batch_size=64)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["capped:max_batch_size=8", "elastic:max_batch_size=8"])
def test_intervals_of_rate_length_speed_and_cv_cover_the_truth_of_simulated_runs(policy: str) -> None:
    covered = dict.fromkeys(("rate", "length", "speed", "cv"), 0)
    widths: list[tuple[float, ...]] = []
    rate = 0.6 * Model(policy=parse_policy(policy), output_tokens=LENGTHS, law=SLOWER).largest_stable_rate
    for seed in range(RUNS):
        found = estimate(seen(simulated(policy, 0.6, 800, seed), policy), parse_policy(policy), LAW)
        covered["rate"] += found.arrival_rate.covers(rate)
        covered["length"] += found.output_tokens.mean(32).covers(LENGTHS.mean)
        covered["speed"] += found.speed.covers(1.3)
        covered["cv"] += found.cv.covers(0.15)
        widths += [(found.speed.relative, found.cv.relative, found.wander.significant)]
    assert min(covered.values()) >= 0.88 * RUNS, covered
    speed_width, cv_width, accused = np.mean(widths, axis=0)
    assert speed_width < 0.04  # an interval that covers everything says nothing
    assert cv_width < 0.25
    assert accused <= 0.02


def test_the_window_of_the_simulator_and_of_the_runs_here_say_the_same() -> None:
    policy = "capped:max_batch_size=8"
    rate = 0.6 * Model(policy=parse_policy(policy), output_tokens=LENGTHS, law=SLOWER).largest_stable_rate
    two = simulated(policy, 0.6, 3000, 1), serve(poisson(rate, 3000, 2), Engine(most=8, law=SLOWER), 3)
    found = [estimate(seen(records, policy), parse_policy(policy), LAW) for records in two]
    for each in found:
        assert each.speed.value == pytest.approx(1.3, rel=0.02)
        assert each.cv.value == pytest.approx(0.15, rel=0.1)
    assert found[0].count == pytest.approx(found[1].count, abs=30)


def test_a_continuous_engine_has_a_speed_too() -> None:
    """No batches: time in the slot against the steps made, with the company that was there."""
    policy = "continuous:max_batch_size=8"
    for law in (LAW.at_speed(1.3), LatencyModel(k1=0.0003, k3=0.0002, k4=0.001, turnaround=0.0015)):
        found = estimate(seen(simulated(policy, 0.7, 1500, 2, law), policy), parse_policy(policy), law.at_speed(1.0))
        assert found.speed.covers(law.speed)
        assert found.speed.relative < 0.03
        assert found.cv.value == 0.0


@pytest.mark.parametrize("factor", [0.5, 2.0, 3.0])
def test_slots_of_a_machine_that_is_several_times_slower_or_faster_than_its_law_have_that_speed(factor: float) -> None:
    """The same run in other seconds: when the others' steps ended, and with it what is fitted, follows the machine's own pace."""
    policy = "continuous:max_batch_size=8"
    law = LatencyModel(k1=0.0003, k3=0.0002, k4=0.001, turnaround=0.004)
    runs = [seen(simulated(policy, 0.7, 1500, 2, law.at_speed(each)), policy).mine for each in (1.0, factor)]
    times = [batch_times(parse_policy(policy), run, law) for run in runs]
    usual, other = (each.measured.sum() / each.fitted.sum() for each in times)
    assert usual == pytest.approx(1.0, abs=0.01)
    assert other == pytest.approx(factor * usual, rel=0.005)


def test_autocorrelated_speed_widens_the_interval() -> None:
    """Independent batches would promise +-1 %; the speed wanders by 8 % over 20 batches."""
    covered = naive = 0
    for seed in range(100):
        times = _wandering(seed, 0.08, 20.0)
        covered += speed(times).covers(1.0)
        ratio = times.ratio
        naive += abs(ratio.mean() - 1) < 1.96 * ratio.std() / math.sqrt(ratio.size)
    assert covered >= 82
    assert naive < 70


def test_the_wander_is_found_with_its_size_and_time() -> None:
    found = [wander(_wandering(seed, 0.08, 40.0)) for seed in range(40)]
    assert all(each.significant for each in found)
    assert np.median([each.sigma.value for each in found]) == pytest.approx(0.08, rel=0.2)
    assert 20.0 < np.median([each.tau for each in found]) < 70.0
    assert sum(each.sigma.covers(0.08) for each in found) >= 34
    assert np.median([each.fast_cv for each in found]) == pytest.approx(0.15, rel=0.1)


def test_a_steady_engine_does_not_wander() -> None:
    found = [wander(_wandering(seed, 0.0, 40.0)) for seed in range(100)]
    assert sum(each.significant for each in found) <= 1
    assert sum(each.sigma.covers(0.0) for each in found) >= 90


def test_a_step_in_the_speed_is_not_wander() -> None:
    times = _wandering(3, 0.0, 40.0)
    slowed = BatchTimes(times.at, times.measured * np.where(times.at > 600, 2.0, 1.0), *_rest(times))
    found = speed_change(slowed)
    assert found is not None
    assert found.at == pytest.approx(600, abs=60)
    assert found.ratio == pytest.approx(2.0, rel=0.1)
    assert sum(speed_change(_wandering(seed, 0.08, 40.0)) is not None for seed in range(30)) <= 3
    assert not any(speed_change(_wandering(seed, 0.0, 40.0)) for seed in range(50))
    assert constant_speed(slowed).says.startswith("the engine became slower by a factor of 1.97, 599 s before the last batch")


def test_stalls_are_counted_with_the_time_they_took() -> None:
    times = _wandering(1, 0.0, 40.0)
    extra = np.where(np.arange(times.count) % 200 == 199, 20.0, 0.0)
    found = stalls(BatchTimes(times.at, times.measured + extra, *_rest(times)))
    assert found.count == times.count // 200
    assert found.time_share == pytest.approx(extra.sum() / (times.measured + extra).sum(), rel=0.02)
    assert no_stalls(times).holds
    assert not no_stalls(BatchTimes(times.at, times.measured + extra, *_rest(times))).holds


def test_slow_moments_that_grow_batches_are_not_taken_for_a_wrong_shape() -> None:
    """The endogeneity trap: in this run the ratio goes with the batch size, and yet the law's shape is right."""
    walk = np.zeros(70_000)
    noise = np.random.default_rng(1).normal(size=walk.size)
    for i in range(1, walk.size):
        walk[i] = 0.995 * walk[i - 1] + 0.03 * noise[i]
    for seed in range(3):
        engine = Engine(most=64, speed=lambda now, seed=seed: float(np.exp(walk[int(now / 0.02) + 20_000 * seed])))
        records = serve(poisson(300.0, 8000, seed), engine, seed)
        times = batch_times(parse_policy("dynamic"), seen(records, "dynamic").mine, LAW)
        assert np.corrcoef(np.log(times.ratio), np.log(times.size))[0, 1] > 0.4
        assert law_shape(times).holds


@pytest.mark.parametrize(
    ("policy", "most", "law", "name"),
    [
        ("capped:max_batch_size=8", 8, LatencyModel(k1=0.0003, k2=0.0014, k3=0.0001, k4=0.0012, cv=0.15), "batch size"),
        ("single", 1, LatencyModel(k2=0.01, k4=0.0008, cv=0.15), "length"),
    ],
)
def test_a_wrong_shape_is_named(policy: str, most: int, law: LatencyModel, name: str) -> None:
    rate = 0.5 * Model(policy=parse_policy(policy), output_tokens=LENGTHS, law=law).largest_stable_rate
    records = serve(poisson(rate, 5000, 1), Engine(most=most, law=law), 1)
    found = law_shape(batch_times(parse_policy(policy), seen(records, policy).mine, LAW))
    assert found.holds is False
    assert name in found.says


def test_too_few_batches_say_nothing() -> None:
    few = _wandering(1, 0.0, 40.0).part(np.arange(1200) < 10)
    assert not speed(few).known
    assert not residual_cv(few).known
    assert not wander(few).sigma.known
    assert speed_change(few) is None
    assert constant_speed(few).holds is None


def _wandering(seed: int, sigma: float, tau: float, count: int = 1200) -> BatchTimes:
    """Batches of about a second, their log speed an Ornstein-Uhlenbeck process, a gamma residual of cv 0.15 on top."""
    rng = np.random.default_rng(seed)
    decay = math.exp(-1 / tau)
    level = np.empty(count)
    level[0] = rng.normal()
    for i in range(1, count):
        level[i] = decay * level[i - 1] + math.sqrt(1 - decay**2) * rng.normal()
    ratio = np.exp(sigma * level - sigma**2 / 2) * rng.gamma(0.15**-2, 0.15**2, count)
    fitted = rng.uniform(0.8, 1.2, count)
    ones = np.ones(count)
    return BatchTimes(np.arange(count, dtype=float), ratio * fitted, fitted, ones, ones, 0.5 * ones)


def _rest(times: BatchTimes) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]:
    return times.fitted, times.size, times.longest, times.decoding
