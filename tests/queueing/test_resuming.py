"""Orders whose interruptions cost something: the stretched services against closed forms and
simulation, and which method answers.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kendall.policies.immediate import Continuous, Single
from kendall.policies.orders import make_order
from kendall.policies.text import SpecError
from kendall.queueing.commands import cli
from kendall.queueing.distributions.token_distribution import Vector, parse_distribution
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.models.soap.queue import solve_order
from kendall.queueing.models.soap.resuming import (
    ResumeCost,
    Resuming,
    repeated,
    resume_doubt,
    step_times,
)
from kendall.queueing.models.soap.token_orders import TokenService, solve_in_tokens
from kendall.queueing.prediction import predict_model, steady_state
from kendall.queueing.prediction.by_length import durations_by_length
from kendall.queueing.prediction.solutions import methods
from kendall.queueing.predictors.predictor_text import parse_predictor
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_model
from papers.sample_paths import Replications, simulate_order

TOKENS = parse_distribution("lognormal:mu=3,sigma=0.9", 150)
LAW = LatencyModel(k1=1e-4, k2=4e-3, k3=1e-5, k4=1e-3, kr=8e-3)
FREE = dataclasses.replace(TokenService.alone(LatencyModel(k4=1e-3), TOKENS), resume=None)
MEAN = FREE.sizes.mean
KEYS: dict[str, dict[str, Any]] = {
    "threshold-preemptive": {"threshold": 30.0},
    "trail": {"c": 0.5},
}
KEEPING_RANK = ("sprpt", "pspjf", "threshold-preemptive", "trail")


def asked(name: str) -> Any:
    return make_order(name, KEYS.get(name, {}))


def pure(name: str, cost: float) -> Resuming:
    """Where nothing is lost but `cost` seconds."""
    return Resuming(FREE.order(asked(name)), ResumeCost(cost, 1e-9, 1e-9))


# the stretched services


def begin_again(
    found: Vector, left: Vector, seconds: float, rate: float, rng: np.random.Generator
) -> None:
    """Add the time of those `left` until each has served `seconds` without an interruption."""
    while left.any():
        gap = rng.exponential(1 / rate, found.size)
        found[left] += np.minimum(gap, seconds)[left]
        left &= gap < seconds


@pytest.mark.parametrize("rate", [1e-9, 1e-3, 0.4, 3.0])
def test_the_time_in_one_piece_has_the_moments_of_repetitions(rate: float) -> None:
    """E = (e^(rs) - 1) / r, and of the sum of a geometric number of failures."""
    seconds = 1.3
    mean, variance = repeated(np.array([rate]), seconds)
    assert mean[0] == pytest.approx(math.expm1(rate * seconds) / rate, rel=1e-9)
    rng = np.random.default_rng(1)
    found = np.zeros(100_000)
    begin_again(found, np.ones(found.size, dtype=bool), seconds, rate, rng)
    assert found.mean() == pytest.approx(mean[0], rel=0.02)
    assert found.var() == pytest.approx(variance[0], rel=0.05, abs=1e-3)


@pytest.mark.parametrize("rate", [1e-9, 0.4, 3.0])
def test_a_step_behind_the_first_token_costs_its_interruptions(rate: float) -> None:
    cost = ResumeCost(0.7, 1.0, 0.5)
    mean, variance = step_times(np.array([rate]), cost)
    expected = -math.expm1(-rate * 0.5) * math.exp(rate * 1.2) / rate
    assert mean[0] == pytest.approx(expected, rel=1e-9)
    rng = np.random.default_rng(2)
    gap = rng.exponential(1 / rate, 100_000)
    found = np.minimum(gap, 0.5)
    begin_again(found, gap < 0.5, 1.2, rate, rng)
    assert found.mean() == pytest.approx(mean[0], rel=0.02)
    assert found.var() == pytest.approx(variance[0], rel=0.05, abs=1e-3)


@pytest.mark.parametrize("name", KEEPING_RANK)
def test_a_resume_that_costs_nothing_is_the_exact_analysis(name: str) -> None:
    told = FREE.predictor(parse_predictor("lognormal:sigma=0.5"))
    exact = solve_order(FREE.order(asked(name)), FREE.sizes, 0.7 / MEAN, told)
    found = solve_order(pure(name, 0.0), FREE.sizes, 0.7 / MEAN, told)
    assert found.load == pytest.approx(exact.load, rel=1e-6)
    assert found.sojourn == pytest.approx(exact.sojourn, rel=1e-5)
    assert found.by_size == pytest.approx(exact.by_size, rel=1e-4)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", KEEPING_RANK)
@pytest.mark.parametrize("text", ["exact", "exponential"])
def test_the_stretched_queue_agrees_with_simulation(name: str, text: str) -> None:
    told, order = FREE.predictor(parse_predictor(text)), pure(name, 0.25 * MEAN)
    found = solve_order(order, FREE.sizes, 0.6 / MEAN, told)
    free = solve_order(FREE.order(asked(name)), FREE.sizes, 0.6 / MEAN, told)
    simulated = simulate_order(order, FREE.sizes, 0.6 / MEAN, told, Replications(20_000, 8, 3))
    delay = simulated.mean - found.service
    assert simulated.standard_error < 0.02 * delay
    assert delay > 1.1 * free.delay, "resumes cost too little to test anything"
    assert abs(found.delay / delay - 1) < 0.07


def test_an_order_whose_ranks_rise_is_refused() -> None:
    for name in ("mlfq", "fb"):
        with pytest.raises(SpecError, match="loses its rank"):
            solve_order(pure(name, 0.01), FREE.sizes, 0.5 / MEAN)
    with pytest.raises(SpecError, match="expected one server"):
        simulate_order(pure("sprpt", 0.01), FREE.sizes, 1.0 / MEAN, servers=2)


def test_resumes_make_a_queue_unstable_that_is_stable_without() -> None:
    rate = 0.9 / MEAN
    assert solve_order(FREE.order(asked("pspjf")), FREE.sizes, rate).load < 1
    with pytest.raises(UnstableQueueError):
        solve_order(pure("pspjf", MEAN), FREE.sizes, rate)


# predict


def model(policy: Any, law: LatencyModel = LAW, **limits: Any) -> Queue:
    return Queue.read(policy, TOKENS, law, **{"predictor": "exact"} | limits)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Single(order="sprpt"), ("approximation", "simulation")),
        (Single(order="trail", c=0.5), ("approximation", "simulation")),
        (Single(order="mlfq"), ("simulation",)),
        (Single(order="fb"), ("simulation",)),
        (Single(order="sprpt", max_preemptions=2), ("simulation",)),
        (Single(order="sprpt", aging=0.1), ("simulation",)),
        (Single(order="spjf"), ("exact", "simulation")),
        (Continuous(max_batch_size=4, order="sprpt"), ("simulation",)),
    ],
)
def test_which_method_answers_where_a_resume_costs_something(
    policy: Any, expected: tuple[str, ...]
) -> None:
    assert methods(model(policy)) == expected


def test_several_servers_and_prompts_that_take_time_are_simulated() -> None:
    assert methods(model(Single(order="sprpt"), servers=2)) == ("simulation",)
    assert methods(model(Single(order="sprpt"), dataclasses.replace(LAW, kp=1e-5))) == (
        "simulation",
    )


@pytest.mark.parametrize(
    "name",
    [
        "sprpt",
        "trail",
        pytest.param("pspjf", marks=pytest.mark.slow),
        pytest.param("threshold-preemptive", marks=pytest.mark.slow),
    ],
)
def test_the_simulator_that_drives_the_policy_agrees(name: str) -> None:
    """Setup, lost steps and kr: what interruptions add to the load, which is exact, beside first
    come, first served on the same requests; and the delay.
    """
    queued, load = model(Single(order=name, **KEYS.get(name, {}))), 0.4
    rate = load * queued.largest_stable_rate
    answer = predict_model(queued, rate)
    found, usual = (
        simulate_model(each, rate, num_requests=30_000, seed=5)
        for each in (queued, model(Single()))
    )
    assert (answer.method, answer.time_to_first_token.mean) == ("approximation", None)
    added = found.utilisation / usual.utilisation - 1
    assert added > 0.03
    assert answer.utilisation / load - 1 == pytest.approx(added, rel=0.07)
    delay, error = found.queueing_delay.mean, found.queueing_delay.standard_error
    assert error < 0.05 * delay
    assert abs(answer.queueing_delay.mean - delay) < 3 * error + 0.03 * delay


def test_what_a_resume_costs_is_said_and_doubted_where_it_is_much() -> None:
    queued = model(Single(order="sprpt"))
    calm = predict_model(queued, 0.5 * queued.largest_stable_rate)
    assert any("takes 0.0121 s to go on (k1 + k2 + kr)" in note for note in calm.assumptions)
    assert not any("in doubt" in note for note in calm.assumptions)
    dear = model(Single(order="sprpt"), dataclasses.replace(LAW, kr=0.05))
    doubted = predict_model(dear, 0.5 * queued.largest_stable_rate)
    assert any("in doubt: interruptions lengthen" in note for note in doubted.assumptions)
    free = predict_model(model(Single(order="sprpt"), dataclasses.replace(LAW, kr=0.0)), 1.0)
    assert any("takes 0.0041 s to go on (k1 + k2 + kr)" in note for note in free.assumptions)
    assert free.method == "approximation"


def test_durations_by_length_have_what_interruptions_add() -> None:
    queued = model(Single(order="sprpt"))
    rate = 0.6 * queued.largest_stable_rate
    found, answer = durations_by_length(queued, rate), predict_model(queued, rate)
    assert found is not None
    weights = TOKENS.pmf[np.rint(found.tokens).astype(int)]
    assert weights @ found.delay == pytest.approx(answer.queueing_delay.mean, rel=1e-6)
    alone = LAW.setup(1) + LAW.step(1) * found.tokens
    assert (found.service > alone * (1 - 1e-9)).all()
    added = found.service / alone
    assert added[-1] > added[0] >= 1


def test_more_expensive_resumes_wait_longer_on_the_command_line() -> None:
    queue = ("--policy", "single:order=sprpt", "--arrival-rate", "8", "--predictor", "exact")
    lengths = ("--output-tokens", "uniform:low=1,high=100", "--json")
    delays = []
    for kr in ("0.002", "0.008", "0.02"):
        law = ("--latency", f"k1=0.0001,k2=0.004,k3=0.00001,k4=0.001,kr={kr}")
        answer = json.loads(CliRunner().invoke(cli.app, ["predict", *queue, *lengths, *law]).stdout)
        assert answer["method"] == "approximation"
        delays.append(answer["queueing_delay"]["mean"])
    law = ("--latency", "k1=0.0001,k2=0.004,k3=0.00001,k4=0.001,kr=1")
    answer = json.loads(CliRunner().invoke(cli.app, ["predict", *queue, *lengths, *law]).stdout)
    assert not answer["stable"]
    assert answer["load"] > 1
    assert any("takes 1 s to go on (k1 + k2 + kr)" in note for note in answer["assumptions"])
    assert delays == sorted(delays)
    assert delays[-1] > 1.1 * delays[0]


def test_the_answer_says_that_it_is_simulated_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = Queue.read(Single(order="fb", quantum=100), TOKENS, LAW)
    monkeypatch.setattr(steady_state, "SIMULATED_REQUESTS", 2000)
    answer = predict_model(queued, 5.0)
    assert answer.method == "simulation"
    said = "one server, 0.0121 s for each resume (k1 + k2 + kr)"
    assert any(said in n for n in answer.assumptions)
    with pytest.raises(SpecError, match=r"k2 \+ kr\)\); expected auto or simulation"):
        predict_model(queued, 5.0, "exact")


def test_solving_in_tokens_names_what_it_has_no_model_of() -> None:
    service = TokenService.alone(LAW, TOKENS)
    assert solve_in_tokens(asked("spjf"), service, 5.0).doubt is None
    with pytest.raises(SpecError, match="expected one server"):
        solve_in_tokens(asked("sprpt"), service, 5.0, 2, parse_predictor("exact"))


@pytest.mark.parametrize(
    ("load", "bare", "said"),
    [
        (0.8, 0.75, None),
        (0.92, 0.9, None),
        (0.6, 0.5, "by 20%, to a load of 0.60"),
        (0.94, 0.9, "by 4%, to a load of 0.94"),
    ],
)
def test_a_doubt_of_resuming_says_by_how_much_services_are_longer(
    load: float, bare: float, said: str | None
) -> None:
    found = resume_doubt(load, bare)
    assert (found is None) == (said is None)
    assert (said or "") in (found or "")


@pytest.mark.slow
@pytest.mark.parametrize(("order", "kr"), [("fb", 0.0), ("mlfq", 0.1)])
def test_interruptions_that_are_more_than_a_server_can_do_are_no_steady_state(
    order: str, kr: float
) -> None:
    """The load of the requests alone is 0.7; each quantum costs an admission beside its token."""
    queued, rate = interrupted(Single(order=order), kr)
    assert methods(queued) == ("simulation",)
    for ask in (predict_model, simulate_model):
        with pytest.raises(UnstableQueueError) as raised:
            ask(queued, rate)
        assert raised.value.load > 1
    calm = predict_model(queued, rate / 7)
    assert (calm.queueing_delay.mean or math.inf) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "kr"),
    [
        (Continuous(max_batch_size=2, order="fb"), 0.02),
        (Continuous(max_batch_size=8, order="mlfq"), 0.2),
    ],
)
def test_so_are_those_that_are_more_than_its_slots_can_do(policy: Continuous, kr: float) -> None:
    queued, rate = interrupted(policy, kr)
    with pytest.raises(UnstableQueueError) as raised:
        simulate_model(queued, rate, num_requests=6000)
    assert raised.value.load > 1
    calm = simulate_model(queued, rate / 7, num_requests=6000)
    assert calm.queueing_delay.mean is not None
    assert calm.queueing_delay.mean < 1.0


def test_a_load_just_beyond_what_can_be_done_is_seen_too() -> None:
    """Of one at a time exactly: the formula says 1.03, and the queue grows slowly."""
    law = LatencyModel(k1=1e-4, k2=4e-3, k3=1e-5, k4=1e-3, kr=3e-3)
    lengths = parse_distribution("lognormal:mu=3,sigma=1", 200)
    queued = Queue.read("single:order=pspjf", lengths, law, predictor="lognormal:sigma=0.5")
    loads = []
    for ask in (predict_model, simulate_model):
        with pytest.raises(UnstableQueueError) as raised:
            ask(queued, 25.0)
        loads.append(raised.value.load)
    assert loads[1] == pytest.approx(loads[0], rel=0.02)


def test_work_beyond_several_servers_is_shared_among_them() -> None:
    """Two servers at twice the rate that is too much for one: as far beyond each."""
    lengths = parse_distribution("lognormal:mu=3,sigma=1", 200)
    law, loads = LatencyModel(k1=1e-4, k2=4e-3, k3=1e-5, k4=1e-3, kr=6e-3), []
    for servers in (1, 2):
        queued = Queue.read(
            "single:order=pspjf", lengths, law, predictor="lognormal:sigma=0.5", servers=servers
        )
        with pytest.raises(UnstableQueueError) as raised:
            simulate_model(queued, 27.0 * servers, num_requests=20_000)
        loads.append(raised.value.load)
    assert loads[1] == pytest.approx(loads[0], rel=0.1)


@pytest.mark.parametrize("order", ["sprpt", "fb", "skippredict,threshold=20"])
@pytest.mark.thinned(3)
def test_work_for_more_than_one_server_is_not_too_much_for_several(order: str) -> None:
    """A load of 0.6 on each of two and three servers: 1.2 and 1.8 in all."""
    for servers in (2, 3):
        queued = Queue.read(
            f"single:order={order}",
            "geometric:mean=40",
            "a=0.01",
            predictor="exact",
            servers=servers,
        )
        found = predict_model(queued, 0.6 * queued.largest_stable_rate)
        assert found.stable
        assert 0 < (found.queueing_delay.mean or 0.0) < 1.0


def interrupted(policy: Single | Continuous, kr: float) -> tuple[Queue, float]:
    queued = model(policy, LatencyModel(k1=1e-4, k2=1e-2, k3=1e-5, k4=5e-3, kr=kr))
    return queued, 0.7 * queued.largest_stable_rate


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Single(order="sprpt"), Continuous(max_batch_size=4)])
@pytest.mark.parametrize("seed", range(5))
def test_a_high_load_that_can_be_done_is_no_endless_queue(
    policy: Single | Continuous, seed: int
) -> None:
    queued = model(dataclasses.replace(policy, order="sprpt"), LatencyModel(k4=1e-3))
    for count in (40, 10_000):
        simulate_model(queued, 0.97 * queued.largest_stable_rate, num_requests=count, seed=seed)
