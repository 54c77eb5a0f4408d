"""What is said of simulated runs, against the formulas of its modules computed another way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.measurement.batch_means import variance_of_mean
from kendall.queueing.measurement.mean_interval import widest_interval
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS, Prediction, Quantiles
from kendall.queueing.simulation.counts import counts_of
from kendall.queueing.simulation.experiment import (
    check_kept_up,
    quantiles_of_gaps,
    sizes_per_dispatch,
    summary,
)
from kendall.queueing.simulation.fast import SimulatedRun
from kendall.queueing.simulation.kernels import REJECTED
from kendall.queueing.simulation.simulated_means import (
    companion_of,
    controlled,
    kind_of_runs,
    mean_of_runs,
    summary_of_runs,
    tail_notes,
    weighted_mean,
    weighted_quantiles,
    without_unsettled,
)

Floats = NDArray[np.float64]
LAW = "k1=0.002,k2=0.01,k3=0.0002,k4=0.005,kp=0.0001"
LENGTHS = "uniform:low=5,high=60"


def skewed(size: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).gamma(0.5, 2.0, size)


# means and errors


def test_the_error_of_one_run_is_that_of_twenty_batches_and_of_several_that_of_their_means() -> (
    None
):
    values = skewed(413)
    batches = [batch.mean() for batch in np.array_split(values, 20)]
    assert mean_of_runs([values]) == pytest.approx((values.mean(), stats.sem(batches)))
    runs = [skewed(50, 2), skewed(70, 3), skewed(90, 4)]
    mean, error = mean_of_runs(runs)
    assert mean == pytest.approx(np.concatenate(runs).mean())
    assert error == pytest.approx(stats.sem([run.mean() for run in runs]))


def test_under_bursts_the_error_is_that_of_the_widest_interval_or_of_all_batches() -> None:
    one, runs = skewed(4000), [skewed(1000 + 200 * seed, seed) for seed in range(1, 4)]
    error = math.sqrt(one.var(ddof=1) / widest_interval(one).effective_n)
    assert mean_of_runs([one], "bursty") == pytest.approx((one.mean(), error))
    sizes = np.array([len(run) for run in runs])
    inside = sum(variance_of_mean(run, 20)[0] * len(run) ** 2 for run in runs) / sizes.sum() ** 2
    means = np.array([run.mean() for run in runs])
    assert inside > means.var(ddof=1) / 3
    assert mean_of_runs(runs, "bursty")[1] == pytest.approx(math.sqrt(inside))
    apart = [run + 9 * place for place, run in enumerate(runs)]
    between = np.array([run.mean() for run in apart]).var(ddof=1) / 3
    assert mean_of_runs(apart, "bursty")[1] == pytest.approx(math.sqrt(between))
    assert mean_of_runs([np.full(40, 2.0)], "bursty") == (2.0, 0.0)


def test_few_values_or_one_recorded_path_have_no_error() -> None:
    assert mean_of_runs([np.empty(0)]) == (None, None)
    assert mean_of_runs([np.arange(19.0)]) == (9.0, None)
    assert mean_of_runs([np.arange(19.0), np.empty(0)]) == (9.0, None)
    assert mean_of_runs([np.arange(40.0)], "recorded") == (19.5, None)
    assert mean_of_runs([np.arange(3.0), np.arange(3.0) + 2], "recorded") == pytest.approx(
        (2.0, 1.0)
    )


@pytest.mark.parametrize("runs", [1, 3])
def test_the_error_of_a_quantile_is_half_its_shift_by_the_error_of_its_share(runs: int) -> None:
    """A share over batches or runs of different lengths: the error of a ratio of two sums."""
    series = [skewed(400 + 37 * seed, seed) for seed in range(runs)]
    values = np.concatenate(series)
    parts = series if runs > 1 else np.array_split(values, 20)
    wide = mean_of_runs(series)[1] / ratio_error(parts)  # type: ignore[operator]
    found = summary_of_runs(series)
    for name, level in LEVELS.items():
        value = np.quantile(values, level)
        error = max(1.0, wide) * ratio_error([part <= value for part in parts])
        low, high = max(level - error, 0.0), level + error
        shift = (
            (np.quantile(values, high) - np.quantile(values, low)) / 2
            if high <= 1
            else value - np.quantile(values, low)
        )
        assert found.value(name) == pytest.approx(value)
        assert found.errors[name] == pytest.approx(shift, rel=1e-6)


def ratio_error(parts: list[Floats]) -> float:
    sums, sizes = np.array([part.sum() for part in parts]), np.array([len(part) for part in parts])
    excess = sums - sums.sum() / sizes.sum() * sizes
    return float(math.sqrt((excess**2).sum() / (1 - 1 / len(parts))) / sizes.sum())


def test_a_mean_by_weights_has_the_error_of_a_ratio() -> None:
    values, weights = skewed(800), np.random.default_rng(5).integers(1, 9, 800)
    found = weighted_mean([values], [weights])
    batches = zip(np.array_split(values, 20), np.array_split(weights, 20), strict=True)
    shifts = [((of - found.mean) * n).mean() / weights.mean() for of, n in batches]
    assert found.mean == pytest.approx((values * weights).sum() / weights.sum())
    assert found.standard_error == pytest.approx(stats.sem(shifts))
    assert weighted_mean([np.empty(0)], [np.empty(0)]) == Quantiles()


def test_a_weighted_quantile_is_the_first_value_that_reaches_the_share() -> None:
    values, counts = np.array([3.0, 1.0, 2.0, 4.0]), np.array([3, 4, 2, 1])
    levels = {"p40": 0.4, "p41": 0.41, "p60": 0.6, "p90": 0.9, "p91": 0.91}
    assert weighted_quantiles(values, counts, levels).tolist() == [1, 2, 2, 3, 4]
    alone = weighted_quantiles(values, np.ones(4), levels)
    assert alone.tolist() == np.quantile(values, list(levels.values())).tolist()


# control variate


def regression(statistic: Callable[[Floats], float], values: Floats, beside: Floats, known: float):
    """Corrected value and its error, over twenty batches."""
    parts = np.array([statistic(part) for part in np.array_split(values, 20)])
    others = np.array([statistic(part) for part in np.array_split(beside, 20)])
    line = stats.linregress(others, parts)
    left = parts - line.intercept - line.slope * others
    error = math.sqrt((left**2).sum() / 18 / 20)
    return statistic(values) + line.slope * (known - statistic(beside)), error, line.slope


def test_each_statistic_is_corrected_by_a_regression_over_twenty_batches() -> None:
    beside = skewed(2000)
    values = 1.0 + 2.0 * beside + skewed(2000, 2)
    exact = Quantiles(1.05, 0.5, 2.8, 4.0, 6.5, standard_error=0.02)
    found = controlled(values, beside, exact)
    value, error, slope = regression(np.mean, values, beside, 1.05)
    assert found.mean == pytest.approx(value)
    assert found.standard_error == pytest.approx(math.hypot(error, 0.02 * slope))
    for name, level in LEVELS.items():
        known = exact.value(name)
        of = regression(lambda part, at=level: np.quantile(part, at), values, beside, known)
        assert found.value(name) == pytest.approx(of[0])
        assert found.errors[name] == pytest.approx(math.hypot(of[1], 0.02 * of[2]))


def test_by_the_mean_of_the_companion_every_statistic_is_corrected() -> None:
    beside = skewed(2000)
    values = 1.0 + 2.0 * beside + skewed(2000, 2)
    found = controlled(values, beside, Quantiles(1.05), by_mean=True)
    means = np.array([part.mean() for part in np.array_split(beside, 20)])
    for name, level in LEVELS.items():
        parts = [np.quantile(part, level) for part in np.array_split(values, 20)]
        slope = stats.linregress(means, parts).slope
        expected = np.quantile(values, level) + slope * (1.05 - beside.mean())
        assert found.value(name) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("policy", "limits", "fixed", "per_token"),
    [
        # of one request alone: k1 + k2 + kp times the mean prompt; k3 + k4
        ("single", {}, 0.012, 0.0052),
        ("single", {"servers": 4}, 0.003, 0.0013),
        ("single", {"prompt_tokens": "deterministic:value=100"}, 0.022, 0.0052),
        # of four that share a step: k1, and a quarter of 4 k3 + k4
        ("continuous:max_batch_size=4", {"servers": 2}, 0.001, 0.000725),
    ],
)
def test_the_companion_is_one_server_with_the_work_of_all(
    policy: str, limits: dict[str, object], fixed: float, per_token: float
) -> None:
    model = Queue.read(policy, LENGTHS, LAW, **limits)  # type: ignore[arg-type]
    found = companion_of(model, 0.5 * model.largest_stable_rate)
    assert found is not None
    assert found.per_token == pytest.approx(per_token)
    assert found.fixed == pytest.approx(fixed)
    arrived, tokens = np.cumsum(skewed(50)), np.random.default_rng(1).integers(5, 60, 50)
    delays, free = [], 0.0
    for at, count in zip(arrived, tokens, strict=True):
        delays.append(max(0.0, free - at))
        free = max(free, at) + found.fixed + found.per_token * count
    assert found.delays(arrived, tokens) == pytest.approx(delays)


# tails

SLOWLY = "simulated means settle slowly: the delays have no variance"
NO_SECOND = "the lengths have no second moment"


@pytest.mark.parametrize(
    ("alpha", "patience", "note"),
    [
        (2.5, None, f"{SLOWLY} (tail index 2.5, at most 3)"),
        (3.0, None, f"{SLOWLY} (tail index 3, at most 3)"),
        (3.1, None, None),
        (2.0, None, f"no means of durations: {NO_SECOND} (tail index 2, at most 2), so that "),
        (1.5, 1.0, f"no mean of the sojourn time: {NO_SECOND} (tail index 1.5, at most 2), so "),
    ],
)
def test_a_tail_without_a_variance_is_said(
    alpha: float, patience: float | None, note: str | None
) -> None:
    lengths = f"pareto:alpha={alpha},minimum=5000"
    model = Queue.read("single", lengths, "a=0.01,c=0", patience=patience)
    assert model.requests.tail_index == alpha
    notes = tail_notes(model)
    assert len(notes) == (note is not None)
    assert not notes or notes[0].startswith(note or "")


@pytest.mark.parametrize(
    ("alpha", "limits", "bare"),
    [
        (2.1, {}, ()),
        (1.5, {}, ("queueing_delay", "served_queueing_delay", "time_to_first_token")),
        (1.5, {"patience": 5.0}, ()),
    ],
)
def test_means_that_do_not_settle_are_left_out(
    alpha: float, limits: dict[str, object], bare: tuple[str, ...]
) -> None:
    model = Queue.read("single", f"pareto:alpha={alpha},minimum=20", "a=0.01,c=0", **limits)  # type: ignore[arg-type]
    all_known = Quantiles(1.0, 1.0, 2.0, 3.0, 4.0, standard_error=0.1)
    names = ("queueing_delay", "served_queueing_delay", "time_to_first_token", "sojourn_time")
    given = Prediction(
        policy="single",
        effective_max_batch_size=1,
        model="",
        method="simulation",
        stable=True,
        load=0.5,
        utilisation=0.5,
        **dict.fromkeys(names, all_known),  # type: ignore[arg-type]
    )
    found = without_unsettled(given, model)
    gone = {*bare, *(("sojourn_time",) if alpha <= 2 else ())}
    for name in names:
        assert (getattr(found, name).mean is None) == (name in gone), name
        assert getattr(found, name).p99 == 4.0


def test_the_kind_of_a_run_is_that_of_its_arrivals() -> None:
    kinds = {
        None: "steady",
        "mmpp:rates=5/60,durations=2/1": "bursty",
        "gamma:rate=20,burstiness=0.4": "bursty",
        "piecewise:rates=10/5,durations=2/1": "spans",
    }
    for arrivals, kind in kinds.items():
        assert kind_of_runs(Queue.read("single", LENGTHS, LAW, arrivals=arrivals)) == kind


# paths


def run_of(arrived_at: Floats, **columns: object) -> SimulatedRun:
    """One by one on one server, but for what is given."""
    count = len(arrived_at)
    given = {
        "dispatched_at": arrived_at,
        "first_token_at": arrived_at,
        "released_at": arrived_at,
        "server_free_at": arrived_at,
        "batch_id": np.arange(count),
        "batch_size": np.ones(count, np.int64),
        "server_id": np.zeros(count, np.int64),
    }
    tokens = columns.pop("output_tokens", np.ones(count, np.int64))
    return SimulatedRun(
        arrived_at,
        np.asarray(tokens),
        given | {name: np.asarray(values) for name, values in columns.items()},
    )


@pytest.mark.parametrize(
    ("ids", "sizes", "expected"),
    [
        ([0, 0, 1, 2, 2], [2, 2, 1, 2, 2], [2, 1, 2]),
        ([0, -1, 1, REJECTED, 1], [1, 0, 2, 0, 2], [1, 2]),
        ([1, 0, 1, 2], [2, 1, 2, 1], [1, 2, 1]),  # in another order than that of arrival
        ([3, 3, 4], [2, 2, 1], [2, 1]),
    ],
)
def test_the_size_of_each_batch_counts_once(
    ids: list[int], sizes: list[int], expected: list[int]
) -> None:
    run = run_of(np.arange(float(len(ids))), batch_id=ids, batch_size=sizes)
    assert sizes_per_dispatch(run).tolist() == expected


def test_gaps_between_tokens_are_the_mean_ones_of_answers_with_several() -> None:
    """Two gaps of 0.5 s, none, one of 3 s, of one that is lost none, four of 0.25 s."""
    run = run_of(
        np.zeros(5),
        output_tokens=[3, 1, 2, 9, 5],
        first_token_at=[1.0, 1.0, 1.0, np.nan, 1.0],
        released_at=[2.0, 1.0, 4.0, np.nan, 2.0],
        batch_id=[0, 1, 2, -1, 3],
    )
    levels = {"p50": 0.5, "p80": 0.8, "p90": 0.9}
    assert quantiles_of_gaps([run], levels) == {"p50": 0.25, "p80": 0.5, "p90": 3.0}
    assert quantiles_of_gaps([run_of(np.zeros(2))], levels) == {}


@pytest.mark.parametrize("patience", [None, 0.6])
def test_those_waiting_and_those_there_are_counted_at_equal_distances(
    patience: float | None,
) -> None:
    """From when the first, or a tenth of the run, are surely gone to the last arrival."""
    rng = np.random.default_rng(3)
    arrived = np.cumsum(rng.exponential(1.0, 300))
    begun = arrived + rng.exponential(1.0, 300)
    ended = begun + rng.exponential(2.0, 300)
    batch = np.where(rng.random(300) < (0.0 if patience is None else 0.2), -1, np.arange(300))
    batch[(batch < 0) & (rng.random(300) < 0.3)] = REJECTED
    run = run_of(arrived, dispatched_at=begun, released_at=ended, batch_id=batch)
    model = Queue.read("single", LENGTHS, LAW, patience=patience)
    gone = arrived + np.where(batch == REJECTED, 0.0, patience or 0.0)
    for name, until in (("queue_length", begun), ("number_in_system", ended)):
        leaves = np.where(batch < 0, gone, until)
        first = arrived[0] + min((leaves - arrived).max(), (arrived[-1] - arrived[0]) / 10)
        at = np.linspace(first, arrived[-1], 300, endpoint=False)
        there = ((arrived[:, None] <= at) & (at < leaves[:, None])).sum(axis=0)
        found = counts_of([run], model)[name]
        assert found.empty == pytest.approx((there == 0).mean())
        expected = np.quantile(there, list(LEVELS.values()), method="inverted_cdf")
        assert list(found.quantiles.values()) == expected.tolist()


@pytest.mark.parametrize(("served", "kept_up"), [(1.005, True), (1.05, False)])
def test_work_of_single_requests_beyond_one_by_more_than_chance_is_too_much(
    served: float, kept_up: bool
) -> None:
    """Ten thousand requests: three times the square root of 2 / 10,000 is 4.2 %."""
    arrived = np.arange(10_000.0)
    run = run_of(arrived, server_free_at=arrived + served, dispatched_at=arrived)
    model = Queue.read("single:order=sprpt", LENGTHS, LAW, predictor="exact")
    if kept_up:
        check_kept_up(model, [run])
        return
    with pytest.raises(UnstableQueueError) as error:
        check_kept_up(model, [run])
    assert error.value.load == pytest.approx(served * 10_000 / 9_999)


@pytest.mark.parametrize("limits", [{}, {"patience": 9.0}])
def test_a_run_that_keeps_up_by_order_of_arrival_or_loses_requests_is_not_checked(
    limits: dict[str, object],
) -> None:
    arrived = np.arange(1000.0)
    run = run_of(arrived, server_free_at=2 * arrived + 5)
    order = "" if not limits else ":order=sprpt"
    check_kept_up(Queue.read(f"single{order}", LENGTHS, LAW, **limits), [run])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "busy"),
    [
        # one server from 0 to 5 and from 7 to 8, the other from 1 to 2
        ("capped:max_batch_size=2", 7.0),
        ("single:order=sprpt", 4.0 + 3.0 + 1.0 + 1.0),  # seconds of service
    ],
)
def test_servers_are_busy_from_the_first_dispatch_to_the_last_departure(
    policy: str, busy: float
) -> None:
    model = Queue.read(policy, LENGTHS, LAW, servers=2, patience=99.0, predictor="exact")
    run = run_of(
        np.array([0.0, 1.0, 1.5, 2.0, 6.0]),
        dispatched_at=[0.0, 1.0, np.nan, 2.0, 7.0],
        server_free_at=[4.0, 2.0, np.nan, 5.0, 8.0],
        released_at=[4.0, 2.0, np.nan, 5.0, 8.0],
        batch_id=[0, 1, -1, 2, 3],
        server_id=[0, 1, -1, 0, 0],
    )
    found = summary([run], model, 0.5, ())
    assert found.utilisation == pytest.approx(busy / 8 / 2)
    assert found.loss_fraction == pytest.approx(0.2)
    lost = run_of(np.zeros(1), batch_id=[-1])
    assert summary([lost], model, 0.5, ()).utilisation is None


def growing(pace: float) -> SimulatedRun:
    """A thousand arrivals a second apart, of which the k-th leaves at 1 + k pace."""
    arrived = np.arange(1000.0)
    return run_of(arrived, server_free_at=1 + pace * arrived, dispatched_at=arrived)


@pytest.mark.parametrize(
    ("slots", "paces", "load"),
    [
        # of the last 500 arrivals 400 leave: 100 more than four times the root of 500, 89.4
        (2, [1.25], 1.25),
        (2, [1.2], None),
        # 150 are there in the last quarter at least
        (150, [1.25], 1.25),
        (151, [1.25], None),
        (2, [1.25, 1.25], 1.25),
        (2, [1.25, 1.6], (500 / 400 + 500 / 313) / 2),
        (2, [1.25, 1.0], None),
    ],
)
def test_a_queue_that_grows_in_every_run_by_more_than_chance_has_no_steady_state(
    slots: int, paces: list[float], load: float | None
) -> None:
    policy = f"continuous:max_batch_size={slots},order=sprpt"
    model, runs = Queue.read(policy, LENGTHS, LAW, predictor="exact"), list(map(growing, paces))
    if load is None:
        check_kept_up(model, runs)
        return
    with pytest.raises(UnstableQueueError) as error:
        check_kept_up(model, runs)
    assert error.value.load == pytest.approx(load)


def test_of_two_stations_the_second_has_to_keep_up() -> None:
    law = "k1=0.002,k2=0,k3=0.0002,k4=0.005,kp=0.0001"
    model = Queue.read("single:order=sprpt", LENGTHS, law, predictor="exact", disaggregated=True)
    fine, slow = growing(1.0), growing(1.0)
    slow.columns["server_free_at"][:] = slow.arrived_at + 2  # type: ignore[index]
    check_kept_up(model, [dataclasses.replace(fine, stations=(slow, fine))])
    with pytest.raises(UnstableQueueError):
        check_kept_up(model, [dataclasses.replace(fine, stations=(fine, slow))])


@pytest.mark.parametrize(("batches", "told"), [(1, "1 batch"), (19, "19 batches"), (20, None)])
def test_hardly_any_batch_in_a_run_is_said(batches: int, told: str | None) -> None:
    """In one of them, or of arrivals that end in all."""
    ids = np.arange(40) % batches
    few, many = (run_of(np.arange(40.0), batch_id=each) for each in (ids, np.arange(40)))
    steady = summary([few, many], Queue.read("single", LENGTHS, LAW), 0.5, ())
    said = [text for text in steady.assumptions if text.startswith("TOO FEW")]
    expected = f"TOO FEW BATCHES: only {told} in a replication, expected at least 20: ask for more"
    assert [text.startswith(expected) for text in said] == [True] * (told is not None)
    spans = Queue.read("single", LENGTHS, LAW, arrivals="piecewise:rates=1,durations=40")
    assert not any("TOO FEW" in text for text in summary([few, many], spans, 0.5, ()).assumptions)


@pytest.mark.parametrize(
    ("arrivals", "told"), [(None, True), ("piecewise:rates=1,durations=9", False)]
)
def test_a_delay_that_grows_is_said_of_a_steady_state(arrivals: str | None, told: bool) -> None:
    arrived = np.arange(400.0)
    run = run_of(arrived, dispatched_at=arrived + np.where(arrived < 200, 1.0, 1.5))
    model = Queue.read("single", LENGTHS, LAW, arrivals=arrivals)
    said = [text for text in summary([run], model, 0.5, ()).assumptions if "second half" in text]
    expected = (
        "TOO SHORT: the mean delay of the second half of the run is 50% above that of the first: "
        "ask for more requests"
    )
    assert said == [expected] * told


@pytest.mark.parametrize(
    ("present", "told"),
    [
        ([8, 10, 12, 16], True),
        ([8, 10, 12, 14], False),  # not half as many again as in the second quarter
        ([8, 10, 9, 16], False),
        ([11, 10, 12, 16], False),
    ],
)
@pytest.mark.parametrize("runs", [1, 2])
def test_ever_more_requests_are_told_where_interruptions_may_make_more_work(
    present: list[int], told: bool, runs: int
) -> None:
    """So many in the system in each quarter of four hundred arrivals; of two runs in both."""
    arrived = np.arange(400.0)
    left = np.maximum.accumulate(np.maximum(np.arange(400) - np.repeat(present, 100), 0))
    leaves = np.searchsorted(left, np.arange(400) + 1).astype(float)
    leaves[left[-1] :] = 9999.0
    grown = run_of(arrived, released_at=leaves, server_free_at=leaves)
    limits = {"max_context_tokens": 200, "kv": "preempt=swap,setup=0,token=0"}
    law = "k1=0.002,k2=0,k3=0.001,k4=0.02"
    model = Queue.read("continuous:max_batch_size=6", LENGTHS, law, **limits)  # type: ignore[arg-type]

    def said(*of: SimulatedRun) -> list[str]:
        notes = summary(of, model, 0.5, ()).assumptions
        return [text for text in notes if "ever more requests are in the system" in text]

    assert len(said(*[grown] * runs)) == told
    even = run_of(arrived, released_at=arrived + 9.5, server_free_at=arrived + 9.5)
    assert not said(grown, even)
    many = " at the end of the run 8 more than at its beginning"
    assert all(many in text for text in said(grown))
