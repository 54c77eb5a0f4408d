"""The check of the live model: the window's own requests through it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest

from kendall.queueing.arrivals.processes import Recorded
from kendall.queueing.control.assess import Assessment, assess
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.checked import Pairs
from kendall.queueing.estimation.window.snapshot import COLUMN, Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.json_form import json_object
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.check import Check
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_run
from tests.queueing.estimation_runs import modulated
from tests.queueing.estimation_windows import snapshot_of_run, window_of

SEED = np.random.SeedSequence(3)

LAW = "k1=0.002,k2=0.004,k3=0.0003,k4=0.006,cv=0.2"
POLICIES = (
    "single",
    "dynamic",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
    "fixed:batch_size=4",
    "continuous:max_batch_size=8",
    "capped:max_batch_size=4,order=spjf",
)
LIMITS = QueueLimits(engine=EngineBounds(max_num_seqs=16))


def model_of(policy: str, law: str = LAW) -> Queue:
    return Queue.read(policy, "geometric:mean=20", law, max_num_seqs=16)


def looked(seen: Snapshot, law: LatencyModel) -> Assessment:
    return assess(seen, law, LIMITS)


def check_of(seen: Snapshot, law: LatencyModel) -> Check:
    found = looked(seen, law).compared.check
    assert found is not None
    return found


def steady(model: Queue, seed: int) -> Snapshot:
    return window_of(model, 0.6, 1500, seed)


def overloaded(model: Queue, seed: int) -> Snapshot:
    return window_of(model, 1.3, 1500, seed)


def in_bursts(model: Queue, seed: int, count: int = 1_500) -> Snapshot:
    rate = model.largest_stable_rate
    at = modulated((0.2 * rate, 1.3 * rate), (3.0, 1.0), count, seed)
    process = Recorded(at - at[0])
    bursty = model.but(process=process)
    seeds = np.random.SeedSequence(seed)
    return snapshot_of_run(simulate_run(bursty, process.mean_rate, at.size, seeds), model)


def begun_busy(model: Queue, seed: int) -> Snapshot:
    """Half of a longer window: requests wait and run when it begins."""
    seen = window_of(model, 0.9, 3000, seed)
    return seen.since(seen.now / 2)


WINDOWS: dict[str, Callable[[Queue, int], Snapshot]] = {
    "steady": steady,
    "overloaded": overloaded,
    "in bursts": in_bursts,
    "begun busy": begun_busy,
}


@pytest.mark.parametrize(
    ("policy", "window"),
    [
        (policy, window)
        for policy in POLICIES
        for window in WINDOWS
        if (policy, window) != ("dynamic", "overloaded")  # a few batches of hundreds
    ],
)
@pytest.mark.thinned(56)
def test_the_difference_is_within_its_interval_whatever_arrives(policy: str, window: str) -> None:
    """Six runs of the model itself; an interval of 95 %, and a path of its own in overload."""
    model = model_of(policy)
    checks = [check_of(WINDOWS[window](model, seed), model.engine.law) for seed in range(6)]
    covered = [abs(each.difference) <= each.half_width + 1e-9 for each in checks]
    assert sum(covered) >= 4
    assert sum(each.verdict == "disagree" for each in checks) <= 1
    ratios = [each.ratio for each in checks]
    assert abs(np.mean(ratios) - 1) < 3 * np.std(ratios, ddof=1) / math.sqrt(6) + 0.03
    assert all(each.requests > 300 for each in checks)


def test_few_batches_say_nothing_however_large_they_are() -> None:
    """600 requests in overload, of which dynamic serves ever more together."""
    model = model_of("dynamic")
    assert {check_of(overloaded(model, seed), model.engine.law).verdict for seed in range(4)} <= {
        "too_few",
        "agree",
    }


@pytest.mark.parametrize("policy", ["single", "capped:max_batch_size=8"])
def test_it_is_far_narrower_than_what_the_run_says_of_its_mean(policy: str) -> None:
    model = model_of(policy)
    widths = []
    for seed in range(4):
        compared = looked(window_of(model, 0.8, 600, seed), model.engine.law).compared
        assert compared.check is not None
        observed = compared.observed
        widths.append(compared.check.half_width / ((observed.high - observed.low) / 2))
    assert np.median(widths) < 0.6


def test_time_that_the_gateway_loses_is_named() -> None:
    """Whoever meets a busy server is dispatched 30 ms after it is free: of the law's turnaround,
    which the model of the check lacks.
    """
    model = model_of("single", "k1=0,k2=0.1,k3=0,k4=0.006")
    seen = window_of(model, 0.5, 900, 1)
    rows = seen.rows[np.argsort(seen.column("arrived_at"))].copy()
    lost, free = 0.03, -math.inf
    for row in rows:
        lasted = row[COLUMN["server_free_at"]] - row[COLUMN["dispatched_at"]]
        start = row[COLUMN["arrived_at"]]
        start = start if free <= start else free + lost
        free = start + lasted
        row[COLUMN["dispatched_at"]] = start
        row[COLUMN["server_free_at"]] = row[COLUMN["released_at"]] = free
    found = check_of(seen.having(rows), model.engine.law)
    assert found.verdict == "disagree"
    (cause,) = found.causes
    assert "the gateway" in cause


def test_an_engine_of_another_shape_than_its_law_differs() -> None:
    """The law says that a batch of eight takes as long as one; it takes eight times as long. At a
    constant load the speed makes up for it, in bursts it cannot.
    """
    model = model_of("capped:max_batch_size=8", "k1=0.02,k2=0.001,k3=0.003,k4=0.0001")
    flat = LatencyModel(k1=0.0, k2=0.05, k3=0.0, k4=0.003)
    for seed in range(3):
        seen = in_bursts(model, seed, count=4_000)
        assert check_of(seen, flat).ratio > 1.15
        assert check_of(seen, model.engine.law).ratio == pytest.approx(1, abs=0.01)


def test_a_slower_engine_is_no_difference() -> None:
    """The speed is taken from the service times: 1.5 times as slow as the law."""
    model = model_of("capped:max_batch_size=8")
    slow = model.but(law=dataclasses.replace(model.engine.law, speed=1.5))
    found = check_of(window_of(slow, 0.6, 900, 3), model.engine.law)
    assert found.verdict == "agree"
    assert found.ratio == pytest.approx(1, abs=0.1)


@pytest.mark.left_out
def test_few_requests_and_orders_by_flow_have_none() -> None:
    model = model_of("single")
    assert looked(window_of(model, 0.6, 12, 1), model.engine.law).compared.check is None
    fair = model_of("single:order=vtc")
    assert looked(window_of(fair, 0.6, 100, 1), fair.engine.law).compared.check is None


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", ["capped:max_batch_size=8", "continuous:max_batch_size=8"])
@pytest.mark.parametrize("window", WINDOWS)
def test_it_is_of_the_requests_that_the_forecast_is_judged_by(policy: str, window: str) -> None:
    model = model_of(policy)
    compared = looked(WINDOWS[window](model, 1), model.engine.law).compared
    assert compared.check is not None
    assert compared.check.requests == compared.n
    assert compared.check.observed == pytest.approx(compared.observed.value, rel=1e-9)


def test_it_speaks_json() -> None:
    model = model_of("single")
    compared = looked(window_of(model, 0.6, 300, 1), model.engine.law).compared
    found = json_object(compared.summary())["check"]
    assert compared.check is not None
    assert found["modelled"] == compared.check.modelled
    assert found["ratio_low"] < found["ratio"] < found["ratio_high"]
    assert math.isfinite(found["measured_services"])


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", ["capped:max_batch_size=8", "continuous:max_batch_size=8"])
@pytest.mark.parametrize("window", WINDOWS)
def test_by_the_second_both_lines_move_together_and_have_the_means_of_the_check(
    policy: str, window: str
) -> None:
    model = model_of(policy)
    pairs = looked(WINDOWS[window](model, 1), model.engine.law).pairs
    assert pairs is not None
    found = pairs.by_second()
    assert sorted(found.at) == found.at
    names = ("n", "observed", "modelled")
    counts, observed, modelled = (np.array(getattr(found, name)) for name in names)
    assert counts.sum() == pairs.check.requests
    assert np.average(observed, weights=counts) == pytest.approx(pairs.check.observed, rel=1e-3)
    assert np.average(modelled, weights=counts) == pytest.approx(pairs.check.modelled, rel=1e-3)
    assert np.corrcoef(observed, modelled)[0, 1] > 0.8
    if model.policy.joins_running:  # of one draw
        assert found.low is found.high is None
        return
    low, high = np.array(found.low), np.array(found.high)
    assert (low <= modelled).all()
    assert (modelled <= high).all()


def test_a_second_has_the_mean_of_its_requests() -> None:
    check = Check(observed=2.0, modelled=3.0, half_width=1.0, requests=3)
    pairs = Pairs(
        ended_at=np.array([10.2, 12.5, 10.9]),
        observed=np.array([1.0, 4.0, 2.0]),
        draws=np.array([[1.0, 5.0, 3.0], [1.0, 7.0, 5.0]]),
        check=check,
    )
    found = pairs.by_second()
    assert (found.at, found.n) == ([11.0, 13.0], [2, 1])
    assert (found.observed, found.modelled) == ([1.5, 4.0], [2.5, 6.0])
    assert (found.low, found.high) == ([2.05, 5.1], [2.95, 6.9])
    assert pairs.by_second(12.9).at == [11.0], "the second that is not over comes with the next"
    assert pairs.by_second(10.0).at == pairs.by_second(10.0).modelled == []


def test_one_server_with_equal_services_follows_lindley_to_the_last_digit() -> None:
    """Whatever arrives: here gaps of which one in a few is long."""
    model = Queue.read("single", "deterministic:value=10", "k1=0,k2=0.01,k3=0,k4=0.009")
    gaps = np.random.default_rng(3).gamma(0.4, 0.2 / 0.4, 2000)
    instants = np.cumsum(gaps)
    run = simulate_run(model.but(process=Recorded(instants)), 5.0, 2000, SEED)
    pairs = looked(snapshot_of_run(run, model), model.engine.law).pairs
    assert pairs is not None
    waits = [0.0]
    for gap in np.diff(run.arrived_at):
        waits.append(max(0.0, waits[-1] + 0.1 - gap))
    assert run.queueing_delay == pytest.approx(waits, abs=1e-9)
    assert pairs.observed.size > 1500
    for modelled in pairs.draws:
        assert modelled == pytest.approx(pairs.observed, abs=1e-9)
