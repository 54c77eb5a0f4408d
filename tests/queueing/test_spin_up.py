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
from kendall.queueing.simulation.spin_up import SpinUp, memory, spin_up, unsettled

LAW = "k1=1e-3,k2=4e-3,k3=1e-4,k4=2e-3"
LONG = "k1=0.008,k2=0.03,k3=4e-4,k4=0.0225"  # at load 0.95 some 7,700 requests in a batch
LENGTHS = "geometric:mean=16"
CALLS = "mixture:weights=0.5+0.5,parts=deterministic:value=1+deterministic:value=3"
SLOW = "latency=k1=0,k2=0,k3=0,k4=0.1"
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


SECOND = "k1=0,k2=0,k3=0,k4=0.1"  # of ten tokens
BATCH = "k1=0,k2=1,k3=0,k4=0"  # of any
DRAWN = {"output_tokens": "deterministic:value=10", "latency": SECOND}


def forgets(load: float, index: float = 1.0, size: int = 1, scv: float = 0.0) -> float:
    """Reflected Brownian motion."""
    return 2 * load**2 * (index + load * size * scv) / (1 - load) ** 2


@pytest.mark.parametrize(
    ("policy", "given", "rate", "expected"),
    [
        ("single", {}, 0.8, forgets(0.8) + 1),
        ("single", {"servers": 3}, 2.4, forgets(0.8) + 3),
        ("single", {"latency": f"{SECOND},cv=1"}, 0.8, forgets(0.8, scv=1.0) + 1),
        ("single", {"arrival_scv": 4.0}, 0.8, forgets(0.8, 4.0) + 1),
        (
            "capped:max_batch_size=4",
            {"latency": f"{BATCH},cv=1"},
            3.2,
            forgets(0.8, size=4, scv=1.0) + 4,
        ),
        # calls of one or three, two on average: (5 - 4) / 2 + 2
        (
            "single",
            {"latency": f"{SECOND},cv=1", "sequences": CALLS},
            0.4,
            forgets(0.8, 2.5, scv=1.0) + 1,
        ),
        # of equal lengths by a half: E X^2 / E X - 1 = 1.5 others
        (
            "single",
            {
                "latency": f"{SECOND},cv=1",
                "sequences": CALLS,
                "intraclass_correlation": 0.5,
            },
            0.4,
            forgets(0.8, 2.5, scv=1.75) + 1,
        ),
        ("single", {"patience": 2.0}, 0.8, 0.8 * 2 + 1),
        ("single", {"patience": 2.0, "sequences": CALLS}, 0.4, 0.8 * 2 + 1),
        ("single", {"patience": 2.0}, 3.0, 3.0 * 2 + 1),
        ("single", {"patience": 99.0}, 0.5, forgets(0.5) + 1),
        ("single", {"max_num_queued_reqs": 4}, 0.8, 2 * 16 / math.pi**2 + 1),
        ("single", {"max_num_queued_reqs": 100}, 1.25, 100 * 1.25 / 0.25 + 1),
        ("single", {"max_num_queued_reqs": 100}, 0.8, forgets(0.8) + 1),
        # two states of five seconds: 1 + 2 (1.6^2) 0.04 / (0.16 x 0.32) = 5; ten seconds a cycle
        ("single", {"arrivals": "mmpp:rates=0/1.6,durations=5/5"}, 0.8, forgets(0.8, 5.0) + 9),
        # B (1 - 5 x 0.1) = 5 x 1.05: ten at most, and half of a batch more with each
        ("dynamic", {"latency": "k1=0.1,k2=1.05,k3=0,k4=0"}, 5.0, 10 / 0.5 + 1),
        ("dynamic", {"latency": "k1=0.1,k2=0.01,k3=0,k4=0"}, 5.0, 1 / 0.5 + 1),
        (
            "elastic",
            {"latency": "k1=0.1,k2=1.05,k3=0,k4=0", "servers": 2},
            10.0,
            10 / 0.5 + 2,
        ),
        # the model with three quarters of the requests, whichever that is
        (
            "single",
            {"second_model": f"share=0.25,servers=1,{SLOW}", "servers": 2},
            1.0,
            (forgets(0.75) + 1) / 0.75,
        ),
        (
            "single",
            {"second_model": f"share=0.75,servers=1,{SLOW}", "servers": 2},
            1.0,
            (forgets(0.75) + 1) / 0.75,
        ),
        # half a second a prefill, a second a decode
        (
            "capped:max_batch_size=1",
            {"latency": "k1=0.5,k2=0,k3=0,k4=0.1", "disaggregated": True},
            0.8,
            forgets(0.4) + 1 + forgets(0.8) + 1,
        ),
    ],
)
def test_how_many_requests_a_queue_remembers(
    policy: str, given: dict[str, object], rate: float, expected: float
) -> None:
    model = Queue.read(policy, **{**DRAWN, **given})  # type: ignore[arg-type]
    assert memory(model, rate) == pytest.approx(expected)


