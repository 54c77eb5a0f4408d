"""An SLO that even a request alone breaks is no choice of any target, and is said at once: by a
lower bound of what the SLO bounds.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from typer.testing import CliRunner

from kendall.queueing.choosing.choices import best_batch_size
from kendall.queueing.choosing.objective import Objective, parse_slo, parse_slos
from kendall.queueing.choosing.rates import largest_rate
from kendall.queueing.choosing.reach import check_reach, least_seconds
from kendall.queueing.choosing.servers import fewest_servers
from kendall.queueing.choosing.token_limit import best_token_limit
from kendall.queueing.commands.plan_cli import app as plan
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.errors import NoStableChoiceError, UnattainableError
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction
from kendall.queueing.simulation.experiment import simulate_model

LAW = "k1=0.0005,k2=0.01,k3=0.0001,k4=0.012,kp=0.0001,turnaround=0.003"
SLOTS = "continuous:max_batch_size=8"
POLICIES = ("single", "capped:max_batch_size=4", "elastic:max_batch_size=4", SLOTS)
DURATIONS = ("time_to_first_token", "inter_token_latency", "sojourn_time", "service_time")


def queue(policy: str = SLOTS, law: str = LAW) -> Queue:
    return Queue.read(
        policy, "lognormal:mu=3,sigma=0.7", law, prompt_tokens="uniform:low=10,high=90"
    )


def goal(text: str) -> Objective:
    return Objective(name="slo", **parse_slos(text))


def never(*_: object) -> Prediction:
    raise AssertionError("nothing needs to be predicted")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("statistic", ["mean", "p50", "p90", "p99.9"])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_duration_is_shorter_than_that_of_a_request_alone(policy: str, statistic: str) -> None:
    """In nearly empty queues, where the bound is close, and busy ones."""
    model = dataclasses.replace(queue(policy), levels={**queue().levels, "p99.9": 0.999})
    for load, close in ((0.001, True), (0.7, False)):
        found = simulate_model(model, load * model.largest_stable_rate, num_requests=40_000)
        for duration in DURATIONS:
            slo = parse_slo(f"{statistic}_{duration}=1s")
            value, least = slo.value(found), least_seconds(model, slo)
            if value is None:
                assert model.policy.padded
                assert least == 0
                continue
            # the counts of 36,000 requests scatter, most of all in the tail
            assert value > least * (0.9 if statistic == "p99.9" else 0.97), duration
            if close and statistic != "p99.9":  # two of a thousand meet
                assert value < 1.35 * least + 0.01, duration


def test_of_a_delay_nothing_is_known_nor_where_more_requests_may_take_less() -> None:
    assert least_seconds(queue(), parse_slo("p99_queueing_delay=1s")) == 0
    fitted = queue("capped:max_batch_size=4", "k1=0.02,k2=-0.005,k3=0.0001,k4=0.01")
    assert least_seconds(fitted, parse_slo("p99_sojourn_time=1s")) == 0
    noisy = queue("single", "k1=0.001,k2=0.01,k3=0,k4=0.01,cv=0.5")
    assert least_seconds(noisy, parse_slo("p50_service_time=1s")) == 0
    mean = parse_slo("mean_service_time=1s")
    assert least_seconds(noisy, mean) == pytest.approx(
        0.011 + 0.01 * noisy.requests.output_tokens.mean
    )


def test_every_target_says_so_before_it_predicts_anything() -> None:
    short = goal("p99_itl<=5ms")
    message = (
        r"nothing keeps p99_inter_token_latency=0\.005: a request that finds everything empty has "
        r"a p99 inter-token latency of 0\.0121 s; expected a longer bound, a faster engine$"
    )
    with pytest.raises(UnattainableError, match=message):
        largest_rate(queue(), short, predict=never)
    with pytest.raises(UnattainableError, match=message):
        fewest_servers(queue(), 5.0, short, predict=never)
    with pytest.raises(UnattainableError, match=message):
        best_batch_size(queue(), 5.0, short, predict=never)
    with pytest.raises(NoStableChoiceError, match=message):
        best_token_limit(queue(), 5.0, short, predict=never)


def test_a_lower_token_limit_may_help_where_the_limit_is_sought() -> None:
    model, sojourn = queue("single"), goal("p99_sojourn_time=500ms")
    with pytest.raises(UnattainableError, match="a faster engine, or a lower token limit"):
        largest_rate(model, sojourn, predict=never)
    best = best_token_limit(model, 0.2, sojourn, largest=64).best
    limited = model.requests.output_tokens.clip(best["max_output_tokens"])
    assert limited.longest < 40
    check_reach(model.but(output_tokens=limited), sojourn)


def test_a_plan_says_at_once_that_no_server_helps() -> None:
    arguments = ["--arrival-rate", "12", "--latency", LAW, "--output-tokens"]
    arguments += ["geometric:mean=20", "--max-num-seqs", "4,8", "--slo", "mean_ttft<=5ms"]
    found = CliRunner().invoke(plan, arguments)
    assert found.exit_code == 3
    assert "a mean time to first token of 0.0156 s" in " ".join(found.stdout.split())
    assert "relax the SLO, or take a faster engine: no server and no lower rate helps" in (
        found.stderr
    )
    assert "raise --largest" not in found.stderr


def test_of_servers_of_different_speed_the_fastest_one_counts() -> None:
    model = queue().but(servers=2, server_speeds=(2.0, 0.5))
    slo = parse_slo("p99_itl=1s")
    assert least_seconds(model, slo) == pytest.approx(0.5 * least_seconds(queue(), slo))
    lengths = parse_distribution("deterministic:value=7")
    alone = queue("single", "a=0.1,c=0").but(output_tokens=lengths)
    values = [least_seconds(alone, parse_slo(f"{each}_sojourn_time=1s")) for each in ("mean", "p9")]
    assert np.allclose(values, 0.7)
