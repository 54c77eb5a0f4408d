"""The speed, its scatter, wander, steps and stalls are told apart, with the law's shape given."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.queueing.estimation.assumptions.engine_assumptions import (
    constant_speed,
    law_shape,
    no_stalls,
)
from kendall.queueing.estimation.estimates import estimate, window_speed
from kendall.queueing.estimation.interval import NORMAL, Estimate
from kendall.queueing.estimation.speed.batch_times import BatchTimes, batch_times
from kendall.queueing.estimation.speed.drift import wander
from kendall.queueing.estimation.speed.slot_stalls import slot_stalls
from kendall.queueing.estimation.speed.speed_change import speed_change
from kendall.queueing.estimation.speed.speed_process import (
    residual_cv,
    rough_speed,
    speed,
    stalled,
    stalls,
    without_outliers,
)
from kendall.queueing.estimation.speed.speeds import Speeds
from kendall.queueing.estimation.summaries import NO_WANDER, SpeedDrift
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.statistics import batch_means_interval
from kendall.queueing.queue import Queue
from tests.queueing.estimation_runs import LAW, LENGTHS, Engine, poisson, seen, serve
from tests.queueing.speed_runs import SLOWER, rest, simulated, wandering

RUNS = 200


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["capped:max_batch_size=8", "elastic:max_batch_size=8"])
def test_intervals_of_rate_length_speed_and_cv_cover_the_truth_of_simulated_runs(
    policy: str,
) -> None:
    covered = dict.fromkeys(("rate", "length", "speed", "cv"), 0)
    widths: list[tuple[float, ...]] = []
    rate = 0.6 * Queue.read(policy, LENGTHS, SLOWER).largest_stable_rate
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
    rate = 0.6 * Queue.read(policy, LENGTHS, SLOWER).largest_stable_rate
    two = (
        simulated(policy, 0.6, 3000, 1),
        serve(poisson(rate, 3000, 2), Engine(most=8, law=SLOWER), 3),
    )
    found = [estimate(seen(records, policy), parse_policy(policy), LAW) for records in two]
    for each in found:
        assert each.speed.value == pytest.approx(1.3, rel=0.02)
        assert each.cv.value == pytest.approx(0.15, rel=0.1)
    assert found[0].count == pytest.approx(found[1].count, abs=30)


def test_a_continuous_engine_has_a_speed_too() -> None:
    """No batches: time in the slot against the steps made, with the company that was there."""
    policy = "continuous:max_batch_size=8"
    for law in (LAW.at_speed(1.3), LatencyModel(k1=0.0003, k3=0.0002, k4=0.001, turnaround=0.0015)):
        found = estimate(
            seen(simulated(policy, 0.7, 1500, 2, law), policy),
            parse_policy(policy),
            law.at_speed(1.0),
        )
        assert found.speed.covers(law.speed)
        assert found.speed.relative < 0.03
        assert found.cv.value == 0.0


@pytest.mark.thinned(3)
@pytest.mark.parametrize("factor", [0.5, 2.0, 3.0])
def test_slots_of_a_machine_that_is_several_times_slower_or_faster_than_its_law_have_that_speed(
    factor: float,
) -> None:
    """The same run in other seconds: when the others' steps ended, and with it what is fitted,
    follows the machine's own pace.
    """
    policy = "continuous:max_batch_size=8"
    law = LatencyModel(k1=0.0003, k3=0.0002, k4=0.001, turnaround=0.004)
    runs = [
        seen(simulated(policy, 0.7, 1500, 2, law.at_speed(each)), policy).mine
        for each in (1.0, factor)
    ]
    times = [batch_times(parse_policy(policy), run, law) for run in runs]
    usual, other = (each.measured.sum() / each.fitted.sum() for each in times)
    assert usual == pytest.approx(1.0, abs=0.01)
    assert other == pytest.approx(factor * usual, rel=0.005)


def test_autocorrelated_speed_widens_the_interval() -> None:
    """Independent batches would promise +-1 %; the speed wanders by 8 % over 20 batches."""
    covered = naive = 0
    for seed in range(100):
        times = wandering(seed, 0.08, 20.0)
        covered += speed(times).covers(1.0)
        ratio = times.ratio
        naive += abs(ratio.mean() - 1) < 1.96 * ratio.std() / math.sqrt(ratio.size)
    assert covered >= 82
    assert naive < 70


def test_the_wander_is_found_with_its_size_and_time() -> None:
    found = [wander(wandering(seed, 0.08, 40.0)) for seed in range(40)]
    assert all(each.significant for each in found)
    assert np.median([each.sigma.value for each in found]) == pytest.approx(0.08, rel=0.2)
    assert 20.0 < np.median([each.tau for each in found]) < 70.0
    assert sum(each.sigma.covers(0.08) for each in found) >= 34
    assert np.median([each.fast_cv for each in found]) == pytest.approx(0.15, rel=0.1)


def test_a_steady_engine_does_not_wander() -> None:
    found = [wander(wandering(seed, 0.0, 40.0)) for seed in range(100)]
    assert sum(each.significant for each in found) <= 1
    assert sum(each.sigma.covers(0.0) for each in found) >= 90


def test_a_step_in_the_speed_is_not_wander() -> None:
    times = wandering(3, 0.0, 40.0)
    slowed = BatchTimes(times.at, times.measured * np.where(times.at > 600, 2.0, 1.0), *rest(times))
    found = speed_change(slowed)
    assert found is not None
    assert found.at == pytest.approx(600, abs=60)
    assert found.ratio == pytest.approx(2.0, rel=0.1)
    assert sum(speed_change(wandering(seed, 0.08, 40.0)) is not None for seed in range(30)) <= 3
    assert not any(speed_change(wandering(seed, 0.0, 40.0)) for seed in range(50))
    assert constant_speed(Speeds(slowed)).says.startswith(
        "the engine became slower by a factor of 1.97, 599 s before the last batch"
    )


def test_stalls_are_counted_with_the_time_they_took() -> None:
    times = wandering(1, 0.0, 40.0)
    extra = np.where(np.arange(times.count) % 200 == 199, 20.0, 0.0)
    found = stalls(BatchTimes(times.at, times.measured + extra, *rest(times)))
    assert found.count == times.count // 200
    assert found.time_share == pytest.approx(extra.sum() / (times.measured + extra).sum(), rel=0.02)
    assert no_stalls(times.count, stalls(times)).holds
    stalling = BatchTimes(times.at, times.measured + extra, *rest(times))
    assert not no_stalls(stalling.count, stalls(stalling)).holds


def test_slow_moments_that_grow_batches_are_not_taken_for_a_wrong_shape() -> None:
    """The endogeneity trap: in this run the ratio goes with the batch size, and yet the law's
    shape is right.
    """
    walk = np.zeros(70_000)
    noise = np.random.default_rng(1).normal(size=walk.size)
    for i in range(1, walk.size):
        walk[i] = 0.995 * walk[i - 1] + 0.03 * noise[i]
    for seed in range(3):
        engine = Engine(
            most=64,
            speed=lambda now, seed=seed: float(np.exp(walk[int(now / 0.02) + 20_000 * seed])),
        )
        records = serve(poisson(300.0, 8000, seed), engine, seed)
        times = batch_times(parse_policy("dynamic"), seen(records, "dynamic").mine, LAW)
        assert np.corrcoef(np.log(times.ratio), np.log(times.size))[0, 1] > 0.4
        assert law_shape(times).holds


@pytest.mark.parametrize(
    ("policy", "most", "law", "name"),
    [
        (
            "capped:max_batch_size=8",
            8,
            LatencyModel(k1=0.0003, k2=0.0014, k3=0.0001, k4=0.0012, cv=0.15),
            "batch size",
        ),
        ("single", 1, LatencyModel(k2=0.01, k4=0.0008, cv=0.15), "length"),
    ],
)
def test_a_wrong_shape_is_named(policy: str, most: int, law: LatencyModel, name: str) -> None:
    rate = 0.5 * Queue.read(policy, LENGTHS, law).largest_stable_rate
    records = serve(poisson(rate, 5000, 1), Engine(most=most, law=law), 1)
    found = law_shape(batch_times(parse_policy(policy), seen(records, policy).mine, LAW))
    assert found.holds is False
    assert name in found.says


@pytest.mark.parametrize(("shift", "accused"), [(0.0, False), (0.005, True)])
def test_a_wrong_shape_is_named_by_the_lengths_where_the_speed_changes(
    shift: float, accused: bool
) -> None:
    """The calibrated law has seconds at the wrong place: short batches take longer than it says,
    long ones less.
    """
    law = dataclasses.replace(LAW, k2=LAW.k2 + shift, k4=LAW.k4 - shift / 30)
    engine = Engine(
        most=64, law=law, speed=lambda now: 1.0 + 0.4 * (now > 60.0) - 0.2 * (now > 120.0)
    )
    records = serve(poisson(60.0, 8000, 1), engine, 1)
    times = batch_times(parse_policy("dynamic"), seen(records, "dynamic").mine, LAW)
    assert constant_speed(Speeds(times)).holds is False
    found = law_shape(times, constant=False)
    assert (found.holds is False, "length" in found.says) == (accused, True)
    assert (found.measure > 0.08) is accused


def test_too_few_batches_say_nothing() -> None:
    few = wandering(1, 0.0, 40.0).part(np.arange(1200) < 10)
    assert not speed(few).known
    assert not residual_cv(few).known
    assert not wander(few).sigma.known
    assert speed_change(few) is None
    assert constant_speed(Speeds(few)).holds is None


def measured(*ratios: float, fitted: float = 1.0) -> BatchTimes:
    """A batch a second."""
    ones = np.ones(len(ratios))
    return BatchTimes(
        np.arange(len(ratios)) * 1.0, fitted * np.array(ratios), fitted * ones, ones, ones, ones
    )


@pytest.mark.parametrize(("count", "known"), [(19, False), (20, True)])
def test_twenty_batches_have_a_speed_and_a_residual(count: int, known: bool) -> None:
    times = wandering(1, 0.0, 40.0).part(np.arange(1200) < count)
    assert (speed(times).known, residual_cv(times).known) == (known, known)


def test_the_speed_has_the_interval_of_its_batch_means() -> None:
    times = wandering(1, 0.0, 40.0)
    found, factor = speed(times), times.measured.sum() / times.fitted.sum()
    errors = batch_means_interval(times.measured - factor * times.fitted)
    assert found.value == pytest.approx(factor)
    assert found.high - found.value == pytest.approx(errors.half_width / times.fitted.mean())
    assert found.value - found.low == pytest.approx(errors.half_width / times.fitted.mean())
    assert found.effective_n == min(errors.effective_n, 1200.0)


def test_the_residual_has_about_the_interval_of_a_normal_samples_deviation() -> None:
    """Of log cv 1.96 / sqrt (2 n), for batches of equal length; a seventh more for what 20
    blocks leave open.
    """
    found = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        found.append(residual_cv(measured(*(1 + 0.1 * rng.normal(size=800)))))
    assert np.mean([each.value for each in found]) == pytest.approx(0.1, rel=0.02)
    assert np.mean([math.log(each.high / each.value) for each in found]) == pytest.approx(
        1.15 * 1.96 / 40, rel=0.1
    )
    assert all(each.low * each.high == pytest.approx(each.value**2) for each in found)
    exact = residual_cv(measured(*[1.0] * 30))
    assert (exact.value, exact.low, exact.high, exact.effective_n) == (0.0, 0.0, 0.0, 30.0)


@pytest.mark.parametrize(
    ("ratio", "fitted", "stalls"),
    [
        # three times the median, and by an average batch more
        (2.95, 1.0, False),
        (3.05, 1.0, True),
        (20.0, 0.04, False),  # 0.76 s, against 0.98 s
        (30.0, 0.04, True),
    ],
)
def test_a_stall_is_three_times_the_median_and_costs_an_average_batch(
    ratio: float, fitted: float, stalls: bool
) -> None:
    times = measured(*[1.0] * 50)
    times.fitted[7], times.measured[7] = fitted, ratio * fitted
    assert stalled(times).tolist() == [place == 7 and stalls for place in range(50)]
    assert without_outliers(times).count == (49 if ratio > 3 else 50)
    if ratio <= 3:
        assert without_outliers(times) is times


def test_three_times_the_median_is_no_outlier_yet() -> None:
    times = measured(*[1.0] * 50, 3.0)
    assert without_outliers(times) is times
    assert not stalled(times).any()
    assert stalled(measured()).size == 0
    assert without_outliers(measured()).count == 0


def test_the_stalls_of_a_run_by_hand() -> None:
    """Two that take 4.02 and 9 s more than the 2 s of the others."""
    times = measured(*[1.0] * 20, 3.01, *[1.0] * 29, 5.5, fitted=2.0)
    found = stalls(times)
    assert (found.count, found.last_at) == (2, 50.0)
    excess = np.array([4.02, 9.0])
    assert found.time_share == pytest.approx(excess.sum() / times.measured.sum())
    assert (found.longest, found.size) == pytest.approx((9.0, excess @ excess / excess.sum()))
    none = stalls(measured(*[1.0] * 20))
    assert (none.count, none.time_share, none.longest, none.last_at, none.size) == (
        0,
        0.0,
        0.0,
        None,
        0.0,
    )


def test_stalls_of_slots_hold_all_in_service_at_once_and_the_busy_time_is_counted_once() -> None:
    """40 requests of two seconds, one each second, then five idle seconds and 40 more; a stall
    delays the 10th and the 11th.
    """
    took = np.full(80, 2.0)
    took[[10, 11]] = 12.0, 11.5
    at = np.concatenate([np.arange(40.0), 46.0 + np.arange(40.0)])  # the first forty end at 41
    ones = np.ones(80)
    found = slot_stalls([BatchTimes(at, took, 2 * ones, ones, ones, ones)])
    assert (found.count, found.longest, found.last_at, found.size) == (1, 10.0, 10.0, 10.0)
    assert found.time_share == pytest.approx(10.0 / 82.0)
    empty = BatchTimes(*(np.empty(0),) * 6)
    assert slot_stalls([empty]).count == slot_stalls([]).count == 0


def test_speed_and_stalls_are_those_since_the_speed_changed() -> None:
    before, after = wandering(3, 0.0, 40.0), wandering(4, 0.0, 40.0)
    late = BatchTimes(after.at + 1200, 2 * after.measured, *rest(after))
    times = BatchTimes(
        *(
            np.concatenate([getattr(part, name) for part in (before, late)])
            for name in BatchTimes.__dataclass_fields__
        )
    )
    times.measured[[100, 2000]] += 30.0
    found = Speeds(times)
    assert found.step is not None
    assert found.recent.at[0] >= found.step.at == pytest.approx(1200, abs=60)
    assert (found.stalls.count, found.stalls.last_at) == (1, 2000.0)
    assert (found.steady.count, found.without_stalls.count) == (2398, found.recent.count - 1)
    assert not found.slow.significant
    slots = Speeds(times, (times,))
    assert slots.stalls.count == 1
    assert Speeds(before, (before.part(before.at < 100),)).stalls.count == 0


SLOW = SpeedDrift(Estimate(0.05, 0.03, 0.08, 50.0), 20.0, 0.1, significant=True)


def test_a_speed_that_wanders_is_known_less_well_and_one_of_slots_by_their_accounting_too() -> None:
    """1.96 sigma sqrt(2 tau / T) of it, where that is more; and 1.2 %."""
    times = wandering(1, 0.0, 40.0)
    plain, span = speed(times), 1199.0
    widened = plain.value * NORMAL * 0.05 * math.sqrt(2 * 20 / span)
    half = (plain.high - plain.low) / 2
    assert widened > half
    found = window_speed(times, SLOW, continuous=False)
    assert (found.low, found.value, found.high) == pytest.approx(
        (plain.value - widened, plain.value, plain.value + widened)
    )
    assert found.effective_n == plain.effective_n
    assert window_speed(times, replace(SLOW, tau=1e9), continuous=False).high == pytest.approx(
        plain.value * (1 + NORMAL * 0.05)
    )
    assert window_speed(
        times, replace(SLOW, sigma=Estimate(1e-6, 0.0, 0.1, 50.0)), continuous=False
    ).high == pytest.approx(plain.high)
    assert window_speed(
        times, replace(SLOW, significant=False), continuous=False
    ).high == pytest.approx(plain.high)
    assert window_speed(times, NO_WANDER, continuous=True).high == pytest.approx(
        plain.high + 0.012 * plain.value
    )
    assert not window_speed(times.part(times.at < 5), SLOW, continuous=True).known


@pytest.mark.parametrize(("batches", "known"), [(19, False), (20, True)])
def test_the_speed_of_few_batches_is_unknown(batches: int, known: bool) -> None:
    """A value of five may be that of one stall."""
    times = wandering(1, 0.08, 20.0)
    found = speed(times.part(np.arange(times.count) < batches))
    assert found.known is math.isfinite(found.value) is known


@pytest.mark.parametrize(("groups", "value"), [(4, False), (5, True)])
def test_few_groups_of_slots_give_a_value_alone(groups: int, value: bool) -> None:
    times = wandering(1, 0.08, 20.0)
    found = rough_speed(times.part(np.arange(times.count) < groups))
    assert math.isfinite(found.value) is value
    assert (found.low, found.high, found.known) == (-math.inf, math.inf, False)