@pytest.mark.parametrize(("slots", "held"), [(4, 4.0), (None, None)])
def test_slots_remember_by_the_scatter_of_the_lengths(slots: int | None, held: float) -> None:
    lengths = "uniform:low=1,high=32"
    bound = "" if slots is None else f":max_batch_size={slots}"
    model = Queue.read(f"continuous{bound}", lengths, LAW)
    rate, drawn = 0.6 * model.largest_stable_rate, model.requests.output_tokens
    together = rate * model.slot_time.mean(1, refilled=False) if held is None else held
    scv = drawn.variance / drawn.mean**2
    assert memory(model, rate) == pytest.approx(forgets(model.load(rate), scv=scv) + together)


@pytest.mark.parametrize(
    "law", ["a=0.01,c=0", "k1=0,k2=0,k3=0.01,k4=0", "k1=0,k2=0,k3=5e-3,k4=5e-3"]
)
def test_services_without_a_variance_are_never_forgotten(law: str) -> None:
    """Whichever coefficient their tail comes by."""
    model = Queue.read("single", "pareto:alpha=1.9,minimum=20", law)
    assert math.isinf(memory(model, 1.0))
    assert spin_up(model, 1.0, 1000, most=9999) == SpinUp(1000, 100)
    assert simulate_model(model, 1.0, num_requests=1000).queueing_delay.p99 is not None


LEFT_OUT = "the first {} requests of a run are left out: its queue remembers long"
TOO_FEW = (
    "TOO SHORT: the queue remembers 163 requests, of which {} are left out before the means: ask "
    "for more requests"
)


@pytest.mark.parametrize(
    ("requests", "most", "expected"),
    [
        # one and a half times 163 are 244.5
        (2450, 10**6, SpinUp(2450, 245)),
        (2440, 10**6, SpinUp(2440, 244, 0, (LEFT_OUT.format(244),))),
        (1000, 10**6, SpinUp(1144, 244, 0, (LEFT_OUT.format(244),))),
        (1000, 1000, SpinUp(1000, 244, 0, (LEFT_OUT.format(244),))),
        (300, 300, SpinUp(300, 150, 0, (LEFT_OUT.format(150),))),
        (100, 100, SpinUp(100, 50, 0, (TOO_FEW.format(50),))),
        (100, 10**6, SpinUp(300, 210, 0, (LEFT_OUT.format(210),))),
        (100, 250, SpinUp(250, 160, 0, (LEFT_OUT.format(160),))),
        (40, 10**6, SpinUp(120, 84, 0, (LEFT_OUT.format(84),))),
        (38, 10**6, SpinUp(114, 79, 0, (TOO_FEW.format(79),))),
    ],
)
def test_how_a_run_begins(requests: int, most: int, expected: SpinUp) -> None:
    """M/D/1 at load 0.9: 2 x 0.81 / 0.01, and one in service."""
    model = Queue.read("single", **DRAWN)  # type: ignore[arg-type]
    assert memory(model, 0.9) == pytest.approx(163)
    assert spin_up(model, 0.9, requests, most=most) == expected


def test_batches_without_a_bound_begin_with_those_that_wait_on_average() -> None:
    """Ten, remembered over 21 requests: four times these are between a tenth of 830 and of 850."""
    model = Queue.read("dynamic", "deterministic:value=1", "k1=0.1,k2=1.05,k3=0,k4=0")
    assert spin_up(model, 5.0, 850, most=10**6) == SpinUp(850, 85)
    begun = spin_up(model, 5.0, 830, most=10**6)
    assert (begun.requests, begun.warm_up, begun.waiting) == (830, 83, 10)
    assert begun.notes == (
        "the first 83 requests of a run are left out, which begins with 10 of them waiting: its "
        "queue remembers long",
    )
    few = spin_up(model, 5.0, 40, most=10**6)
    assert (few.requests, few.warm_up, few.waiting) == (40 + 27, 31, 10)


def test_a_run_of_arrivals_that_end_is_kept_whole() -> None:
    model = Queue.read("single", LENGTHS, LAW, arrivals="piecewise:rates=1,durations=9")
    assert spin_up(model, 1.0, 1000, most=10**6) == SpinUp(1000, 0)


@pytest.mark.parametrize(
    ("growth", "noise", "told"),
    [
        (0.0199, 0.0, False),
        (0.0201, 0.0, True),
        # four errors: g^2 (1 - 16 / 19) = 64 / 19 a^2 with a twentieth's mean off by +-a
        (0.1, 0.0215, True),
        (0.1, 0.0218, False),
        (-0.5, 0.0, False),
    ],
)
def test_a_second_half_above_the_first_is_told_from_two_percent_and_four_errors_on(
    growth: float, noise: float, told: bool
) -> None:
    means = np.append(np.ones(10), np.full(10, 1 + growth)) + noise * (-1.0) ** np.arange(20)
    run = np.repeat(means, 5)
    assert unsettled([run]) == (pytest.approx(growth) if told else 0.0)
    assert unsettled([run, np.full(19, 9.0)]) == (pytest.approx(growth) if told else 0.0)
    assert unsettled([run[:19]]) == 0.0


def test_the_growth_of_several_runs_is_their_mean_and_its_error_smaller() -> None:
    noisy = np.repeat(np.append(np.ones(10), np.full(10, 1.1)) + 0.025 * (-1.0) ** np.arange(20), 5)
    assert unsettled([noisy]) == 0.0
    assert unsettled([noisy, noisy]) == pytest.approx(0.1)


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
