"""Closed forms of orders with predictions, one bit with two choices, several servers."""

import numpy as np
import pytest

from kendall.policies.text import SpecError
from kendall.queueing.errors import NotConvergedError, UnstableQueueError
from kendall.queueing.models.soap.orders import (
    SHORTEST_FIRST,
    SHORTEST_REMAINING,
    FifoRanks,
    ThresholdRanks,
)
from kendall.queueing.models.soap.queue import solve_order
from kendall.queueing.models.soap.several_servers import order_doubt, solve_on_servers
from kendall.queueing.predictors.laws import (
    ExactPrediction,
    ExponentialPrediction,
    WholeTokens,
)
from kendall.queueing.predictors.sizes import Atoms, SizeGrid, WeibullSizes, exponential_sizes
from papers.closed_forms import (
    best_threshold,
    bit,
    exponential_bit,
    exponential_spjf,
    exponential_sprpt,
    threshold_sojourn,
)
from papers.prediction_costs import DelayPredict, SkipPredict
from papers.two_choices import TwoClasses, two_choices

EXPONENTIAL, WEIBULL = exponential_sizes(), WeibullSizes(0.5, 0.5)
PREDICTED = ExponentialPrediction()
ONE_CLASS = TwoClasses(1.0, 1.0, 0.5, 0.0, 1.0)


@pytest.mark.parametrize("load", [0.5, 0.9])
def test_exponential_predictions_are_bessel_functions(load):
    spjf = solve_order(SHORTEST_FIRST, EXPONENTIAL, load, PREDICTED).sojourn
    sprpt = solve_order(SHORTEST_REMAINING, EXPONENTIAL, load, PREDICTED).sojourn
    assert spjf == pytest.approx(exponential_spjf(load), rel=1e-5)
    assert sprpt == pytest.approx(exponential_sprpt(load), rel=1e-5)


@pytest.mark.parametrize("threshold", [0.3, 1.5, 4.0])
def test_the_parts_of_one_bit_are_bessel_functions(threshold):
    found, expected = bit(EXPONENTIAL, threshold, PREDICTED), exponential_bit(threshold)
    assert found.short == pytest.approx(expected.short, abs=1e-7)
    assert found.short_work == pytest.approx(expected.short_work, abs=1e-7)


@pytest.mark.parametrize("sizes", [EXPONENTIAL, WEIBULL])
@pytest.mark.parametrize("told", [ExactPrediction(), PREDICTED])
@pytest.mark.parametrize("preemptive", [True, False])
def test_the_analysis_of_a_threshold_is_its_closed_form(sizes, told, preemptive):
    expected = threshold_sojourn(sizes, 0.9, bit(sizes, 1.3, told), preemptive)
    found = solve_order(ThresholdRanks(1.3, preemptive), sizes, 0.9, told)
    assert found.sojourn == pytest.approx(expected, rel=1e-6)


def test_preemption_leaves_the_best_threshold_of_exponential_sizes():
    """E[T] not interrupted = 1 + lam E[T] preemptive."""
    thresholds = [best_threshold(EXPONENTIAL, 0.8, PREDICTED, way) for way in (True, False)]
    assert thresholds[0] == pytest.approx(thresholds[1], rel=2e-3)
    told = bit(EXPONENTIAL, thresholds[0], PREDICTED)
    assert threshold_sojourn(EXPONENTIAL, 0.8, told, False) == pytest.approx(
        1 + 0.8 * threshold_sojourn(EXPONENTIAL, 0.8, told, True)
    )
    with pytest.raises(UnstableQueueError):
        threshold_sojourn(EXPONENTIAL, 1.0, told, True)


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_predictions_of_one_size_scale_with_it(size):
    found = PREDICTED.joint(Atoms(np.array([size]), np.ones(1)), SizeGrid(200))
    assert float(found.joint[:, 0] @ found.predictions) == pytest.approx(size, rel=1e-2)


@pytest.mark.parametrize(("most", "exact"), [(3, False), (4, True)])
def test_up_to_most_predictions_are_kept_apart(most, exact):
    sizes = Atoms(np.arange(1.0, 5.0), np.full(4, 0.25))
    tokens = WholeTokens(ExactPrediction(), 0.0, 1.0, most=most)
    assert tokens.joint(sizes, SizeGrid(2)).exact == exact


