"""What an answer holds: every quantity of the contract is given where its method can give it,
finite, in order and of the right size.
"""

from __future__ import annotations

import itertools
import math

import pytest

from kendall.policies import parse_policy
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction import largest_stable_rate, predict, predict_model, unstable
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS, Prediction, Quantiles
from kendall.queueing.simulation.experiment import simulate_model

LAW = LatencyModel(k1=0.3e-3, k2=1.4e-3, k3=25e-6, k4=0.92e-3, cv=0.12, turnaround=1.5e-3)
LENGTHS = parse_distribution("uniform:low=1,high=32")
BATCHES = [
    "single",
    "capped:max_batch_size=1",
    "capped:max_batch_size=4",
    "elastic:max_batch_size=4",
    "dynamic",
    "fixed:batch_size=4",
]
CONTINUOUS = ["continuous:max_batch_size=1", "continuous:max_batch_size=4"]
LOADS = [0.2, 0.6, 0.9]
CASES = list(itertools.product(BATCHES + CONTINUOUS, LOADS))


def rate_of(policy: str, load: float) -> float:
    return load * largest_stable_rate(parse_policy(policy), LENGTHS, LAW, max_num_seqs=16)


def assert_ordered(law: Quantiles, *, whole: bool = True) -> None:
    """Its mean and all its levels, or those of them that are given; finite, not below 0, not
    falling.
    """
    levels = [getattr(law, name) for name in LEVELS]
    given = [level for level in levels if level is not None]
    assert law.mean is not None
    assert math.isfinite(law.mean)
    assert not whole or len(given) == len(LEVELS)
    assert all(math.isfinite(level) and level >= 0 for level in given)
    assert given == sorted(given)


def assert_sound(answer: Prediction, load: float) -> None:
    """What holds of every steady state."""
    delay, sojourn, first = (
        answer.queueing_delay.mean,
        answer.sojourn_time.mean,
        answer.time_to_first_token.mean,
    )
    assert delay is not None
    assert sojourn is not None
    assert first is not None
    assert answer.stable
    assert answer.load == pytest.approx(load)
    assert 0 < delay < first < sojourn
    assert answer.utilisation is not None
    assert 0 < answer.utilisation < 1
    assert answer.batch_size.mean is not None
    assert 1 <= answer.batch_size.mean <= 16
    assert answer.served_queueing_delay == answer.queueing_delay
    assert answer.loss_fraction == 0.0
    assert all(bound >= delay for bound in answer.bounds.values())


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("policy", "load"), CASES)
def test_a_prediction_is_whole(policy: str, load: float) -> None:
    answer = predict(parse_policy(policy), rate_of(policy, load), LENGTHS, LAW, max_num_seqs=16)
    joins = policy in CONTINUOUS
    assert answer.method == ("approximation" if joins else "exact")
    assert_sound(answer, load)
    assert_ordered(answer.queueing_delay, whole=not joins)
    assert_ordered(answer.sojourn_time, whole=not joins)
    for name in LEVELS:
        delay, sojourn = getattr(answer.queueing_delay, name), getattr(answer.sojourn_time, name)
        assert joins or delay < sojourn, name
    step = answer.inter_token_latency.mean
    assert (step is None) == policy.startswith("elastic")
    assert step is None or LAW.step(1) * (1 - 1e-9) <= step <= LAW.step(16) + LAW.admission(16)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "policy",
    ["single", "capped:max_batch_size=4", "fixed:batch_size=4", "continuous:max_batch_size=4"],
)
@pytest.mark.parametrize("method", ["auto", "simulation"])
def test_both_token_times_are_of_one_type_whatever_the_method(policy: str, method: str) -> None:
    """A caller may ask each for any level; without one it is None."""
    queue = Queue.read(policy, LENGTHS, LAW, max_num_seqs=16)
    rate = 0.5 * queue.largest_stable_rate
    for answer in (predict_model(queue, rate, method), unstable(queue, 1.2, method)):
        assert type(answer.time_to_first_token) is type(answer.inter_token_latency) is Quantiles
        assert (answer.time_to_first_token.p99 is None) == (
            answer.method != "simulation" or not answer.stable
        )
        simulated = answer.method == "simulation" and answer.stable
        unpadded = not queue.policy.padded
        assert (answer.inter_token_latency.p99 is None) == (not (simulated and unpadded))
        error = ["standard_error"] if simulated and unpadded else []
        assert list(answer.as_dict()["inter_token_latency"]) == ["mean", *LEVELS, *error]


