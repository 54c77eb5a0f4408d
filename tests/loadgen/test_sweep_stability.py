"""The rule that stops an unstable point: rarely wrong at load 0.8, soon right beyond saturation.
By simulation.
"""

from __future__ import annotations

import numpy as np
import pytest

from kendall.loadgen.measures.stability import (
    BLOCKS,
    LEAST_ARRIVALS,
    Growth,
    GrowthWatch,
    backlog,
    growth,
)
from kendall.policies import parse_policy
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import parse_law
from kendall.queueing.measurement.record import Record
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_run

LAW = parse_law("k1=0.0003,k2=0.0014,k3=0.000025,k4=0.00092,cv=0.12,turnaround=0.00155")
POLICIES = (
    "single",
    "dynamic",
    "fixed:batch_size=4",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
    "continuous:max_batch_size=4",
)


def stopped_after(
    policy: str,
    load: float,
    requests: int,
    seed: np.random.SeedSequence,
    lengths: str = "geometric:mean=16",
) -> float | None:
    """Requests until the rule says unstable, as a sweep would watch the run; None where it never
    does.
    """
    model = Queue.read(parse_policy(policy), parse_distribution(lengths), LAW, max_num_seqs=16)
    rate = load * model.largest_stable_rate
    run = simulate_run(model, rate, requests, seed)
    released, watch = np.sort(run.released_at), GrowthWatch(rate, least_seconds=0.0)
    instants = np.arange(0.0, run.arrived_at[-1], max(0.1, run.arrived_at[-1] / 3000))
    number = np.searchsorted(run.arrived_at, instants) - np.searchsorted(released, instants)
    for at, waiting in zip(instants.tolist(), number.tolist(), strict=True):
        look = watch.observe(at, waiting)
        if look is not None and look.unstable:
            return at * rate
    return None


def stops(policy: str, load: float, requests: int, runs: int) -> list[float]:
    found = [
        stopped_after(policy, load, requests, seed)
        for seed in np.random.SeedSequence(4).spawn(runs)
    ]
    return [at for at in found if at is not None]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_stable_point_is_not_stopped(policy: str) -> None:
    assert stops(policy, 0.8, 4000, runs=40) == []


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_at_load_eight_tenths_fewer_than_one_run_in_a_hundred_is_stopped(policy: str) -> None:
    """No stop in 1,000 runs: below 0.4 % with 98 % confidence (0.996^1000 = 0.018)."""
    assert stops(policy, 0.8, 4000, runs=1000) == []


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_overload_of_a_half_is_stopped_within_two_thousand_requests(policy: str) -> None:
    found = stops(policy, 1.5, 2000, runs=15)
    assert len(found) == 15
    assert min(found) >= LEAST_ARRIVALS


def test_a_tenth_too_much_is_found_within_twenty_thousand_requests() -> None:
    assert len(stops("single", 1.1, 20_000, runs=15)) == 15


def test_one_jump_is_no_growth() -> None:
    """From one level to another that stays: t is about 1."""
    at = np.arange(0.0, 100.0, 0.1)
    for jump in (25.0, 50.0, 90.0):
        assert abs(growth(at, np.where(at < jump, 0.0, 500.0), 10.0).t) < 1.5


def test_growth_is_measured_in_arrivals() -> None:
    at = np.arange(0.0, 100.0, 0.1)
    noise = np.random.default_rng(0).normal(size=at.size)
    found = growth(at, 2.0 * at + noise, 10.0)
    assert found.share == pytest.approx(0.2, rel=0.02)
    assert found.unstable
    assert "growing by 20%" in str(found)
    assert not growth(at, noise, 10.0).unstable


def test_nothing_is_said_before_there_is_enough() -> None:
    watch = GrowthWatch(100.0)
    assert all(watch.observe(i / 10, 10 * i) is None for i in range(50))
    assert watch.observe(5.1, 510) is not None
    assert GrowthWatch(1.0).so_far() is None
    short = GrowthWatch(1.0)
    for i in range(BLOCKS + 1):
        short.observe(float(i), 30 * i)
    found = short.so_far()
    assert found is not None
    assert not found.unstable, f"only {found.arrivals} arrivals"


GROWING = {
    "share": 0.5,
    "half_width": 0.1,
    "t": 10.0,
    "number": 500,
    "seconds": 20.0,
    "arrivals": 1000.0,
}


@pytest.mark.parametrize(
    ("name", "enough", "too_little"),
    [
        ("arrivals", 200, 199),
        ("number", 20, 19),
        ("t", 4.01, 3.99),
        ("share", 0.0301, 0.0299),
    ],
)
def test_a_point_is_stopped_only_where_every_condition_is_met(
    name: str, enough: float, too_little: float
) -> None:
    assert Growth(**GROWING | {name: enough}).unstable  # type: ignore[arg-type]
    few = {"share": 0.1} if name == "arrivals" else {}
    assert not Growth(**GROWING | few | {name: too_little}).unstable  # type: ignore[arg-type]


def test_fewer_arrivals_will_do_where_much_of_them_stays() -> None:
    """A minute at 2/s of a server that answers 1/s."""
    assert Growth(**GROWING | {"arrivals": 96.0, "number": 60}).unstable  # type: ignore[arg-type]
    assert not Growth(**GROWING | {"arrivals": 49.0, "number": 60}).unstable  # type: ignore[arg-type]


def test_growth_has_the_sign_of_the_change_and_its_share_of_the_arrivals() -> None:
    """100 s at 10 requests/s: of the last 80 s each leaves 2 behind, or takes 2 away."""
    at = np.arange(0.0, 100.5, 0.5)
    noise = np.random.default_rng(0).normal(0, 0.5, at.size)
    for slope in (2.0, -2.0):
        found = growth(at, 300 + slope * at + noise, 10.0)
        assert found.share == pytest.approx(slope / 10, rel=0.02)
        assert found.t * slope > 0
        assert abs(found.t) > 20
        assert found.half_width < 0.05
        assert found.unstable == (slope > 0)
        assert (found.seconds, found.arrivals) == (100.0, pytest.approx(800.0))


def test_the_first_look_waits_for_enough_arrivals_after_the_warm_up() -> None:
    """250 arrivals at 10/s, of which the first fifth is left out; then at every 15 % more."""
    watch = GrowthWatch(10.0, least_seconds=0.0)
    looks = [at for at in range(60) if watch.observe(float(at), at) is not None]
    assert looks == [25, 29, 34, 40, 46, 53]


def test_growth_of_a_run_counts_its_own_rate() -> None:
    """201 requests, the first long before the others, none of which is ever answered."""
    begins = [0.0, *(10.0 + index / 20 for index in range(200))]
    records = [
        Record(request_id=str(at), outcome="failed", intended_at=at, sent_at=at) for at in begins
    ]
    found = backlog(records)
    assert found is not None
    assert found.seconds == pytest.approx(19.95)
    assert found.arrivals == pytest.approx(0.8 * 200)
    assert found.number == 201
