"""Scenarios of the slides, simulated: compiled paths against slow ones written independently."""

import dataclasses

import numpy as np
import pytest

from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.soap.orders import ThresholdRanks
from kendall.queueing.models.soap.queue import solve_order
from kendall.queueing.prediction import predict_model
from kendall.queueing.predictors.sizes import exponential_sizes
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import run_trace
from papers.scenarios import many_queues, phases
from papers.scenarios.many_queues import ChoiceWork, drawn_choices, run_choices
from papers.scenarios.phases import PhaseWork, queue_of_phases
from papers.scenarios.runs import Measured, Replications, measured, ratio
from papers.scenarios.several_models import simulate_models
from papers.two_choices import TwoClasses, two_choices
from tests.papers.scenario_paths import slow_choices, slow_phases

SEEDS = (1, 2, 3)


def arrivals(rng, count, rate=1.0):
    return np.cumsum(rng.exponential(size=count)) / rate


def agrees(found, exact):
    assert found.standard_error < 0.03 * exact  # power guard
    assert abs(found.mean - exact) < 4 * found.standard_error


# runs


def test_a_mean_leaves_the_ends_of_each_run_out_and_its_error_is_over_the_runs():
    runs = Replications(100, 4, 5)
    values = iter(np.arange(4.0))

    def run(rng):
        column = np.full(100, next(values))
        column[:10] = column[95:] = 1e9
        return column, rng.random(100)

    mean, random = measured(run, runs)
    assert mean == Measured(1.5, pytest.approx(np.arange(4).std(ddof=1) / 2))
    assert 0.3 < random.mean < 0.7
    again = measured(lambda rng: (np.zeros(100), rng.random(100)), runs)[1]
    assert again == random


def test_the_error_of_a_ratio_adds_relative_errors_in_quadrature():
    assert ratio(Measured(6.0, 0.3), Measured(2.0, 0.04)) == Measured(
        3.0, pytest.approx(3 * np.hypot(0.05, 0.02))
    )


# phases


WORK = PhaseWork(
    arrival_rate=1.0,
    kinds=(
        (0.6, parse_distribution("geometric:mean=20"), parse_distribution("geometric:mean=30")),
        (0.4, parse_distribution("uniform:low=1,high=90"), parse_distribution("geometric:mean=9")),
    ),
    law=LatencyModel(k2=0.1, kp=0.0137, k4=0.0211),
)


def at_rate(rate):
    return dataclasses.replace(WORK, arrival_rate=rate)


@pytest.mark.parametrize(
    ("policy", "dedicated"),
    [("single", 1), ("single:order=spjf,by=service", 1), ("single:order=prefill-first", 0)],
)
def test_the_layouts_are_queues_of_the_product(policy, dedicated):
    work = at_rate(1.3)
    drawn = work.drawn(np.random.default_rng(4), 200)
    seconds = work.phases(drawn)
    queue = queue_of_phases(work, policy, 2 - dedicated, dedicated)
    rng = np.random.default_rng(0)
    run = run_trace(queue, dataclasses.replace(drawn, residuals=rng.spawn(2)))
    ranks = seconds if "spjf" in policy else np.array([[0.0], [not dedicated]]) + 0 * seconds
    expected = slow_phases(drawn.arrived_at, seconds, ranks, 2, prefill=dedicated)
    assert run.released_at == pytest.approx(np.array(expected[1]), rel=1e-12)


def test_means_of_phases_are_those_of_the_queue():
    """M/G/1 with the sum of both phases: Pollaczek and Khinchine."""
    tokens = parse_distribution("geometric:mean=20")
    work = PhaseWork(
        arrival_rate=1.0, kinds=((1.0, tokens, tokens),), law=LatencyModel(k2=0.1, kp=0.01, k4=0.02)
    )
    prefill, decode = work.seconds
    assert (prefill, decode) == pytest.approx((0.3, 0.4))
    variance = 20 * 19 * (0.01**2 + 0.02**2)
    exact = ((prefill + decode) ** 2 + variance) / 2 / (1 - 0.7) + 0.7
    queue = queue_of_phases(work, "single", 1)
    found, first = phases.simulate_queue(work, queue, Replications(20_000, 16, 3))
    assert found.mean - first.mean == pytest.approx(decode, rel=0.01)
    agrees(found, exact)


def test_kinds_of_requests_are_mixed_by_their_probabilities():
    short, long = (parse_distribution(f"deterministic:value={n}") for n in (10, 50))
    work = PhaseWork(
        arrival_rate=2.0,
        kinds=((0.25, short, long), (0.75, long, short)),
        law=LatencyModel(k1=0.5, k2=0.25, kp=0.1, k3=1.0, k4=1.0, speed=2.0),
    )
    drawn = work.drawn(np.random.default_rng(1), 20_000)
    assert drawn.arrived_at[-1] == pytest.approx(10_000, rel=0.03)
    seconds = work.phases(drawn)
    kinds = {(1.5 + 2.0, 200.0), (1.5 + 10.0, 40.0)}
    assert {tuple(np.round(row, 9)) for row in seconds.T} == kinds
    assert seconds.mean(axis=1) == pytest.approx(work.seconds, rel=0.03)
    assert work.seconds == pytest.approx((1.5 + 0.2 * (2.5 + 37.5), 4 * (12.5 + 7.5)))


