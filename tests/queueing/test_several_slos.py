"""Several SLOs at once: every one is kept, the first compares; and which one nothing keeps."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from kendall.policies import parse_policy
from kendall.policies.text import SpecError
from kendall.queueing.choosing.answer import rough
from kendall.queueing.choosing.choices import best_batch_size
from kendall.queueing.choosing.gain.criterion import forbidden, parse_objective
from kendall.queueing.choosing.objective import Objective, parse_slos
from kendall.queueing.choosing.quantity import compared_by
from kendall.queueing.choosing.rates import largest_rate
from kendall.queueing.choosing.servers import fewest_servers
from kendall.queueing.commands.optimize_cli import app
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.errors import NoStableChoiceError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import simulate_model, simulate_run, summary
from tests.queueing.test_objective import DELAYS, forecast, predicted

LAW = LatencyModel(k1=0.0002, k2=0.02, k3=0.00001, k4=0.02)
LENGTHS = parse_distribution("geometric:mean=40")


def queue(policy: str = "continuous:max_batch_size=8", **more: object) -> Queue:
    return Queue.read(parse_policy(policy), LENGTHS, LAW, **more)


def goal(text: str) -> Objective:
    return Objective(name="slo", **parse_slos(text))


def test_the_first_compares_and_all_are_kept() -> None:
    both = goal("p99_ttft<=4s, mean_queueing_delay=0.9s")
    assert [str(slo) for slo in both.slos] == [
        "p99_time_to_first_token=4",
        "mean_queueing_delay=0.9",
    ]
    assert both.constraint == "p99_time_to_first_token=4, mean_queueing_delay=0.9"
    assert compared_by([parse_policy("single")], both.slo) == "time_to_first_token"
    assert not goal("p99_queueing_delay=4s,mean_queueing_delay=0.9s").kept(predicted())
    assert not goal("mean_queueing_delay=1s,p99_queueing_delay=2.9s").kept(predicted())
    assert goal("p99_queueing_delay=3s,mean_queueing_delay=1s").kept(predicted())


def test_one_that_is_given_twice_is_one() -> None:
    assert goal("p99_ttft<=4s,p99_time_to_first_token<=4000ms").constraint == (
        "p99_time_to_first_token=4"
    )


@pytest.mark.parametrize("order", [1, -1])
def test_the_largest_rate_of_two_is_the_lesser_of_their_own(order: int) -> None:
    """Whichever comes first."""
    model, texts = queue("capped:max_batch_size=8"), ["mean_ttft=1.2s", "p99_queueing_delay=2s"]
    alone = [largest_rate(model, goal(text)).best["arrival_rate"] for text in texts]
    together = largest_rate(model, goal(",".join(texts[::order]))).best["arrival_rate"]
    assert abs(alone[0] / alone[1] - 1) > 0.02
    assert together == pytest.approx(min(alone), rel=2e-3)


@pytest.mark.slow
def test_the_rate_that_keeps_both_token_times_is_held_and_five_percent_more_is_not() -> None:
    """By a simulation of its own, with another seed; the quantile of the token latency is that of
    the means of answers, each counted once for every gap.
    """
    both = goal("p99_ttft<=1s,p99_itl<=50ms")
    model = queue()

    def quantiles(each: Queue, rate: float) -> object:
        return predict_model(each, rate, quantiles=True)

    found = largest_rate(model, both, predict=quantiles)  # type: ignore[arg-type]
    rate = found.best["arrival_rate"]
    there, above = (
        simulate_model(model, times * rate, num_requests=1_000_000, seed=5) for times in (1, 1.05)
    )
    assert there.time_to_first_token.p99 == pytest.approx(1.0, rel=0.04)
    assert there.inter_token_latency.p99 is not None
    assert there.inter_token_latency.p99 < 0.05
    assert above.time_to_first_token.p99 is not None
    assert above.time_to_first_token.p99 > 1.04
    assert found.best["p99_time_to_first_token"] == pytest.approx(1.0, rel=5e-3)
    assert found.best["p99_inter_token_latency"] == pytest.approx(0.0201, rel=0.01)


def test_the_token_latency_may_be_what_binds() -> None:
    """A law whose steps grow with the slots: of 8 slots no more than some may be taken."""
    law = LatencyModel(k2=0.02, k3=0.005, k4=0.02)
    model = queue().but(law=law)
    found = best_batch_size(model, 1.0, goal("p99_itl<=35ms,p99_ttft<=60s"), 8, predict=_rough)
    sizes = {point["batch_size"]: point for point in found.curve}
    kept = [size for size, point in sizes.items() if point["score"] is not None]
    assert kept
    assert max(kept) < 8
    assert all(sizes[size]["p99_inter_token_latency"] <= 0.035 for size in kept)
    assert sizes[8]["p99_inter_token_latency"] > 0.035


def _rough(model: Queue, rate: float) -> object:
    slos = goal("p99_itl<=35ms,p99_ttft<=60s").slos
    model.stable_load(rate)
    return rough(model, rate, slos)


def test_rough_predictions_have_every_quantile_that_is_asked_for() -> None:
    slos = goal("p99_itl<=1s,p90_ttft<=1s,p50_sojourn_time=9s,mean_itl=1s").slos
    model = queue()
    quick = rough(model, 6.0, slos, 50_000)
    run = simulate_run(model, 6.0, 50_000, np.random.SeedSequence(0)).after(5_000)
    whole = summary([run], model, model.load(6.0), ())
    for slo in slos:
        assert slo.value(quick) == pytest.approx(slo.value(whole), rel=1e-9), slo
    assert quick.time_to_first_token.p99 is None


def test_what_nothing_keeps_says_which_objective_fails_and_by_how_much() -> None:
    both = goal("mean_sojourn_time=1h,mean_queueing_delay=1ms")
    with pytest.raises(NoStableChoiceError) as caught:
        fewest_servers(queue("capped:max_batch_size=2"), 0.8, both, largest=1)
    assert "none keeps the constraint mean_sojourn_time=3600, mean_queueing_delay=0.001 " in str(
        caught.value
    )
    assert "(nearest: mean_queueing_delay " not in str(caught.value)
    assert "(nearest: queueing_delay " in str(caught.value)
    assert "sojourn_time " not in str(caught.value).partition("nearest")[2]


def test_a_padded_policy_has_no_token_latency() -> None:
    with pytest.raises(SpecError, match=r"p99_inter_token_latency=0\.05, which exact does not"):
        largest_rate(queue("capped:max_batch_size=4"), goal("p99_itl<=50ms"))


def test_the_command_shows_what_each_bounds() -> None:
    arguments = ["--target", "servers", "--policy", "single", "--arrival-rate", "2"]
    arguments += ["--output-tokens", "geometric:mean=40", "--latency", "k1=0,k2=0.02,k3=0,k4=0.02"]
    arguments += ["--slo", "p99_queueing_delay=2s,p90_sojourn_time=3s"]
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert found["best"]["p99_queueing_delay"] <= 2
    assert found["best"]["p90_sojourn_time"] <= 3
    text = CliRunner().invoke(app, arguments).stdout
    assert "p90 sojourn" in text


def test_advice_names_the_objective_that_a_setting_breaks() -> None:
    both = parse_objective({"slo": "mean_queueing_delay=5s,p99_queueing_delay=2s"})
    assert forbidden(both, forecast(), limits_tokens=True) == (
        f"breaks the SLO p99_queueing_delay=2 (predicted {DELAYS.p99:g} s)"
    )
    lacking = forecast(prediction=predicted(dataclasses.replace(DELAYS, p99=None)))
    assert forbidden(both, lacking, limits_tokens=True, simulated=(1.0, 2.5)) == (
        "breaks the SLO p99_queueing_delay=2 (predicted 2.5 s)"
    )
    assert forbidden(both, lacking, limits_tokens=True, simulated=(1.0, 1.9)) is None


def test_the_largest_rate_under_memory_is_what_memory_leaves() -> None:
    arguments = ["--target", "arrival-rate", "--objective", "throughput"]
    arguments += ["--policy", "continuous:max_batch_size=8", "--output-tokens", "geometric:mean=40"]
    arguments += ["--max-output-tokens", "100", "--latency", "k1=0,k2=0.02,k3=0,k4=0.02"]

    def rate(*more: str) -> float:
        found = json.loads(CliRunner().invoke(app, [*arguments, *more, "--json"]).stdout)
        return float(found["best"]["arrival_rate"])

    assert rate("--max-context-tokens", "10000") == pytest.approx(rate())
    assert rate("--max-context-tokens", "200") == pytest.approx(rate() / 4, rel=0.05)
