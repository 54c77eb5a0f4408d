"""How simulations of a steady state begin: nothing of an empty queue is left in their means, runs
that forget it within their first tenth are what they were, and what a run cannot tell it says.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from kendall.queueing.distributions.token_distribution import TokenDistribution, Vector
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.drift_control import has_drifts, means_by_drifts
from kendall.queueing.simulation.experiment import (
    begin_of,
    simulate_model,
    simulate_run,
    simulate_steady_state,
    steady_run,
)
from kendall.queueing.simulation.spin_up import memory, spin_up, unsettled

LAW = "k1=1e-3,k2=4e-3,k3=1e-4,k4=2e-3"
LONG = "k1=0.008,k2=0.03,k3=4e-4,k4=0.0225"  # at load 0.95 some 7,700 requests in a batch
LENGTHS = "geometric:mean=16"
BURSTS = "mmpp:rates=5/50,durations=10/1"


def at(load: float, policy: str, lengths: str = LENGTHS, law: str = LAW, **limits: object):
    model = Queue.read(policy, lengths, law, **limits)  # type: ignore[arg-type]
    return model, load * model.largest_stable_rate


def recursion(
    rate: float, law: tuple[float, ...], drawn: TokenDistribution, start: int, batches: int
) -> Vector:
    """Sizes and durations of elastic batches, one after the other."""
    k1, k2, k3, k4 = law
    rng, size, found = np.random.default_rng(17), start, np.empty((batches, 2))
    for batch in range(batches):
        lengths = drawn.sample(rng, size)
        seconds = k1 * size + k2 + k3 * lengths.sum() + k4 * lengths.max()
        found[batch] = size, seconds
        size = max(int(rng.poisson(rate * seconds)), 1)
    return found


HEAVY = "lognormal:mu=3.839,sigma=0.8"  # of mean 64 too


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "load", "start", "batches", "known"),
    [
        ("geometric:mean=64", 0.95, 7700, 6000, 0.01),
        ("geometric:mean=64", 0.97, 14000, 4000, 0.01),
        (HEAVY, 0.95, 14900, 3000, 0.06),  # a million requests are 70 batches
    ],
)
def test_unbounded_batches_at_a_high_load_are_not_too_small(
    lengths: str, load: float, start: int, batches: int, known: float
) -> None:
    """Against a recursion of its own, from the fluid's batch on: E[Wq] = lam E[H^2] / (2 E[B])."""
    model, rate = at(load, "elastic", lengths, LONG)
    drawn = model.requests.output_tokens
    sizes, seconds = recursion(rate, (0.008, 0.03, 4e-4, 0.0225), drawn, start, batches)[100:].T
    parts = zip(np.array_split(seconds, 10), np.array_split(sizes, 10), strict=True)
    means = [rate * (h**2).mean() / (2 * b.mean()) for h, b in parts]
    mean, error = float(np.mean(means)), float(np.std(means, ddof=1)) / math.sqrt(10)
    found = predict_model(model, rate)
    assert found.method == "simulation"
    delay, own = found.queueing_delay.mean, found.queueing_delay.standard_error
    assert delay is not None
    assert own is not None
    assert own < known * delay
    assert error < max(0.01, known / 4) * delay, "too few batches to tell"
    assert delay == pytest.approx(mean, abs=(4 if known < 0.02 else 3) * math.hypot(own, error))
    assert found.batch_size.mean == pytest.approx(sizes.mean(), rel=max(0.02, 2 * known))
    # a request meets a batch by its length, and waits for what is left of it
    met = np.random.default_rng(1).choice(seconds, 100_000, p=seconds / seconds.sum())
    waits = met * np.random.default_rng(2).random(met.size)
    assert found.queueing_delay.p99 == pytest.approx(
        np.quantile(waits, 0.99), rel=max(0.03, 3 * known)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "lengths", "load"),
    [("elastic", "geometric:mean=64", 0.5), ("dynamic", "uniform:low=1,high=32", 0.5)],
)
def test_the_drifts_give_the_exact_mean_ten_times_as_quietly(
    policy: str, lengths: str, load: float
) -> None:
    model, rate = at(load, policy, lengths, "k1=0.02,k2=0.1,k3=0.002,k4=0.01")
    exact, means, plain = predict_model(model, rate, "exact"), [], []
    for seed in range(8):
        run = simulate_run(model, rate, 100_000, np.random.SeedSequence(seed)).after(20_000)
        found = means_by_drifts(run, model, rate)
        assert found is not None
        delay, size = found
        means.append((delay.mean, size.mean))
        plain.append(run.queueing_delay.mean())
        assert delay.mean == pytest.approx(
            exact.queueing_delay.mean, abs=4.5 * (delay.standard_error or 0)
        )
        assert size.mean == pytest.approx(exact.batch_size.mean, abs=4.5 * size.standard_error)
    assert 4 * np.std([mean for mean, _ in means]) < np.std(plain)


