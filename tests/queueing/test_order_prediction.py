"""Orders as a policy's text names them, with predictors as texts: the law, the queue, `predict`."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kendall.policies.immediate import Capped, Continuous, Single
from kendall.policies.orders import ORDERS, make_order
from kendall.policies.text import SpecError
from kendall.queueing.arrivals.length_prediction import (
    parse_length_prediction,
    predict_lengths,
)
from kendall.queueing.commands import cli
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.mg1 import solve_mg1
from kendall.queueing.models.soap.orders import (
    LeastAttainedRanks,
    LevelsRanks,
    PredictedRanks,
    ThresholdRanks,
)
from kendall.queueing.models.soap.queue import solve_order
from kendall.queueing.models.soap.token_orders import (
    TokenService,
    delay_ratio,
    is_solved,
    predicted_tokens,
    solve_in_tokens,
)
from kendall.queueing.prediction import predict_model
from kendall.queueing.prediction.solutions import methods
from kendall.queueing.predictors.laws import OneBit
from kendall.queueing.predictors.predictor_text import PredictorText, parse_predictor
from kendall.queueing.predictors.sizes import Atoms, Residual
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_model
from papers.sample_paths import Replications, simulate_order

TOKENS = parse_distribution("lognormal:mu=3,sigma=0.9", 150)
STEADY = LatencyModel(k1=1e-4, k2=4e-3, k3=1e-5, k4=1e-3)
LAW = LatencyModel(k1=1e-4, k2=4e-3, k3=1e-5, k4=1e-3, cv=0.4, stall_share=0.1, stall=0.05)
# interruptions that cost nothing: the analysis itself
SERVICE = dataclasses.replace(TokenService.alone(STEADY, TOKENS), resume=None)
RATE = 0.8 / SERVICE.sizes.mean
KEYS: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 30.0},
    "threshold-preemptive": {"threshold": 30.0},
    "skippredict": {"threshold": 30.0},
    "delaypredict": {"limit": 20},
    "trail": {"c": 0.5},
    "mlfq": {"quantum": 10, "levels": 3},
}
UNSOLVED = ("edf", "priority", "hrrn", "binned", "vtc", "boost")
SOLVED = tuple(name for name in ORDERS if name not in UNSOLVED)
TEXTS = ("none", "exact", "exponential", "lognormal:sigma=0.5", "onebit:threshold=30,accuracy=0.9")
BOUNDED = "uniform:low=0.5,high=1.5"
MISSES = "onebit:threshold=30,miss_short=0.05,miss_long=0.4"


def asked(name, **given):
    return make_order(name, KEYS.get(name, {}) | given)


# texts


@pytest.mark.parametrize(
    "text",
    [*TEXTS, "onebit:threshold=200", BOUNDED, MISSES, "onebit:threshold=3,miss_long=0"],
)
def test_a_predictor_is_read_and_written_canonically(text):
    assert str(parse_predictor(f" {text} ")) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got an empty predictor; expected none, exact"),
        ("exakt", "got predictor 'exakt'; expected one of none.*did you mean 'exact'"),
        ("one_bit:threshold=3", "did you mean 'onebit'"),
        ("exact:sigma=1", "got key 'sigma' for predictor exact; expected no key"),
        ("lognormal", "got 'lognormal'; expected sigma too, for example lognormal:sigma=0.5"),
        ("lognormal:sigma=-1", "got sigma=-1; expected a number >= 0"),
        ("lognormal:sigma=x", "got sigma='x'"),
        ("lognormal:sigma=1,sigma=2", "got sigma twice"),
        ("onebit", "expected threshold too"),
        ("onebit:threshold=0", "got threshold=0; expected tokens >= 1"),
        ("onebit:threshold=2.5", "got threshold=2.5 in .*; expected a whole number"),
        ("onebit:threshold=9,accuracy=1.5", "got accuracy=1.5; expected a probability"),
        ("onebit:treshold=9", "did you mean 'threshold'"),
        ("onebit:threshold=9,miss_short=2", "got miss_short=2; expected a probability"),
        ("onebit:threshold=9,miss_long=nan", "got miss_long="),
        ("onebit:threshold=9,accuracy=1,miss_long=0", "expected accuracy, or miss_short and miss_"),
        ("uniform:low=1", "got 'uniform:low=1'; expected high too"),
        ("uniform:low=2,high=1", "got low=2 and high=1; expected low below high"),
        ("uniform:low=-1,high=1", "got low=-1; expected a number >= 0"),
        ("joint", "expected path too"),
        ("uniform:low=1,high=1e308", "got high=1e.*308; expected a number > 0, at most 1,000,000"),
        ("joint:path=/dev/null", "got path=/dev/null, which is no file; expected a file of pairs"),
        ("joint:path=.", "got path=., which is no file"),
        ("joint:path=no-such-file", "got path=no-such-file: No such file.*CSV or JSON lines"),
    ],
)
def test_what_is_no_predictor_is_refused_in_one_line(text, message):
    with pytest.raises(SpecError, match=message):
        parse_predictor(text)


@given(st.integers(1, 10**6), st.floats(0, 1))
def test_every_bit_is_read_back(threshold, accuracy):
    told = PredictorText("onebit", threshold=threshold, accuracy=accuracy)
    assert parse_predictor(str(told)) == told


def test_the_most_absurd_errors_are_drawn_as_lengths() -> None:
    """Clients may send any prediction, and the live model takes their spread from them."""
    lengths = TOKENS.sample(np.random.default_rng(1), 200)
    for sigma in ("700", "1e300"):
        text = f"lognormal:sigma={sigma}"
        with np.errstate(all="raise", under="ignore"):
            drawn = predicted_tokens(parse_predictor(text), np.random.default_rng(2), lengths, 150)
            sent = predict_lengths(parse_length_prediction(text), np.random.default_rng(2), lengths)
            assert sent is not None
        assert {1.0, 150.0} <= set(drawn)
        assert np.minimum(sent, 150).tolist() == drawn.tolist()
        assert sent.max() == 2**53


# tokens become seconds


def test_thresholds_quanta_and_bits_of_tokens_are_seconds_of_service():
    order = SERVICE.order(asked("threshold"))
    assert isinstance(order, ThresholdRanks)
    assert SERVICE.seconds(30) < order.threshold < SERVICE.seconds(31)
    assert SERVICE.order(asked("mlfq")) == LevelsRanks((SERVICE.seconds(10), SERVICE.step * 20))
    assert SERVICE.order(asked("mlfq", levels=1)) == LevelsRanks(())
    assert SERVICE.order(asked("fb")) == LeastAttainedRanks()
    fifths = SERVICE.order(asked("fb", quantum=30))
    assert fifths == LevelsRanks((SERVICE.seconds(30), *[SERVICE.step * 30] * 3))
    assert SERVICE.order(asked("trail")) == PredictedRanks(
        slope=-1.0, share=0.5, setup=SERVICE.setup
    )
    bit = SERVICE.predictor(parse_predictor("onebit:threshold=30"))
    assert isinstance(bit, OneBit)
    assert bit.values == (SERVICE.seconds(15), SERVICE.seconds(60))
    assert bit.short(np.array([SERVICE.seconds(30), SERVICE.seconds(31)])).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("exact", "exact"),
        ("exponential", "exponential"),
        ("lognormal:sigma=0.5", "lognormal:sigma=0.5"),
        ("onebit:threshold=31", "one_bit:threshold=31,accuracy=1"),
    ],
)
def test_predictions_are_drawn_as_the_load_generator_sends_them(text, sent):
    lengths = TOKENS.sample(np.random.default_rng(1), 1000)
    drawn = predicted_tokens(parse_predictor(text), np.random.default_rng(2), lengths, 150)
    other = predict_lengths(parse_length_prediction(sent), np.random.default_rng(2), lengths)
    assert drawn.tolist() == np.minimum(other, 150).tolist()
    nothing = predicted_tokens(parse_predictor("none"), np.random.default_rng(2), lengths, 150)
    assert set(nothing) == {150.0}


@pytest.mark.parametrize(
    "order", [asked("hrrn"), asked("edf"), asked("binned", bins=2), asked("spjf", aging=0.1)]
)
def test_an_order_without_such_a_rank_is_refused(order):
    assert not is_solved(order)
    with pytest.raises(SpecError, match=f"got order {order.name}; expected one by arrival, by"):
        SERVICE.order(order)


@pytest.mark.parametrize("name", sorted(set(SOLVED) - {"fb", "mlfq", "delaypredict"}))
def test_without_predictions_every_order_that_asks_for_them_is_first_come_first_served(name):
    """Every request counts as the longest: beyond any threshold. Under delaypredict the first
    tokens go first all the same.
    """
    first_come = solve_in_tokens(asked("fcfs"), SERVICE, RATE)
    assert solve_in_tokens(asked(name), SERVICE, RATE).sojourn == pytest.approx(
        first_come.sojourn, rel=1e-9
    )


def test_residual_and_stalls_are_those_of_the_exact_single_queue():
    service = TokenService.alone(LAW, TOKENS)
    found = solve_in_tokens(asked("fcfs"), service, RATE)
    assert found.delay == pytest.approx(solve_mg1(LAW, TOKENS, RATE).delay.mean, rel=1e-9)


@pytest.mark.parametrize("name", ["sprpt", "pspjf", "mlfq", "threshold"])
def test_a_residual_lengthens_the_wait_and_not_the_interruptions(name):
    """Against simulation, ranks by the tokens made so far; the residual's SCV is 0.5."""
    sizes = Atoms(SERVICE.sizes.sizes, SERVICE.sizes.weights, residual=Residual(1.5))
    order, told = SERVICE.order(asked(name)), SERVICE.predictor(parse_predictor(TEXTS[3]))
    exact = solve_order(order, sizes, RATE, told).sojourn
    assert exact > 1.05 * solve_order(order, SERVICE.sizes, RATE, told).sojourn
    found = simulate_order(order, sizes, RATE, told, Replications(20_000, 24, 11))
    assert found.standard_error < 0.03 * exact
    assert abs(found.mean - exact) < 4 * found.standard_error


