"""A run of the advised length says what was asked: its interval covers, is narrow enough, and is
seldom too short.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.policies.text import SpecError
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.law import LatencyModel, parse_law
from kendall.queueing.measurement.batch_means import Interval
from kendall.queueing.measurement.mean_interval import plug_in
from kendall.queueing.measurement.statistics import FloatArray, find_warm_up, mean_interval
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import draw_jobs, simulate_run
from kendall.queueing.simulation.run_length import (
    LEAST_MEMORIES,
    RunLength,
    advise_model,
    describe,
    exact_moments,
    pilot_moments,
)
from tests.server.harness import replay
from tests.virtual_time import run_virtual

LAW = LatencyModel(k1=0.002, k2=0.01, k3=0.0002, k4=0.002)
LENGTHS = parse_distribution("uniform:low=1,high=60")
ONE = parse_distribution("deterministic:value=1")
EXPONENTIAL = LatencyModel(k4=1.0, cv=1.0)  # a residual with cv 1 on one token of one second
CAPPED = "capped:max_batch_size=8"
RUNS = 200
CELLS = [(policy, load) for policy in ("single", CAPPED) for load in (0.5, 0.7, 0.9)]


def model_of(policy: str, law: LatencyModel = LAW) -> Queue:
    return Queue.read(parse_policy(policy), LENGTHS, law, max_num_seqs=64)


def at_load(model: Queue, load: float) -> float:
    return load * model.largest_stable_rate


def printed(delays: FloatArray) -> Interval:
    """What a report says of a run: its warm-up dropped, then the interval."""
    return mean_interval(delays[find_warm_up(delays).dropped :])


def runs_of_advised_length(
    policy: str, load: float, relative: float
) -> tuple[list[Interval], float]:
    model = model_of(policy)
    rate = at_load(model, load)
    advice = advise_model(model, rate, relative=relative)
    seeds = (np.random.SeedSequence((seed, 4)) for seed in range(RUNS))
    exact = predict_model(model, rate)
    assert exact.method == "exact"
    intervals = [
        printed(simulate_run(model, rate, advice.requests, seed).queueing_delay) for seed in seeds
    ]
    return intervals, float(exact.queueing_delay.mean or 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "load"), CELLS)
def test_intervals_of_runs_as_long_as_advised_cover_the_exact_mean_delay(
    policy: str, load: float
) -> None:
    """200 runs of the length advised for +-20 %: 88 % cover and are not too short, at most 10 % are
    too short, nine of ten are as narrow.

    The runs are the simulator's: on virtual time the gateway takes about a millisecond a request,
    so 200 runs at load 0.9 would take it hours. That its delays are the same numbers, not only the
    same law, is the test after this one.
    """
    intervals, exact = runs_of_advised_length(policy, load, 0.2)
    assert (
        sum(interval.covers(exact) and not interval.too_short for interval in intervals)
        >= 0.88 * RUNS
    )
    assert sum(interval.too_short for interval in intervals) <= 0.1 * RUNS
    assert np.quantile([interval.relative for interval in intervals], 0.9) < 0.21


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "load", "seeds", "most"),
    [
        ("single", 0.5, 1, 5000),
        (CAPPED, 0.5, 4, 5000),
        (CAPPED, 0.7, 2, 5000),
        (CAPPED, 0.9, 1, 6000),
    ],
)
def test_the_gateway_on_virtual_time_prints_the_interval_that_the_simulator_prints(
    policy: str, load: float, seeds: int, most: int
) -> None:
    """The runs of the test above, as long as advised or as their first `most` requests, through
    batcher and emulated engine.
    """
    model = model_of(policy)
    rate = at_load(model, load)
    count = min(most, advise_model(model, rate, relative=0.2).requests)
    for seed in range(seeds):
        jobs, _ = draw_jobs(model, rate, count, np.random.SeedSequence((seed, 4)))
        records = run_virtual(
            replay(model.policy, [(job.request, job.output_tokens) for job in jobs], LAW)
        )
        live = np.array(
            [
                record.queueing_delay
                for record in sorted(records, key=lambda record: int(record.request_id))
            ]
        )
        simulated = simulate_run(
            model, rate, count, np.random.SeedSequence((seed, 4))
        ).queueing_delay
        np.testing.assert_allclose(live, simulated, rtol=0, atol=1e-9)
        assert printed(live).half_width == pytest.approx(printed(simulated).half_width, rel=1e-9)


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7, 0.9])
def test_the_variance_of_the_mean_wait_in_an_mm1_queue_is_daleys(load: float) -> None:
    model = Queue.read(parse_policy("single"), ONE, EXPONENTIAL)
    found = exact_moments(model, load)
    assert found.mean == pytest.approx(load / (1 - load))
    assert found.asymptotic_variance == pytest.approx(
        load * (2 + 5 * load - 4 * load**2 + load**3) / (1 - load) ** 4
    )


@pytest.mark.parametrize("law", ["k1=0,k2=0.01,k3=0,k4=0.002", "k1=0,k2=0.01,k3=0,k4=0.002,cv=0.8"])
def test_the_pilot_finds_the_exact_variance_of_the_mean_wait(law: str) -> None:
    model = model_of("single", parse_law(law))
    rate = at_load(model, 0.7)
    exact, pilot = exact_moments(model, rate), pilot_moments(model, rate, "queueing_delay")
    assert pilot.mean == pytest.approx(exact.mean, rel=0.02)
    assert pilot.variance == pytest.approx(exact.variance, rel=0.05)
    assert pilot.asymptotic_variance == pytest.approx(exact.asymptotic_variance, rel=0.15)


def test_the_variance_of_simulated_means_is_the_one_that_was_planned_with() -> None:
    model = model_of("single")
    rate, count = at_load(model, 0.7), 20_000
    exact = exact_moments(model, rate)
    means = [
        simulate_run(model, rate, count, np.random.SeedSequence(seed)).queueing_delay.mean()
        for seed in range(400)
    ]
    assert np.var(means) * count == pytest.approx(
        exact.asymptotic_variance, rel=0.2
    )  # three standard errors


def test_a_finer_precision_takes_more_requests_by_the_square_of_the_unwidened_interval() -> None:
    """Twice the precision takes four times the requests in the limit; a rough one needs more, as
    its interval is widened more.
    """
    model = model_of("single")
    rough, fine, finer, finest = (
        advise_model(model, at_load(model, 0.7), relative=relative)
        for relative in (0.1, 0.05, 0.002, 0.001)
    )
    assert fine.requests == pytest.approx(
        (plug_in(0.1) / plug_in(0.05)) ** 2 * rough.requests, abs=4
    )
    assert finest.requests == pytest.approx(4 * finer.requests, rel=0.01)
    assert rough.relative_half_width == pytest.approx(0.1)
    assert fine.seconds == fine.requests / at_load(model, 0.7)


def test_no_run_is_advised_that_is_too_short_for_its_interval() -> None:
    """Uncapped batches vary little and remember long: +-25 % alone would ask for a run that
    batch means cannot judge.
    """
    model = model_of("dynamic")
    advice = advise_model(model, at_load(model, 0.8), relative=0.25)
    assert advice.requests >= LEAST_MEMORIES * advice.memory
    assert advice.relative_half_width < 0.2


def test_a_duration_that_does_not_vary_is_advised_the_least_length() -> None:
    """Regular arrivals, each served alone in a quarter of a second."""
    law = LatencyModel(k4=0.25)
    model = Queue.read("continuous:max_batch_size=4", ONE, law, arrival_scv=0.0)
    advice = advise_model(model, 0.5)
    assert (advice.memory, advice.relative_half_width) == (1.0, 0.0)
    assert advice.requests == math.ceil(LEAST_MEMORIES / 0.95)


def test_a_policy_that_joins_running_batches_is_advised_by_its_sojourn() -> None:
    advice = advise_model(
        Queue.read("continuous:max_batch_size=4", LENGTHS, LAW), 4.0, relative=0.2
    )
    assert advice.quantity == "sojourn_time"
    single = Queue.read("single", LENGTHS, LAW)
    assert advise_model(single, 4.0, quantity="sojourn_time").how.startswith("pilot of")


def test_arrivals_that_cluster_take_a_longer_run_than_poisson_arrivals() -> None:
    poisson, clustered = (
        advise_model(Queue.read("single", LENGTHS, LAW, arrival_scv=scv), 9.0) for scv in (1.0, 8.0)
    )
    assert (poisson.how, clustered.how) == ("exact", "pilot of 2,000,000 requests")
    assert clustered.requests > 4 * poisson.requests


def test_advice_for_a_lossy_queue_comes_from_a_pilot_even_above_load_1() -> None:
    lossy = advise_model(Queue.read("single", LENGTHS, LAW, patience=1.0), 20.0)
    assert lossy.load > 1
    assert lossy.how.startswith("pilot of")


def test_one_line_tells_load_length_and_precision() -> None:
    advice = RunLength(11_940, 6000.0, 0.1, 0.95, 0.9, "queueing_delay", 30.0, "exact")
    assert describe(advice) == (
        "load 0.90: 12,000 requests (100 min) for +-10 % of the mean queueing delay in nine "
        "runs of ten (exact)"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"relative": 0.0}, "got relative=0.0; expected 0 < relative <= 0.25"),
        ({"relative": 0.5}, "counts as too short"),
        ({"confidence": 1.0}, "got confidence=1.0"),
        ({"confidence": 0.0}, "got confidence=0.0"),
    ],
)
def test_what_cannot_be_asked_is_refused(given: dict[str, float], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        advise_model(Queue.read("single", LENGTHS, LAW), 4.0, **given)  # type: ignore[arg-type]


def test_an_unstable_queue_has_no_run_length_and_one_where_nobody_waits_none_either() -> None:
    with pytest.raises(UnstableQueueError):
        advise_model(Queue.read("single", LENGTHS, LAW), 1000.0)
    with pytest.raises(SpecError, match="no request waits"):
        advise_model(
            Queue.read("continuous:max_batch_size=64", ONE, LAW), 0.01, quantity="queueing_delay"
        )
