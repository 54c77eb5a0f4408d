"""A policy from outside is predicted by simulation, and nothing takes it for one that a formula
knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import kendall
from kendall.policies import (
    Decision,
    Dispatch,
    Policy,
    QueueState,
    Request,
    SpecError,
    WaitUntil,
    parse_policy,
)
from kendall.policies.core import IDLE
from kendall.policies.registry import use_modules
from kendall.queueing.choosing.autopilot.bounds import AutopilotBounds
from kendall.queueing.choosing.candidates import at_sizes, sized, sized_policy, usual_policies
from kendall.queueing.choosing.choices import best_batch_size
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.objective import Objective
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.errors import PredictionError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.measurement.recursion import measured_starts, served
from kendall.queueing.prediction import predict_model
from kendall.queueing.prediction.solutions import best_method, methods
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.fast import is_compiled
from kendall.queueing.simulation.reference import Job, SimulatedEngine, simulate_trace
from tests.policies.broken import Garbage, Raises, Shortest, Swap
from tests.policies.outside import SHORTEST, module, nothing_known

LENGTHS = parse_distribution("uniform:low=8,high=24")
LAW = LatencyModel(k1=0.001, k2=0.02, k3=0.0002, k4=0.01)
WEIGHTED = SHORTEST.replace("    max_batch_size", "    weight: int\n    max_batch_size")


@pytest.fixture(autouse=True)
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`shortest`, and `weighted`, which needs a parameter."""
    folder = tmp_path_factory.mktemp("policies")
    weighted = WEIGHTED.replace('"shortest"', '"weighted"')
    with nothing_known():
        use_modules([module(folder, SHORTEST), module(folder, weighted, "weighted.py")])
        yield


def model(policy: Policy | str = "shortest", **limits: object) -> Queue:
    given = parse_policy(policy) if isinstance(policy, str) else policy
    return Queue.read(given, LENGTHS, LAW, **limits)  # type: ignore[arg-type]


def request(name: str, arrived_at: float, limit: int) -> Request:
    return Request(id=name, arrived_at=arrived_at, prompt_tokens=1, max_output_tokens=limit)


@dataclass(frozen=True, kw_only=True)
class Joining(Shortest):
    """The next one into each free slot."""

    name: ClassVar[str] = "joining"
    joins_running: ClassVar[bool] = True

    def decide(self, state: QueueState, now: float) -> Decision:
        for server in state.servers:
            if state.waiting and len(server.in_service) < self.max_batch_size:
                return Dispatch((state.waiting[0].request.id,), server.id)
        return IDLE


@pytest.mark.parametrize("policy", [Shortest(), Joining(), parse_policy("dynamic")])
def test_only_the_simulation_answers_for_it(policy: Policy) -> None:
    found = model(policy)
    exact = policy.name == "dynamic"
    assert (best_method(found) == "simulation") is not exact
    if not exact:
        assert methods(found) == ("simulation",)
        assert methods(model(policy, servers=2, patience=3.0)) == ("simulation",)
        assert methods(model(policy, sequences=LENGTHS)) == ("simulation",)
        assert methods(model(policy, arrival_scv=2.0)) == ("simulation",)


def test_it_is_not_called_a_queue_that_a_formula_knows() -> None:
    found = model()
    assert found.name == "M/G/1 under shortest"
    assert not any("first come" in each for each in found.assumptions)
    assert any("full batches" in each for each in found.assumptions)
    assert not is_compiled(found)


def test_no_exact_answer_is_given_for_it() -> None:
    with pytest.raises(SpecError, match=r"got method 'exact' for shortest .*; expected auto or"):
        predict_model(model(), 5.0, "exact")


@pytest.mark.left_out
def test_the_prediction_is_the_simulation_of_the_policy_itself() -> None:
    """All requests have one limit here, so that the shortest is the oldest: capped's exact
    answer.
    """
    exact = kendall.predict("capped:max_batch_size=8", 20.0, LENGTHS, LAW)
    unpadded = kendall.predict("elastic:max_batch_size=8", 20.0, LENGTHS, LAW)
    own = kendall.predict("shortest", 20.0, LENGTHS, LAW)
    assert (exact.method, own.method) == ("exact", "simulation")
    mean, error = own.queueing_delay.mean, own.queueing_delay.standard_error
    assert mean is not None
    assert error is not None
    assert error < 0.05 * mean
    assert abs(mean - (unpadded.queueing_delay.mean or 0.0)) < 4 * error
    assert own.load == pytest.approx(unpadded.load)


