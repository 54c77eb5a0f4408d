"""Flows as texts, drawn, and simulated under vtc."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from kendall.policies.core import Request, Waiting
from kendall.policies.flow_counters import FlowCounters, TokenWeights
from kendall.policies.immediate import Continuous, Single
from kendall.policies.text import SpecError
from kendall.policies.waiting_queues import queue_for
from kendall.queueing.commands import cli
from kendall.queueing.distributions.flows import Flows, parse_flows
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.service import Member
from kendall.queueing.prediction import predict_model
from kendall.queueing.prediction.solutions import methods
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import draw_jobs, simulate_model
from kendall.queueing.simulation.ledger import ServedBatch, Started

TOKENS = parse_distribution("geometric:mean=20", 150)
LAW = LatencyModel(k1=1e-4, k2=4e-3, k3=1e-5, k4=2e-3)
VTC, FIRST_COME = Single(order="vtc"), Single()


def test_flows_are_read_and_written() -> None:
    assert parse_flows(" heavy = 9 , light=0.5") == Flows(("heavy", "light"), (9.0, 0.5))
    assert str(parse_flows("heavy=9.0,light=0.5")) == "heavy=9,light=0.5"
    assert str(parse_flows("a/b@c=1")) == "a/b@c=1"
    most = ",".join(f"f{place}=1" for place in range(1000))
    assert len(parse_flows(most).names) == 1000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "got no flow; expected a name and a weight for each, as in heavy=9,light=1"),
        ("heavy", "got 'heavy' in 'heavy'; expected key=value, for example heavy=9,light=1"),
        ("a=1,a=2", "got a twice in 'a=1,a=2'"),
        ("a=0", "got flow a=0; expected a weight > 0"),
        ("a=-1", "got flow a=-1; expected a weight > 0"),
        ("a=inf", "got flow a=inf; expected a weight > 0"),
        ("a=1e101,b=1", "got flow a=1e+101; expected a weight > 0, at most 1e+100"),
        ("a=x", "got a='x' in 'a=x'; expected a number"),
        ("a b=1", "got flow 'a b'; expected 1 to 128 printable ASCII characters without spaces"),
        (f"{'x' * 129}=1", "; expected 1 to 128 printable ASCII characters"),
        ("é=1", "got flow 'é'; expected"),
        (",".join(f"f{n}=1" for n in range(1001)), "got 1001 flows; expected at most 1000"),
    ],
)
def test_what_is_no_flow_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse_flows(text)
    assert says in str(raised.value)


def test_the_simulator_counts_each_token_of_a_flow_once() -> None:
    counters = FlowCounters(TokenWeights(prompt=1.0, output=2.0))
    request = Request(
        id="a", arrived_at=0.0, prompt_tokens=5, max_output_tokens=9, flow="heavy", sequences=1
    )
    counters.join("heavy")
    member = Member("a", 5, 9)
    batch = ServedBatch(
        id=0,
        size=1,
        server_id=0,
        at=0.0,
        policy=VTC,
        policy_text="",
        epoch=0,
        formed_at=None,
    )
    started = Started(request=request, started_at=0.0, member=member, batch=batch)
    for member.produced in (2, 2, 7, 12):
        started.count_tokens(counters)
    assert counters.virtual_tokens["heavy"] == 2 * 9
    assert started.output_tokens_so_far == 9  # what pads its batch is not its own


def test_flows_are_drawn_by_weight() -> None:
    flows, size = parse_flows("a=1,b=6,c=3"), 20_000
    counts = np.bincount(flows.draw(np.random.default_rng(5), size), minlength=3)
    for count, share in zip(counts, (0.1, 0.6, 0.3), strict=True):
        assert abs(count - share * size) < 4 * math.sqrt(size * share * (1 - share))
    assert counts.sum() == size


def test_a_run_has_the_same_flows_whatever_else_is_drawn() -> None:
    flows = parse_flows("a=1,b=1")
    stream, other = np.random.SeedSequence(7), np.random.SeedSequence(7)
    other.spawn(5)
    assert flows.of_run(stream, 50).tolist() == flows.of_run(other, 50).tolist()
    assert flows.of_run(stream, 50).tolist() != flows.of_run(stream.spawn(1)[0], 50).tolist()


def test_jobs_are_of_these_flows_and_are_otherwise_the_same() -> None:
    flows = parse_flows("a=1,b=1")
    drawn = {}
    for given in (None, flows):
        queue = Queue.read(VTC, TOKENS, LAW, flows=given)
        drawn[given], _ = draw_jobs(queue, 5.0, 100, np.random.SeedSequence(3))
    names = [job.request.flow for job in drawn[flows]]
    assert names == [flows.names[n] for n in flows.of_run(np.random.SeedSequence(3), 100)]
    assert {job.request.flow for job in drawn[None]} == {""}
    for one, other in zip(drawn[None], drawn[flows], strict=True):
        assert one.output_tokens == other.output_tokens
        assert one.request.arrived_at == other.request.arrived_at


def test_a_light_flow_waits_less_and_all_together_as_long_as_first_come_first_served() -> None:
    """Lengths do not depend on the flow, and the order looks at none that is to come: the mean over
    all requests is that of first come, first served.
    """
    queue = Queue.read(VTC, TOKENS, LAW, flows="heavy=9,light=1")
    rate = 0.5 * queue.largest_stable_rate
    fair = simulate_model(queue, rate, num_requests=12_000, seed=1)
    exact = predict_model(Queue.read(FIRST_COME, TOKENS, LAW), rate).queueing_delay.mean
    assert fair.queueing_delay.mean is not None
    assert fair.queueing_delay.standard_error is not None
    assert exact is not None
    assert fair.queueing_delay.standard_error < 0.05 * exact
    assert abs(fair.queueing_delay.mean - exact) < 4 * fair.queueing_delay.standard_error
    heavy, light = fair.flows["heavy"].mean, fair.flows["light"].mean
    assert heavy is not None
    assert light is not None
    assert light < 0.7 * heavy
    assert 0.9 * heavy + 0.1 * light == pytest.approx(fair.queueing_delay.mean, rel=0.05)


def test_with_one_flow_it_is_first_come_first_served() -> None:
    for policy, other in (
        (VTC, FIRST_COME),
        (Continuous(max_batch_size=3, order="vtc"), Continuous(max_batch_size=3)),
    ):
        queue, plain = (Queue.read(each, TOKENS, LAW) for each in (policy, other))
        rate = 0.7 * plain.largest_stable_rate
        answers = [simulate_model(each, rate, num_requests=2000, seed=2) for each in (queue, plain)]
        assert answers[0].queueing_delay.mean == pytest.approx(answers[1].queueing_delay.mean)
        assert answers[0].flows == {}
        said = "one flow: its requests are served first come, first served"
        assert said in answers[0].assumptions
        assert said not in answers[1].assumptions
    assert methods(queue) == ("simulation",)


def test_flows_without_an_order_that_counts_change_nothing_and_that_is_said() -> None:
    queue = Queue.read(FIRST_COME, TOKENS, LAW, flows="a=1,b=1")
    plain = Queue.read(FIRST_COME, TOKENS, LAW)
    rate = 0.5 * plain.largest_stable_rate
    answer = predict_model(queue, rate)
    assert answer.queueing_delay == predict_model(plain, rate).queueing_delay
    assert "the flows change nothing: the order counts no service" in answer.assumptions
    assert simulate_model(queue, rate, num_requests=200).flows == {}


def test_a_call_of_several_sequences_is_of_one_flow() -> None:
    with pytest.raises(SpecError, match="got flows and sequences; expected one of the two"):
        Queue.read(VTC, TOKENS, LAW, flows="a=1,b=1", sequences="uniform:low=1,high=3")


def test_the_command_gives_the_delay_of_each_flow() -> None:
    arguments = "--policy single:order=vtc --arrival-rate 10 --output-tokens geometric:mean=20"
    law = "--latency k1=1e-4,k2=4e-3,k3=1e-5,k4=2e-3 --flows heavy=9,light=1 --num-requests 2000"
    asked = ["simulate", *arguments.split(), *law.split()]
    answer = json.loads(CliRunner().invoke(cli.app, [*asked, "--json"]).stdout)
    assert list(answer["flows"]) == ["heavy", "light"]
    delay = answer["flows"]["light"]["queueing_delay"]
    assert set(delay) == {"mean", "p50", "p90", "p95", "p99", "standard_error"}
    assert "flows: heavy=9,light=1, independent of the lengths" in answer["assumptions"]
    shown = CliRunner().invoke(cli.app, asked).stdout
    assert "delay of heavy" in shown
    plain = [each for each in asked if each not in ("--flows", "heavy=9,light=1")]
    assert "flows" not in json.loads(CliRunner().invoke(cli.app, [*plain, "--json"]).stdout)


def test_who_comes_back_into_the_queue_counts_among_those_who_wait() -> None:
    """Its engine was lost: it is dispatched once more, or leaves."""
    request = Request(id="r", arrived_at=0.0, prompt_tokens=3, max_output_tokens=9, flow="a")
    queue = queue_for(VTC)
    queue.append(Waiting(request))
    for _ in range(2):
        (taken,) = queue.take(["r"])
        queue.put_back([taken])
    assert queue.remove("r") is not None
    assert not list(queue)