def test_stalls_are_in_the_formula_and_not_in_the_simulation():
    sizes = TokenService.alone(LAW, TOKENS).sizes
    with pytest.raises(SpecError, match="got stalls"):
        simulate_order(SERVICE.order(asked("spjf")), sizes, RATE)


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", SOLVED)
def test_the_solved_queue_agrees_with_simulation(name, text):
    order, told = SERVICE.order(asked(name)), SERVICE.predictor(parse_predictor(text))
    found = solve_in_tokens(asked(name), SERVICE, RATE, 1, parse_predictor(text))
    assert found.sojourn == solve_order(order, SERVICE.sizes, RATE, told).sojourn
    simulated = simulate_order(order, SERVICE.sizes, RATE, told, Replications(10_000, 16, 7))
    assert simulated.standard_error < 0.05 * found.sojourn
    assert abs(simulated.mean - found.sojourn) < 4 * simulated.standard_error


def test_what_has_outlived_its_prediction_twice_does_not_pass_who_has_the_same() -> None:
    """At any setup, though prediction + (prediction - setup) - prediction is not prediction - setup
    in floating point: it was 0.127 s at the setup of 4.1 ms.
    """
    told, order = SERVICE.predictor(parse_predictor(TEXTS[-1])), SERVICE.order(asked("srpt-b"))
    found = [
        solve_order(dataclasses.replace(order, setup=setup), SERVICE.sizes, RATE, told).sojourn
        for setup in (1e-3, 2.3e-3, 4.1e-3)
    ]
    assert found == pytest.approx([0.1093] * 3, rel=2e-3)