def test_only_one_server_that_takes_all_that_waits_has_drifts() -> None:
    for policy, limits in (
        ("elastic:max_batch_size=8", {}),
        ("dynamic:order=spjf", {}),
        ("elastic", {"patience": 1.0}),
        ("elastic", {"servers": 2}),
        ("elastic", {"arrival_scv": 2.0}),
        ("continuous", {}),
    ):
        model, _ = at(0.5, policy, **limits)
        assert not has_drifts(model), policy
    model, rate = at(0.3, "elastic")
    assert has_drifts(model)
    run = simulate_run(model, rate, 60, np.random.SeedSequence(0))
    assert means_by_drifts(run, model, rate) is None, "too few batches"


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("policy", "load", "limits"),
    [
        ("single", 0.9, {}),
        ("capped:max_batch_size=8", 0.95, {}),
        ("elastic", 0.6, {}),
        ("continuous:max_batch_size=16", 0.9, {}),
        ("single", 0.9, {"servers": 4}),
        ("capped:max_batch_size=8", 0.6, {"arrivals": BURSTS}),
    ],
)
def test_a_run_whose_tenth_suffices_is_the_one_that_it_was(
    policy: str, load: float, limits: dict[str, object]
) -> None:
    model, rate = at(load, policy, **limits)
    begin = begin_of(model, rate, 100_000)
    assert (begin.requests, begin.warm_up, begin.waiting, begin.notes) == (100_000, 10_000, 0, ())
    run = simulate_run(model, rate, 100_000, np.random.SeedSequence(3).spawn(1)[0]).after(10_000)
    assert simulate_model(model, rate, seed=3).queueing_delay.mean == run.queueing_delay.mean()


def test_a_longer_run_begins_as_the_shorter_one_did() -> None:
    model, rate = at(0.995, "single")
    begin = begin_of(model, rate, 100_000)
    assert begin.requests > 200_000
    assert begin.requests - begin.warm_up == 90_000
    stream = np.random.SeedSequence(3)
    run = steady_run(model, rate, begin, np.random.SeedSequence(3))
    short = simulate_run(model, rate, begin.warm_up + 100, stream)
    assert np.array_equal(short.dispatched_at[begin.warm_up :], run.dispatched_at[:100])
    assert "requests of a run are left out: its queue remembers long" in begin.notes[0]


def test_those_who_wait_as_a_run_begins_are_its_first_requests() -> None:
    model, rate = at(0.97, "elastic", "geometric:mean=64", LONG)
    begin = begin_of(model, rate, 1_000_000)
    assert 13_000 < begin.waiting < 15_000
    whole = simulate_run(model, rate, 40_000, np.random.SeedSequence(1), waiting=begin.waiting)
    assert (whole.arrived_at[: begin.waiting] == 0).all()
    plain = simulate_run(model, rate, 40_000, np.random.SeedSequence(1))
    assert np.array_equal(whole.arrived_at[begin.waiting :], plain.arrived_at[: -begin.waiting])
    assert whole.batch_size[1] == pytest.approx(begin.waiting, rel=0.01)


@pytest.mark.parametrize(
    ("policy", "limits", "expected"),
    [
        ("single", {}, 4 / 0.1**2),  # M/M/1 at a high load: 4 / (1 - load)^2
        ("single", {"servers": 5}, 4 / 0.1**2),
        ("single", {"arrival_scv": 4.0}, 10 / 0.1**2),
    ],
)
def test_the_memory_is_that_of_reflected_brownian_motion(
    policy: str, limits: dict[str, object], expected: float
) -> None:
    model, rate = at(0.9, policy, "deterministic:value=1", "k1=0,k2=0,k3=0,k4=1,cv=1", **limits)
    assert memory(model, rate) == pytest.approx(expected, rel=0.25)


def test_of_a_run_that_cannot_be_longer_at_most_a_half_is_left_out() -> None:
    model, rate = at(0.97, "single")
    begin = spin_up(model, rate, 2000, most=2000)
    assert (begin.requests, begin.warm_up) == (2000, 1000)
    assert memory(model, rate) > 2000


def test_what_a_run_cannot_forget_it_says() -> None:
    model, rate = at(0.9995, "single")
    found = simulate_model(model, rate, num_requests=20_000)
    assert any("TOO SHORT: the queue remembers" in text for text in found.assumptions)


def test_an_end_above_the_beginning_is_told_from_chance() -> None:
    rng = np.random.default_rng(5)
    steady = [rng.exponential(size=10_000) for _ in range(3)]
    assert unsettled(steady) == 0
    grown = [values * np.linspace(0.8, 1.2, values.size) for values in steady]
    assert unsettled(grown) == pytest.approx(0.222, abs=0.03)
    assert unsettled([np.zeros(100)]) == 0
    fallen = [values[::-1] for values in grown]
    assert unsettled(fallen) == 0


def test_the_error_of_runs_under_bursts_does_not_depend_on_their_luck() -> None:
    """Of one run of as many requests it was as little as a third of the spread."""
    model, rate = at(0.657, "capped:max_batch_size=8", arrivals=BURSTS)
    found = [
        simulate_model(model, rate, num_requests=25_000, replications=8, seed=seed).queueing_delay
        for seed in range(16)
    ]
    spread = float(np.std([each.mean for each in found], ddof=1))
    errors = [each.standard_error or 0.0 for each in found]
    assert min(errors) > 0.5 * spread
    assert np.mean(errors) == pytest.approx(spread, rel=0.5)


def test_a_prediction_under_bursts_counts_several_seeds() -> None:
    model, rate = at(0.657, "capped:max_batch_size=8", arrivals=BURSTS)
    each = simulate_model(model, rate, num_requests=50_000, replications=8)
    assert simulate_steady_state(model, rate, 400_000) == each
