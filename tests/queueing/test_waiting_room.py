"""A bound on the requests waiting or in service (`max_num_queued_reqs`): M/G/1/K, simulations of
other queues, and how rejected requests are counted.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import poisson
from typer.testing import CliRunner

import kendall
from kendall.policies.text import SpecError
from kendall.queueing.commands.cli import app
from kendall.queueing.errors import OutOfReachError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service_time import ServiceTime
from kendall.queueing.models.mg1k import solve_finite
from kendall.queueing.prediction.query import PredictionQuery
from kendall.queueing.predictors.predictor_text import parse_predictor
from kendall.queueing.queue import Queue
from kendall.queueing.result import LEVELS, Prediction
from kendall.queueing.simulation.experiment import run_trace
from kendall.queueing.simulation.fast import SimulatedRun, Trace, is_compiled
from kendall.queueing.simulation.spin_up import memory
from tests.queueing.test_kernels import FULL, LENGTHS, POLICIES, PROMPTS, WHOLE, assert_same, both

ONE = np.ones(1)
EXPONENTIAL, CONSTANT = ServiceTime(ONE, ONE, 1.0), ServiceTime(ONE, ONE)
LAW = "k1=0.001,k2=0.01,k3=0.0001,k4=0.005"
MEAN = 0.16655  # seconds of a single request of 1 to 60 tokens


def asked(policy: str, rate: float, most: int | None, **limits: object) -> PredictionQuery:
    given: dict[str, Any] = {"latency": LAW, "output_tokens": "uniform:low=1,high=60"}
    return PredictionQuery.read(
        policy, arrival_rate=rate, max_num_queued_reqs=most, **{**given, **limits}
    )


def within(theory: float | None, samples: list[float], power: float = 0.05) -> None:
    """Within 4 standard errors of the mean of replications, and these below 5 % of the value."""
    assert theory is not None
    error = float(np.std(samples, ddof=1)) / math.sqrt(len(samples))
    assert error <= power * theory
    assert abs(theory - float(np.mean(samples))) <= 4 * error


# by formula


@pytest.mark.parametrize("most", [1, 2, 5, 40])
@pytest.mark.parametrize("rho", [0.05, 0.5, 1.0, 1.6, 30.0])
def test_exponential_services_are_mm1k(rho: float, most: int) -> None:
    """P(L = n) is proportional to rho^n."""
    chances = rho ** (np.arange(most + 1.0) - (most if rho > 1 else 0))
    chances /= chances.sum()
    queue = solve_finite(EXPONENTIAL, rho, most)
    assert queue.chances == pytest.approx(chances, abs=1e-13)
    assert queue.loss_fraction == pytest.approx(chances[-1], rel=1e-10, abs=1e-14)
    admitted = rho * (1 - chances[-1])
    assert queue.sojourn_time == pytest.approx(chances @ np.arange(most + 1) / admitted, rel=1e-10)
    assert queue.sojourn_time - queue.queueing_delay == pytest.approx(1.0)
    assert queue.utilisation == pytest.approx(1 - chances[0], rel=1e-10)


def by_balance(service: ServiceTime, rate: float, most: int) -> tuple[float, float]:
    """Loss and mean number in the system: the chain at departures by linear equations; what one
    service loses, and how many are there while it lasts, from its arrivals.
    """
    numbers = np.arange(400)
    arrivals = service.weights @ poisson.pmf(numbers, rate * service.values[:, None])
    rows = np.zeros((most, most))
    for behind, number in itertools.product(range(most), numbers):
        rows[behind, min(max(behind, 1) - 1 + number, most - 1)] += arrivals[number]
    equations = np.vstack([rows.T - np.eye(most), np.ones(most)])
    stationary = np.linalg.lstsq(equations, np.append(np.zeros(most), 1.0), rcond=None)[0]
    lost = present = 0.0
    for behind, chance in enumerate(stationary):
        begun = max(behind, 1)
        lost += chance * float(arrivals @ np.maximum(numbers - (most - begun), 0))

        def there(seconds: float, begun: int = begun) -> float:
            return float(poisson.pmf(numbers, rate * seconds) @ np.minimum(begun + numbers, most))

        areas = [quad(there, 0, value, epsabs=1e-11)[0] for value in service.values]
        present += chance * float(service.weights @ areas)
    return lost / (1 + lost), present / (service.mean + stationary[0] / rate)


@pytest.mark.parametrize(("rate", "most"), [(0.4, 1), (0.9, 4), (1.0, 9), (2.5, 3)])
@pytest.mark.parametrize(
    "service", [CONSTANT, ServiceTime(np.array([0.2, 3.0]), np.array([0.7, 0.3]))]
)
def test_other_services_are_those_of_linear_equations(
    service: ServiceTime, rate: float, most: int
) -> None:
    loss, present = by_balance(service, rate, most)
    queue = solve_finite(service, rate, most)
    assert queue.loss_fraction == pytest.approx(loss, rel=1e-8)
    assert queue.chances @ np.arange(most + 1) == pytest.approx(present, rel=1e-7)
    admitted = rate * (1 - loss)
    assert queue.sojourn_time == pytest.approx(present / admitted, rel=1e-7)


def test_a_room_that_never_fills_is_none_and_an_overloaded_one_is_full() -> None:
    endless = kendall.predict("single", 0.9, "geometric:mean=1000", "a=0.001")
    roomy = asked("single", 0.9, 5000, latency="a=0.001", output_tokens="geometric:mean=1000")
    found = roomy.predict("exact")
    assert found.loss_fraction == pytest.approx(0, abs=1e-14)
    assert found.queueing_delay.mean == pytest.approx(endless.queueing_delay.mean, rel=1e-9)
    assert found.number_in_system.count.quantiles == endless.number_in_system.count.quantiles
    full = solve_finite(CONSTANT, 100.0, 2000)
    assert full.loss_fraction == pytest.approx(0.99, rel=1e-12)
    assert full.sojourn_time == pytest.approx(2000, rel=1e-3)
    with pytest.raises(OutOfReachError, match="load 1e\\+03 before a bounded queue"):
        solve_finite(CONSTANT, 1000.0, 5)


def test_the_numbers_of_a_prediction_are_those_of_the_law() -> None:
    rho, most = 0.8, 4
    queue = asked("single", rho, most, latency="a=0.001", output_tokens="geometric:mean=1000")
    found = queue.predict("exact")
    chances = rho ** np.arange(most + 1.0)
    chances /= chances.sum()
    loss, admitted = chances[-1], rho * (1 - chances[-1])
    assert (found.model, found.method, found.stable) == ("M/G/1/4", "exact", True)
    assert found.loss_fraction == found.rejected_fraction == pytest.approx(loss, rel=2e-3)
    assert found.utilisation == pytest.approx(1 - chances[0], rel=1e-3)
    numbers = np.arange(most + 1)
    for name, count, empty in (
        ("number_in_system", numbers, chances[0]),
        ("queue_length", np.maximum(numbers - 1, 0), chances[0] + chances[1]),
    ):
        number = getattr(found, name)
        assert number.mean == pytest.approx(chances @ count, rel=2e-3)
        assert number.count.empty == pytest.approx(empty, rel=1e-3)
        reached = {
            level: float(count[np.searchsorted(np.cumsum(chances), at)])
            for level, at in LEVELS.items()
        }
        assert number.count.quantiles == reached
    delay = chances @ np.maximum(numbers - 1, 0) / admitted
    assert found.queueing_delay.mean == found.served_queueing_delay.mean
    assert found.queueing_delay.mean == pytest.approx(delay, rel=2e-3)
    assert found.time_to_first_token.mean == pytest.approx(delay + 0.001, rel=2e-3)


@pytest.mark.parametrize("most", [1, 4, 12])
@pytest.mark.parametrize("load", [0.7, 1.4])
@pytest.mark.thinned(6)
def test_the_formula_meets_the_simulation(load: float, most: int) -> None:
    query = asked("single", load / MEAN, most, latency=f"{LAW},cv=0.5")
    theory = query.predict("exact")
    runs = [query.simulate(100_000, seed=seed) for seed in range(8)]
    assert theory.load == pytest.approx(load)
    within(theory.loss_fraction, [run.loss_fraction or 0.0 for run in runs], power=0.1)
    within(theory.sojourn_time.mean, [run.sojourn_time.mean or 0.0 for run in runs])
    within(theory.number_in_system.mean, [run.number_in_system.mean or 0.0 for run in runs])
    within(theory.utilisation, [run.utilisation or 0.0 for run in runs])
    empty = [run.number_in_system.count.empty or 0.0 for run in runs]
    within(theory.number_in_system.count.empty, empty, power=0.1)
    if most > 1:
        within(theory.queueing_delay.mean, [run.queueing_delay.mean or 0.0 for run in runs])
        within(theory.queue_length.mean, [run.queue_length.mean or 0.0 for run in runs])
    else:
        assert theory.queueing_delay.mean == runs[0].queueing_delay.mean == 0


# by simulation


@pytest.mark.parametrize("servers", [1, 3, 10])
def test_without_a_place_to_wait_the_loss_is_erlangs(servers: int) -> None:
    """M/G/c/c: B = (a^c / c!) / sum(a^n / n!), whatever the law of the services."""
    query = asked("single", servers / MEAN, servers, servers=servers)
    terms = [servers**n / math.factorial(n) for n in range(servers + 1)]
    runs = [query.simulate(20_000, seed=seed) for seed in range(8)]
    within(terms[-1] / sum(terms), [run.loss_fraction or 0.0 for run in runs])
    assert all(run.queueing_delay.p99 == 0 for run in runs)


@pytest.mark.parametrize(("load", "most"), [(0.8, 5), (1.5, 8)])
def test_batches_of_exponential_services_are_a_markov_chain(load: float, most: int) -> None:
    """At most 2 together for exponential seconds of mean 1; states: in service, waiting."""
    rate = 2 * load
    states = [(0, 0)] + [(s, w) for s in (1, 2) for w in range(most - s + 1)]
    place = {state: index for index, state in enumerate(states)}
    flows = np.zeros((len(states), len(states)))
    for (serving, waiting), index in place.items():
        joined = (serving, waiting + 1) if serving else (1, 0)
        if joined in place:
            flows[index, place[joined]] += rate
        if serving:
            size = min(2, waiting)
            flows[index, place[size, waiting - size]] += 1
    balance = np.vstack([(flows - np.diag(flows.sum(axis=1))).T, np.ones(len(states))])
    chances = np.linalg.lstsq(balance, np.append(np.zeros(len(states)), 1), rcond=None)[0]
    loss = sum(chances[place[state]] for state in states if sum(state) == most)
    waiting = sum(chance * state[1] for state, chance in zip(states, chances, strict=True))
    lengths = "deterministic:value=1"
    query = asked(
        "capped:max_batch_size=2",
        rate,
        most,
        latency="k1=0,k2=1,k3=0,k4=0,cv=1",
        output_tokens=lengths,
    )
    runs = [query.simulate(20_000, seed=seed) for seed in range(8)]
    within(float(loss), [run.loss_fraction or 0.0 for run in runs])
    within(float(waiting), [run.queue_length.mean or 0.0 for run in runs])
    delay = float(waiting / (rate * (1 - loss)))
    within(delay, [run.queueing_delay.mean or 0.0 for run in runs])
    found = query.predict()
    assert (found.method, found.model) == ("simulation", f"M/G^[1,2]/1/{most}")
    assert found.queueing_delay.mean == pytest.approx(delay, rel=0.01)


def rejected_of(policy: str, most: int, rows: list[tuple[float, int]], **limits: Any) -> list[int]:
    """Which of (arrival, tokens) are rejected, one second a token; compiled and not."""
    arrived, lengths = map(np.array, zip(*rows, strict=True))
    queue = Queue.read(
        policy, "uniform:low=1,high=9", LatencyModel(k4=1.0), max_num_queued_reqs=most, **limits
    )
    trace = Trace(arrived, lengths, np.zeros_like(lengths), np.random.default_rng(0).spawn(1))
    fast, slow = (run_trace(queue, trace, generic=generic) for generic in (False, True))
    assert_same(fast, slow)
    assert np.array_equal(fast.rejected, slow.rejected)
    return np.flatnonzero(fast.rejected).tolist()


def test_an_answer_that_has_left_makes_room_though_its_batch_runs_on() -> None:
    """1 and 2 are a batch from 1 to 4, and the answer of 2 is ready at 2; continuous, 3 takes the
    place of 2 and ends at 3.
    """
    rows = [(0.0, 1), (0.5, 3), (0.6, 1), (1.5, 1), (2.5, 1), (2.6, 1), (3.5, 1)]
    assert rejected_of("capped:max_batch_size=2", 3, rows) == [4, 5, 6]
    assert rejected_of("elastic:max_batch_size=2", 3, rows) == [5, 6]
    assert rejected_of("continuous:max_batch_size=2", 3, rows) == [5]


def test_at_one_instant_answers_leave_before_requests_arrive() -> None:
    rows = [(0.0, 2), (0.0, 1), (0.0, 1), (2.0, 1), (2.0, 1)]
    assert rejected_of("single", 2, rows) == [2, 4]


def same_paths(queue: Queue, load: float) -> SimulatedRun:
    fast, slow = both(queue, load * queue.largest_stable_rate, 1000)
    assert_same(fast, slow)
    assert np.array_equal(fast.rejected, slow.rejected)
    return fast


@pytest.mark.parametrize(
    "policy",
    [
        *POLICIES,
        "single:order=spjf",
        "capped:max_batch_size=5,order=binned,bins=3",
        "elastic:max_batch_size=5,order=hrrn",
        "continuous:max_batch_size=4,order=threshold,threshold=12",
    ],
)
@pytest.mark.thinned(9)
def test_a_replay_is_the_policys_own_sample_path(policy: str) -> None:
    for servers, patience, calls in (
        (1, None, None),
        (1, 0.2, None),
        (3, 0.2, None),
        (2, None, "uniform:low=1,high=4"),
    ):
        queue = Queue.read(
            policy,
            LENGTHS,
            FULL,
            servers=servers,
            patience=patience,
            sequences=calls,
            prompt_tokens=PROMPTS,
            max_num_seqs=16,
            predictor=parse_predictor("lognormal:sigma=0.5"),
            max_num_queued_reqs=20,
        )
        assert is_compiled(queue)
        assert same_paths(queue, 1.5).rejected.any() or patience is not None


def test_an_order_that_interrupts_is_simulated_by_the_policy_itself() -> None:
    query = asked("single:order=sprpt", 8.0, 6, predictor="exact")
    assert not is_compiled(query.model)
    found = query.simulate(4000)
    assert found.stable
    assert found.rejected_fraction > 0.1
    assert found.sojourn_time.mean is not None


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=40)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 6), st.integers(0, 2)), min_size=5, max_size=30
    ),
    law=st.sampled_from(WHOLE),
    limits=st.sampled_from([(1, None), (1, 3.0), (2, None), (2, 3.0)]),
    spare=st.integers(0, 4),
)
@pytest.mark.thinned(3)
def test_ties_are_broken_as_the_driver_breaks_them(
    policy: str,
    steps: list[tuple[int, int, int]],
    law: LatencyModel,
    limits: tuple[int, float | None],
    spare: int,
) -> None:
    """Whole seconds everywhere: arrivals, ends of answers and of batches fall on one instant."""
    servers, patience = limits
    given: dict[str, Any] = {"servers": servers, "patience": patience, "max_num_seqs": 4}
    bound = 4 if policy.startswith("fixed") else 1
    queue = Queue.read(
        policy.replace("0.02", "2"), LENGTHS, law, max_num_queued_reqs=bound + spare, **given
    )
    columns = [np.array(column) for column in zip(*steps, strict=True)]
    arrived = np.cumsum(columns[0].astype(float))
    fast, slow = (
        run_trace(
            queue,
            Trace(arrived, columns[1], columns[2], np.random.default_rng(0).spawn(servers)),
            generic=generic,
        )
        for generic in (False, True)
    )
    assert_same(fast, slow)
    assert np.array_equal(fast.rejected, slow.rejected)


# how they are counted


def test_patience_and_a_bound_lose_both_kinds() -> None:
    """What waits is what Little's law gives of the admitted; a lost one waits for its patience."""
    query = asked("single", 8.0, 6, patience=0.5)
    found = query.simulate(200_000)
    assert found.model == "M/G/1/6+D"
    assert 0.01 < found.rejected_fraction < (found.loss_fraction or 0.0) - 0.01
    admitted = 8.0 * (1 - found.rejected_fraction)
    assert found.queue_length.mean == pytest.approx(admitted * (found.queueing_delay.mean or 0.0))
    serving = (found.number_in_system.mean or 0.0) - (found.queue_length.mean or 0.0)
    assert serving == pytest.approx(found.utilisation, rel=0.01)
    assert (found.served_queueing_delay.mean or 0.0) < (found.queueing_delay.mean or 0.0) < 0.5
    waiting = found.queue_length.count
    assert waiting.quantiles["p99"] == 5
    assert any("of all admitted requests" in text for text in found.assumptions)


