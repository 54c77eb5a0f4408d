"""What `kendall optimize` says of its best setting holds there: the queue that is searched is the
one that was asked for, its values are those of `kendall predict`.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest
from scipy.optimize import brentq

from kendall.queueing.choosing.answer import Prices
from kendall.queueing.choosing.objective import Objective, parse_slos
from kendall.queueing.choosing.rates import largest_rate
from kendall.queueing.choosing.token_limit import best_token_limit
from kendall.queueing.prediction import infinite_mean, predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_model, simulate_run
from tests.queueing.optimum_is_predicted import Case, cases, misses
from tests.queueing.test_kernels import assert_same

SEED, QUICK, MANY, STATIONS = 3, 8, 40, 12
LAW = "k1=0.003,k2=0.01,k3=0.0003,k4=0.012"


@lru_cache
def drawn(seed: int, count: int, *, stations: bool = False) -> list[Case]:
    return list(cases(seed, count, stations=stations))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(QUICK))
def test_the_best_setting_is_predicted_as_it_was_found(number: int) -> None:
    assert not misses(drawn(SEED, QUICK)[number])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(MANY))
def test_the_best_setting_of_more_queues_is_predicted_as_it_was_found(number: int) -> None:
    assert not misses(drawn(7, MANY)[number])


@pytest.mark.left_out
@pytest.mark.parametrize("number", range(STATIONS))
def test_the_best_setting_of_two_stations_is_predicted_as_it_was_found(number: int) -> None:
    assert not misses(drawn(11, STATIONS, stations=True)[number])


def test_the_largest_rate_of_requests_sent_in_turn_is_that_of_erlang_gaps() -> None:
    """E2/M/1: P(W > t) = s e^{-(1 - s) t}, s the root of s = (2 l / (2 l + 1 - s))^2, which is
    0.8705 requests/s on two servers; in one central queue it is 1.2222.
    """

    def p99(rate: float) -> float:
        root = brentq(lambda s: (2 * rate / (2 * rate + 1 - s)) ** 2 - s, 1e-9, 1 - 1e-9)
        return max(0.0, math.log(100 * root) / (1 - root))

    exact = 2 * float(brentq(lambda rate: p99(rate) - 5.0, 0.2, 0.6))
    assert exact == pytest.approx(0.8705, abs=1e-3)
    model = Queue.read(
        "single",
        "geometric:mean=500",
        "k1=0,k2=0,k3=0,k4=0.002",
        servers=2,
        routing="round_robin",
    )
    goal = Objective(name="slo", **parse_slos("p99_queueing_delay=5"))
    prices = Prices(goal.slos)
    found = largest_rate(model, goal, predict=prices.quick, full=prices.full).best
    assert found["arrival_rate"] == pytest.approx(exact, rel=0.01)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("routing", ["random", "round_robin"])
@pytest.mark.parametrize(
    "policy", ["single:order=spjf", "capped:max_batch_size=4", "continuous:max_batch_size=4"]
)
def test_a_path_is_that_of_one_of_the_servers_at_its_share_of_the_rate(
    policy: str, routing: str
) -> None:
    """Whoever draws it: the split is not the caller's."""
    model = Queue.read(policy, "geometric:mean=20", LAW, servers=3, routing=routing)
    rate = 0.8 * model.largest_stable_rate
    one, own_rate = model.seen_by_a_request(rate)
    assert (model.one_of_several is not None, own_rate) == (True, pytest.approx(rate / 3))
    for generic in (False, True):
        paths = [
            simulate_run(each, at, 300, np.random.SeedSequence(2), generic=generic)
            for each, at in ((model, rate), (one, own_rate))
        ]
        assert_same(*paths)


def test_an_infinite_mean_is_infinite_at_each_of_several_servers() -> None:
    model = Queue.read("dynamic", "uniform:low=1,high=9", "k1=0.1,k2=1,k3=0,k4=0.1,cv=1")
    several = model.but(servers=3, routing="random")
    assert infinite_mean(model, 0.9)
    assert infinite_mean(several, 0.9)
    assert not infinite_mean(several, 0.5)
    found = Prices().quick(several, 0.9 * several.largest_stable_rate)
    assert found.queueing_delay.mean is None


@pytest.mark.slow
@pytest.mark.parametrize("slo", ["mean_queueing_delay=800ms", "p90_time_to_first_token=2s"])
def test_a_rate_at_which_the_mean_is_infinite_keeps_no_slo_on_a_mean(slo: str) -> None:
    """From load 1 / sqrt(1 + cv^2) on, to which the search looks."""
    law = "k1=0.002,k2=0.005,k3=0.0002,k4=0.01,cv=0.3"
    model = Queue.read("dynamic", "geometric:mean=40", law, max_output_tokens=400)
    assert infinite_mean(model, 0.96)
    goal = Objective(name="slo", **parse_slos(slo))
    prices = Prices(goal.slos)
    assert not goal.kept(prices.quick(model, 0.98 * model.largest_stable_rate))
    found = largest_rate(model, goal, predict=prices.quick, full=prices.full).best
    assert 0.2 < found["load"] < 0.95


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("policy", "limits"),
    [
        ("single", {"arrivals": "gamma:rate=1,burstiness=0.25"}),
        ("single:order=spjf", {"predictor": "exact"}),
        ("single", {"servers": 2, "routing": "round_robin"}),
    ],
)
def test_the_best_token_limit_of_single_counts_what_was_asked_for(
    policy: str, limits: dict[str, object]
) -> None:
    """Not Poisson arrivals in their order, for which every limit has a formula."""
    model = Queue.read(policy, "geometric:mean=60", "a=0.01,c=0.1", **limits)  # type: ignore[arg-type]
    rate = 0.6 * model.largest_stable_rate
    goal = Objective(name="clipped", max_clipped_fraction=0.05)
    found = best_token_limit(model, rate, goal, 300, predict=Prices().quick, full=Prices().full)
    limit = found.best["max_output_tokens"]
    limited = model.but(output_tokens=model.requests.output_tokens.clip(limit))
    assert found.best["queueing_delay"] == predict_model(limited, rate).queueing_delay.mean
    there = simulate_model(limited, rate, num_requests=200_000, seed=8).queueing_delay
    assert there.mean is not None
    assert there.standard_error is not None
    error = 5 * there.standard_error + 0.02 * there.mean
    assert found.best["queueing_delay"] == pytest.approx(there.mean, abs=error)
