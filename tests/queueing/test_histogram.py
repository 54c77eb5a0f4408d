"""The histogram beside the predicted one."""

from __future__ import annotations

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.estimation.histogram import (
    CLASSES,
    DRAWN,
    beside,
    drawn,
    quantiles,
    round_up,
)
from kendall.queueing.latency.law import parse_law
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue

LAW = parse_law("k1=1e-3,k2=8e-3,k3=1e-4,k4=2e-3")


def model(policy: str) -> Queue:
    return Queue.read(parse_policy(policy), parse_distribution("uniform:low=5,high=30"), LAW)


@pytest.mark.parametrize(
    "policy",
    [
        "single",
        "capped:max_batch_size=4",
        "fixed:batch_size=3,max_wait=0.1",
        "continuous:max_batch_size=4",
    ],
)
def test_what_is_drawn_has_the_mean_of_theory(policy: str) -> None:
    queue = model(policy)
    rate = 0.6 * queue.largest_stable_rate
    sojourn = policy.startswith("continuous")
    theory = predict_model(queue, rate)
    mean = theory.sojourn_time.mean if sojourn else theory.queueing_delay.mean
    assert drawn(queue, rate, sojourn=sojourn).mean() == pytest.approx(mean, rel=0.05)


def test_shares_add_up_and_classes_are_few_and_round() -> None:
    rng = np.random.default_rng(1)
    for scale in (1e-4, 0.013, 2.7, 900.0):
        found = beside(rng.exponential(scale, 3000), rng.exponential(1.1 * scale, 50_000))
        assert found is not None
        assert 5 < len(found.observed) <= CLASSES + 1
        assert len(found.observed) == len(found.predicted)
        for side, beyond in zip(("observed", "predicted"), found.beyond, strict=True):
            assert sum(getattr(found, side)) + beyond == pytest.approx(1, abs=1e-3)
            assert beyond < 0.02
        assert found.width == round_up(found.width)
        expected = -np.expm1(-found.width / scale)
        assert found.observed[0] == pytest.approx(expected, abs=0.03)


def test_too_few_delays_are_no_histogram() -> None:
    assert beside(np.ones(5), np.ones(100)) is None
    assert beside(np.ones(50), np.ones(0)) is None


def test_those_who_never_wait_are_one_class() -> None:
    """Of a width as if the longest had waited for 0.1 ms."""
    found = beside(np.zeros(50), np.zeros(500))
    assert found is not None
    assert (found.width, found.observed[0], found.predicted[0]) == (5e-6, 1.0, 1.0)


@pytest.mark.parametrize(
    ("width", "rounded"),
    [
        (0.0021, 0.0025),
        (0.0025, 0.0025),
        (0.7, 1.0),
        (1.0, 1.0),
        (1.01, 2.0),
        (2.1, 2.5),
        (3.0, 5.0),
        (5.0, 5.0),
        (51.0, 100.0),
    ],
)
def test_widths_are_round(width: float, rounded: float) -> None:
    assert round_up(width) == rounded


def test_both_shares_by_hand() -> None:
    """Up to 0.98 s, of which 28 classes of 35 ms make 50 ms; the longest hundredth lies beyond."""
    observed, theory = np.append(np.arange(199) / 200 * 0.98, 7.0), np.repeat([0.0, 0.06], 50)
    found = beside(observed, theory)
    assert found is not None
    assert found.width == 0.05
    assert len(found.observed) == 20
    assert found.observed[0] == pytest.approx(11 / 200)
    assert found.predicted == [0.5, 0.5, *(0.0,) * 18]
    assert found.beyond == [1 / 200, 0.0]
    assert (found.n, found.drawn) == (200, 100)


@pytest.mark.parametrize(("count", "enough"), [(19, False), (20, True)])
def test_twenty_delays_are_a_histogram(count: int, enough: bool) -> None:
    assert (beside(np.ones(count), np.ones(100)) is not None) == enough


def test_sojourns_are_drawn_where_they_are_asked_for() -> None:
    queue = model("single")
    rate = 0.5 * queue.largest_stable_rate
    apart = drawn(queue, rate, sojourn=True).mean() - drawn(queue, rate).mean()
    assert apart == pytest.approx(1 / queue.largest_stable_rate, rel=0.02), "the service"


def test_those_whose_patience_ran_out_are_left_out() -> None:
    queue = model("single").but(patience=0.05)
    delays = drawn(queue, 1.5 * queue.largest_stable_rate)
    assert delays.size < 0.8 * DRAWN
    assert np.isfinite(delays).all()
    assert delays.max() <= 0.05 + 1e-12


def test_quantiles_are_of_all_draws_together() -> None:
    draws = np.arange(200.0).reshape(2, 100)
    found = quantiles(draws)
    assert found == {
        "mean": 99.5,
        "p50": 99.5,
        "p90": pytest.approx(179.1),
        "p95": pytest.approx(189.05),
        "p99": pytest.approx(197.01),
    }
