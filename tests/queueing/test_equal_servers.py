"""Servers of one queue that are not equally fast are named; those that are, are not."""

from __future__ import annotations

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.queueing.control.assess import Assessment, assess
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.assumptions.engine_assumptions import equal_servers
from kendall.queueing.estimation.speed.batch_times import BatchTimes, slot_times, times_by_server
from kendall.queueing.estimation.speed.server_speeds import LEAST, speeds_of
from kendall.queueing.estimation.speed.speeds import Speeds
from kendall.queueing.estimation.window.snapshot import Snapshot
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.latency.law import parse_law
from kendall.queueing.measurement.record import Record
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import draw_jobs
from kendall.queueing.simulation.reference import Driver, SimulatedEngine
from tests.queueing.estimation_runs import seen

LAW = parse_law("k1=0.0003,k2=0.0014,k3=0.00002,k4=0.0012,cv=0.1")
LENGTHS = parse_distribution("uniform:low=1,high=31")
POLICIES = ("single", "capped:max_batch_size=8", "continuous:max_batch_size=4")


def window(policy: str, speeds: tuple[float, ...], count: int = 6000) -> Snapshot:
    """`speeds`: how many times as long as the law's own each server takes."""
    model = Queue.read(policy, LENGTHS, LAW, servers=len(speeds), max_num_seqs=16)
    rate = 0.6 * model.largest_stable_rate / max(speeds)
    jobs, rngs = draw_jobs(model, rate, count, np.random.SeedSequence(3))
    engines = [
        SimulatedEngine(LAW.at_speed(speed), max_batch_size=16).driven(server, rng)
        for server, (speed, rng) in enumerate(zip(speeds, rngs, strict=True))
    ]
    records: list[Record] = Driver(model.policy, jobs, engines).run()
    return seen(records, policy, servers=len(speeds))


def assessed(policy: str, speeds: tuple[float, ...]) -> Assessment:
    return assess(
        window(policy, speeds),
        LAW,
        QueueLimits(servers=len(speeds), engine=EngineBounds(max_num_seqs=16)),
    )


def told(found: Assessment) -> tuple[bool | None, str]:
    (mine,) = [each for each in found.compared.assumptions if each.name == "equal_servers"]
    return mine.holds, mine.says


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_one_that_is_slower_is_named(policy: str) -> None:
    holds, says = told(assessed(policy, (1.0, 1.5)))
    assert holds is False
    assert says.startswith("server 1 takes 1.")
    assert " times as long as server 0 for the same work" in says
    assert float(says.split()[3]) == pytest.approx(1.5, rel=0.1)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_work_of_each_is_measured_against_its_own_speed(policy: str) -> None:
    parsed, served = parse_policy(policy), window(policy, (1.0, 1.5))
    found = Speeds.of(parsed, served, LAW)
    assert found.factors[1] / found.factors[0] == pytest.approx(1.5, rel=0.05)
    slots = slot_times(served.mine, LAW) if parsed.joins_running else []
    raw = times_by_server(parsed, served.mine, LAW, slots)
    assert found.times.fitted.sum() == pytest.approx(
        sum(found.factors[server] * times.fitted.sum() for server, times in raw.items())
    )
    for server, (own, slot) in enumerate(zip(found.slots, slots, strict=True)):
        assert own.fitted == pytest.approx(found.factors[server] * slot.fitted)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_equal_ones_are_equal(policy: str) -> None:
    assert told(assessed(policy, (1.2, 1.2, 1.2))) == (True, "the servers are equally fast")


def test_a_difference_within_the_tolerance_is_none() -> None:
    assert told(assessed("single", (1.0, 1.06)))[0] is True


def test_of_one_server_nothing_is_said() -> None:
    names = [each.name for each in assessed("single", (1.0,)).compared.assumptions]
    assert "equal_servers" not in names


@pytest.mark.parametrize(
    ("count", "noise", "holds"),
    [(LEAST, 0.01, False), (LEAST - 1, 0.01, None), (100, 1.0, True)],
)
def test_few_batches_and_noise_say_nothing(count: int, noise: float, holds: bool | None) -> None:
    """A ratio of 1.5 that is as wide as it is large is none."""
    chance = np.random.default_rng(1)

    def times(speed: float) -> BatchTimes:
        fitted = np.ones(count)
        measured = speed * np.exp(noise * chance.standard_normal(count))
        return BatchTimes(np.arange(count) * 2.0, measured, *(fitted,) * 4)

    assert equal_servers(speeds_of({0: times(1.0), 1: times(1.5)})).holds is holds
