"""Batches of like lengths: the chain of their bins against its exact limits, two laws and the
simulation.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.policies.ordered import order_of
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.errors import OutOfReachError, UnstableQueueError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.batches.batch_chain import solve_batch_chain
from kendall.queueing.models.batches.bin_chain import BinnedQueue, solve_bin_chain
from kendall.queueing.models.batches.binned import bins_of
from kendall.queueing.prediction import methods, predict_model
from kendall.queueing.prediction.by_length import durations_by_length
from kendall.queueing.predictors.predictor_text import parse_predictor
from kendall.queueing.queue import Queue
from kendall.queueing.result import FALLBACK, Quantiles
from kendall.queueing.simulation.experiment import simulate_model
from tests.queueing.made import made_queue

LAW = LatencyModel(k1=1e-3, k2=3e-3, k3=4e-4, k4=2e-3)
UNIFORM = parse_distribution("uniform:low=1,high=100")
SCV_1 = parse_distribution("lognormal:mu=3.8123,sigma=0.83255", 512)  # mean 64 before the limit
SCV_4 = parse_distribution("lognormal:mu=3.3542,sigma=1.26864", 512)
MEASURED = 0.04  # formula and simulation differ by less, docs/why/theory.md


def model(
    bins: int, lengths: TokenDistribution = UNIFORM, predictor: str = "exact", **settings
) -> Queue:
    given = {
        "policy": parse_policy(f"dynamic:order=binned,bins={bins}"),
        "output_tokens": lengths,
        "law": LAW,
        "predictor": parse_predictor(predictor),
    }
    return made_queue(**{**given, **settings})


def plain(queue: Queue) -> Queue:
    """Without bins."""
    return dataclasses.replace(queue, policy=parse_policy("dynamic"))


def numbers(given: Quantiles) -> dict[str, float]:
    return {name: value for name, value in given.numbers().items() if value is not None}


def rate_of(queue: Queue, load: float) -> float:
    """Requests/s, by what the batches without bins can serve."""
    return load * plain(queue).largest_stable_rate


def solved(queue: Queue, rate: float) -> BinnedQueue:
    parts = list(
        bins_of(
            queue.requests.output_tokens, order_of(queue.policy).form.bins, queue.requests.predictor
        )
    )
    return solve_bin_chain(queue.batch_time, rate, parts)


@pytest.mark.parametrize(("bins", "predictor"), [(1, "exact"), (4, "none")])
def test_one_bin_is_the_dynamic_queue(bins, predictor):
    """Also where no length is predicted, so that all are in the last bin."""
    queue = model(bins, predictor=predictor)
    found = predict_model(queue, rate_of(queue, 0.6), "exact")
    known = predict_model(plain(queue), rate_of(queue, 0.6), "exact")
    for name in ("queueing_delay", "sojourn_time", "time_to_first_token", "inter_token_latency"):
        own, other = (numbers(getattr(each, name)) for each in (found, known))
        assert own == pytest.approx(other, rel=1e-12)
    assert found.queueing_delay.p99 is not None
    assert found.batch_size.mean == pytest.approx(known.batch_size.mean, rel=1e-12)
    assert found.utilisation == pytest.approx(known.utilisation, rel=1e-12)


def test_the_chain_of_the_bins_has_the_batch_chain_as_its_limit():
    """With one bin."""
    queue = model(1)
    rate = rate_of(queue, 0.5)
    known, found = solve_batch_chain(queue.batch_time, rate, None), solved(queue, rate)
    assert found.queueing_delay == pytest.approx(known.queueing_delay, rel=1e-5)
    assert found.sojourn_time == pytest.approx(known.sojourn_time, rel=1e-5)
    assert found.batch_size == pytest.approx(known.batch_size, rel=1e-5)
    assert found.utilisation == pytest.approx(known.utilisation, rel=1e-5)


def test_a_request_that_comes_alone_waits_for_the_rest_of_another():
    """E[Wq] / lam -> E[H^2] / 2 at light load, whatever the bins."""
    queue = model(5)
    rate = rate_of(queue, 1e-4)
    half = rate * queue.batch_time.second_moment(1) / 2
    assert solved(queue, rate).queueing_delay == pytest.approx(half, rel=1e-3)


@pytest.mark.parametrize("bins", [1, 2, 3, 6])
def test_each_bin_is_served_what_arrives_and_littles_law_holds_within_the_bins(bins):
    queue = model(bins)
    found = solved(queue, rate_of(queue, 0.5))
    assert found.residual < 1.1e-3
    assert found.sizes.sum() == pytest.approx(1)
    assert found.sizes @ np.arange(1, len(found.sizes) + 1) == pytest.approx(found.batch_size)
    assert found.by_request(np.ones(len(found.sizes))) == pytest.approx(1)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("lengths", "load", "law"),
    [
        (UNIFORM, 0.6, LAW),
        (SCV_4, 0.8, LAW),
        (UNIFORM, 0.5, dataclasses.replace(LAW, cv=0.3)),
    ],
)
def test_two_bins_are_exact(lengths, load, law):
    queue = model(2, lengths, law=law)
    rate = rate_of(queue, load)
    found = predict_model(queue, rate)
    simulated = simulate_model(queue, rate, num_requests=1_000_000)
    assert found.method == "exact"
    for name in ("queueing_delay", "sojourn_time", "batch_size"):
        other = getattr(simulated, name)
        assert other.standard_error < 0.02 * other.mean
        assert abs(getattr(found, name).mean - other.mean) < 4 * other.standard_error
    assert found.utilisation == pytest.approx(simulated.utilisation, rel=0.01)
    first = simulated.time_to_first_token.mean
    assert found.time_to_first_token.mean == pytest.approx(first, rel=0.03)


POINTS = [
    *itertools.product((SCV_1, SCV_4), (4, 8), (0.6, 0.8)),
    *itertools.product((UNIFORM,), (3, 4), (0.6, 0.8)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "bins", "load"), POINTS)
def test_more_bins_are_within_what_was_measured(lengths, bins, load):
    agrees(model(bins, lengths), load)


@pytest.mark.parametrize(
    ("bins", "predictor", "load"), [(3, "exact", 0.5), (4, "lognormal:sigma=0.5", 0.4)]
)
def test_three_bins_and_wrong_predictions_too(bins, predictor, load):
    agrees(model(bins, predictor=predictor), load)


def agrees(queue: Queue, load: float) -> None:
    rate = rate_of(queue, load)
    found = predict_model(queue, rate)
    assert found.method == "approximation"
    simulated = simulate_model(queue, rate, num_requests=1_000_000)
    delay = simulated.queueing_delay
    assert delay.standard_error < 0.02 * delay.mean
    assert found.queueing_delay.mean == pytest.approx(
        delay.mean, abs=MEASURED * delay.mean + 2 * delay.standard_error
    )
    assert found.batch_size.mean == pytest.approx(simulated.batch_size.mean, rel=MEASURED)


def test_large_batches_are_simulated_and_the_answer_says_why():
    queue = model(8)
    rate = rate_of(queue, 0.95)
    with pytest.raises(OutOfReachError, match="from 8 bins is out of reach"):
        predict_model(queue, rate, "approximation")
    found = predict_model(queue, rate)
    assert found.method == "simulation"
    assert any(each.startswith(f"{FALLBACK}approximation") for each in found.assumptions)
    with pytest.raises(UnstableQueueError):
        predict_model(queue, 1.01 * queue.largest_stable_rate)


def test_a_bound_that_batches_reach_is_simulated_and_another_changes_nothing():
    queue = model(3)
    rate = rate_of(queue, 0.3)
    free = predict_model(queue, rate)
    wide, narrow = (predict_model(queue.but(max_num_seqs=bound), rate) for bound in (256, 2))
    assert wide.queueing_delay.mean == free.queueing_delay.mean
    assert narrow.method == "simulation"
    assert any("reach the engine's bound of 2" in each for each in narrow.assumptions)


def test_which_methods_there_are():
    assert methods(model(2)) == ("exact", "simulation")
    assert methods(model(3)) == ("approximation", "simulation")
    assert methods(model(3, predictor="none")) == ("exact", "simulation")
    for change in (
        {"servers": 2},
        {"patience": 1.0},
        {"scv": 2.0},
        {"policy": parse_policy("capped:max_batch_size=8,order=binned,bins=2")},
        {"policy": parse_policy("dynamic:order=spjf")},
    ):
        assert methods(model(2).but(**change)) == ("simulation",)


def test_no_durations_by_length_are_given_for_batches():
    assert durations_by_length(model(2), rate_of(model(2), 0.3)) is None