@pytest.mark.parametrize("text", TEXTS)
def test_answers_of_one_token_leave_nothing_to_order(text):
    service = TokenService.alone(LAW, parse_distribution("deterministic:value=1"))
    rate = 0.5 / service.sizes.mean
    for name in ("spjf", "sprpt"):
        found = solve_in_tokens(asked(name), service, rate, 1, parse_predictor(text))
        assert found.sojourn == pytest.approx(solve_in_tokens(asked("fcfs"), service, rate).sojourn)


def test_the_ratio_of_delays_is_that_of_the_two_queues():
    told = parse_predictor(TEXTS[3])
    queues = [solve_in_tokens(asked(n), SERVICE, RATE, 1, told) for n in ("spjf", "fcfs")]
    assert delay_ratio(asked("spjf"), SERVICE, 0.8, told) == pytest.approx(
        queues[0].delay / queues[1].delay, rel=1e-9
    )


# predict


def model(policy, **limits):
    return Queue.read(policy, TOKENS, LAW, **limits)


@pytest.mark.parametrize(
    ("policy", "limits", "expected"),
    [
        (Single(order="spjf"), {}, ("exact", "simulation")),
        (Single(order="sprpt", max_preemptions=2), {}, ("simulation",)),
        (Single(order="spjf"), {"servers": 4}, ("approximation", "simulation")),
        (Single(order="spjf"), {"patience": 1.0}, ("simulation",)),
        (Single(order="spjf"), {"arrival_scv": 2.0}, ("simulation",)),
        (Single(order="spjf"), {"sequences": "uniform:low=1,high=3"}, ("simulation",)),
        (Single(order="hrrn"), {}, ("simulation",)),
        (Single(order="spjf", aging=0.1), {}, ("simulation",)),
        (Single(order="trail", c=0.5), {}, ("approximation", "simulation")),
        (Continuous(max_batch_size=4, order="spjf"), {}, ("approximation", "simulation")),
        (Continuous(max_batch_size=4, order="sprpt"), {}, ("simulation",)),
        (Continuous(max_batch_size=4, order="sprpt"), {"servers": 2}, ("simulation",)),
        (Capped(max_batch_size=4, order="spjf"), {}, ("simulation",)),
    ],
)
def test_which_method_answers_an_order(policy, limits, expected):
    assert methods(model(policy, **limits)) == expected


