"""What the requests of a window would wait behind a load balancer, beside the one queue."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import cache
from typing import Any

import pytest

from kendall.policies import parse_policy
from kendall.policies.text import SpecError
from kendall.queueing.choosing.advice import load_balancer
from kendall.queueing.choosing.advice.load_balancer import USUAL, behind_load_balancer, routings_of
from kendall.queueing.choosing.forecast import Setting
from kendall.queueing.choosing.gain.operating_point import OperatingPoint
from kendall.queueing.control.assess import assess
from kendall.queueing.engine_bounds import EngineBounds
from kendall.queueing.estimation.estimates import Estimates
from kendall.queueing.estimation.window_queue import QueueLimits
from kendall.queueing.json_form import json_object
from kendall.queueing.prediction import predict_model
from kendall.queueing.queue import Queue
from tests.queueing.estimation_runs import LAW, LENGTHS
from tests.queueing.estimation_windows import window_of

SERVERS, LOAD = 2, 0.7
LIMITS = QueueLimits(servers=SERVERS, engine=EngineBounds(max_num_seqs=16))
POLICIES = ("single", "capped:max_batch_size=4", "continuous:max_batch_size=4")


@cache
def estimates(policy: str) -> Estimates:
    model = Queue.read(policy, LENGTHS, LAW, servers=SERVERS, max_num_seqs=16)
    return assess(window_of(model, LOAD, 4000, 1), LAW, LIMITS).estimates


def point(policy: str, **changed: Any) -> OperatingPoint:
    known = dataclasses.replace(estimates(policy), **changed)
    return OperatingPoint(estimates=known, shape=LAW, limits=LIMITS)


def asked(policy: str, *routings: str) -> dict[str, Any]:
    found = behind_load_balancer(
        point(policy), Setting(policy=policy, servers=SERVERS), routings or USUAL
    )
    assert found is not None
    plain = json_object(found)
    json.dumps(plain, allow_nan=False)
    return plain


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_the_numbers_are_those_of_predict_with_this_routing(policy: str) -> None:
    """At the rate, law and lengths of the window: the same where there is a formula, within the
    standard errors where one of the two is simulated.
    """
    known, found = point(policy), asked(policy)
    model = known.model(Setting(policy=policy, servers=SERVERS))
    assert [each["routing"] for each in found["routings"]] == ["random", "round_robin"]
    for each in ({"routing": "central"} | found["central"], *found["routings"]):
        one = predict_model(model.but(routing=each["routing"]), known.rate)
        for name in ("queueing_delay", "sojourn_time"):
            there, here = getattr(one, name), each[name]
            errors = (there.standard_error or 0.0, here.get("standard_error") or 0.0)
            assert here["mean"] == pytest.approx(
                there.mean, rel=1e-9, abs=4 * math.hypot(*errors)
            ), (each["routing"], name)
            assert errors[1] < 0.1 * here["mean"], "too few requests to tell"


@pytest.mark.thinned(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_queue_at_each_server_costs_what_is_said_to_be_more(policy: str) -> None:
    found = asked(policy)
    assert (found["servers"], found["policy"]) == (SERVERS, policy)
    joins = parse_policy(policy).joins_running
    assert found["compared"] == ("sojourn_time" if joins else "queueing_delay")
    by_chance, in_turn = (each["queueing_delay"]["mean"] for each in found["routings"])
    assert by_chance > in_turn > 1.2 * found["central"]["queueing_delay"]["mean"]
    for each in found["routings"]:
        assert each["reason"] is None
        for name in ("queueing_delay", "sojourn_time"):
            assert each["more"][name] == pytest.approx(
                each[name]["mean"] - found["central"][name]["mean"]
            )


def test_the_fewest_requests_are_simulated_where_they_are_asked_for() -> None:
    (found,) = asked("single", "least_requests")["routings"]
    every = {each["routing"]: each for each in asked("single")["routings"]}
    mean, error = found["queueing_delay"]["mean"], found["queueing_delay"]["standard_error"]
    assert found["method"] == "simulation"
    assert 0 < error < 0.15 * mean, "too few requests to tell"
    assert 0 < found["more"]["queueing_delay"] < every["round_robin"]["more"]["queueing_delay"]


def test_a_routing_that_cannot_be_simulated_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kendall.queueing.simulation.run_limits._LOOKS", 100_000)
    (found,) = asked("single", "least_requests")["routings"]
    assert "a simulation of servers=2" in found["reason"]
    assert found["queueing_delay"] is found["sojourn_time"] is found["more"] is None


def test_with_one_server_or_without_a_steady_state_there_is_nothing_to_compare() -> None:
    rate = estimates("single").arrival_rate
    half = dataclasses.replace(rate, value=rate.value / SERVERS)  # one server keeps up
    one = Setting(policy="single")
    assert behind_load_balancer(point("single", arrival_rate=half), one) is None
    much = dataclasses.replace(rate, value=2 * rate.value / LOAD)
    two = Setting(policy="single", servers=SERVERS)
    assert behind_load_balancer(point("single", arrival_rate=much), two) is None
    none = dataclasses.replace(rate, value=0.0)
    assert behind_load_balancer(point("single", arrival_rate=none), two) is None


def test_no_delay_is_shorter_than_the_gateways_own() -> None:
    known = point("single", gateway_turnaround=5.0)
    found = behind_load_balancer(known, Setting(policy="single", servers=SERVERS))
    assert found is not None
    delays = [each.queueing_delay for each in (found.central, *found.routings)]
    assert [each and each.mean for each in delays] == [5.0] * 3


def test_the_query_names_one_routing_or_none() -> None:
    assert routings_of({}) == load_balancer.USUAL
    assert routings_of({"routing": "least_requests"}) == ("least_requests",)
    for text in ("central", "fewest"):
        with pytest.raises(SpecError, match=f"got routing '{text}'; expected random, round_robin"):
            routings_of({"routing": text})
