"""Two models: the choice by predicted length or by a share, on one server or on their own."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm
from typer.testing import CliRunner

from kendall.policies.text import SpecError
from kendall.queueing.commands.cli import app
from kendall.queueing.errors import UnstableQueueError
from kendall.queueing.prediction import methods, predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.second_model import parse_second_model
from kendall.queueing.simulation.experiment import draw_jobs, simulate_model, simulate_run
from kendall.queueing.simulation.fast import SimulatedRun

LARGE, SMALL = "a=0.02,c=0.1", "a=0.005,c=0.05"
SLIDES: dict[str, Any] = {"predictor": "lognormal:sigma=0.5", "max_output_tokens": 400}
LENGTHS = "lognormal:mu=3,sigma=1"
SHORTEST = "single:order=spjf,by=service"


def queue(second: str | None, policy: str = "single", law: str = LARGE, **limits: object) -> Queue:
    given: dict[str, Any] = SLIDES | limits
    return Queue.read(policy, LENGTHS, law, second_model=second, **given)


def run_of(model: Queue, rate: float = 1.0, count: int = 3000, seed: int = 0) -> SimulatedRun:
    return simulate_run(model, rate, count, np.random.SeedSequence(seed))


# on one server


@pytest.mark.parametrize("policy", ["single", "single:order=spjf", SHORTEST])
@pytest.mark.parametrize("law", [LARGE, "k1=0.1,k2=0,k3=0.01,k4=0.01,cv=0.5"])
def test_equal_models_with_nothing_to_load_are_one(policy: str, law: str) -> None:
    prompts = {"prompt_tokens": "geometric:mean=5"}
    one, two = queue(None, policy, law), queue(f"threshold=30,latency={law}", policy, law)
    expected, found = run_of(one), run_of(two)
    for name in ("dispatched_at", "first_token_at", "released_at", "server_id", "batch_size"):
        assert np.array_equal(getattr(found, name), getattr(expected, name), equal_nan=True), name
    shared = run_of(queue(f"share=0.4,latency={law}", policy, law, **prompts))
    alone = run_of(queue(None, policy, law, **prompts))
    assert np.array_equal(shared.released_at, alone.released_at)


def slow_path(model: Queue, rate: float, seed: int) -> list[float]:
    """Ends of the requests, one request at a time."""
    second = model.engine.second_model
    assert second is not None
    jobs, _ = draw_jobs(model, rate, 300, np.random.SeedSequence(seed))
    told = [job.request.predicted_output_tokens or 0.0 for job in jobs]
    small = [each <= (second.threshold or 0.0) for each in told]
    now, held, left, ended = 0.0, False, list(range(len(jobs))), [math.nan] * len(jobs)

    def seconds(job: int, tokens: float) -> float:
        setup, step = (0.05, 0.005) if small[job] else (0.1, 0.02)
        return setup + step * tokens + (second.switch if small[job] != held else 0.0)

    while left:
        now = max(now, jobs[left[0]].request.arrived_at)
        here = [job for job in left if jobs[job].request.arrived_at <= now]
        if model.text == SHORTEST:
            job = min(here, key=lambda job: (seconds(job, told[job]), job))
        else:
            loaded = [job for job in here if small[job] == held and second.first == "loaded"]
            job = (loaded or here)[0]
        now += seconds(job, jobs[job].output_tokens)
        held, ended[job] = small[job], now
        left.remove(job)
    return ended


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("policy", "first"), [("single", "arrival"), ("single", "loaded"), (SHORTEST, "arrival")]
)
def test_a_model_is_loaded_before_a_request_that_needs_it(
    policy: str, first: str, seed: int
) -> None:
    model = queue(f"threshold=30,switch=0.4,first={first},latency={SMALL}", policy)
    run = run_of(model, 1.3, 300, seed)
    assert run.released_at == pytest.approx(slow_path(model, 1.3, seed), rel=1e-12)
    assert np.sort(run.batch_id).tolist() == list(range(300))
    loading = (run.first_token_at - run.dispatched_at) > 0.4
    assert 0.01 < loading.mean() < 0.9


@pytest.mark.thinned(6)
@pytest.mark.parametrize("switch", [0, 0.05, 0.4])
@pytest.mark.parametrize("choice", ["threshold=30", "share=0.3"])
def test_first_come_the_mean_is_exact(switch: float, choice: str) -> None:
    model = queue(f"{choice},switch={switch},latency={SMALL}", law=f"{LARGE},cv=0.5")
    exact = predict_model(model, 0.9, "exact")
    found = simulate_model(model, 0.9, num_requests=60_000, replications=8)
    for name in ("queueing_delay", "sojourn_time", "service_time", "time_to_first_token"):
        mean, simulated = getattr(exact, name).mean, getattr(found, name)
        assert simulated.standard_error < 0.05 * mean
        assert abs(simulated.mean - mean) < 4 * simulated.standard_error, name
    assert found.utilisation == pytest.approx(exact.load, rel=0.02)
    assert exact.utilisation == pytest.approx(exact.load)


def test_a_changeover_of_alternating_constants_has_a_closed_form() -> None:
    """Equal services of b seconds, half of each model: S is b or b + s; the chain of kinds is
    symmetric, so that S is independent of what came before, and the queue M/G/1.
    """
    law, rate, b, s = "a=0,c=0.5", 0.8, 0.5, 0.6
    model = queue(f"share=0.5,switch={s},latency={law}", law=law)
    second = (b**2 + (b + s) ** 2) / 2
    exact = rate * second / 2 / (1 - rate * (b + s / 2))
    assert predict_model(model, rate, "exact").queueing_delay.mean == pytest.approx(exact)
    assert model.load(rate) == pytest.approx(rate * (b + s / 2))


def test_the_load_has_what_loading_takes_where_the_order_does_not_decide_it() -> None:
    text = f"share=0.5,switch=2,latency={SMALL}"
    assert queue(text).largest_stable_rate < 1
    with pytest.raises(UnstableQueueError):
        predict_model(queue(text), 1.0)
    loaded = queue(text.replace("switch=2", "switch=2,first=loaded"))
    assert loaded.largest_stable_rate > 1
    assert methods(loaded) == methods(queue(text, SHORTEST)) == ("simulation",)
    assert simulate_model(loaded, 1.0, num_requests=20_000).stable
    assert "the load leaves that out" in str(loaded.assumptions)


def test_an_order_that_loads_too_often_is_found_unstable() -> None:
    model = queue(f"share=0.5,switch=3,latency={SMALL}", "single:order=spjf")
    assert model.load(1.0) < 0.5
    with pytest.raises(UnstableQueueError):
        simulate_model(model, 1.0, num_requests=20_000)


# on servers of their own


def test_apart_they_are_two_queues_of_poisson_arrivals() -> None:
    """Exact predictions: M/G/1 of the short answers and M/G/1 of the long ones (SITA)."""
    text, rate = f"threshold=30,servers=1,latency={SMALL}", 1.2
    model = queue(text, servers=2, predictor="exact")
    pmf = model.requests.output_tokens.pmf
    n = np.arange(len(pmf))
    total = 0.0
    for chosen, a, c in ((n <= 30, 0.005, 0.05), (n > 30, 0.02, 0.1)):
        share, service = pmf[chosen].sum(), c + a * n[chosen]
        own, mean, second = rate * share, *(pmf[chosen] @ service**k / share for k in (1, 2))
        total += share * own * second / 2 / (1 - own * mean)
    found = predict_model(model, rate, "exact")
    assert found.queueing_delay.mean == pytest.approx(total, rel=1e-9)
    assert found.load == pytest.approx(own * mean), "the busier one"


def test_a_wrong_prediction_brings_long_answers_to_the_small_model() -> None:
    model = queue(f"threshold=30,latency={SMALL}")
    lengths = model.requests.output_tokens
    n = np.arange(1, len(lengths.pmf))
    share = lengths.pmf[1:] @ norm.cdf(np.log(30.5 / n) / 0.5)
    (_, _), (found, small) = model.models
    assert found == pytest.approx(share, rel=1e-9)
    assert small.requests.output_tokens.longest > 100
    assert f"{share:.1%} of the requests, predicted up to 30 tokens" in str(model.assumptions)


@pytest.mark.parametrize(
    ("policy", "choice", "servers"),
    [
        ("single", "threshold=30", 2),
        ("single", "threshold=30", 3),
        ("dynamic", "share=0.4", 2),
        ("continuous:max_batch_size=8", "share=0.4", 2),
        ("single:order=spjf", "share=0.4", 2),
    ],
)
def test_apart_formulas_and_simulation_agree(policy: str, choice: str, servers: int) -> None:
    law, small = "k1=0.05,k2=0.05,k3=0.002,k4=0.018", "k1=0.01,k2=0.05,k3=0.001,k4=0.005"
    model = queue(f"{choice},servers=1,latency={small}", policy, law, servers=servers)
    exact = predict_model(model, 1.1, methods(model)[0])
    found = simulate_model(model, 1.1, num_requests=40_000, replications=8)
    assert exact.method != "simulation"
    for name in ("sojourn_time", "service_time"):
        mean, simulated = getattr(exact, name).mean, getattr(found, name)
        off = 4 * simulated.standard_error + (0.02 * mean if exact.method != "exact" else 0)
        assert simulated.standard_error < 0.05 * mean
        assert abs(simulated.mean - mean) < off, name
    assert found.utilisation == pytest.approx(exact.utilisation, rel=0.03)
    assert found.batch_size.mean == pytest.approx(exact.batch_size.mean, rel=0.05)


def test_requests_of_a_model_stay_on_its_servers() -> None:
    run = run_of(queue(f"threshold=30,servers=1,latency={SMALL}", servers=3), 2.0)
    small = run.server_id == 2
    seconds, tokens = run.released_at - run.dispatched_at, run.output_tokens
    assert seconds[small] == pytest.approx(0.05 + 0.005 * tokens[small])
    assert seconds[~small] == pytest.approx(0.1 + 0.02 * tokens[~small])
    assert set(run.server_id.tolist()) == {0, 1, 2}
    assert len(np.unique(run.batch_id)) == len(run.batch_id)


def test_orders_by_predictions_that_err_have_no_formula_for_sorted_requests() -> None:
    text = f"threshold=30,servers=1,latency={SMALL}"
    assert methods(queue(text, "single:order=spjf", servers=2)) == ("simulation",)
    exactly = queue(text, "single:order=spjf", servers=2, predictor="exact")
    assert methods(exactly) == ("exact", "simulation")


# texts


def test_a_text_is_read_and_written() -> None:
    text = f"threshold=30,switch=400ms,first=loaded,latency={SMALL}"
    read = parse_second_model(text)
    assert (read.threshold, read.switch, read.first) == (30, 0.4, "loaded")
    assert parse_second_model(str(read)) == read
    assert parse_second_model("share=0.5,servers=2,latency=inoue-v100").servers == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("threshold=30", "its latency law or profile last"),
        (f"latency={SMALL}", "neither of threshold and share"),
        (f"threshold=3,share=0.5,latency={SMALL}", "both of threshold and share"),
        (f"threshold=0,latency={SMALL}", "a finite number of tokens > 0"),
        (f"threshold=nan,latency={SMALL}", "expected a number"),
        (f"share=1,latency={SMALL}", "between 0 and 1"),
        (f"share=0.5,switch=inf,latency={SMALL}", "finite seconds >= 0"),
        (f"share=0.5,first=later,latency={SMALL}", "arrival or loaded"),
        (f"share=0.5,servers=1.5,latency={SMALL}", "a whole number >= 1"),
        (f"share=0.5,servers=1,switch=1,latency={SMALL}", "load no other"),
        (f"shares=0.5,latency={SMALL}", "did you mean 'share'"),
        ("share=0.5,latency=nowhere", "name or file of a profile"),
    ],
)
def test_a_wrong_text_is_refused(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse_second_model(text)


@pytest.mark.parametrize(
    ("second", "limits", "said"),
    [
        ("threshold=30", {"predictor": "none"}, "expected a predictor"),
        ("share=0.5", {"servers": 2}, "got two models on 2 servers"),
        ("share=0.5,servers=2", {"servers": 2}, "got a second model on 2 of 2 servers"),
        ("share=0.5", {"patience": 3.0}, "got patience=3.0 and second_model"),
        ("share=0.5", {"max_num_queued_reqs": 3}, "max_num_queued_reqs=3 and second_model"),
        ("share=0.5", {"sequences": "uniform:low=1,high=2"}, "got sequences and"),
        ("share=0.5", {"energy": "busy=300"}, "got energy and"),
        ("share=0.5", {"prediction_cost": "2ms"}, "got prediction_cost"),
        ("share=0.5", {"policy": "dynamic"}, "expected single"),
        ("share=0.5", {"policy": "single:order=sprpt"}, "expected single"),
        ("share=0.5,first=loaded", {"policy": SHORTEST}, "expected order fcfs"),
        (
            "share=0.5",
            {"law": "k1=0.1,k2=0,k3=0,k4=0.02,stall_share=0.1,stall=1"},
            "without stalls",
        ),
    ],
)
def test_what_does_not_go_with_a_second_model_is_refused(
    second: str, limits: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        queue(f"{second},latency={SMALL}", **limits)


@pytest.mark.parametrize("command", [["predict"], ["simulate", "--num-requests", "2000"]])
def test_the_commands_answer(command: Sequence[str]) -> None:
    second = f"threshold=30,switch=0.4,latency={SMALL}"
    given = ["--policy", "single", "--arrival-rate", "1", "--output-tokens", LENGTHS]
    given += ["--latency", LARGE, "--max-output-tokens", "400", "--second-model", second]
    answer = CliRunner().invoke(
        app, [*command, *given, "--predictor", "lognormal:sigma=0.5", "--json"]
    )
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert found["model"] == "M/G/1, two models"
    assert found["load"] == pytest.approx(0.759, abs=0.001)