# several models


def test_the_slides_models_are_the_queue_of_the_product():
    """M/G/1 of the two models, first come, first served; loading longer takes longer."""
    runs = Replications(20_000, 8, 4)
    small = "threshold=30,switch={},latency=a=0.005,c=0.05"
    queues = [
        Queue.read(
            "single",
            "lognormal:mu=3,sigma=1",
            "a=0.02,c=0.1",
            max_output_tokens=400,
            predictor="lognormal:sigma=0.5",
            second_model=small.format(switch),
        )
        for switch in (0, 0.1)
    ]
    found = [simulate_models(queue, 1.0, runs) for queue in queues]
    for queue, each in zip(queues, found, strict=True):
        agrees(each, predict_model(queue, 1.0, "exact").sojourn_time.mean)
    assert found[0].mean < found[1].mean


# many queues


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("servers", "choices"), [(1, 1), (3, 1), (3, 2), (5, 3)])
def test_jobs_of_many_queues_follow_a_path_made_one_event_at_a_time(servers, choices, seed):
    classes = TwoClasses(0.5, 2.0, 1 / 3, 0.2, 0.1)
    rng = np.random.default_rng(seed)
    work = drawn_choices(rng, 120, classes, 0.95 * servers, (choices, servers))
    found = run_choices(work, servers)
    assert found == pytest.approx(np.array(slow_choices(work, servers)), rel=1e-9)


def test_picked_servers_differ_and_each_is_picked_alike():
    work = drawn_choices(np.random.default_rng(1), 30_000, TwoClasses(1, 1, 0.5), 1.0, (3, 5))
    assert all(len(set(row)) == 3 for row in work.picked[:2000].tolist())
    counts = np.array([np.bincount(column, minlength=5) for column in work.picked.T]) / 30_000
    assert counts == pytest.approx(np.full((3, 5), 0.2), abs=0.01)


def test_jobs_have_the_law_and_the_bits_that_were_asked():
    classes = TwoClasses(0.5, 2.0, 0.25, 0.2, 0.1)
    work = drawn_choices(np.random.default_rng(2), 100_000, classes, 4.0, (1, 1))
    assert work.arrived_at[-1] == pytest.approx(25_000, rel=0.02)
    assert work.seconds.mean() == pytest.approx(classes.mean, rel=0.03)
    assert work.long.mean() == pytest.approx(classes.predicted_long, rel=0.03)
    short_share, long_share = classes.truly_long()
    means = [0.5 + 1.5 * share for share in (short_share, long_share)]
    for bit in (0, 1):
        assert work.seconds[work.long == bit].mean() == pytest.approx(means[bit], rel=0.03)


@pytest.mark.slow
def test_one_choice_is_a_queue_of_two_classes():
    """Exponential sizes, the bit by a threshold: M/G/1 with preemptive priority."""
    exact = solve_order(
        ThresholdRanks(1.0, preemptive=True, last_come=False), exponential_sizes(), 0.7
    )

    def run(rng):
        sizes = rng.exponential(size=50_000)
        work = ChoiceWork(
            arrivals(rng, 50_000, 0.7 * 4),
            sizes,
            (sizes > 1).astype(np.int64),
            rng.integers(0, 4, (50_000, 1)),
        )
        return (run_choices(work, 4) - work.arrived_at,)

    (found,) = measured(run, Replications(50_000, 24, 6))
    agrees(found, exact.sojourn)


def test_many_queues_are_near_the_limit_of_many_queues():
    classes = TwoClasses(0.5, 2.0, 1 / 3, 0.2, 0.2)
    found = many_queues.simulate_choices(classes, 0.8, 50, 2, Replications(40_000, 12, 3))
    limit = two_choices(classes, 0.8, most=18).sojourn
    assert found.standard_error < 0.01 * limit
    assert limit - 2 * found.standard_error < found.mean < 1.05 * limit


@pytest.mark.slow
def test_the_distance_from_the_limit_falls_as_the_number_of_queues_grows():
    classes = TwoClasses(0.5, 2.0, 1 / 3)
    limit = two_choices(classes, 0.9).sojourn
    off = [
        many_queues.simulate_choices(classes, 0.9, servers, 2, Replications(200_000, 16, 8)).mean
        / limit
        - 1
        for servers in (5, 20, 80)
    ]
    assert off[0] > 3 * off[1] > 0
    assert off[1] > 2 * off[2] > 0


@pytest.mark.parametrize(("choices", "load"), [(0, 0.5), (3, 0.5), (1, 1.0), (1, 0.0)])
def test_impossible_choices_are_refused(choices, load):
    with pytest.raises(SpecError, match="of 2 servers at load"):
        many_queues.simulate_choices(TwoClasses(1, 1, 0.5), load, 2, choices, Replications(10, 2))