def test_a_continuous_engine_has_every_quantile_where_they_are_asked_for() -> None:
    """The means are the formula's; the quantiles are those of another simulation too."""
    queue = Queue.read("continuous:max_batch_size=4", LENGTHS, LAW)
    rate = 0.8 * queue.largest_stable_rate
    plain, whole = predict_model(queue, rate), predict_model(queue, rate, quantiles=True)
    other = simulate_model(queue, rate, num_requests=1_000_000, seed=5)
    for name in ("queueing_delay", "sojourn_time", "time_to_first_token", "inter_token_latency"):
        found, simulated = getattr(whole, name), getattr(other, name)
        assert found.mean == getattr(plain, name).mean
        assert found.standard_error is None
        for level in ("p90", "p99"):
            assert getattr(found, level) == pytest.approx(getattr(simulated, level), rel=0.05)
        assert_ordered(found)
    assert (whole.method, plain.fallback) == ("approximation", None)
    assert whole.fallback == "approximate means, quantiles from a simulation of 1,000,000 requests"


def test_a_continuous_engine_whose_formula_is_in_doubt_is_simulated() -> None:
    """Sixteen slots and answers of one length: the formula is off by a quarter."""
    queue = Queue.read("continuous:max_batch_size=16", "deterministic:value=16", LAW)
    rate = 0.9 * queue.largest_stable_rate
    assert any("approximation in doubt" in text for text in predict_model(queue, rate).assumptions)
    found = predict_model(queue, rate, quantiles=True)
    assert found.method == "simulation"
    assert found.queueing_delay.standard_error is not None
    assert (found.fallback or "").startswith("simulation, not approximation in doubt: ")
    formula = predict_model(queue, rate, "approximation", quantiles=True)
    assert formula.queueing_delay.p99 is None


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("policy", "load"), [(policy, 0.6) for policy in BATCHES + CONTINUOUS])
def test_a_simulation_is_whole_and_its_errors_cover_the_exact_means(
    policy: str, load: float
) -> None:
    rate = rate_of(policy, load)
    found = simulate_model(
        Queue.read(policy, LENGTHS, LAW, max_num_seqs=16), rate, num_requests=20_000, replications=4
    )
    exact = predict(parse_policy(policy), rate, LENGTHS, LAW, max_num_seqs=16)
    assert found.method == "simulation"
    assert_sound(found, load)
    for name in ("queueing_delay", "sojourn_time"):
        law, known = getattr(found, name), getattr(exact, name)
        assert_ordered(law)
        assert 0 < law.standard_error < 0.1 * law.mean, "it says something"
        if policy in BATCHES:
            assert abs(law.mean - known.mean) < 4.5 * law.standard_error
            for level in LEVELS:
                assert getattr(law, level) == pytest.approx(
                    getattr(known, level), rel=0.15, abs=2e-3
                ), (name, level)


@pytest.mark.parametrize("policy", BATCHES + CONTINUOUS)
def test_a_higher_load_makes_everything_longer(policy: str) -> None:
    """Every mean and every level grows with the rate, but for the time that fixed batches take
    to form.
    """
    low, high = (
        predict(parse_policy(policy), rate_of(policy, load), LENGTHS, LAW, max_num_seqs=16)
        for load in (0.6, 0.9)
    )
    for name in ("queueing_delay", "sojourn_time"):
        for level in ("mean", *LEVELS):
            one, other = getattr(getattr(low, name), level), getattr(getattr(high, name), level)
            assert None in (one, other) or one <= other * (1 + 1e-9), (name, level)
    assert low.load < high.load
    assert low.utilisation < high.utilisation  # type: ignore[operator]
    assert low.batch_size.mean <= high.batch_size.mean  # type: ignore[operator]
