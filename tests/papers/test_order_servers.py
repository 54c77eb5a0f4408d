"""Orders on several servers: the compiled sample paths."""

import math

import numpy as np
import pytest

from kendall.queueing.models.mgc import mmc
from kendall.queueing.models.soap.orders import DrawnJobs, LeastAttainedRanks
from kendall.queueing.models.soap.ranks import Ranks
from kendall.queueing.simulation.orders.kernels import mean_work_ahead, run_ranks
from papers.sample_paths import (
    Replications,
    can_rise,
    controlled,
    rank_rows,
    simulate_order,
    sojourns,
)
from papers.server_kernels import run_least_attained, run_ranks_on_servers
from tests.queueing.orders_made import LAWS, ORDERS, SOURCES

RANKED = [name for name in ORDERS if name != "fb"]


def drawn(name, count, load, seed=1):
    rng = np.random.default_rng(seed)
    arrived_at = np.cumsum(rng.exponential(1 / load, count))
    sizes = LAWS["exponential"].sample(rng, count)
    return arrived_at, ORDERS[name].draw(rng, sizes, SOURCES["exponential"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKED)
def test_several_servers_that_are_one_give_the_path_of_one_to_the_last_bit(name):
    arrived_at, jobs = drawn(name, 5000, 0.9)
    rows = rank_rows(jobs)
    one = run_ranks(arrived_at, jobs.totals, rows, 0.0)
    for rising in {can_rise(jobs.ranks), True}:
        assert np.array_equal(run_ranks_on_servers(arrived_at, jobs.totals, rows, 1, rising), one)


def stepped(name, arrived_at, jobs, servers, step):
    """The same by small steps of time: in each, the jobs that go first are served."""
    ages, left = np.zeros(len(arrived_at)), np.full(len(arrived_at), np.nan)
    now = 0.0
    while np.isnan(left).any():
        here = np.flatnonzero((arrived_at <= now) & np.isnan(left))
        if isinstance(ORDERS[name], LeastAttainedRanks):
            keys = [(0.0, ages[job], job) for job in here]
        else:
            keys = [rank_at(jobs.ranks, job, ages[job]) for job in here]
        served = [here[k] for k in sorted(range(len(here)), key=keys.__getitem__)[:servers]]
        ages[served] += step
        now += step
        left[[job for job in served if ages[job] >= jobs.totals[job]]] = now
    return left - arrived_at


def in_ticks(arrived_at, totals, ranks, resume):
    """Departures from one server in whole seconds: in each, the first by rank is served, and one
    that was interrupted first as long as it resumes.
    """
    start, level, value, slope = ranks.start, ranks.level, ranks.value, ranks.slope
    ages, owed = np.zeros(len(totals), np.int64), np.zeros(len(totals), np.int64)
    left, now, last = np.full(len(totals), np.nan), 0, -1

    def key(job):
        piece = int(np.flatnonzero(start[job] <= ages[job])[-1])
        own = value[job, piece] + slope[job, piece] * (ages[job] - start[job, piece])
        return level[job, piece], own, -job if level[job, piece] == ranks.last_come else job

    while np.isnan(left).any():
        here = np.flatnonzero((arrived_at <= now) & np.isnan(left))
        job = min(here, key=key, default=-1)
        if last >= 0 and job != last and np.isnan(left[last]) and ages[last] > 0:
            owed[last] = resume
        now, last = now + 1, job
        if job < 0:
            continue
        if owed[job] > 0:
            owed[job] -= 1
            continue
        ages[job] += 1
        if ages[job] == totals[job]:
            left[job] = now
    return left


@pytest.mark.parametrize("resume", [0, 2])
@pytest.mark.parametrize("last_come", [None, 1])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_fall_or_jump_are_served_as_second_by_second(seed, last_come, resume):
    rng, count = np.random.default_rng(seed), 60
    arrived_at = np.cumsum(rng.integers(0, 12, count)).astype(float)
    totals = rng.integers(1, 12, count).astype(float)
    second = rng.integers(1, 9, count).astype(float)
    third = np.where(rng.random(count) < 0.5, second + rng.integers(1, 5, count), np.inf)
    start = np.column_stack([np.zeros(count), second, third])
    level, value = rng.integers(0, 3, (2, count, 3)).astype(float)
    slope = -rng.integers(0, 3, (count, 3)) / 4
    jobs = DrawnJobs(totals, Ranks(start, level, value, slope, last_come), float(resume))
    found = sojourns(ORDERS["fifo"], arrived_at, jobs)
    expected = in_ticks(arrived_at, totals, jobs.ranks, resume) - arrived_at
    assert found == pytest.approx(expected, abs=1e-6)


def test_unfinished_work_is_found_by_lindleys_recursion():
    """The second finds 3 - 2, the third 1 + 4 - 1, the fourth nothing."""
    arrived_at, sizes = np.array([0.0, 2.0, 3.0, 9.0]), np.array([3.0, 4.0, 1.0, 5.0])
    assert mean_work_ahead(arrived_at, sizes, 1, 3) == pytest.approx((1 + 4) / 2)
    assert mean_work_ahead(arrived_at, sizes, 2, 4) == pytest.approx((4 + 0) / 2)
    assert mean_work_ahead(arrived_at, sizes, 0, 4) == pytest.approx(5 / 4)


def rank_at(ranks, job, age):
    begun = ranks.start[job] <= age if age > 0 else np.arange(ranks.start.shape[1]) == 0
    piece = int(np.flatnonzero(begun)[-1])
    level = ranks.level[job, piece]
    value = ranks.value[job, piece] + ranks.slope[job, piece] * (age - ranks.start[job, piece])
    return level, value, -job if level == ranks.last_come else job


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", ORDERS)
def test_a_path_is_that_of_serving_who_goes_first_in_small_steps(name, servers):
    """Equal ranks take turns under bounce: in steps, or by the slack of the kernel."""
    arrived_at, jobs = drawn(name, 20, 1.3 * servers, seed=servers)
    found = sojourns(ORDERS[name], arrived_at, jobs, servers)
    expected = stepped(name, arrived_at, jobs, servers, 1e-3)
    assert found == pytest.approx(expected, abs=0.1 if name == "bounce" else 0.03)


@pytest.mark.parametrize(
    ("servers", "arrived_at", "sizes", "ended"),
    [
        # the second is served alone until both have had 0.25 s, then each at half speed
        (1, [0.0, 0.25], [1.0, 2.0], [2.0, 3.0]),
        (1, [0.0, 0.25], [2.0, 1.0], [3.0, 2.0]),
        (1, [0.0, 0.25], [1.0, 1.0], [2.0, 2.0]),
        # the third has one of two servers until all have had 0.5 s, then each two thirds of one
        (2, [0.0, 0.0, 0.25], [0.75, 1.75, 2.75], [1.125, 2.125, 3.125]),
        (2, [0.0, 0.0, 0.25], [2.75, 0.75, 1.75], [3.125, 1.125, 2.125]),
    ],
)
def test_jobs_of_one_age_share_the_servers_and_leave_in_the_order_of_their_sizes(
    servers, arrived_at, sizes, ended
):
    found = run_least_attained(np.array(arrived_at), np.array(sizes), servers)
    assert found == pytest.approx(np.array(ended))


@pytest.mark.parametrize("name", ["fb", "levels", "fifo"])
def test_orders_that_ask_nothing_leave_the_mean_of_exponential_sizes(name):
    """In M/M/4 each busy server ends a job at rate 1, whichever job it serves."""
    found = simulate_order(
        ORDERS[name], LAWS["exponential"], 3.2, runs=Replications(20_000, 24, 5), servers=4
    )
    exact = mmc(3.2, 1.0, 4).mean_sojourn
    assert found.standard_error < 0.02 * exact
    assert abs(found.mean - exact) < 4 * found.standard_error


def test_a_sojourn_that_follows_its_control_variates_is_known_without_error():
    work, size = np.array([1.0, 2.0, 4.0, 9.0, 7.5]), np.array([1.5, 0.5, 1.0, 2.0, 1.25])
    runs = np.column_stack([3 + 2 * work + 0.5 * size, work, size])
    found = controlled(runs, (5.0, 1.0), 100)
    assert found.mean == pytest.approx(3 + 2 * 5.0 + 0.5, rel=1e-12)
    assert found.standard_error == pytest.approx(0.0, abs=1e-9)
    assert found.jobs == 100


def test_without_control_variates_the_standard_error_is_that_of_a_mean():
    runs = np.array([[1.0], [2.0], [4.0], [9.0]])
    found = controlled(runs, (), 100)
    assert found.mean == pytest.approx(4.0, rel=1e-12)
    assert found.standard_error == pytest.approx(np.std(runs, ddof=1) / 2, rel=1e-12)


def test_the_standard_error_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(6)
    off = []
    for _ in range(2000):
        work, size, noise = rng.normal(size=(3, 12))
        found = controlled(np.column_stack([work - size + noise, work, size]), (0.0, 0.0), 1)
        off.append(found.mean / found.standard_error)
    assert np.std(off) == pytest.approx(math.sqrt(9 / 7), rel=0.05)  # Student's, 9 degrees
