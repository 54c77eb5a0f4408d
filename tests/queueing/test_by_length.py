"""Durations by output length under an order of service: their means are those of the queue, and
shortest first has its closed form.
"""

from __future__ import annotations

import numpy as np
import pytest

from kendall.queueing.distributions.token_distribution import TokenDistribution
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.prediction import methods, predict_model
from kendall.queueing.prediction.by_length import ByLength, durations_by_length
from kendall.queueing.queue import Queue

LAW = "k1=0.0003,k2=0.001,k3=0.0002,k4=0.001,cv=0.2,turnaround=0.001"
ORDERED = (
    "single:order=spjf",
    "single:order=sprpt",
    "single:order=trail,c=0.5",
    "continuous:max_batch_size=4,order=spjf",
    "continuous:max_batch_size=4,order=threshold,threshold=12",
)


def model(policy: str, **limits: object) -> Queue:
    given = {"predictor": "lognormal:sigma=0.5", "max_output_tokens": 64} | limits
    return Queue.read(policy, "lognormal:mu=2.5,sigma=0.8", LAW, **given)


@pytest.mark.parametrize("policy", ["single:order=fb", "continuous:max_batch_size=4,order=pspjf"])
def test_where_only_a_simulation_knows_what_interruptions_cost_there_are_none(policy: str) -> None:
    queue = model(policy)
    assert methods(queue) == ("simulation",)
    assert durations_by_length(queue, 0.5 * queue.largest_stable_rate) is None


def means(found: ByLength, lengths: TokenDistribution) -> tuple[float, float]:
    counts = np.flatnonzero(lengths.pmf)
    delay, service = found.at(counts.astype(float))
    return float(lengths.pmf[counts] @ delay), float(lengths.pmf[counts] @ service)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", [*ORDERED, "single", "continuous:max_batch_size=4"])
@pytest.mark.parametrize("load", [0.3, 0.8])
def test_the_means_over_all_lengths_are_those_of_the_queue(policy: str, load: float) -> None:
    queue = model(policy)
    rate = load * queue.largest_stable_rate
    formula = methods(queue)[0]
    found, predicted = durations_by_length(queue, rate), predict_model(queue, rate, formula)
    assert found is not None
    delay, service = means(found, queue.requests.output_tokens)
    assert delay == pytest.approx(predicted.queueing_delay.mean, rel=1e-9)
    assert delay + service == pytest.approx(predicted.sojourn_time.mean, rel=1e-9)
    assert (np.diff(found.service) > 0).all()


def test_several_servers_share_out_their_mean_as_one_does() -> None:
    one, many = model("single:order=spjf"), model("single:order=spjf", servers=4)
    found = [durations_by_length(each, 0.7 * each.largest_stable_rate) for each in (one, many)]
    assert found[0] is not None
    assert found[1] is not None
    ratio = found[1].delay / found[0].delay
    assert np.allclose(ratio, ratio[0])
    rate = 0.7 * many.largest_stable_rate
    expected = predict_model(many, rate, "approximation").queueing_delay.mean
    assert means(found[1], many.requests.output_tokens)[0] == pytest.approx(expected, rel=1e-9)


def test_in_the_order_of_arrival_all_wait_alike() -> None:
    for policy in ("single", "continuous:max_batch_size=4"):
        queue = model(policy)
        found = durations_by_length(queue, 0.8 * queue.largest_stable_rate)
        assert found is not None
        assert np.allclose(found.delay, found.delay[0])


def test_shortest_first_is_schrage_and_millers() -> None:
    """W(x) = lam E[S^2] / (2 (1 - lam E[S; S < x]) (1 - lam E[S; S <= x])), atoms."""
    queue = model("single:order=spjf", predictor="exact")
    rate = 0.8 * queue.largest_stable_rate
    found = durations_by_length(queue, rate)
    assert found is not None
    counts = np.flatnonzero(queue.requests.output_tokens.pmf)
    weights = queue.requests.output_tokens.pmf[counts]
    service = queue.engine.law.setup(1) + queue.engine.law.step(1) * counts
    work = rate * np.cumsum(weights * service)
    before = np.append(0.0, work[:-1])
    residual = rate * float(weights @ service**2) * (1 + queue.engine.law.cv**2) / 2
    assert found.tokens == pytest.approx(counts)
    assert found.delay == pytest.approx(residual / ((1 - before) * (1 - work)), rel=1e-9)
    assert found.service == pytest.approx(service, rel=1e-9)


@pytest.mark.parametrize(
    ("policy", "limits"),
    [
        ("single:order=spjf,aging=0.1", {}),
        ("single:order=hrrn", {}),
        ("capped:max_batch_size=4,order=spjf", {}),
        ("single:order=sprpt,max_preemptions=2", {}),
        ("single:order=spjf", {"patience": 1.0}),
        ("continuous:order=spjf", {}),
    ],
)
def test_what_only_a_simulation_knows_is_none(policy: str, limits: dict[str, object]) -> None:
    assert durations_by_length(model(policy, **limits), 5.0) is None


def test_an_unstable_queue_has_none() -> None:
    queue = model("single:order=spjf")
    with pytest.raises(UnstableQueueError):
        durations_by_length(queue, 1.01 * queue.largest_stable_rate)


def test_the_longest_tenth_takes_part_of_the_length_at_its_edge() -> None:
    """Lengths 1, 2, 3 with probabilities 0.75, 0.2, 0.05."""
    lengths = TokenDistribution(np.array([0.0, 0.75, 0.2, 0.05]))
    found = ByLength(np.array([1.0, 2.0, 3.0]), np.array([1.0, 10.0, 100.0]), np.array([1.0, 2, 3]))
    assert found.of_longest(lengths) == pytest.approx((0.5 * 100 + 0.5 * 10, 2.5))
    assert found.of_longest(lengths, 0.05) == pytest.approx((100.0, 3.0))
    assert found.of_longest(lengths, 0.25) == pytest.approx((0.2 * 100 + 0.8 * 10, 2.2))
    assert found.of_longest(lengths, 1.0) == pytest.approx((0.75 + 2.0 + 5.0, 1.3))
