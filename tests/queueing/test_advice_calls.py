"""What-ifs, advice and the autopilot where calls hold several sequences: they predict the queue
of calls, not of single requests.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from kendall.queueing.choosing.advice.advise import parse_objective
from kendall.queueing.choosing.autopilot.bounds import AutopilotBounds
from kendall.queueing.choosing.autopilot.controller import Autopilot
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.estimates import Estimates, estimate
from kendall.queueing.estimation.lengths.lengths import lengths
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.queue import Queue
from kendall.queueing.result import Prediction
from kendall.queueing.simulation.experiment import simulate_model
from tests.queueing.advised import advise, what_ifs
from tests.queueing.assessed_windows import LAW as PILOTED
from tests.queueing.assessed_windows import LAWFUL, SEQS, seen
from tests.queueing.estimation_runs import LAW, LENGTHS
from tests.queueing.estimation_windows import window_of

POLICY, LOAD = "capped:max_batch_size=8", 0.5
LIMITS = QueueLimits(engine=EngineBounds(max_num_seqs=16))
SEQUENCES = parse_distribution("uniform:low=1,high=7")
OTHERS = (
    "elastic:max_batch_size=8",
    "dynamic",
    "fixed:batch_size=8",
    "continuous:max_batch_size=8",
)
WITHIN = 0.06  # sampling errors of the estimates and of both simulations


def model_of(policy: str) -> Queue:
    return Queue.read(policy, LENGTHS, LAW, sequences=SEQUENCES, max_num_seqs=16)


@cache
def window() -> Estimates:
    """Of 50,000 calls."""
    model = model_of(POLICY)
    return estimate(window_of(model, LOAD, 200_000, 5), model.policy, LAW)


@cache
def simulated(policy: str) -> Prediction:
    """At the run's true rate and laws, with other random numbers."""
    rate = LOAD * model_of(POLICY).largest_stable_rate
    return simulate_model(model_of(policy), rate, num_requests=100_000, replications=8, seed=99)


def test_the_estimates_count_calls() -> None:
    found = window()
    assert found.call_sizes is not None
    assert found.call_sizes.mean == pytest.approx(4, rel=0.02)
    assert found.arrival_rate.value == pytest.approx(
        LOAD * model_of(POLICY).largest_stable_rate, rel=0.02
    )


def test_what_ifs_are_those_of_the_queue_of_calls() -> None:
    found = what_ifs(
        window(),
        LAW,
        Setting(policy=POLICY),
        LIMITS,
        policies=OTHERS,
        token_limits=[],
        sizes=[],
        beside=True,
    )
    assert [each.setting.policy for each in found] == [POLICY, *OTHERS]
    for each in found:
        assert each.prediction is not None
        names = (
            ("sojourn_time",)
            if each.setting.policy.startswith("continuous")
            else ("queueing_delay", "sojourn_time")
        )
        for name in names:
            expected = getattr(simulated(each.setting.policy), name).mean
            assert getattr(each.prediction, name).mean == pytest.approx(expected, rel=WITHIN), (
                each.setting.policy,
                name,
            )


def test_advice_of_a_policy_ranks_and_predicts_as_the_simulation_does() -> None:
    (found,) = advise(
        window(),
        LAW,
        Setting(policy=POLICY),
        LIMITS,
        parse_objective({"objective": "delay"}),
        targets=["policy"],
    )
    assert found.best is not None
    assert found.best.prediction is not None
    means = {policy: simulated(policy).sojourn_time.mean or 0.0 for policy in (POLICY, *OTHERS)}
    assert found.best.setting.policy == min(means, key=lambda policy: means[policy])
    assert found.best.prediction.sojourn_time.mean == pytest.approx(
        means[found.best.setting.policy], rel=WITHIN
    )
    assert found.current.mean.value == pytest.approx(
        simulated(POLICY).queueing_delay.mean, rel=WITHIN
    )
    assert found.gain.value == pytest.approx(1 - min(means.values()) / means[POLICY], abs=0.05)


@pytest.mark.parametrize("field", ["queueing_delay", "sojourn_time"])
def test_the_99th_percentile_that_advice_reports_is_that_of_the_queue_of_calls(field: str) -> None:
    operating_point = OperatingPoint(estimates=window(), shape=LAW, limits=LIMITS)
    objective = parse_objective({"slo": f"p99_{field}=0.5"})
    for policy in (POLICY, "elastic:max_batch_size=8"):
        expected = getattr(simulated(policy), field).p99
        (found,) = operating_point.reported_slos(Setting(policy=policy), objective)
        assert found == pytest.approx(expected, rel=WITHIN), policy


@pytest.mark.parametrize(("share", "kept"), [(0.85, False), (1.15, True)])
def test_a_slo_of_the_99th_percentile_is_kept_where_the_simulation_keeps_it(
    share: float, kept: bool
) -> None:
    """Just below and just above the least p99 of the sojourn that a batch size of this policy
    reaches.
    """
    sizes = {
        size: simulated(f"capped:max_batch_size={size}").sojourn_time.p99 or 0.0
        for size in (6, 8, 12, 16)
    }
    objective = parse_objective({"slo": f"p99_sojourn_time={share * min(sizes.values()):.6g}"})
    (found,) = advise(
        window(), LAW, Setting(policy=POLICY), LIMITS, objective, targets=["batch-size"]
    )
    assert (found.best is not None) == kept, found.says


def test_the_autopilot_leaves_a_setting_that_calls_of_four_would_overload() -> None:
    """The same rate of calls: of one sequence each the queue is at 0.3 of its load, of four it
    has no steady state.
    """
    current = Setting(policy="capped:max_batch_size=2")
    rate = 0.3 * Queue.read(current.policy, LAWFUL, PILOTED, max_num_seqs=SEQS).largest_stable_rate
    decisions = {}
    for size in (1, 4):
        assessed = seen(0.0, current, rate)
        of_calls = dataclasses.replace(assessed.estimates, sequences=lengths(np.full(500, size)))
        bounds = AutopilotBounds(policies=("capped", "elastic"), max_clipped_fraction=0.0)
        decisions[size] = Autopilot(bounds=bounds, mode="act").decide(
            dataclasses.replace(assessed, estimates=of_calls)
        )
    assert decisions[1] is None or decisions[1].load_before == pytest.approx(0.3, rel=0.01)
    found = decisions[4]
    assert found is not None
    assert found.kind == "change"
    assert found.load_before == pytest.approx(1.2, rel=0.02)
    assert "grows without bound" in found.reason
    model = Queue.read(
        found.after.policy,
        LAWFUL,
        PILOTED,
        sequences=parse_distribution("deterministic:value=4"),
        max_num_seqs=SEQS,
    )
    assert found.load_after == pytest.approx(model.load(rate), rel=0.03)
    assert found.load_after < 0.8
    truth = getattr(
        simulate_model(model, rate, num_requests=100_000, replications=4, seed=7), found.compared
    ).mean
    assert found.predicted_after.value == pytest.approx(truth, rel=WITHIN)