@pytest.mark.parametrize("text", TEXTS[1:4])
def test_predict_gives_the_means_of_the_solved_order(text):
    queued = model(Single(order="spjf"), predictor=text)
    answer = predict_model(queued, RATE)
    queue = solve_in_tokens(
        asked("spjf"), TokenService.alone(LAW, TOKENS), RATE, 1, parse_predictor(text)
    )
    assert (answer.method, answer.policy) == ("exact", "single:order=spjf")
    assert answer.queueing_delay.mean == queue.delay
    assert answer.sojourn_time.mean == queue.sojourn
    assert answer.time_to_first_token.mean == pytest.approx(
        queue.delay + queued.batch_time.first_token(1)
    )
    assert answer.queueing_delay.p99 is None
    assert answer.fallback == (
        "exact means, but no quantiles: no formula covers their law under this order"
    )
    assert answer.bounds == {}
    assert f"order of service: spjf; predictor of the output lengths: {text}" in answer.assumptions


@pytest.mark.parametrize("order", ["sprpt", "pspjf"])
def test_an_interrupted_service_has_no_predicted_first_token(order):
    answer = predict_model(model(Single(order=order), predictor="exact"), RATE)
    assert answer.time_to_first_token.mean is None
    assert answer.inter_token_latency.mean is None
    assert answer.queueing_delay.mean > 0


def test_slots_gain_as_one_server_does_by_the_formula():
    first_come = predict_model(model(Continuous(max_batch_size=4)), 30.0, "approximation")
    queued = model(Continuous(max_batch_size=4, order="spjf"), predictor="exact")
    shortest = predict_model(queued, 30.0, "approximation")
    saved = first_come.queueing_delay.mean - shortest.queueing_delay.mean
    assert saved > 0
    for field in ("sojourn_time", "time_to_first_token"):
        difference = getattr(first_come, field).mean - getattr(shortest, field).mean
        assert difference == pytest.approx(saved)
    many = Continuous(max_batch_size=64, order="spjf")
    assert predict_model(model(many, predictor="exact"), 30.0).queueing_delay.mean < 1e-6


def simulated_delay(policy, rate, text, law=STEADY, count=30_000):
    queued = Queue.read(policy, TOKENS, law, predictor=text)
    return simulate_model(queued, rate, num_requests=count, seed=3).queueing_delay


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS[1:4])
def test_slots_of_an_engine_gain_less_than_predicted_and_doubt_says_so(text):
    """Four slots at load 0.8."""
    policies = Continuous(max_batch_size=4, order="spjf"), Continuous(max_batch_size=4)
    queues = [Queue.read(policy, TOKENS, STEADY, predictor=text) for policy in policies]
    rate = 0.8 * queues[0].largest_stable_rate
    answers = [predict_model(queued, rate, "approximation") for queued in queues]
    predicted = answers[0].queueing_delay.mean / answers[1].queueing_delay.mean
    delays = [simulated_delay(policy, rate, text).mean for policy in policies]
    assert 0.75 < predicted / (delays[0] / delays[1]) < 1.03
    assert any("is taken from one" in note for note in answers[0].assumptions)


