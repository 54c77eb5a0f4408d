"""The control variate of simulated delays: right where the answer is known, and quieter."""

import numpy as np
import pytest

from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.mg1 import solve_mg1
from kendall.queueing.prediction.steady_state import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS, Quantiles
from kendall.queueing.simulation.experiment import (
    simulate_model,
    simulate_run,
    simulate_steady_state,
)
from kendall.queueing.simulation.simulated_means import (
    Controlled,
    Sampled,
    companion_of,
    controlled,
    controlled_mean,
    summary_of_runs,
    weighted_mean,
    weighted_quantiles,
)

LAW = LatencyModel(k1=0.001, k3=0.00006, k4=0.008)
NAMES = ("mean", *LEVELS)


def model_of(slots: int, lengths: str, **limits: object) -> Queue:
    policy = f"continuous:max_batch_size={slots}"
    return Queue.read(policy, parse_distribution(lengths, 4096), LAW, **limits)


@pytest.mark.parametrize("lengths", ["geometric:mean=64", "lognormal:mu=4,sigma=1.27"])
def test_on_one_slot_the_answer_is_that_of_m_g_1_however_short_the_run(lengths: str) -> None:
    model = model_of(1, lengths)
    rate = 0.9 * model.largest_stable_rate
    exact = solve_mg1(LatencyModel(k2=0.001, k4=0.00806), model.requests.output_tokens, rate).delay
    found = simulate_steady_state(model, rate, 20_000).queueing_delay
    for name in NAMES:
        assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=1e-6)
    assert found.standard_error == pytest.approx(0, abs=1e-9)


def test_several_slots_vary_less_from_seed_to_seed_around_the_mean_of_a_long_run() -> None:
    model = model_of(8, "lognormal:mu=4,sigma=1.27")
    rate = 0.95 * model.largest_stable_rate
    companion = companion_of(model, rate)
    assert companion is not None
    plain, better = [], []
    for seed in range(12):
        run = simulate_run(model, rate, 60_000, np.random.SeedSequence(seed))
        beside = companion.delays(run.arrived_at, run.output_tokens)
        plain.append(row(summary_of_runs([run.queueing_delay])))
        better.append(row(controlled(run.queueing_delay, beside, companion.exact)))
    spread, less = np.std(plain, axis=0, ddof=1), np.std(better, axis=0, ddof=1)
    mean, p99 = NAMES.index("mean"), NAMES.index("p99")
    assert less[mean] < 0.4 * spread[mean]
    assert less[p99] < 0.5 * spread[p99]
    long = simulate_model(model, rate, num_requests=2_000_000, seed=99).queueing_delay
    assert np.mean(better, axis=0)[mean] == pytest.approx(long.mean, abs=4 * long.standard_error)
    assert np.mean(better, axis=0)[p99] == pytest.approx(long.p99, rel=0.12)


def row(found: Quantiles) -> list[float]:
    return [getattr(found, name) for name in NAMES]


def test_the_standard_error_is_the_spread_from_seed_to_seed() -> None:
    rng = np.random.default_rng(3)
    exact = Quantiles(0.0, 0.0, 1.2816, 1.6449, 2.3263)
    means, errors = [], []
    for _ in range(400):
        beside = rng.normal(size=4000)
        values = 10 + 2 * beside + 0.5 * rng.normal(size=4000)
        found = controlled(values, beside, exact)
        means.append(found.mean)
        errors.append(found.standard_error)
    spread = np.std(means, ddof=1)
    assert spread == pytest.approx(0.5 / np.sqrt(4000), rel=0.15)
    assert np.mean(errors) == pytest.approx(spread, rel=0.1)
    assert np.mean(means) == pytest.approx(10, abs=5 * spread)


def test_quantiles_rise_are_not_negative_and_a_zero_stays() -> None:
    rng = np.random.default_rng(1)
    values = np.maximum(0.0, rng.normal(-1, 1, 4000))
    found = controlled(values, rng.exponential(size=4000), Quantiles(0.1, 0.1, 0.1, 0.1, 0.1))
    assert found.p50 == 0.0
    assert 0.0 <= found.p50 <= found.p90 <= found.p95 <= found.p99


def test_what_the_companion_does_not_know_is_the_sample_s_own() -> None:
    rng = np.random.default_rng(2)
    values, beside = rng.exponential(size=4000), rng.exponential(size=4000)
    assert row(controlled(values, beside, Quantiles())) == row(summary_of_runs([values]))


@pytest.mark.parametrize(("count", "corrected"), [(20, False), (21, True)])
def test_values_are_corrected_from_more_than_one_a_batch_on(count: int, corrected: bool) -> None:
    rng = np.random.default_rng(4)
    values, beside, weights = rng.exponential(size=count), rng.exponential(size=30), np.arange(30)
    kept, exact = np.arange(30) >= 30 - count, Quantiles(1.0, 0.7, 2.3, 3.0, 4.6)
    control, plain = Controlled(beside, exact), Sampled("steady")
    found = control([values], [kept])
    assert found == (
        controlled(values, beside[kept], exact) if corrected else plain([values], [kept])
    )
    assert (found.mean == pytest.approx(values.mean())) != corrected
    counts = weights[kept] + 1
    weighted = control.mean([values], [kept], [counts])
    assert weighted == (
        controlled_mean(values, beside[kept], exact, counts)
        if corrected
        else plain.mean([values], [kept], [counts])
    )
    assert (weighted.mean == pytest.approx(np.average(values, weights=counts))) != corrected