def test_a_bound_that_is_never_reached_changes_nothing() -> None:
    for policy, limits in (("single", {"patience": 0.5}), ("elastic:max_batch_size=4", {})):
        wide, open_ended = (
            asked(policy, 4.0, most, **limits).simulate(5000) for most in (10_000, None)
        )
        assert wide.queueing_delay == open_ended.queueing_delay
        assert wide.loss_fraction == open_ended.loss_fraction
        assert wide.rejected_fraction == 0
        assert "rejected_fraction" not in wide.as_dict()


def test_a_call_is_admitted_whole_or_not_at_all() -> None:
    arrived, calls = np.array([0.0, 0.0, 0.5, 0.5, 1.0]), np.array([2, 2, 4, 4, 5])
    lengths = np.full(5, 9)
    queue = Queue.read(
        "single",
        "uniform:low=1,high=9",
        LatencyModel(k4=1.0),
        max_num_queued_reqs=3,
        sequences="uniform:low=1,high=2",
    )
    given = Trace(
        arrived, lengths, np.zeros_like(lengths), np.random.default_rng(0).spawn(1), call_ends=calls
    )
    for generic in (False, True):
        run = run_trace(queue, given, generic=generic)
        assert run.rejected.tolist() == [False, False, True, True, False]


def test_flows_count_their_own_admitted_requests() -> None:
    query = asked("capped:max_batch_size=4,order=vtc", 60.0, 12, flows="heavy=3,light=1")
    found = query.simulate(3000)
    assert found.rejected_fraction > 0.1
    assert all(math.isfinite(delay.mean or math.nan) for delay in found.flows.values())
    means = [delay.mean or 0.0 for delay in found.flows.values()]
    assert min(means) <= (found.queueing_delay.mean or 0.0) <= max(means)