@pytest.mark.parametrize("order", ["spjf", "ljf", "threshold"])
def test_the_simulator_that_drives_the_policy_agrees(order):
    policy = Single(order=order, **KEYS.get(order, {}))
    text, rate = "lognormal:sigma=0.5", 0.6 / SERVICE.sizes.mean
    exact = predict_model(Queue.read(policy, TOKENS, STEADY, predictor=text), rate)
    found = simulated_delay(policy, rate, text)
    assert found.standard_error < 0.1 * exact.queueing_delay.mean
    assert abs(found.mean - exact.queueing_delay.mean) < 4 * found.standard_error


@pytest.mark.slow
@pytest.mark.parametrize("order", ["sprpt", "pspjf", "threshold-preemptive", "trail", "mlfq", "fb"])
def test_the_simulator_that_drives_a_preemptive_policy_agrees(order):
    """A law without setup: there an interruption costs the step that it ends, no more."""
    policy = Single(order=order, **KEYS.get(order, {}) | ({"quantum": 10} if order == "fb" else {}))
    law, text = LatencyModel(k4=1e-3), "lognormal:sigma=0.5"
    queued = Queue.read(policy, TOKENS, law, predictor=text)
    rate = 0.6 * queued.largest_stable_rate
    exact = predict_model(queued, rate).queueing_delay.mean
    found = simulated_delay(policy, rate, text, law, 100_000)
    assert found.standard_error < 0.05 * exact
    assert abs(found.mean - exact) < 4 * found.standard_error + 0.05 * exact


@pytest.mark.slow
@pytest.mark.parametrize("order", ["spjf", "sprpt"])
def test_a_simulated_order_is_busy_for_its_load(order):
    law = LatencyModel(k4=1e-3)
    queued = Queue.read(Single(order=order), TOKENS, law, predictor="exact")
    found = simulate_model(queued, 0.6 * queued.largest_stable_rate, num_requests=20_000)
    assert found.utilisation == pytest.approx(0.6, rel=0.04)
    assert found.batch_size.mean == 1
    slots = Queue.read(Continuous(max_batch_size=2, order=order), TOKENS, law, predictor="exact")
    found = simulate_model(slots, 0.6 * slots.largest_stable_rate, num_requests=2000)
    assert (found.utilisation is None) == (order == "sprpt")


def test_an_unstable_order_raises():
    with pytest.raises(UnstableQueueError):
        predict_model(model(Single(order="spjf")), 2 * RATE)


QUEUE = ("--policy", "single", "--arrival-rate", "3", "--output-tokens", "uniform:low=1,high=100")


def test_predictor_on_the_command_line():
    given = ["predict", *QUEUE, "--latency", "a=0.001,c=0", "--json"]
    plain, told = (
        json.loads(CliRunner().invoke(cli.app, [*given, *more]).stdout)
        for more in ((), ("--predictor", "lognormal:sigma=0.5"))
    )
    note = "the predictor changes nothing: the order reads no predicted length"
    assert told["assumptions"].index(note) == 1 + told["assumptions"].index(
        "first come, first served"
    )
    told["assumptions"].remove(note)
    assert told == plain
    wrong = CliRunner().invoke(cli.app, [*given, "--predictor", "oracle"])
    assert isinstance(wrong.exception, SpecError)


@pytest.mark.parametrize("policy", ["single", "single:order=spjf", "dynamic:order=binned,bins=2"])
def test_a_law_that_puts_the_first_token_before_its_dispatch_says_nothing_of_it(policy):
    queued = Queue.read(
        policy, "uniform:low=20,high=40", "k1=0,k2=-0.05,k3=0,k4=0.01", predictor="exact"
    )
    found = predict_model(queued, 1.0, "exact")
    assert found.time_to_first_token.mean is None
    assert found.inter_token_latency.mean == pytest.approx(0.01)


# predictors by noise that is bounded, by two errors, by pairs


def test_a_broken_line_of_pairs_is_named(tmp_path) -> None:
    good = '{"output_tokens": 5, "predicted_output_tokens": 6}'
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"{good}\n\n{good}\n{{oops\n{good}\n")
    with pytest.raises(SpecError, match="line 4: Expecting property name"):
        parse_predictor(f"joint:path={path}")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> str:
    rng = np.random.default_rng(5)
    lengths = TOKENS.sample(rng, 20_000)
    told = predicted_tokens(parse_predictor(TEXTS[3]), rng, lengths, 10_000)
    path = tmp_path_factory.mktemp("pairs") / "pairs.csv"
    rows = [f"{true},{predicted}" for true, predicted in zip(lengths, told, strict=True)]
    path.write_text("\n".join(["output_tokens,predicted_output_tokens", *rows, "3,", "", ",4"]))
    return f"joint:path={path}"


