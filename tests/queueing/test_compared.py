"""Settings of different families are compared by what means the same for all of them; no delay
is shorter than the gateway's own.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from functools import cache

import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.queueing.choosing.advice.advise import parse_objective
from kendall.queueing.choosing.autopilot.bounds import AutopilotBounds
from kendall.queueing.choosing.autopilot.controller import Autopilot
from kendall.queueing.choosing.autopilot.decision import Decision
from kendall.queueing.choosing.choices import best_batch_size, best_policy
from kendall.queueing.choosing.forecast import Advice, Setting
from kendall.queueing.choosing.objective import Objective, parse_slo
from kendall.queueing.choosing.phrases import share
from kendall.queueing.choosing.quantity import compared_by, mean_of
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.estimation.estimates import Estimates, estimate
from kendall.queueing.estimation.interval import symmetric
from kendall.queueing.estimation.summaries import Stalls
from kendall.queueing.estimation.window.producer import WindowProducer
from kendall.queueing.estimation.window.replica import WindowReplica
from kendall.queueing.json_form import from_json, json_object
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from kendall.queueing.result import Quantiles
from kendall.queueing.simulation.experiment import simulate_model
from tests.queueing.advised import advise, forecast, what_ifs
from tests.queueing.estimation_runs import record_of
from tests.queueing.families import (
    DELAY,
    LAWS,
    LIMITS,
    POLICY,
    TURNAROUND,
    USUAL,
    assessed,
    model_of,
    window,
)
from tests.queueing.made import prediction_of


def asked(
    objective: Objective = DELAY,
    *,
    law: str = "page",
    load: float = 0.6,
    current: str = POLICY,
    target: str = "policy",
) -> Advice:
    (found,) = advise(
        window(law, load),
        LAWS[law][0],
        Setting(policy=current),
        LIMITS,
        objective,
        targets=[target],
    )
    return found


@cache
def simulated(law: str, load: float, policy: str) -> tuple[float, float]:
    """Mean sojourn time at the true rate, lengths and law, and its standard error; infinite
    without a steady state.
    """
    model, rate = model_of(law, policy), load * model_of(law).largest_stable_rate
    if model.load(rate) >= 1:
        return math.inf, 0.0
    found = simulate_model(
        model.but(max_num_seqs=16), rate, seed=7, num_requests=200_000
    ).sojourn_time
    assert found.mean is not None
    return found.mean, found.standard_error or 0.0


# what compares


@pytest.mark.parametrize(
    ("policies", "slo", "quantity"),
    [
        ((POLICY, "capped:max_batch_size=2"), None, "queueing_delay"),
        (("dynamic", POLICY), None, "queueing_delay"),
        (("elastic", "elastic:max_batch_size=4"), None, "queueing_delay"),
        ((POLICY, "elastic:max_batch_size=8"), None, "sojourn_time"),
        ((POLICY, "continuous"), None, "sojourn_time"),
        (("continuous:max_batch_size=2", "continuous"), None, "sojourn_time"),
        ((POLICY, "continuous"), "p99_queueing_delay=1s", "sojourn_time"),
        ((POLICY, "dynamic"), "p99_queueing_delay=1s", "queueing_delay"),
        ((POLICY, "dynamic"), "p99_sojourn_time=1s", "sojourn_time"),
        ((POLICY, "continuous"), "mean_time_to_first_token=1s", "time_to_first_token"),
    ],
)
def test_delays_are_compared_within_one_family_of_batches_only(
    policies: tuple[str, ...], slo: str | None, quantity: str
) -> None:
    assert (
        compared_by(map(parse_policy, policies), None if slo is None else parse_slo(slo))
        == quantity
    )


def test_a_lost_request_counts_as_one_that_waited_for_its_patience() -> None:
    """Losing more is no way to a shorter sojourn: of 100, 20 waited for 1 s in vain and 80 took
    0.1 s + 0.3 s.
    """
    found = prediction_of(
        load=1.2,
        queueing_delay=Quantiles(0.28),
        served_queueing_delay=Quantiles(0.1),
        sojourn_time=Quantiles(0.4),
        loss_fraction=0.2,
    )
    assert mean_of(found, "sojourn_time") == pytest.approx(0.2 * 1.0 + 0.8 * 0.4)
    assert mean_of(found, "queueing_delay") == 0.28


# the ranking is that of simulation


def check_ranking(law: str, load: float) -> None:
    found = asked(law=law, load=load)
    assert found.best is not None
    truth = {policy: simulated(law, load, policy) for policy in USUAL}
    scores = {
        point["policy"]: math.inf if point["score"] is None else point["score"]
        for point in found.curve
    }
    assert set(scores) == set(USUAL)
    for one, other in itertools.permutations(USUAL, 2):
        (short, error), (long, more) = truth[one], truth[other]
        if short < math.inf and long - short > 0.03 * short + 4 * math.hypot(error, more):
            assert scores[one] < scores[other], (one, other, truth, scores)
    least = min(mean for mean, _ in truth.values())
    assert truth[found.best.setting.policy][0] <= 1.03 * least
    before, after = truth[POLICY][0], truth[found.best.setting.policy][0]
    assert found.gain.known
    assert found.gain.low < found.gain.value < found.gain.high or found.gain.value == 0
    assert found.gain.low - 0.03 <= 1 - after / before <= found.gain.high + 0.03


def test_advice_ranks_policies_as_simulation_does() -> None:
    check_ranking("page", 0.6)


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("load", [0.2, 0.4, 0.6, 0.8])
def test_advice_ranks_policies_as_simulation_does_under_other_laws_and_loads(
    law: str, load: float
) -> None:
    check_ranking(law, load)


@pytest.mark.slow
def test_the_interval_of_a_gain_across_families_covers_the_true_gain() -> None:
    """From capped batches to continuous, 40 windows: 88 % or more."""
    truth = 1 - simulated("page", 0.6, USUAL[-1])[0] / simulated("page", 0.6, POLICY)[0]
    shape = LAWS["page"][0]
    found = [
        advise(
            window("page", 0.6, seed),
            shape,
            Setting(policy=POLICY),
            LIMITS,
            DELAY,
            targets=["policy"],
        )[0]
        for seed in range(40)
    ]
    assert {each.best.setting.policy for each in found if each.best is not None} == {USUAL[-1]}
    assert sum(each.gain.covers(truth) for each in found) >= 0.88 * 40
    assert np.median([each.gain.high - each.gain.low for each in found]) < 0.1


def test_optimize_ranks_policies_by_their_sojourn() -> None:
    """Steps that slow down with each slot: continuous has the shortest delay by far and not the
    shortest sojourn.
    """
    lengths = parse_distribution("deterministic:value=20")
    model = Queue.read("single", lengths, LatencyModel(k1=0.02, k2=1e-3, k3=1e-4, k4=1e-3))
    found = best_policy(model, ["single", "continuous:max_batch_size=16"], 4.0, DELAY)
    delays, sojourns = (
        {point["policy"]: point[name] for point in found.curve}
        for name in ("queueing_delay", "sojourn_time")
    )
    assert found.compared == "sojourn_time"
    assert min(delays, key=lambda policy: delays[policy]) == "continuous:max_batch_size=16"
    assert found.best["policy"] == min(sojourns, key=lambda policy: sojourns[policy])
    assert found.best["score"] == found.best["sojourn_time"]


def test_the_size_of_continuous_is_chosen_by_the_sojourn() -> None:
    model, rate = (
        model_of("steps", "continuous"),
        0.7 * model_of("steps", "continuous").largest_stable_rate,
    )
    found = best_batch_size(model, rate, DELAY, 16)
    assert found.compared == "sojourn_time"
    least = min(point["sojourn_time"] for point in found.curve if point["stable"])
    assert found.best["sojourn_time"] <= 1.001 * least


def test_an_slo_on_the_first_token_ranks_by_it_and_a_quantile_is_simulated() -> None:
    found = asked(parse_objective({"slo": "p90_time_to_first_token=400ms"}))
    assert found.compared == "time_to_first_token"
    assert found.best is not None
    kept = [point for point in found.curve if point["score"] is not None]
    assert found.best.setting.policy == min(kept, key=lambda point: point["score"])["policy"]
    assert all(point["score"] == point["time_to_first_token"] for point in kept)
    assert "p90 of the time to first token" in found.says
    assert found.gain.known
    assert found.gain.low < found.gain.value < found.gain.high < 1


# words and intervals


def test_the_advice_of_another_family_speaks_of_sojourns_and_shows_both() -> None:
    found = asked()
    plain = json.loads(json.dumps(json_object(found), allow_nan=False))
    assert plain["compared"] == "sojourn_time"
    assert "mean sojourn time" in found.says
    assert "; mean queueing delay " in found.says
    assert "100 to 100 %" not in found.says
    for setting in (plain["current"], plain["best"]):
        for name in ("queueing_delay", "sojourn_time", "time_to_first_token"):
            assert setting[name]["mean"] >= TURNAROUND
        for name in ("interval", "sojourn_interval"):
            assert setting[name]["low"] <= setting[name]["value"] <= setting[name]["high"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.34, "34"),
        (0.994, "99"),
        (0.9961, "99.6"),
        (0.99996, "99.996"),
        (1 - 1e-9, "over 99.9999"),
        (1.0, "100"),
        (-0.4, "-40"),
        (-0.001, "0"),
    ],
)
def test_a_share_that_is_not_all_is_not_printed_as_100(value: float, text: str) -> None:
    assert share(value) == text


def test_a_gain_over_a_queue_that_may_be_stable_is_bounded_below() -> None:
    """At load 1.01, known within 15 %: at the lower end the setting in force would do."""
    found = window()
    load = forecast(found, LAWS["page"][0], Setting(policy=POLICY), LIMITS).load
    rate = found.arrival_rate.value * 1.01 / load
    vague = dataclasses.replace(found, arrival_rate=symmetric(rate, 0.15 * rate, 100.0))
    (advice,) = advise(
        vague, LAWS["page"][0], Setting(policy=POLICY), LIMITS, DELAY, targets=["policy"]
    )
    assert not advice.current.stable
    assert advice.gain.value == advice.gain.high == 1
    assert 0 < advice.gain.low < 0.95
    assert "% less" not in advice.says


def test_few_stalls_widen_the_interval() -> None:
    """What two stalls add to the delay is known within 1 / sqrt 2 only."""
    stalled = dataclasses.replace(window(), stalls=Stalls(2, 0.02, 0.4, 50.0, 0.4))
    often = dataclasses.replace(stalled, stalls=dataclasses.replace(stalled.stalls, count=2000))
    few, many = (
        forecast(each, LAWS["page"][0], Setting(policy=POLICY), LIMITS) for each in (stalled, often)
    )
    assert few.mean.value == many.mean.value
    assert few.mean.relative > 2 * many.mean.relative
    assert few.sojourn.relative > many.sojourn.relative


# the gateway's own turnaround


def test_no_forecast_is_quicker_than_the_gateway() -> None:
    """Continuous batching at a light load has no queueing delay by theory: 1e-48 s was printed."""
    estimates, shape = window(load=0.2), LAWS["page"][0]
    bare = dataclasses.replace(estimates, gateway_turnaround=0.0)
    setting = Setting(policy="continuous:max_batch_size=16")
    found, theory = (forecast(each, shape, setting, LIMITS) for each in (estimates, bare))
    assert found.prediction is not None
    assert theory.prediction is not None
    assert (theory.prediction.queueing_delay.mean or 0.0) < 1e-9
    for value in found.prediction.queueing_delay.numbers().values():
        assert value is None or value >= TURNAROUND
    assert (found.mean.low, found.mean.value) == (TURNAROUND, TURNAROUND)
    assert math.isfinite(found.mean.high)
    assert found.prediction.sojourn_time.mean == pytest.approx(
        (theory.prediction.sojourn_time.mean or 0.0) + TURNAROUND, rel=1e-9
    )
    for each in what_ifs(estimates, shape, Setting(policy=POLICY), LIMITS, beside=True):
        if each.stable:
            assert each.prediction is not None
            assert (each.prediction.queueing_delay.mean or 0.0) >= TURNAROUND
            assert each.mean.low >= TURNAROUND


def test_a_turnaround_lengthens_short_delays_only() -> None:
    found = predict_model(model_of("page"), 20.0)
    long, short = found.with_turnaround(1e-6), found.with_turnaround(10.0)
    assert long.queueing_delay.mean == found.queueing_delay.mean
    assert long.sojourn_time == found.sojourn_time
    assert (short.queueing_delay.mean, short.queueing_delay.p50) == (10.0, 10.0)
    assert short.sojourn_time.mean == pytest.approx(
        found.sojourn_time.mean + 10.0 - found.queueing_delay.mean
    )
    first = found.time_to_first_token.mean
    assert first is not None
    assert short.time_to_first_token == Quantiles(
        pytest.approx(first + 10.0 - found.queueing_delay.mean)
    )  # type: ignore[arg-type,operator]
    assert found.with_turnaround(0.0) is found


def test_the_turnaround_is_the_shortest_delay_of_all_epochs() -> None:
    producer, replica = WindowProducer(), WindowReplica()
    producer.begin_epoch(0, 0.0)
    for number, delay in enumerate((0.5, 0.0007, 0.3)):
        producer.on_record(
            record_of(number, number, 1, 1.0 + number, 1.0 + number + delay, 2.5 + number, 4)
        )
    replica.add(producer.take())
    producer.begin_epoch(1, 10.0)
    producer.on_record(record_of(9, 9, 1, 11.0, 12.0, 13.0, 4))
    replica.add(producer.take())
    snapshot = replica.snapshot(POLICY, 14.0)
    assert snapshot.shortest_delay == pytest.approx(0.0007)
    found = estimate(snapshot, parse_policy(POLICY), LAWS["page"][0])
    assert found.gateway_turnaround == pytest.approx(0.0007)
    assert (
        Estimates.from_json(json.loads(json.dumps(json_object(found.saved())))).gateway_turnaround
        == found.gateway_turnaround
    )
    older = {
        name: value
        for name, value in json_object(found.saved()).items()
        if name != "gateway_turnaround"
    }
    assert Estimates.from_json(older).gateway_turnaround == 0.0


# the autopilot


def test_the_autopilot_compares_families_by_sojourn_and_says_so() -> None:
    autopilot = Autopilot(
        bounds=AutopilotBounds(policies=("capped", "continuous"), max_clipped_fraction=0.0),
        mode="act",
    )
    found = autopilot.decide(assessed(POLICY))
    assert found is not None
    assert (found.kind, parse_policy(found.after.policy).name) == ("change", "continuous")
    assert found.compared == "sojourn_time"
    assert found.observed_before.value == 0.5
    assert found.predicted_gain.known
    assert found.predicted_gain.low < found.predicted_gain.value < found.predicted_gain.high < 1
    assert "predicted sojourn time" in found.says
    assert found.predicted_after.value < found.predicted_before.value
    again = from_json(json.loads(json.dumps(json_object(found), allow_nan=False)), Decision)
    assert again.compared == "sojourn_time"
    older = {name: value for name, value in json_object(found).items() if name != "compared"}
    assert from_json(older, Decision).compared == "queueing_delay"