def test_external_costs_are_the_expected_predictions():
    sizes = EXPONENTIAL.cells(SizeGrid(200, (1.0,)))
    skip = SkipPredict(threshold=1.0, bit_cost=0.5, size_cost=4.0)
    assert skip.cost(sizes) == pytest.approx(0.5 + 4 * np.exp(-1))
    assert DelayPredict(limit=1.0, size_cost=4.0).cost(sizes) == pytest.approx(4 * np.exp(-1))
    assert DelayPredict(limit=1.0, size_cost=0.1, external=False).cost(sizes) == 0


# two choices


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 0.9, 0.95])
def test_one_class_is_the_supermarket_model(load):
    known = sum(load ** (2**i - 2) for i in range(1, 14))
    assert two_choices(ONE_CLASS, load).sojourn == pytest.approx(known, rel=1e-6)


@pytest.mark.slow
def test_one_choice_is_one_queue_with_priorities():
    """M/M/1 with preemptive priority, two means."""
    classes, load = TwoClasses(0.5, 2.0, 1 / 3), 0.6
    rate = load / classes.mean
    short = rate * 2 / 3 * 0.5
    work = rate * (2 / 3 * 2 * 0.25 + 1 / 3 * 2 * 4) / 2
    first = 0.5 + rate * 2 / 3 * 0.25 / (1 - short)
    second = 2.0 / (1 - short) + work / ((1 - short) * (1 - load))
    expected = 2 / 3 * first + second / 3
    assert two_choices(classes, load, choices=1).sojourn == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_wrong_bit_lies_between_an_exact_one_and_none():
    def sojourn(*wrong):
        return two_choices(TwoClasses(0.5, 2.0, 1 / 3, *wrong), 0.9).sojourn

    assert sojourn() < sojourn(0.2, 0.2) < sojourn(0.0, 1.0)
    with pytest.raises(SpecError):
        TwoClasses(0.5, 2.0, 1.5)
    with pytest.raises(UnstableQueueError):
        two_choices(ONE_CLASS, 1.0)


@pytest.mark.slow
def test_queues_that_are_cut_too_short_are_refused():
    assert two_choices(ONE_CLASS, 0.9, most=8).sojourn == pytest.approx(
        two_choices(ONE_CLASS, 0.9).sojourn, rel=1e-6
    )
    with pytest.raises(NotConvergedError, match="queues cut at 4 jobs"):
        two_choices(ONE_CLASS, 0.9, most=4)


# several servers


def test_one_server_of_several_and_first_come_are_what_they_were():
    one = solve_on_servers(SHORTEST_FIRST, EXPONENTIAL, 0.8, 1)
    assert one.sojourn == pytest.approx(solve_order(SHORTEST_FIRST, EXPONENTIAL, 0.8).sojourn)
    assert one.doubt is None
    four = solve_on_servers(FifoRanks(), EXPONENTIAL, 3.2, 4)
    assert four.delay == pytest.approx(0.7455, rel=1e-3)  # M/M/4 at 0.8
    assert four.doubt is None


def test_several_servers_gain_as_one_does_and_say_where_that_is_doubtful():
    four = solve_on_servers(SHORTEST_FIRST, WEIBULL, 3.2, 4)
    first_come = solve_on_servers(FifoRanks(), WEIBULL, 3.2, 4)
    ratio = (
        solve_order(SHORTEST_FIRST, WEIBULL, 0.8).delay
        / solve_order(FifoRanks(), WEIBULL, 0.8).delay
    )
    assert four.delay / first_come.delay == pytest.approx(ratio)
    assert four.doubt is not None
    assert "on 4 servers is taken from one, where it is" in four.doubt
    with pytest.raises(SpecError, match="one server"):
        solve_on_servers(DelayPredict(limit=1.0, size_cost=0.1, external=False), WEIBULL, 1.0, 4)


def test_doubt_grows_with_the_servers_and_with_what_the_order_changes():
    silent = [order_doubt(ratio, 0.8, servers) is None for ratio, servers in CHANGES]
    assert silent == [True, True, False, True, False, False]
    assert order_doubt(0.68, 0.8, 4) is not None
    assert order_doubt(0.68, 0.9, 4) is None
    assert order_doubt(1.0, 0.5, 1000) is None


CHANGES = ((0.01, 1), (0.92, 4), (0.9, 4), (1.09, 4), (1.11, 4), (0.92, 16))