@pytest.fixture(params=[BOUNDED, MISSES, "joint"])
def newer(request, pairs) -> str:
    return pairs if request.param == "joint" else request.param


def test_a_newer_predictor_is_predicted_as_it_is_simulated(newer):
    queued = Queue.read(Single(order="spjf"), TOKENS, STEADY, predictor=newer)
    exact = predict_model(queued, RATE, "exact").queueing_delay.mean
    runs = [
        simulate_model(queued, RATE, num_requests=40_000, seed=seed).queueing_delay.mean
        for seed in range(8)
    ]
    error = float(np.std(runs, ddof=1)) / math.sqrt(len(runs))
    assert error < 0.02 * exact
    assert abs(float(np.mean(runs)) - exact) < 4 * error


def test_pairs_of_a_law_predict_as_that_law(pairs):
    means = [
        solve_in_tokens(asked("spjf"), SERVICE, RATE, 1, parse_predictor(text)).delay
        for text in (pairs, TEXTS[3])
    ]
    assert means[0] == pytest.approx(means[1], rel=0.01)


def test_the_nearest_true_length_tells_the_factor(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = ["{}", '{"output_tokens": 10, "predicted_output_tokens": 20}']
    rows += ['{"output_tokens": 100, "predicted_output_tokens": 50}', "[]"]
    path.write_text("\n".join(rows))
    told = parse_predictor(f"joint:path={path}")
    assert str(told) == f"joint:path={path}"
    lengths = np.array([1.0, 10, 55, 56, 1000])
    drawn = predicted_tokens(told, np.random.default_rng(0), lengths, 10_000)
    assert drawn.tolist() == [2, 20, 110, 28, 500]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("output_tokens,predicted_output_tokens\n3,4\n", "with 1 pair; expected at least 2"),
        ("a,b\n3,4\n5,6\n", "with 0 pairs; expected at least 2 rows that have output_tokens and"),
        ("{not json\n", "expected CSV or JSON lines"),
        ("", "with 0 pairs"),
    ],
)
def test_a_file_without_pairs_is_refused(tmp_path, content, message):
    path = tmp_path / "pairs"
    path.write_text(content)
    with pytest.raises(SpecError, match=message):
        parse_predictor(f"joint:path={path}")


def test_a_false_long_and_a_false_short_differ():
    """The same share of requests told wrong; more of them are short."""
    short, long = (
        solve_in_tokens(asked("spjf"), SERVICE, RATE, 1, parse_predictor(text)).delay
        for text in ("onebit:threshold=30,miss_short=0.2", "onebit:threshold=30,miss_long=0.2")
    )
    right = solve_in_tokens(asked("spjf"), SERVICE, RATE, 1, parse_predictor("onebit:threshold=30"))
    assert right.delay < min(short, long)
    assert short != pytest.approx(long, rel=0.01)


def test_errors_without_spread_are_none():
    exact, none = (
        solve_in_tokens(asked("spjf"), SERVICE, RATE, 1, parse_predictor(text)).delay
        for text in ("exact", "lognormal:sigma=0")
    )
    assert exact == none


@pytest.mark.parametrize(
    ("policy", "limits", "says"),
    [
        ("continuous:max_batch_size=4,order=sprpt", {}, True),
        ("continuous:max_batch_size=4,order=spjf", {}, False),
        ("continuous:max_batch_size=4,order=sprpt", {"kv": "preempt=preserve"}, False),
    ],
)
def test_slots_that_interrupt_at_any_instant_say_what_that_loses(policy, limits, says):
    queue = Queue.read(
        policy, "geometric:mean=20", LatencyModel(k4=0.01), max_output_tokens=200, **limits
    )
    said = "an interruption loses the token in the making, which is made again"
    assert (said in queue.assumptions) == says


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("single", "one request at a time is taken whatever its prompt"),
        ("capped:max_batch_size=2", "the prompts of 2 requests have at most 64 tokens"),
    ],
)
def test_a_bound_on_tokens_that_does_not_bind_says_why(policy, said):
    limits = {"prompt_tokens": "uniform:low=1,high=30", "step_tokens": 64}
    queue = Queue.read(policy, "geometric:mean=20", LatencyModel(k4=0.01, kp=0.001), **limits)
    assert f"token bounds of the engine do not bind: {said}" in queue.assumptions