def test_other_arrivals_and_a_trace_are_bounded_too(tmp_path: Path) -> None:
    found = kendall.predict(
        "single", 4.0, "geometric:mean=40", LAW, arrival_scv=4.0, max_num_queued_reqs=5
    )
    assert (found.method, found.model) == ("simulation", "GI/G/1/5")
    assert (found.number_in_system.value("p99") or 0.0) <= 5
    rows = [f"{at},10,20" for at in ("00.00", "00.01", "00.02", "50.00")]
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:15:{row}" for row in rows]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    replayed = kendall.predict("single", latency=LAW, trace=trace, max_num_queued_reqs=2)
    assert replayed.loss_fraction == replayed.rejected_fraction == 0.25


@pytest.mark.parametrize("policy", ["single", "dynamic", "elastic:max_batch_size=4"])
def test_no_load_is_unstable(policy: str) -> None:
    found = asked(policy, 1000.0, 10).predict()
    assert found.stable
    assert found.load > 1
    assert found.loss_fraction is not None
    assert found.loss_fraction > 0.5
    assert (found.number_in_system.mean or 0.0) <= 10


def test_a_bounded_queue_forgets_its_beginning_at_any_load() -> None:
    """M/M/1/K at load 1: 1 / (2 - 2 cos(pi / (K + 1))) requests; above, until it is full."""
    exponential = {"latency": "a=0.001", "output_tokens": "geometric:mean=1000"}
    queue = asked("single", 1.0, 50, **exponential).model
    relaxation = 1 / (2 - 2 * math.cos(math.pi / 51))
    assert memory(queue, 1.0) == pytest.approx(relaxation, rel=0.05)
    assert memory(queue, 2.0) == pytest.approx(100, rel=0.02)
    assert memory(queue, 0.5) == pytest.approx(memory(queue.but(max_num_queued_reqs=None), 0.5))