def test_where_each_counts_once_the_mean_is_that_of_the_whole_summary() -> None:
    rng = np.random.default_rng(5)
    values, beside = rng.exponential(size=400), rng.exponential(size=400)
    exact = Quantiles(1.0, 0.7, 2.3, 3.0, 4.6)
    whole = controlled(values, beside, exact)
    alone = controlled_mean(values, beside, exact, np.ones(400))
    assert (alone.mean, alone.standard_error) == pytest.approx((whole.mean, whole.standard_error))
    assert alone.p50 is None


@pytest.mark.parametrize(
    ("policy", "limits"),
    [
        ("dynamic", {}),
        ("continuous", {}),
        ("continuous:max_batch_size=4", {"patience": 1.0}),
        ("continuous:max_batch_size=4", {"sequences": "uniform:low=1,high=3"}),
        ("continuous:max_batch_size=4", {"arrivals": "mmpp:rates=0.1/1,durations=10/1"}),
        ("single", {"server_speeds": "1,2"}),
        ("single", {"disaggregated": True}),
    ],
)
def test_only_independent_requests_to_equal_servers_or_slots_have_one(policy, limits) -> None:
    model = Queue.read(policy, parse_distribution("geometric:mean=64"), LAW, **limits)
    assert companion_of(model, 0.1) is None


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("policy", "limits", "least"),
    [
        ("single", {"servers": 4}, 0.2),
        ("single", {"servers": 2, "arrival_scv": 4.0}, 0.2),
        ("single:order=spjf", {"predictor": "exact"}, 0.6),
        ("single:order=spjf", {"servers": 4, "predictor": "exponential"}, 0.6),
        ("continuous:max_batch_size=8,order=spjf", {"predictor": "exact"}, 0.6),
        ("continuous:max_batch_size=8", {"servers": 2}, 0.4),
        ("continuous:max_batch_size=8", {"arrival_scv": 4.0}, 0.3),
    ],
)
def test_servers_slots_and_orders_vary_less_around_the_same_mean(policy, limits, least) -> None:
    law = LatencyModel(k1=1e-3, k2=4e-3, k3=1e-4, k4=2e-3)
    model = Queue.read(policy, parse_distribution("lognormal:mu=3,sigma=0.8"), law, **limits)
    rate = 0.9 * model.largest_stable_rate
    companion = companion_of(model, rate)
    assert companion is not None
    plain, better = [], []
    for seed in range(12):
        run = simulate_run(model, rate, 40_000, np.random.SeedSequence(seed))
        beside = companion.delays(run.arrived_at, run.output_tokens)[4000:]
        plain.append(row(summary_of_runs([run.queueing_delay[4000:]])))
        better.append(row(controlled(run.queueing_delay[4000:], beside, companion.exact)))
    spread, less = np.std(plain, axis=0, ddof=1), np.std(better, axis=0, ddof=1)
    assert less[0] < least * spread[0]
    assert (less[1:] < 1.25 * spread[1:]).all(), "no quantile is noisier"
    both = np.hypot(spread[0], less[0]) / np.sqrt(12)
    assert np.mean(better, axis=0)[0] == pytest.approx(np.mean(plain, axis=0)[0], abs=4 * both)


def test_heavy_tails_have_none() -> None:
    lengths = parse_distribution("pareto:alpha=2.5,minimum=10", tail=True)
    assert companion_of(Queue.read("continuous:max_batch_size=4", lengths, LAW), 0.01) is None


def test_predictions_of_a_continuous_engine_are_simulated_with_it() -> None:
    model = model_of(1, "geometric:mean=64")
    rate = 0.9 * model.largest_stable_rate
    exact = solve_mg1(LatencyModel(k2=0.001, k4=0.00806), model.requests.output_tokens, rate).delay
    found = predict_model(model, rate, quantiles=True).queueing_delay
    assert found.p99 == pytest.approx(exact.p99, rel=1e-6)


def test_a_time_between_tokens_counts_once_for_each_gap_of_its_answer() -> None:
    values = [np.array([1.0, 2.0, 4.0]), np.array([8.0])]
    counts = [np.array([60, 20, 15]), np.array([5])]
    assert weighted_mean(values, counts).mean == pytest.approx(2.0)
    found = weighted_quantiles(np.concatenate(values), np.concatenate(counts))
    assert found.tolist() == [1.0, 4.0, 4.0, 8.0]
    assert weighted_mean([np.array([])], [np.array([])]) == Quantiles()
