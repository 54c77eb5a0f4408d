"""The Gittins index (`queueing.models.gittins`): its ranks against every stopping point, the order
under decreasing, constant and increasing hazard rates, and its mean delay by the analysis and by
simulation.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.policies import format_policy, parse_policy
from kendall.policies.ordered import order_of, wants_steps
from kendall.queueing.choosing.orders import OrderSearch
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.gittins import LEVELS, STINT, gittins_ranks
from kendall.queueing.models.soap.token_orders import TokenService, solve_in_tokens
from kendall.queueing.prediction import methods, predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_run
from kendall.queueing.simulation.fast import is_compiled
from tests.queueing.test_kernels import assert_same, both

TOKENS = LatencyModel(k4=0.005)  # no set-up
LOGNORMAL = "lognormal:mu=4.8,sigma=1"  # mean 200
MOST = 20_000


def mean_sojourn(order: str, lengths: str, load: float = 0.8, law: LatencyModel = TOKENS) -> float:
    """By the analysis, a resume free; in mean service times."""
    queue = Queue.read(f"single:order={order}", lengths, law, max_output_tokens=MOST)
    alone = TokenService.alone(law, queue.requests.output_tokens)
    service = TokenService(law.setup(1), law.step(1), alone.sizes)
    rate = load / service.sizes.mean
    solved = solve_in_tokens(order_of(queue.policy), service, rate)
    return solved.sojourn / service.sizes.mean


weights = st.lists(st.integers(0, 9), min_size=1, max_size=LEVELS).filter(any)


@given(weights, st.sampled_from([0.0, 0.5, 7.0]))
def test_a_rank_is_the_least_service_per_completion_over_every_stop(
    numbers: list[int], setup: float
) -> None:
    pmf = np.array([0, *numbers]) / sum(numbers)
    starts, ranks = gittins_ranks(TokenDistribution(pmf), setup)
    counts = [n for n in range(len(pmf)) if pmf[n]]

    def best(age: int) -> float:
        left, found = sum(pmf[n] for n in counts if n > age), []
        for stop in range(age + 1, len(pmf)):
            ended = sum(pmf[n] for n in counts if age < n <= stop)
            work = sum(pmf[n] * (min(n, stop) - age) for n in counts if n > age)
            found.append((work + setup * left * (age == 0)) / ended if ended else math.inf)
        return min(found)

    expected = {age: best(age) for age in (0, *counts[:-1])}
    if not starts:
        assert max(expected.values()) <= expected[0] * (1 + 1e-8)
        return
    shown = {age: ranks[np.searchsorted(starts, age, side="right") - 1] for age in expected}
    assert shown == pytest.approx(expected, rel=1e-8)
    assert all(first != second for first, second in itertools.pairwise(ranks))


@pytest.mark.parametrize("lengths", [LOGNORMAL, "pareto:alpha=1.5,minimum=60"])
def test_the_ranks_of_many_lengths_are_few(lengths: str) -> None:
    starts, ranks = gittins_ranks(parse_distribution(lengths, MOST))
    assert len(starts) == len(ranks) <= LEVELS
    assert starts[0] == 0
    assert list(starts) == sorted(set(starts))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "lengths",
    [
        "geometric:mean=200",
        "deterministic:value=200",
        "weibull:shape=2,scale=200",
        "uniform:low=1,high=90",
    ],
)
@pytest.mark.parametrize("law", [TOKENS, LatencyModel(k2=0.1, k4=0.005)], ids=["plain", "set-up"])
def test_lengths_of_constant_or_increasing_hazard_rate_are_served_first_come_first_served(
    lengths: str, law: LatencyModel
) -> None:
    queue = Queue.read("single:order=gittins", lengths, law)
    assert gittins_ranks(queue.requests.output_tokens) == ((), ())
    assert not wants_steps(queue.policy)
    assert mean_sojourn("gittins", lengths, law=law) == mean_sojourn("fcfs", lengths, law=law)
    own, usual = (
        simulate_run(each, 0.8, 2000, np.random.SeedSequence(1)).released_at
        for each in (queue, queue.but(policy=parse_policy("single")))
    )
    assert own == pytest.approx(usual, rel=1e-12)


def test_the_mean_sojourn_time_is_below_that_of_fcfs_and_of_fb() -> None:
    """An M/G/1 at load 0.8 with lognormal services, sigma 1."""
    first_come, least_attained = mean_sojourn("fcfs", LOGNORMAL), mean_sojourn("fb", LOGNORMAL)
    assert first_come == pytest.approx(6.44, abs=0.01)
    assert least_attained == pytest.approx(4.16, abs=0.005)
    assert mean_sojourn("gittins", LOGNORMAL) < least_attained - 0.01


def test_decreasing_hazard_rates_make_it_least_attained_service() -> None:
    """Within what `LEVELS` ages leave; a Pareto law has no length below its minimum, so that it
    gains on fb there.
    """
    weibull = "weibull:shape=0.5,scale=100"
    assert mean_sojourn("gittins", weibull) < 1.004 * mean_sojourn("fb", weibull)
    _, ranks = gittins_ranks(parse_distribution(weibull, MOST))
    assert list(ranks[:-1]) == sorted(ranks[:-1])  # but for the token limit
    pareto = "pareto:alpha=1.5,minimum=60"
    assert 0.9 < mean_sojourn("gittins", pareto) / mean_sojourn("fb", pareto) < 1


@pytest.mark.parametrize("lengths", [LOGNORMAL, "weibull:shape=0.6,scale=120"])
def test_the_analysis_is_the_simulation_where_going_on_costs_nothing(lengths: str) -> None:
    queue = Queue.read("single:order=gittins", lengths, TOKENS, max_output_tokens=4000)
    rate = 0.7 * queue.largest_stable_rate
    service = TokenService(
        0.0, 0.005, TokenService.alone(TOKENS, queue.requests.output_tokens).sizes
    )
    exact = solve_in_tokens(order_of(queue.policy), service, rate).sojourn
    means = [
        float(simulate_run(queue, rate, 100_000, stream).sojourn_time[10_000:].mean())
        for stream in np.random.SeedSequence(4).spawn(12)
    ]
    error = np.std(means, ddof=1) / math.sqrt(len(means))
    assert error < 0.02 * exact
    # a token in the making is lost with every interruption by an arrival: half of one, 2.5 ms
    assert abs(np.mean(means) - exact) < 4 * error + 0.005 * exact


def test_in_slots_it_preempts_as_well_and_saves_of_the_delay() -> None:
    given = ("lognormal:mu=3,sigma=1.3", "k1=0.001,k2=0.001,k3=0.0002,k4=0.004,kr=0.001")
    queue = Queue.read("continuous:max_batch_size=2,order=gittins", *given, max_output_tokens=400)
    rate = 0.85 * queue.largest_stable_rate
    own, usual = (
        simulate_run(each, rate, 4000, np.random.SeedSequence(2)).sojourn_time.mean()
        for each in (queue, queue.but(policy=parse_policy("continuous:max_batch_size=2")))
    )
    assert own < 0.95 * usual


def test_a_queue_ranks_by_its_own_lengths() -> None:
    queue = Queue.read("single:order=gittins", LOGNORMAL, TOKENS, max_output_tokens=4000)
    assert queue.policy == parse_policy("single:order=gittins")
    assert queue.text == format_policy(queue.policy) == "single:order=gittins"
    shorter = queue.clipped_at(100)
    assert order_of(queue.policy).form != order_of(shorter.policy).form
    prompted = queue.but(
        law=LatencyModel(k4=0.005, kp=0.001),
        prompt_tokens=parse_distribution("deterministic:value=20"),
    )
    plain, slow = (order_of(each.policy).form for each in (queue, prompted))
    assert slow.ranks[0] > plain.ranks[0]  # a prompt is service before the first token


def test_ranks_change_at_stints_that_are_long_beside_a_resume() -> None:
    lengths = parse_distribution(LOGNORMAL, MOST)
    starts, _ = gittins_ranks(lengths, resume=3.0)
    assert np.diff(starts).min() >= 3.0 * STINT
    assert len(starts) > 5
    assert gittins_ranks(lengths, resume=1000.0) == ((), ())


@pytest.mark.parametrize("kr", [0.0, 0.003])
@pytest.mark.parametrize("load", [0.5, 0.85])
def test_it_is_no_worse_than_fcfs_where_going_on_costs_something(kr: float, load: float) -> None:
    law = LatencyModel(k2=0.002, k4=0.002, kr=kr)
    queue = Queue.read(
        "single:order=gittins", "lognormal:mu=3,sigma=1.3", law, max_output_tokens=400
    )
    own, usual = (
        simulate_run(each, load * each.largest_stable_rate, 40_000, np.random.SeedSequence(3))
        .sojourn_time[2000:]
        .mean()
        for each in (queue, queue.but(policy=parse_policy("single")))
    )
    assert own < 0.9 * usual


@pytest.mark.parametrize("law", [TOKENS, LatencyModel(k2=0.001, k4=0.005, kr=0.001)])
@pytest.mark.parametrize(("servers", "patience"), [(1, None), (2, None), (1, 1.0), (3, 0.5)])
@pytest.mark.thinned(8)
def test_the_compiled_loop_has_the_path_of_the_policy(
    law: LatencyModel, servers: int, patience: float | None
) -> None:
    queue = Queue.read(
        "single:order=gittins",
        "lognormal:mu=3,sigma=1.3",
        law,
        max_output_tokens=400,
        servers=servers,
        patience=patience,
    )
    assert is_compiled(queue)
    assert len(order_of(queue.policy).form.starts) > 5
    fast, slow = both(queue, 0.85 * queue.largest_stable_rate, 500)
    assert_same(fast, slow)
    first_come, _ = both(
        queue.but(policy=parse_policy("single")), 0.85 * queue.largest_stable_rate, 500
    )
    assert not np.array_equal(fast.released_at, first_come.released_at)


def test_its_prediction_is_simulated_where_it_preempts_and_that_of_fcfs_where_it_does_not() -> None:
    law = LatencyModel(k2=0.004, k4=0.002, kr=0.005)
    queue = Queue.read(
        "single:order=gittins", "lognormal:mu=3,sigma=1.3", law, max_output_tokens=400
    )
    assert methods(queue)[0] == "simulation"
    found = predict_model(queue, 0.7 * queue.largest_stable_rate)
    usual = predict_model(queue.but(policy=parse_policy("single")), 0.7 * queue.largest_stable_rate)
    assert found.method == "simulation"
    assert found.sojourn_time.mean < 0.9 * usual.sojourn_time.mean
    even = Queue.read("single:order=gittins", "geometric:mean=50", law)
    same = predict_model(even, 5.0)
    exact = predict_model(even.but(policy=parse_policy("single")), 5.0)
    assert same.method == "approximation"
    assert same.queueing_delay.mean == pytest.approx(exact.queueing_delay.mean, rel=1e-4)


def test_it_is_a_candidate_among_the_orders() -> None:
    queue = Queue.read("single", LOGNORMAL, TOKENS, max_output_tokens=4000)
    assert "gittins" in OrderSearch(queue, 0.5, {}).usual()
    assert "gittins" not in OrderSearch(queue.but(policy=parse_policy("dynamic")), 0.5, {}).usual()