@dataclass(frozen=True)
class Undecided:
    name: ClassVar[str] = "undecided"


def test_an_instance_is_taken_in_python() -> None:
    found = kendall.simulate(Shortest(), 5.0, LENGTHS, LAW, num_requests=2000)
    assert found.policy == "shortest"
    nothing: Any = Undecided()
    with pytest.raises(SpecError, match="without decide"):
        kendall.predict(nothing, 5.0, LENGTHS, LAW)


def test_slots_are_counted_where_requests_join() -> None:
    """By `joins_running`, not by the class."""
    joining, continuous = model(Joining()), model("continuous:max_batch_size=4")
    assert joining.largest_stable_rate == continuous.largest_stable_rate


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Raises(), "policy broken raised KeyError: 'oops'"),
        (Garbage(), "policy broken: got 'dispatch everything'; expected a Dispatch"),
        (
            Swap(),
            "policy broken: got a second dispatch of '0' at one instant; expected a WaitUntil",
        ),
    ],
)
def test_a_policy_that_fails_ends_the_simulation_with_its_fault(policy: Policy, says: str) -> None:
    with pytest.raises(PredictionError) as raised:
        kendall.simulate(policy, 5.0, LENGTHS, LAW, num_requests=2000)
    assert says in str(raised.value)


@dataclass(frozen=True, kw_only=True)
class Dozing(Policy):
    """Wants to be asked again in a millisecond, for ever."""

    name: ClassVar[str] = "dozing"

    def decide(self, state: QueueState, now: float) -> Decision:
        return WaitUntil(now + 0.001)


@pytest.mark.slow
def test_a_policy_that_only_wakes_up_ends_the_simulation() -> None:
    with pytest.raises(PredictionError, match=r"asked 10,000 times to be woken, until [\d.]+ s"):
        kendall.simulate(Dozing(), 5.0, LENGTHS, LAW, num_requests=2000)


def test_its_batch_size_can_be_chosen() -> None:
    assert sized("shortest", 4) == "shortest:max_batch_size=4"
    assert sized("weighted", 4, in_force=parse_policy("weighted:weight=2")) == (
        "weighted:weight=2,max_batch_size=4"
    )
    assert at_sizes(Setting(policy="shortest"), (2, 4), 3) == ["shortest:max_batch_size=2"]
    assert sized_policy(Dozing()) is None
    found = best_batch_size(model(), 5.0, Objective(name="throughput"), 4)
    assert found.best["batch_size"] == 4


def test_the_policy_in_force_is_among_the_usual_ones() -> None:
    assert usual_policies(Setting(policy="weighted:weight=2"), 8)[-1] == "weighted:weight=2"


def test_the_autopilot_keeps_its_parameters() -> None:
    bounds = AutopilotBounds(policies=("weighted:weight=2", "shortest"))
    texts = [each.policy for each in bounds.other_policies(Setting(policy="dynamic"), 4)]
    assert texts == ["weighted:weight=2", "shortest:max_batch_size=4"]
    with pytest.raises(SpecError, match="expected weight too"):
        AutopilotBounds(policies=("weighted",))


def test_its_own_starts_stand_where_the_recursion_knows_no_condition() -> None:
    """A recursion would credit the gateway with every request that the policy let wait."""
    jobs = [
        Job(request(str(place), place * 0.01, limit), limit)
        for place, limit in enumerate([20, 30, 10, 5, 40, 3])
    ]
    engine = SimulatedEngine(LAW, 2)
    records = simulate_trace(parse_policy("shortest"), jobs, engine, [np.random.default_rng(0)])
    starts = measured_starts(served(records))
    assert starts == {record.request_id: record.dispatched_at for record in records}
    order = sorted(records, key=lambda record: (record.dispatched_at or 0.0, record.request_id))
    assert [record.request_id for record in order[1:3]] == ["3", "5"]
