"""`order=boost`: a shorter mean delay than in the order of arrival, without a longer tail."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kendall.policies.core import Request
from kendall.policies.ordered import order_of
from kendall.policies.text import SpecError, parse_policy
from kendall.queueing.choosing.orders import OrderSearch, best_order
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_run

GAMMA, TOKEN = 0.2, 0.01
BOOST = f"single:order=boost,gamma={GAMMA},token_time={TOKEN}"
LENGTHS = "lognormal:mu=4.2,sigma=1"  # of mean 110 tokens, a second or so each


def request(arrived_at: float, tokens: float) -> Request:
    return Request(
        id="",
        arrived_at=arrived_at,
        prompt_tokens=1,
        max_output_tokens=2000,
        predicted_output_tokens=tokens,
    )


def boost(tokens: float) -> float:
    """Seconds, as the paper has it."""
    return math.log(1 / (1 - math.exp(-GAMMA * TOKEN * tokens))) / GAMMA


@pytest.mark.parametrize("tokens", [1.0, 30.0, 100.0, 2000.0])
def test_a_request_stands_where_one_without_a_boost_came_so_much_earlier(tokens: float) -> None:
    order = order_of(parse_policy(BOOST))
    assert order.rank(request(7.0, tokens), 0) == pytest.approx(7.0 - boost(tokens))
    assert order.rank(request(7.0, tokens), 5) == order.rank(request(7.0, tokens), 0)


def test_nothing_predicted_and_no_tokens_at_all_are_ranks_too() -> None:
    order = order_of(parse_policy(BOOST))
    assert math.isfinite(order.rank(request(0.0, 0.0), 0))
    unknown = Request(id="", arrived_at=3.0, prompt_tokens=1, max_output_tokens=2000)
    assert order.rank(unknown, 0) == pytest.approx(3.0 - boost(2000))


def test_nobody_is_passed_by_one_that_comes_much_later() -> None:
    model = Queue.read(BOOST, LENGTHS, f"a={TOKEN}", max_output_tokens=2000, predictor="exact")
    run = simulate_run(model, 0.95 * model.largest_stable_rate, 20_000, np.random.SeedSequence(3))
    longest = boost(1)
    at = np.argsort(run.dispatched_at)
    arrived = run.arrived_at[at]
    passed = np.maximum.accumulate(arrived) - arrived  # by who was served before it
    assert 0 < passed.max() <= longest


@pytest.mark.parametrize(
    ("lengths", "predictor", "mean", "tail"),
    [
        ("lognormal:mu=4.36,sigma=0.7", "lognormal:sigma=0.5", 0.82, 1.0),
        (LENGTHS, "lognormal:sigma=0.5", 0.75, 0.95),
        (LENGTHS, "lognormal:sigma=1", 0.8, 1.05),
    ],
)
@pytest.mark.slow
def test_its_mean_is_shorter_and_its_p99_hardly_longer(
    lengths: str, predictor: str, mean: float, tail: float
) -> None:
    """Fitted to the queue, over that of fcfs on the same requests: two seeds of 400,000, whose
    ratios lie within 0.03 of each other.
    """
    usual = Queue.read("single", lengths, f"a={TOKEN}", max_output_tokens=2000)
    rate = 0.8 * usual.largest_stable_rate
    (order,) = (each for each in OrderSearch(usual, rate).usual() if each.startswith("boost"))
    policy = parse_policy("single:order=" + order.replace(":", ",", 1))
    ordered = usual.but(policy=policy).but(
        predictor=Queue.read(
            BOOST, lengths, "a=1", max_output_tokens=9, predictor=predictor
        ).requests.predictor
    )
    ratios = []
    for seed in (1, 2):
        own, other = (
            simulate_run(model, rate, 400_000, np.random.SeedSequence(seed)).queueing_delay
            for model in (ordered, usual)
        )
        ratios.append(
            (own.mean() / other.mean(), np.quantile(own, 0.99) / np.quantile(other, 0.99))
        )
    found = np.array(ratios)
    assert np.ptp(found, axis=0).max() < 0.03
    assert found[:, 0].mean() <= mean
    assert found[:, 1].mean() <= tail


def test_the_best_order_is_named_with_one_that_keeps_the_tail() -> None:
    usual = Queue.read("single", LENGTHS, f"a={TOKEN}", max_output_tokens=2000)
    rate = 0.8 * usual.largest_stable_rate
    found = best_order(
        usual, rate, ["spjf", f"boost:gamma={GAMMA},token_time={TOKEN}"], ["lognormal:sigma=1"]
    )
    points = {point["order"].partition(":")[0]: point for point in found.curve}
    assert points["fcfs"]["p99_delay_ratio"] == 1
    assert points["spjf"]["p99_delay_ratio"] > 1.05 > points["boost"]["p99_delay_ratio"]
    assert found.best["order"] == "spjf"


def test_an_idle_queue_has_no_tail_to_fit() -> None:
    idle = Queue.read("single", LENGTHS, f"a={TOKEN}", max_output_tokens=2000)
    orders = OrderSearch(idle, 0.01 * idle.largest_stable_rate).usual()
    assert not [order for order in orders if order.startswith("boost")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gamma=0,token_time=1", "got gamma=0; expected a number per second from 1e-12 to 1e12"),
        ("gamma=1,token_time=0", "got token_time=0; expected finite seconds > 0"),
        ("gamma=1,token_time=-1s", "token_time"),
        ("gamma=nan,token_time=1", "gamma"),
        ("gamma=1e-300,token_time=1e-300", "got gamma=1e-300; expected a number per second"),
        ("gamma=1e-9,token_time=1e-9", "got gamma=1e-09 and token_time=1e-09; expected a product"),
        ("gamma=1e9,token_time=1e9", "got gamma=1e+09 and token_time=1e+09; expected a product"),
        ("gamma=1", "got order boost without token_time; expected token_time=NUMBER"),
        ("gamma=1,token_time=1,aging=1", "got aging for order boost; expected gamma, token_time"),
    ],
)
def test_bad_parameters_are_refused(text: str, said: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_policy(f"single:order=boost,{text}")
    assert said in str(error.value)