# as it is asked for


def printed(*flags: str) -> str:
    options = ("--output-tokens", "uniform:low=1,high=60", "--latency", LAW)
    said = CliRunner().invoke(app, [*flags, *options], catch_exceptions=False)
    assert said.exit_code == 0, said.output
    return said.stdout


def test_the_command_takes_it_as_serve_does_and_0_is_no_limit() -> None:
    given = ("predict", "--policy", "single", "--arrival-rate", "5", "--method", "exact")
    text = printed(*given, "--max-num-queued-reqs", "8")
    assert "M/G/1/8" in text
    assert "(rejected 0.0" in text
    bounded = json.loads(printed(*given, "--max-num-queued-reqs", "8", "--json"))
    assert bounded["rejected_fraction"] == bounded["loss_fraction"] > 0
    assert printed(*given, "--max-num-queued-reqs", "0") == printed(*given)
    few = ("--max-num-queued-reqs", "8", "--num-requests", "2000", "--json")
    simulated = json.loads(printed("simulate", *given[1:5], *few))
    assert simulated["loss_fraction"] > 0


@pytest.mark.parametrize(
    ("policy", "limits", "said"),
    [
        (
            "single",
            {"max_num_queued_reqs": 0},
            "got max_num_queued_reqs=0; expected a whole number",
        ),
        ("single", {"max_num_queued_reqs": 2.5}, "got max_num_queued_reqs=2.5"),
        (
            "single",
            {"routing": "random", "servers": 2},
            "got max_num_queued_reqs and routing=random; expected one queue",
        ),
        ("single", {"disaggregated": True}, "got max_num_queued_reqs and disaggregated"),
        (
            "single",
            {"sequences": "deterministic:value=9"},
            "got max_num_queued_reqs=4 and calls of up to 9 sequences; expected at least 9",
        ),
        ("fixed:batch_size=8", {}, "got max_num_queued_reqs=4 and policy fixed:batch_size=8"),
        (
            "fixed:batch_size=3,order=binned,bins=2",
            {},
            "expected at least 5, or max_wait: a batch that is not full waits for ever",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(policy: str, limits: dict[str, Any], said: str) -> None:
    given = {"max_num_queued_reqs": 4, **limits}
    with pytest.raises(SpecError) as error:
        kendall.predict(policy, 1.0, "uniform:low=1,high=60", LAW, **given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("policy", ["fixed:batch_size=4", "fixed:batch_size=8,max_wait=0.1"])
def test_a_batch_that_finds_room_is_dispatched(policy: str) -> None:
    found: Prediction = asked(policy, 30.0, 4).simulate(2000)
    assert found.batch_size.mean is not None
    assert found.batch_size.mean <= 4


def test_the_other_methods_do_not_know_it() -> None:
    for method in ("bound", "paper", "approximation"):
        with pytest.raises(SpecError, match="expected auto, exact or simulation"):
            asked("single", 4.0, 8).predict(method)
