"""The simulator and the prediction stand beside a run that another program made."""

from __future__ import annotations

import dataclasses
import math
from unittest.mock import ANY

import numpy as np
import pytest

from kendall.loadgen.compare.compare import compare
from kendall.loadgen.compare.theory import (
    lengths_of,
    predict_means,
    published_delay,
    replay_arrivals,
    servers_of,
    theory_of,
)
from kendall.policies import parse_policy
from kendall.queueing.distributions.token_distribution import TokenDistribution, parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.replayed import DRAWS
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.recursion import served
from kendall.queueing.prediction import predict_model
from kendall.queueing.prediction.by_length import durations_by_length
from kendall.queueing.queue import Queue
from kendall.queueing.simulation import fast
from kendall.queueing.simulation.experiment import run_given
from tests.loadgen.driver import LAW, LENGTHS, drive
from tests.loadgen.policy_cases import CASES, each_policy


@pytest.mark.thinned(6)
@each_policy
def test_the_simulator_and_the_drivers_of_these_tests_agree_on_every_instant(
    policy: str, rate: float
) -> None:
    records = drive(parse_policy(policy), rate, n=1000)
    replayed = replay_arrivals(
        parse_policy(policy), served(records), LAW, bounds=EngineBounds(max_num_seqs=64)
    )
    for record in records:
        assert replayed[record.request_id] == pytest.approx(
            (record.dispatched_at, record.released_at), abs=1e-9
        )


def test_residuals_are_averaged_over_draws() -> None:
    policy = parse_policy("capped:max_batch_size=4")
    group = served(drive(policy, 16.0, n=300))
    law = dataclasses.replace(LAW, cv=0.3)
    one, again, other = (replay_arrivals(policy, group, law, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other


SOLVED = {
    policy: rate for policy, rate in CASES.items() if "max_wait" not in policy
}  # that one is simulated, for seconds


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "rate"), list(SOLVED.items()), ids=list(SOLVED))
def test_the_prediction_is_near_a_long_run(policy: str, rate: float) -> None:
    """The means of a run and of its prediction lie within three half widths, and the run is long
    enough to tell.
    """
    theory = theory_of(LAW, LENGTHS, asked_rate=rate * 0.8, bounds=EngineBounds(max_num_seqs=64))
    (comparison,) = compare(
        drive(parse_policy(policy), rate * 0.8, n=4000), dataclasses.replace(theory, replay=None)
    )
    predicted = comparison.quantity.predicted
    assert predicted is not None
    assert comparison.load is not None
    assert 0 < comparison.load < 1
    assert abs(predicted.deviation) < 0.02 + 3 * predicted.half_width
    assert predicted.half_width < 0.4


@pytest.mark.parametrize(("asked", "at"), [(8.0, 8.0), (None, 12.0)])
def test_predictions_are_of_the_rate_that_was_asked_for(asked: float | None, at: float) -> None:
    """Of the run's own where none was; the live one is always of the run's, and its lengths."""
    policy = parse_policy("single")
    group = served(drive(policy, 6.0, n=40))
    law = dataclasses.replace(LAW, k4=LAW.k4 / 10, k2=LAW.k2 / 10)
    theory = theory_of(law, LENGTHS, asked)
    model = Queue.read("single", LENGTHS, law)
    assert theory.predict is not None
    assert theory.live is not None
    assert theory.published is not None
    assert theory.by_length is not None
    assert theory.predict(policy, 12.0, group, law) == predict_means(model, at)
    assert theory.published(policy, 12.0, group, law) == published_delay(model, at)
    by_length, expected = theory.by_length(policy, 12.0, group, law), durations_by_length(model, at)
    assert str(by_length) == str(expected) != str(durations_by_length(model, 10.0))
    own = model.but(output_tokens=lengths_of(group))
    assert theory.live(policy, 12.0, group, law) == predict_means(own, 12.0)


def test_a_run_has_as_many_servers_as_it_shows() -> None:
    group = served(drive(parse_policy("single"), 6.0, n=3))
    assert servers_of(group) == 1
    assert servers_of([dataclasses.replace(group[0], server_id=2), *group]) == 3


def single(lengths: TokenDistribution, law: LatencyModel) -> Queue:
    return Queue.read("single", lengths, law)


def test_an_unstable_queue_has_a_load_and_no_delay() -> None:
    predicted = predict_means(single(LENGTHS, LAW), 100.0)
    assert predicted.load is not None
    assert predicted.load > 1
    assert predicted.queueing_delay is None


@pytest.mark.parametrize("rate", [math.nan, math.inf, 0.0])
def test_a_rate_that_is_none_predicts_nothing(rate: float) -> None:
    assert predict_means(single(LENGTHS, LAW), rate).queueing_delay is None


def test_pollaczek_khinchine_is_what_single_is_predicted() -> None:
    lengths = TokenDistribution(np.array([0.0, 1.0]))
    law = LatencyModel(k2=0.04, k4=0.01)
    predicted = predict_means(single(lengths, law), 10.0)
    assert predicted.queueing_delay == pytest.approx(
        0.5 * 0.05 / (2 * 0.5)
    )  # M/D/1: rho S / (2 (1 - rho))


@pytest.mark.parametrize(
    ("policy", "cv", "draws"),
    [
        ("capped:max_batch_size=4", 0.0, 1),
        ("capped:max_batch_size=4", 0.3, DRAWS),
        ("continuous:max_batch_size=4", 0.3, 1),
    ],
)
def test_what_is_random_is_replayed_more_than_once(
    policy: str, cv: float, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = served(drive(parse_policy(policy), 16.0, n=50))
    drawn: list[object] = []

    def run(*given: object) -> fast.SimulatedRun:
        drawn.append(given)
        return run_given(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("kendall.queueing.estimation.replayed.run_given", run)
    replay_arrivals(parse_policy(policy), group, dataclasses.replace(LAW, cv=cv))
    assert len(drawn) == draws


@pytest.mark.parametrize("policy", ["dynamic", "elastic", "fixed:batch_size=4"])
def test_prompts_lengthen_a_published_service_by_their_mean(policy: str) -> None:
    """Published formulas know no prompts: each member's own time is longer by `kp` times the
    mean.
    """
    law = dataclasses.replace(LAW, kp=2e-5)
    prompts = parse_distribution("uniform:low=50,high=250")
    given = Queue.read(policy, "geometric:mean=20", law, max_output_tokens=60)
    given = given.but(prompt_tokens=prompts)
    longer = given.but(
        law=dataclasses.replace(law, k1=law.k1 + 2e-5 * 150, kp=0.0),
        prompt_tokens=None,
    )
    rate = 0.5 * longer.largest_stable_rate
    expected = predict_model(longer, rate, method="paper").queueing_delay.mean
    assert expected is not None
    assert published_delay(given, rate) == (pytest.approx(expected, rel=1e-12), ANY)
