"""`--arrivals`: queues whose arrivals are not Poisson, against closed forms, matrix-analytic means,
recursions of our own and the policy objects themselves.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import brentq

import kendall
from kendall.policies import SpecError
from kendall.queueing.arrivals.modulated import Mmpp
from kendall.queueing.arrivals.processes import Gamma
from kendall.queueing.arrivals.rates import Piecewise
from kendall.queueing.arrivals.text import parse_arrivals
from kendall.queueing.prediction import methods, predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import number_of_spans, simulate_model, simulate_run
from kendall.queueing.simulation.run_limits import enough_slots
from kendall.queueing.simulation.simulated_means import TOO_SHORT, brevity, mean_of_runs

LAW = "k1=3e-4,k2=1.4e-3,k3=25e-6,k4=9.2e-4,cv=0.12"
LENGTHS = "uniform:low=1,high=32"
POLICIES = [
    "single",
    "dynamic",
    "fixed:batch_size=4,max_wait=0.05",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
    "continuous:max_batch_size=4",
]
TEXTS = [
    "gamma:rate=20,burstiness=0.4",
    "deterministic:rate=20",
    "mmpp:rates=5/60,durations=2/1",
    "piecewise:rates=10/60/0/5,durations=4/3/2/5",
    "ramp:start=1,end=50,duration=20",
]
MEAN = 0.05  # seconds of an exponential service


def exponential(**options: Any) -> kendall.Prediction:
    """M services of mean 0.05 s: geometric counts are 0.1 % from it."""
    return kendall.simulate(
        "single", None, "geometric:mean=1000", f"a={MEAN / 1000},c=0", **options
    )


def within(simulated: kendall.Quantiles, mean: float, *, power: float = 0.05) -> None:
    error = simulated.standard_error
    assert simulated.mean is not None
    assert error is not None
    assert error < power * mean, "the run is too short to tell anything"
    assert abs(simulated.mean - mean) < 4 * error, (simulated, mean)


# --- Poisson arrivals by other names --------------------------------------------------------------


def test_a_poisson_text_is_the_rate_of_old() -> None:
    asked = kendall.predict("single", None, LENGTHS, LAW, arrivals="poisson:rate=12")
    assert asked == kendall.predict("single", 12, LENGTHS, LAW)
    assert asked.method == "exact"


@pytest.mark.parametrize("policy", ["single", "capped:max_batch_size=8", "fixed:batch_size=4"])
@pytest.mark.parametrize(
    "text", ["gamma:rate=30,burstiness=1", "mmpp:rates=30/30/30,durations=1/0.1/3"]
)
@pytest.mark.thinned(12)
def test_what_is_poisson_by_another_name_waits_as_the_exact_answer_says(
    policy: str, text: str
) -> None:
    exact = kendall.predict(policy, 30, LENGTHS, LAW)
    found = kendall.predict(policy, None, LENGTHS, LAW, arrivals=text)
    assert (exact.method, found.method) == ("exact", "simulation")
    assert found.load == pytest.approx(exact.load, rel=1e-12)
    for name in ("queueing_delay", "sojourn_time", "time_to_first_token"):
        expected = getattr(exact, name).mean
        within(getattr(found, name), expected)
    assert found.queueing_delay.p99 == pytest.approx(exact.queueing_delay.p99, rel=0.03)


# --- closed forms ---------------------------------------------------------------------------------


def gim1(rate: float, scv: float) -> float:
    """Mean delay of GI/M/1 with gamma gaps: sigma / (mu (1 - sigma)), sigma the root of
    sigma = E exp(-mu (1 - sigma) A).
    """
    mu = 1 / MEAN

    def transform(s: float) -> float:
        return math.exp(-s / rate) if scv == 0 else (1 + s * scv / rate) ** (-1 / scv)

    sigma = brentq(lambda x: transform(mu * (1 - x)) - x, 0.0, 1 - 1e-9 - (1 - rate / mu) / 1e3)
    return float(sigma / (mu * (1 - sigma)))


@pytest.mark.slow
@pytest.mark.parametrize(("scv", "load"), [(0, 0.8), (0.25, 0.7), (4, 0.7), (10, 0.5)])
def test_gamma_gaps_and_exponential_services_wait_as_gi_m_1(scv: float, load: float) -> None:
    rate = load / MEAN
    text = f"gamma:rate={rate},burstiness={1 / scv}" if scv else f"deterministic:rate={rate}"
    found = exponential(arrivals=text, num_requests=1_000_000)
    within(found.queueing_delay, gim1(rate, scv))
    assert found.model == ("GI/G/1" if scv else "D/G/1")


def mmpp_m1(process: Mmpp) -> float:
    """Mean delay of MMPP/M/1: the quasi-birth-death process of (number, state), R by iteration,
    E N = pi_0 R (I - R)^-2 e, Little's law.
    """
    rates, durations = np.diag(process.rates), np.array(process.durations)
    states, mu = len(durations), 1 / MEAN
    Q = np.roll(np.diag(1 / durations), 1, axis=1) - np.diag(1 / durations)
    one, R = np.eye(states), np.zeros((states, states))
    inverse = np.linalg.inv(rates + mu * one - Q)
    for _ in range(200_000):
        R, before = (rates + mu * R @ R) @ inverse, R
        if np.abs(R - before).max() < 1e-15:
            break
    inner = np.linalg.inv(one - R)
    empty = Q - rates + mu * R
    system = np.vstack([empty.T, (inner @ np.ones(states))[None, :]])
    pi = np.linalg.lstsq(system, np.append(np.zeros(states), 1.0), rcond=None)[0]
    number = float(pi @ R @ inner @ inner @ np.ones(states))
    return number / process.mean_rate - MEAN


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["mmpp:rates=5/30,durations=2/1", "mmpp:rates=0/12/24,durations=1/0.5/0.7"]
)
def test_modulated_arrivals_wait_as_mmpp_m_1(text: str) -> None:
    """The second state of the first has load 1.5: Poisson arrivals at its mean rate wait less."""
    process = parse_arrivals(text)
    assert isinstance(process, Mmpp)
    expected = mmpp_m1(process)
    found = exponential(arrivals=text, num_requests=2_000_000)
    within(found.queueing_delay, expected)
    load = process.mean_rate * MEAN
    assert expected > 1.5 * load / (1 - load) * MEAN
    assert found.model == "MMPP/G/1"


def test_mmpp_m_1_of_equal_rates_is_m_m_1() -> None:
    assert mmpp_m1(Mmpp((10.0, 10.0), (1.0, 2.0))) == pytest.approx(MEAN, rel=1e-9)


def lindley(instants: NDArray[np.float64], service: float) -> NDArray[np.float64]:
    """Delays behind one server of constant services."""
    gone = np.maximum.accumulate(instants - service * np.arange(len(instants)))
    return gone + service * np.arange(len(instants)) - instants


@pytest.mark.slow
def test_steps_wait_as_thinned_arrivals_do_from_an_empty_queue() -> None:
    """Another sampler, another queue: thinning, and the recursion of Lindley in closed form."""
    rates, durations, service = (2.0, 40.0, 2.0), (20.0, 5.0, 20.0), 0.04
    text = "piecewise:rates=2/40/2,durations=20/5/20"
    rng, total, number = np.random.default_rng(5), [], []
    for _ in range(1500):
        at = np.sort(rng.uniform(0, 45, rng.poisson(45 * 40)))
        kept = at[rng.random(len(at)) * 40 < np.repeat(rates, durations)[at.astype(int)]]
        total.append(lindley(kept, service).sum())
        number.append(len(kept))
    expected = sum(total) / sum(number)
    error = (
        np.std(np.array(total) - expected * np.array(number)) / np.mean(number) / math.sqrt(1500)
    )
    found = kendall.predict("single", None, "deterministic:value=40", "a=1e-3,c=0", arrivals=text)
    delay = found.queueing_delay
    assert delay.mean is not None
    assert delay.standard_error is not None
    assert abs(delay.mean - expected) < 4 * math.hypot(error, delay.standard_error)
    assert math.hypot(error, delay.standard_error) < 0.03 * expected
    assert found.model == "M(t)/G/1"
    assert found.load == pytest.approx(280 / 45 * 0.04)
    assert "load at its peak 1.6" in found.assumptions


# --- one path -------------------------------------------------------------------------------------


@pytest.mark.thinned(6)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("text", TEXTS)
def test_the_kernels_and_the_policy_itself_make_the_same_path(policy: str, text: str) -> None:
    model = Queue.read(policy, LENGTHS, LAW, arrivals=text, max_num_seqs=16)
    rate = parse_arrivals(text).mean_rate
    fast, slow = (
        simulate_run(model, rate, 400, np.random.SeedSequence(7), generic=generic)
        for generic in (False, True)
    )
    assert len(fast.arrived_at) == len(slow.arrived_at) > 100
    for name in ("arrived_at", "dispatched_at", "first_token_at", "released_at", "batch_size"):
        assert np.array_equal(getattr(fast, name), getattr(slow, name)), name


def test_the_instants_are_those_of_the_load_generator() -> None:
    """One seed of the generator: the very process that `kendall load --arrivals` draws."""
    model = Queue.read("single", LENGTHS, LAW, arrivals=TEXTS[2])
    stream = np.random.SeedSequence(3)
    run = simulate_run(model, parse_arrivals(TEXTS[2]).mean_rate, 500, stream)
    rng = np.random.default_rng(np.random.SeedSequence(3).spawn(1)[0])
    assert np.array_equal(run.arrived_at, parse_arrivals(TEXTS[2]).instants(rng, count=500))


def test_another_rate_scales_the_process() -> None:
    """As an optimiser asks: twice the rates, the same durations of the states."""
    model = Queue.read("single", LENGTHS, LAW, arrivals="mmpp:rates=2/20,durations=5/1")
    doubled = simulate_model(model, 10.0, num_requests=20_000)
    assert doubled == simulate_model(
        Queue.read("single", LENGTHS, LAW, arrivals="mmpp:rates=4/40,durations=5/1"),
        10.0,
        num_requests=20_000,
    )
    assert any("mmpp:rates=4/40,durations=5/1: mean rate 10" in a for a in doubled.assumptions)


def test_calls_of_several_sequences_come_at_the_instants_of_the_process() -> None:
    model = Queue.read("dynamic", LENGTHS, LAW, arrivals=TEXTS[2], sequences="uniform:low=1,high=3")
    rate = parse_arrivals(TEXTS[2]).mean_rate
    fast, slow = (
        simulate_run(model, rate, 400, np.random.SeedSequence(7), generic=generic)
        for generic in (False, True)
    )
    assert np.array_equal(fast.released_at, slow.released_at)
    assert len(np.unique(fast.arrived_at)) < 300


# --- errors of bursty means -----------------------------------------------------------------------


def test_the_error_of_a_bursty_run_is_what_other_seeds_show() -> None:
    """Batch means taken as independent understate it here by a third and more."""
    model = Queue.read("single", LENGTHS, LAW, arrivals="mmpp:rates=8/45,durations=20/5")
    rate, count, seeds = 15.4, 20_000, 60
    means, printed, plain = [], [], []
    for seed in range(seeds):
        run = simulate_run(model, rate, count, np.random.SeedSequence(seed))
        mean, error = mean_of_runs([run.queueing_delay], "bursty")
        means.append(mean)
        printed.append(error)
        plain.append(mean_of_runs([run.queueing_delay])[1])
    actual = float(np.std(np.array(means, dtype=float), ddof=1))
    told = math.sqrt(float(np.mean(np.square(np.array(printed, dtype=float)))))
    assert 0.75 * actual < told < 1.5 * actual, (actual, told)
    assert told > math.sqrt(float(np.mean(np.square(np.array(plain, dtype=float)))))


def test_a_state_longer_than_the_run_is_named() -> None:
    """Within one state such a run looks like a short-lived Poisson queue, and its error small."""
    text = "mmpp:rates=5/20,durations=6h/1h"
    found = kendall.simulate("single", None, LENGTHS, LAW, arrivals=text, num_requests=50_000)
    assert any(each.startswith(f"{TOO_SHORT}0.2") for each in found.assumptions), found.assumptions
    predicted = kendall.predict("single", None, LENGTHS, LAW, arrivals=text)
    assert any(each.startswith(TOO_SHORT) for each in predicted.assumptions)


@pytest.mark.parametrize(("lasts", "said"), [(199.0, "99.5 cycles of the states"), (200.0, None)])
def test_a_hundred_cycles_of_the_states_are_enough(lasts: float, said: str | None) -> None:
    """Of two seconds each, in one run or in two."""
    arrivals = "mmpp:rates=5/30,durations=1.5/0.5"
    model = Queue.read("single", LENGTHS, LAW, arrivals=arrivals)
    alike = np.ones(1000)
    for runs in ([lasts], [0.25 * lasts, 0.75 * lasts]):
        instants = [np.array([3.0, 3.0 + seconds]) for seconds in runs]
        found = brevity(model, instants, [alike] * len(runs))
        assert (found is None) == (said is None)
        assert found is None or found.startswith(f"{TOO_SHORT}{said}")


def test_a_run_whose_mean_is_not_settled_is_named_and_a_longer_one_is_not() -> None:
    def notes(count: int) -> list[str]:
        found = kendall.simulate(
            "single",
            None,
            LENGTHS,
            LAW,
            arrivals="gamma:rate=35,burstiness=0.05",
            num_requests=count,
        )
        return [each for each in found.assumptions if each.startswith(TOO_SHORT)]

    assert len(notes(4000)) == 1
    assert notes(1_000_000) == []


def test_the_error_of_spans_is_that_of_a_ratio() -> None:
    """By hand: sums 2, 12 over 1, 3 values: mean 3.5, excesses -1.5 and 1.5."""
    mean, error = mean_of_runs([np.array([2.0]), np.array([2.0, 4.0, 6.0])], "spans")
    assert mean == 3.5
    assert error == pytest.approx(math.sqrt(4.5 * 2) / 4)
    assert mean_of_runs([np.array([2.0, 3.0])], "spans") == (2.5, None)


def test_spans_are_as_many_as_bring_the_requests_but_never_fewer_than_twenty() -> None:
    model = Queue.read("single", LENGTHS, LAW, arrivals="piecewise:rates=10,durations=10")
    assert number_of_spans(model, 5000) == 50
    assert number_of_spans(model, 100) == 20
    brief = Queue.read("single", LENGTHS, LAW, arrivals="piecewise:rates=0.01,durations=1")
    assert number_of_spans(brief, 100_000) == 10_000


def test_spans_without_a_request_are_none() -> None:
    found = kendall.simulate(
        "capped:max_batch_size=4",
        None,
        LENGTHS,
        LAW,
        arrivals="piecewise:rates=0.5,durations=1",
        num_requests=400,
    )
    assert found.queueing_delay.mean is not None
    assert found.queueing_delay.mean < 0.01
    assert found.stable


def test_an_overload_that_ends_is_answered() -> None:
    """A load above 1 over the whole span has delays, as the queue empties afterwards."""
    found = kendall.predict(
        "single", None, LENGTHS, LAW, arrivals="piecewise:rates=100/100,durations=5/5"
    )
    assert found.stable
    assert found.load > 1.5
    assert found.queueing_delay.mean is not None
    assert found.queueing_delay.mean > 1
    swamped = kendall.predict(
        "dynamic", None, LENGTHS, LAW, arrivals="ramp:start=1e3,end=4e3,duration=1"
    )
    assert swamped.load > 1
    assert swamped.queueing_delay.mean is not None, "a mean of finitely many requests is finite"
    with pytest.raises(kendall.UnstableQueueError):
        kendall.predict("single", None, LENGTHS, LAW, arrivals="mmpp:rates=99/101,durations=1/1")


def test_prefill_and_decode_on_two_servers_wait_longer_behind_bursts() -> None:
    options: dict[str, Any] = {"disaggregated": True, "prompt_tokens": "geometric:mean=50"}
    law = f"{LAW},kp=1e-4"
    bursts = "mmpp:rates=10/50,durations=3/1"
    calm = kendall.predict("single", 20, LENGTHS, law, **options)
    found = kendall.predict("single", None, LENGTHS, law, arrivals=bursts, **options)
    assert found.method == "simulation"
    assert found.model == "MMPP/G/1 -> ./G/1"
    assert (found.queueing_delay.mean or 0) > 1.3 * (calm.queueing_delay.mean or 9)


def test_slots_without_a_bound_are_enough_for_the_highest_rate() -> None:
    """Bursts that fill more slots than the compiled simulator has are left to the policy itself."""
    law = "k1=1e-6,k2=0,k3=1e-9,k4=0.02"
    for peak, compiled in ((200, True), (4000, False)):
        text = f"mmpp:rates=10/{peak},durations=10/1"
        model = Queue.read("continuous", "deterministic:value=100", law, arrivals=text)
        chosen = enough_slots(model, parse_arrivals(text).mean_rate)
        assert (chosen.bound is not None) == compiled


# --- methods and refusals -------------------------------------------------------------------------


def test_gamma_gaps_keep_their_approximation_where_it_is_asked_for() -> None:
    model = Queue.read("single", LENGTHS, LAW, arrivals="gamma:rate=20,burstiness=0.25")
    assert methods(model) == ("exact", "approximation", "bound", "paper", "simulation")
    by_scv = kendall.predict("single", 20, LENGTHS, LAW, arrival_scv=4, method="approximation")
    asked = predict_model(model, 20, "approximation")
    assert asked.queueing_delay == by_scv.queueing_delay
    assert predict_model(model, 20).method == "exact"
    capped = Queue.read("capped:max_batch_size=4", LENGTHS, LAW, arrivals=TEXTS[0])
    assert methods(capped) == methods(Queue.read("single", LENGTHS, LAW, arrivals=TEXTS[2]))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "got no arrivals; expected one of three: set arrival_rate (requests per second), set"),
        (
            {"arrival_rate": 3, "arrivals": "gamma:rate=1,burstiness=2"},
            "got arrival_rate=3 and arrivals=gamma:rate=1,burstiness=2; expected one of",
        ),
        ({"arrivals": "poisson:rate=inf"}, "which all come at once; expected a finite mean rate"),
        ({"arrivals": "gamma:rate=inf,burstiness=2"}, "which all come at once"),
        ({"arrivals": "weibull:rate=2"}, "got arrivals 'weibull'; expected one of poisson, gamma"),
        ({"arrivals": "gamma:rate=2"}, "expected burstiness too"),
        ({"arrivals": 3}, "got arrivals=3; expected a text such as"),
        (
            {"arrivals": "gamma:rate=1,burstiness=2", "arrival_scv": 2.0},
            "got arrival_scv=2 and arrivals; expected one of them: gamma:rate=..,burst",
        ),
        (
            {"arrivals": "mmpp:rates=1/2,durations=1/1", "servers": 2, "routing": "random"},
            "got routing=random and arrivals=mmpp:rates=1/2,durations=1/1; expected Poisson",
        ),
        (
            {"arrivals": "ramp:start=1,end=2,duration=9", "sequences": "uniform:low=1,high=2"},
            "got arrivals=ramp:start=1,end=2,duration=9, which end, and sequences; expected",
        ),
        (
            {"arrivals": "mmpp:rates=1/2,durations=1/1", "method": "exact"},
            "expected auto or simulation",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(options: dict[str, Any], says: str) -> None:
    rate = options.pop("arrival_rate", None)
    with pytest.raises(SpecError) as error:
        kendall.predict("single", rate, LENGTHS, LAW, **options)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_span_of_too_many_requests_is_refused() -> None:
    with pytest.raises(SpecError, match="got 1000000 requests in each of 20 replications"):
        kendall.predict(
            "single", None, LENGTHS, LAW, arrivals="piecewise:rates=10,durations=100000"
        )


def test_states_that_change_too_often_to_be_drawn_are_refused() -> None:
    with pytest.raises(SpecError, match="changes of state"):
        Mmpp((1.0, 2.0), (1e-9, 1e-9)).instants(np.random.default_rng(0), count=1000)


def test_a_process_object_is_as_good_as_its_text() -> None:
    by_text = kendall.simulate("single", None, LENGTHS, LAW, arrivals=TEXTS[3], num_requests=2000)
    process = Piecewise((10.0, 60.0, 0.0, 5.0), (4.0, 3.0, 2.0, 5.0))
    assert by_text == kendall.simulate(
        "single", None, LENGTHS, LAW, arrivals=process, num_requests=2000
    )
    assert Queue.read("single", LENGTHS, LAW, arrivals=Gamma(2.0, 0.5)).arrivals.scv == 2
