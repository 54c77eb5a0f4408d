"""Calls of several sequences: the exact chain, the compiled simulation, the simulation of the
policy and the gateway say the same.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from kendall.policies import SpecError, parse_policy
from kendall.queueing.commands.cli import app
from kendall.queueing.distributions.call_lengths import CallLengths
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.models.batches import calls
from kendall.queueing.models.batches.batch_chain import solve_batch_chain
from kendall.queueing.models.batches.call_chain import solve_call_chain
from kendall.queueing.models.batches.calls import Calls, draw_calls
from kendall.queueing.prediction import methods, predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import draw_jobs, simulate_model, simulate_run
from kendall.queueing.simulation.fast import COLUMNS, draw_trace, is_compiled
from kendall.queueing.simulation.reference import SimulatedEngine, simulate_trace
from kendall.queueing.simulation.run_length import advise_model
from tests.server.harness import replay
from tests.virtual_time import run_virtual

POLICIES = (
    "single",
    "dynamic",
    "capped:max_batch_size=3",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
    "elastic",
    "fixed:batch_size=4",
    "fixed:batch_size=4,max_wait=0.02",
    "continuous:max_batch_size=4",
)
CHAINED = (
    "single",
    "dynamic",
    "capped:max_batch_size=3",
    "capped:max_batch_size=8",
    "elastic:max_batch_size=8",
)
EQUAL, HALF = 1.0, 0.5  # probability that the lengths of a call are equal
CALLS = (
    "deterministic:value=2",
    "deterministic:value=4",
    "uniform:low=1,high=8",
    "geometric:mean=3",
)
LAW = "k1=0.0003,k2=0.0014,k3=0.00002,k4=0.0012,turnaround=0.0015"
LENGTHS = "uniform:low=1,high=31"


def model_of(policy: str, sequences: str | None, cv: float = 0.15, **limits: object) -> Queue:
    return Queue.read(
        policy,
        LENGTHS,
        f"{LAW},cv={cv}",
        sequences=sequences,
        max_num_seqs=limits.pop("max_num_seqs", None),
        **limits,
    )


@pytest.mark.parametrize("sequences", CALLS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.thinned(9)
def test_the_compiled_simulation_is_the_policys_to_the_last_bit(policy, sequences):
    model = model_of(policy, sequences)
    rate, seed = 0.6 * model.largest_stable_rate, 3
    fast = simulate_run(model, rate, 2000, np.random.SeedSequence(seed))
    slow = simulate_run(model, rate, 2000, np.random.SeedSequence(seed), generic=True)
    assert np.array_equal(fast.arrived_at, slow.arrived_at)
    assert (np.diff(fast.arrived_at) == 0).any()
    for name in COLUMNS:
        assert np.array_equal(getattr(fast, name), getattr(slow, name), equal_nan=True), name


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_several_servers_and_patience_too(policy):
    model = model_of(policy, "uniform:low=1,high=8", servers=2, patience=0.05)
    rate = 1.1 * model.largest_stable_rate
    fast = simulate_run(model, rate, 2000, np.random.SeedSequence(3))
    slow = simulate_run(model, rate, 2000, np.random.SeedSequence(3), generic=True)
    assert fast.lost.any()
    assert np.array_equal(fast.lost, slow.lost)
    for name in COLUMNS:
        assert np.array_equal(
            getattr(fast, name)[~fast.lost], getattr(slow, name)[~slow.lost], equal_nan=True
        ), name


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.thinned(9)
def test_the_gateway_makes_the_same_batches_at_the_same_instants(policy):
    model = model_of(policy, "uniform:low=1,high=8", max_num_seqs=16)
    jobs, _ = draw_jobs(model, 0.6 * model.largest_stable_rate, 1500, np.random.SeedSequence(4))
    live = run_virtual(
        replay(
            parse_policy(policy),
            [(job.request, job.output_tokens) for job in jobs],
            model.engine.law,
            seed=3,
            max_num_seqs=16,
        )
    )
    residuals = [np.random.default_rng(np.random.SeedSequence(3).spawn(2)[1])]
    engine = SimulatedEngine(model.engine.law, max_batch_size=16)
    simulated = {
        r.request_id: r for r in simulate_trace(parse_policy(policy), jobs, engine, residuals)
    }
    assert len(live) == len(simulated) == len(jobs)
    for record in live:
        other = simulated[record.request_id]
        assert (record.batch_id, record.batch_size) == (other.batch_id, other.batch_size), (
            record,
            other,
        )
        assert record.dispatched_at == pytest.approx(other.dispatched_at, abs=1e-9)
        assert record.released_at == pytest.approx(other.released_at, abs=1e-9)


def test_calls_have_the_asked_sizes_and_all_requests():
    sizes = draw_calls(
        parse_distribution("uniform:low=1,high=8"), 10_001, np.random.SeedSequence(1)
    )
    assert sizes.sum() == 10_001
    assert sizes.min() >= 1
    assert sizes.mean() == pytest.approx(4.5, rel=0.05)


def test_one_sequence_in_a_call_changes_nothing():
    one, none = (
        model_of("capped:max_batch_size=8", text) for text in ("deterministic:value=1", None)
    )
    assert one.requests.sequences is None
    assert one.name == none.name
    assert predict_model(one, 50.0) == predict_model(none, 50.0)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("load", [0.3, 0.9])
@pytest.mark.parametrize("cv", [0.0, 0.3])
@pytest.mark.parametrize("bound", [1, 2, 3, 8, 33, None])
def test_calls_of_one_are_the_chain_of_single_arrivals(bound, cv, load):
    policy = "dynamic" if bound is None else f"capped:max_batch_size={bound}"
    time = model_of(policy, None, cv).batch_time
    rate = load * time.largest_stable_rate(bound)
    if bound is None:
        rate *= 0.5
    plain, calls = (
        solve_batch_chain(time, rate, bound),
        solve_call_chain(time, Calls(rate, np.array([0.0, 1.0])), bound),
    )
    for name in ("queueing_delay", "sojourn_time", "batch_size", "utilisation"):
        assert getattr(calls, name) == pytest.approx(getattr(plain, name), rel=1e-9), name
    assert calls.full == pytest.approx(plain.full, rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("size", [2, 5])
def test_single_requests_are_the_closed_form(size):
    """M^X/G/1: E[Wq] = lam m E[S^2] / (2 (1 - rho)) + (m2 / m - 1) E[S] / (2 (1 - rho))."""
    model = model_of("single", f"deterministic:value={size}")
    rate = 0.7 * model.largest_stable_rate
    first, second = model.batch_time.mean(1), model.batch_time.second_moment(1)
    closed = (rate * size * second + (size - 1) * first) / (2 * (1 - rate * size * first))
    assert predict_model(model, rate, "exact").queueing_delay.mean == pytest.approx(
        closed, rel=1e-12
    )


def test_calls_that_fill_whole_batches_are_single_arrivals_of_longer_service():
    """B sequences a call into batches of B: M/G/1 of whole batches."""
    model = model_of("capped:max_batch_size=4", "deterministic:value=4", cv=0.3)
    rate = 0.8 * model.largest_stable_rate
    first, second = model.batch_time.mean(4), model.batch_time.second_moment(4)
    closed = rate * second / (2 * (1 - rate * first))
    found = predict_model(model, rate, "exact")
    assert found.queueing_delay.mean == pytest.approx(closed, rel=1e-8)
    assert found.batch_size.mean == pytest.approx(4, rel=1e-9)


@pytest.mark.parametrize(
    ("policy", "sequences"),
    [("capped:max_batch_size=3", "uniform:low=1,high=8"), ("dynamic", "deterministic:value=4")],
)
def test_the_chain_is_what_simulation_finds(policy, sequences):
    assert_chain_and_simulation_agree(policy, sequences, 0.5, 0.15, 200_000)


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.6, 0.85])
@pytest.mark.parametrize("cv", [0.0, 0.3])
@pytest.mark.parametrize("sequences", CALLS)
@pytest.mark.parametrize("policy", CHAINED)
def test_the_chain_is_what_simulation_finds_everywhere(policy, sequences, cv, load):
    load = load if policy != "dynamic" else 0.5 * load  # unbounded
    assert_chain_and_simulation_agree(policy, sequences, load, cv, 1_000_000)


def assert_chain_and_simulation_agree(
    policy: str, sequences: str, load: float, cv: float, count: int, **limits: object
) -> None:
    model = model_of(policy, sequences, cv, **limits)
    assert methods(model)[0] == "exact"
    rate = load * model.largest_stable_rate
    exact = predict_model(model, rate, "exact")
    simulated = simulate_model(model, rate, num_requests=count // 5, replications=20, seed=11)
    for name in ("queueing_delay", "sojourn_time", "batch_size", "time_to_first_token"):
        found, expected = getattr(simulated, name), getattr(exact, name)
        assert found.standard_error < 0.05 * found.mean, "the run is too short to tell"
        assert abs(found.mean - expected.mean) <= 4 * found.standard_error, (name, found, expected)
    assert simulated.utilisation == pytest.approx(exact.utilisation, rel=0.02)


@pytest.mark.parametrize("policy", ["fixed:batch_size=4", "continuous:max_batch_size=4"])
def test_where_the_chain_does_not_reach_it_is_simulated(policy):
    model = model_of(policy, "deterministic:value=4")
    assert methods(model) == ("simulation",)


def test_quantiles_are_simulated_and_means_exact():
    model = model_of("capped:max_batch_size=8", "deterministic:value=3")
    rate = 0.6 * model.largest_stable_rate
    found, exact = predict_model(model, rate), predict_model(model, rate, "exact")
    assert found.method == "exact"
    assert found.queueing_delay.mean == exact.queueing_delay.mean
    assert exact.queueing_delay.p99 is None
    assert exact.queueing_delay.mean < found.queueing_delay.p90 < found.queueing_delay.p99
    assert found.fallback == found.assumptions[-1]
    assert found.fallback == (
        "exact means, but quantiles from a simulation of 300,000 sequences: "
        "no formula covers the law of the delay where calls hold several sequences"
    )


def test_the_command_takes_a_law_of_sequences():
    common = [
        "--policy",
        "capped:max_batch_size=8",
        "--output-tokens",
        LENGTHS,
        "--latency",
        LAW,
        "--arrival-rate",
        "20",
        "--json",
    ]
    answers = {}
    for command in ("predict", "simulate"):
        result = CliRunner().invoke(app, [command, *common, "--sequences", "deterministic:value=4"])
        assert result.exit_code == 0, result.output
        answers[command] = json.loads(result.output)
    assert answers["predict"]["model"] == "M^X/G^[1,8]/1"
    assert answers["simulate"]["batch_size"]["mean"] == pytest.approx(
        answers["predict"]["batch_size"]["mean"], rel=0.05
    )


@pytest.mark.slow
def test_quantiles_are_simulated_with_no_more_than_the_simulator_can_in_seconds():
    """A law that the compiled simulator does not cover: 300,000 sequences would take a minute."""
    model = Queue.read(
        "single",
        "uniform:low=4,high=24",
        "k1=-5e-5,k2=0.026,k3=1e-5,k4=5e-5",
        sequences="deterministic:value=8",
    )
    assert not is_compiled(model)
    found = predict_model(model, 0.3 * model.largest_stable_rate)
    assert found.method == "exact"
    assert (
        20_000
        < int(
            re.search(r"from a simulation of ([\d,]+) sequences", found.fallback)[1].replace(
                ",", ""
            )
        )
        < 60_000
    )
    assert 0 < found.queueing_delay.p90 < found.queueing_delay.p99


def test_the_first_line_says_that_the_quantiles_are_simulated_and_why():
    common = [
        "--policy",
        "capped:max_batch_size=8",
        "--output-tokens",
        LENGTHS,
        "--latency",
        LAW,
        "--arrival-rate",
        "20",
    ]
    result = CliRunner().invoke(
        app, ["predict", *common, "--sequences", "deterministic:value=3"], env={"COLUMNS": "500"}
    )
    assert result.exit_code == 0, result.output
    first, *others = result.output.splitlines()
    assert (
        "(exact means, but quantiles from a simulation of 300,000 sequences: no formula covers"
        in first
    )
    assert not any("simulation" in line for line in others)


@pytest.mark.parametrize("policy", ["single", "capped:max_batch_size=8"])
def test_a_run_of_calls_is_as_long_as_its_own_queue_needs(policy):
    """Sequences that come together remember longer; the run takes the time of the calls."""
    one, four = (model_of(policy, text) for text in (None, "deterministic:value=4"))
    rule, alone = (advise_model(model, 0.5 * model.largest_stable_rate) for model in (four, one))
    assert rule.memory > 3 * alone.memory
    assert rule.requests > alone.requests
    assert rule.how.startswith("pilot")
    assert rule.seconds == pytest.approx(rule.requests / (4 * 0.5 * four.largest_stable_rate))


def test_the_load_counts_sequences():
    one, four = (
        model_of("capped:max_batch_size=8", text) for text in (None, "deterministic:value=4")
    )
    assert four.largest_stable_rate == pytest.approx(one.largest_stable_rate / 4)
    assert four.name == "M^X/G^[1,8]/1"


@pytest.mark.parametrize("variance", [0.0, 0.5])
def test_columns_that_are_scaled_down_are_the_same_law(
    variance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Calls.of(3.0, parse_distribution("uniform:low=1,high=4"))
    means = np.array([0.5, 30.0, 200.0])
    plain = calls._Panjer(counted, means, variance).following(600)
    monkeypatch.setattr(calls, "_LARGE", 10.0)
    scaled = calls._Panjer(counted, means, variance).following(600)
    assert scaled == pytest.approx(plain, rel=1e-9, abs=1e-300)


@pytest.mark.thinned(12)
@pytest.mark.parametrize("sequences", ["deterministic:value=4", "uniform:low=1,high=8"])
@pytest.mark.parametrize("policy", POLICIES)
def test_both_simulators_draw_the_same_lengths_by_call(policy, sequences):
    model = model_of(policy, sequences, intraclass_correlation=HALF)
    rate = 0.6 * model.largest_stable_rate
    fast = simulate_run(model, rate, 2000, np.random.SeedSequence(3))
    slow = simulate_run(model, rate, 2000, np.random.SeedSequence(3), generic=True)
    assert np.array_equal(fast.output_tokens, slow.output_tokens)
    for name in COLUMNS:
        assert np.array_equal(getattr(fast, name), getattr(slow, name), equal_nan=True), name


@pytest.mark.parametrize("correlation", [0.0, HALF, EQUAL])
def test_drawn_calls_have_the_correlation_and_the_lengths_keep_their_law(correlation):
    model = model_of("single", "deterministic:value=4", intraclass_correlation=correlation)
    trace = draw_trace(model, 1.0, 400_000, np.random.SeedSequence(5))
    calls = trace.output_tokens.reshape(-1, 4)
    found = np.corrcoef(calls[:, 0], calls[:, 3])[0, 1]
    assert found == pytest.approx(correlation, abs=0.01)
    assert np.mean(calls.min(axis=1) == calls.max(axis=1)) == pytest.approx(correlation, abs=0.01)
    assert trace.output_tokens.mean() == pytest.approx(model.requests.output_tokens.mean, rel=0.01)
    assert trace.output_tokens.var() == pytest.approx(
        model.requests.output_tokens.variance, rel=0.01
    )


ALIKE = (
    ("capped:max_batch_size=8", "deterministic:value=4"),
    ("capped:max_batch_size=8", "deterministic:value=8"),
    ("dynamic", "deterministic:value=2"),
    ("elastic:max_batch_size=8", "deterministic:value=4"),
    ("elastic", "deterministic:value=3"),
    ("single", "deterministic:value=4"),
    ("single", "uniform:low=1,high=8"),
)


@pytest.mark.parametrize("correlation", [HALF, EQUAL])
@pytest.mark.parametrize(("policy", "sequences"), [ALIKE[0], ALIKE[3], ALIKE[6]])
@pytest.mark.thinned(2)
def test_formula_and_simulation_agree_on_calls_of_like_lengths(policy, sequences, correlation):
    assert_chain_and_simulation_agree(
        policy, sequences, 0.5, 0.15, 200_000, intraclass_correlation=correlation
    )


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.6, 0.85])
@pytest.mark.parametrize("correlation", [0.2, HALF, EQUAL])
@pytest.mark.parametrize(("policy", "sequences"), ALIKE)
def test_formula_and_simulation_agree_on_calls_everywhere(policy, sequences, correlation, load):
    load = load if policy not in {"dynamic", "elastic"} else 0.5 * load  # unbounded
    assert_chain_and_simulation_agree(
        policy, sequences, load, 0.15, 1_000_000, intraclass_correlation=correlation
    )


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, HALF, EQUAL])
@pytest.mark.parametrize("policy", ["capped:max_batch_size=8", "elastic:max_batch_size=8"])
def test_quantiles_of_whole_calls_are_those_of_a_simulation(policy, correlation):
    model = model_of(policy, "deterministic:value=4", intraclass_correlation=correlation)
    rate = 0.6 * model.largest_stable_rate
    exact = predict_model(model, rate, "exact")
    simulated = simulate_model(model, rate, num_requests=400_000, replications=5, seed=2)
    for name in ("queueing_delay", "sojourn_time"):
        found, expected = getattr(simulated, name), getattr(exact, name)
        for level in ("p90", "p99"):
            assert found.value(level) == pytest.approx(expected.value(level), rel=0.03), (
                name,
                level,
            )


@pytest.mark.parametrize("cv", [0.0, 0.3])
@pytest.mark.parametrize(
    ("policy", "size"), [("capped:max_batch_size=8", 4), ("elastic:max_batch_size=6", 3)]
)
def test_whole_calls_are_the_chain_of_sequences_where_lengths_are_independent(policy, size, cv):
    """Two ways to the same means: calls as requests of their own, and M^X."""
    model = model_of(policy, f"deterministic:value={size}", cv)
    rate = 0.7 * model.largest_stable_rate
    whole = predict_model(model, rate, "exact")
    chain = solve_call_chain(
        model.batch_time, Calls.of(rate, model.requests.sequences), model.bound
    )
    assert whole.queueing_delay.mean == pytest.approx(chain.queueing_delay, rel=1e-7)
    assert whole.sojourn_time.mean == pytest.approx(chain.sojourn_time, rel=1e-7)
    assert whole.batch_size.mean == pytest.approx(chain.batch_size, rel=1e-7)
    assert whole.utilisation == pytest.approx(chain.utilisation, rel=1e-7)


def test_equal_lengths_are_calls_of_one_longer_answer():
    """n sequences of one length, padded: single requests under a law of n times k1 and k3."""
    model = model_of("capped:max_batch_size=8", "deterministic:value=4", intraclass_correlation=1.0)
    one = Queue.read(
        "capped:max_batch_size=2",
        LENGTHS,
        "k1=0.0012,k2=0.0014,k3=0.00008,k4=0.0012,turnaround=0.0015,cv=0.15",
    )
    assert model.largest_stable_rate == pytest.approx(one.largest_stable_rate, rel=1e-12)
    rate = 0.7 * model.largest_stable_rate
    calls, single = predict_model(model, rate, "exact"), predict_model(one, rate, "exact")
    for name in ("queueing_delay", "sojourn_time"):
        for level in ("p50", "p99"):
            assert getattr(calls, name).value(level) == pytest.approx(
                getattr(single, name).value(level), rel=1e-6
            )
    assert calls.batch_size.mean == pytest.approx(4 * single.batch_size.mean, rel=1e-9)


@pytest.mark.thinned(9)
@pytest.mark.parametrize("correlation", [0.0, HALF, EQUAL])
@pytest.mark.parametrize(
    "sequences",
    ["deterministic:value=4", "deterministic:value=3", "uniform:low=1,high=8", "geometric:mean=3"],
)
@pytest.mark.parametrize("batch", [1, 5, 8, 12])
def test_a_batch_from_a_line_of_calls_has_that_longest_and_that_total(
    batch, sequences, correlation
):
    calls = CallLengths(parse_distribution(LENGTHS), parse_distribution(sequences), correlation)
    model = model_of("single", sequences, intraclass_correlation=correlation)
    count = 100_000 * max(4, batch)
    drawn = draw_trace(model, 1.0, count, np.random.SeedSequence(6)).output_tokens
    batches = np.asarray(drawn).reshape(-1, batch)
    longest, total = batches.max(axis=1), batches.sum(axis=1)
    law = calls.longest(batch)
    assert law.pmf.sum() == pytest.approx(1, rel=1e-12)
    assert longest.mean() == pytest.approx(law.mean, rel=0.01)
    assert longest.var() == pytest.approx(law.variance, rel=0.05, abs=0.05)
    assert total.var() == pytest.approx(calls.total_variance(batch), rel=0.03)
    covariance = np.cov(total, longest)[0, 1]
    assert covariance == pytest.approx(calls.total_with_longest(batch), rel=0.05, abs=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [HALF, EQUAL])
@pytest.mark.parametrize("sequences", ["deterministic:value=4", "uniform:low=1,high=8"])
def test_full_batches_that_split_calls_are_busy_for_the_load(sequences, correlation):
    """`fixed` serves full batches only: its utilisation is the load, whatever a batch splits."""
    model = model_of("fixed:batch_size=6", sequences, intraclass_correlation=correlation)
    rate = 0.6 * model.largest_stable_rate
    found = simulate_model(model, rate, num_requests=500_000, replications=4, seed=1)
    assert found.utilisation == pytest.approx(0.6, rel=0.01)


def test_calls_that_batches_split_are_simulated_where_their_lengths_are_alike():
    split = model_of("capped:max_batch_size=6", "deterministic:value=4", intraclass_correlation=0.3)
    whole = model_of("capped:max_batch_size=8", "deterministic:value=4", intraclass_correlation=0.3)
    assert methods(split) == ("simulation",)
    assert methods(whole) == ("exact", "simulation")
    assert any("equal with probability 0.3" in text for text in whole.assumptions)


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"intraclass_correlation": 0.5}, "without sequences"),
        ({"intraclass_correlation": 1.5, "sequences": "deterministic:value=4"}, "0 "),
        ({"intraclass_correlation": -0.1, "sequences": "deterministic:value=4"}, "0 "),
    ],
)
def test_a_correlation_that_cannot_be_is_refused(limits, told):
    with pytest.raises(SpecError, match=told):
        Queue.read("dynamic", LENGTHS, LAW, **limits)


def test_the_commands_take_a_correlation():
    common = ["--policy", "capped:max_batch_size=8", "--output-tokens", LENGTHS, "--latency", LAW]
    common += ["--arrival-rate", "20", "--json", "--sequences", "deterministic:value=4"]
    delays = {}
    for command in ("predict", "simulate"):
        for value in ("0", "1"):
            arguments = [command, *common, "--intraclass-correlation", value]
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, result.output
            found = json.loads(result.output)
            delays[command, value] = found["queueing_delay"]["mean"]
    assert delays["predict", "1"] < 0.9 * delays["predict", "0"]
    assert delays["simulate", "1"] == pytest.approx(delays["predict", "1"], rel=0.05)
