"""Spans of a simulated continuous queue, whose law is known: the check within 5 %, the law, the
slots and the number of servers, with spans that are lost, clocks that differ, a server that goes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest

from kendall.policies import parse_policy
from kendall.queueing.description.parts import Engine, Requests
from kendall.queueing.distributions.token_distribution import parse_distribution
from kendall.queueing.estimation.served_times import ServedTimes
from kendall.queueing.estimation.speed.observed_law import observed_law
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.queue import Queue
from kendall.queueing.simulation.experiment import run_given, run_trace
from kendall.queueing.simulation.fast import SimulatedRun, Trace, draw_trace
from kendall.server.page import Feed
from kendall.server.page.state import topics
from kendall.server.watch.app import create_app
from kendall.server.watch.options import WatchedQueueOptions
from kendall.server.watch.receiver import Received
from kendall.server.watch.report import WatchReport, report_of
from kendall.server.watch.servers import WatchedServers
from kendall.server.watch.spans import requests_of
from tests.server.watch.exports import exports_of

pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")
LAW = LatencyModel(k1=0.004, k3=0.0005, k4=0.006, kp=0.00004)
CLOSE = 0.05
Look = Callable[[WatchedServers], Awaitable[None]]


@dataclass(frozen=True)
class Scene:
    """A run, and what its servers do to their spans; seconds."""

    slots: int = 4
    load: float = 0.7
    servers: int = 1
    seconds: float = 150.0
    lost: float = 0.0
    offsets: Sequence[float] = (0.0, 0.0)  # of the servers' clocks
    gone: float = math.inf  # the second server is
    routing: str = "central"
    phase: float = 0.0  # by which exports of the second server are later
    unseen: float = 0.0  # at most, until a scheduler sees a request
    cached: int = 0  # tokens, at most, that the prefix cache held of a prompt
    seed: int = 3
    asked: WatchedQueueOptions = field(default_factory=WatchedQueueOptions)

    def run(self) -> tuple[SimulatedRun, Trace]:
        model = Queue(
            policy=parse_policy(f"continuous:max_batch_size={self.slots}"),
            requests=Requests(
                output_tokens=parse_distribution("geometric:mean=40"),
                prompt_tokens=parse_distribution("uniform:low=16,high=256"),
            ),
            engine=Engine(law=LAW, servers=self.servers, routing=self.routing),
        )
        rate = self.load * model.largest_stable_rate
        trace = draw_trace(
            model, rate, round(self.seconds * rate), np.random.SeedSequence(self.seed)
        )
        if model.one_of_several is None:
            return run_trace(model, trace), trace
        return run_given(model, trace, np.random.SeedSequence(self.seed)), trace

    def watched(self, look: Look | None = None) -> WatchReport:
        """At the end of the run; `look` is awaited then, with what is known."""
        run, trace = self.run()
        sent = heapq.merge(
            *(
                exports_of(
                    run,
                    trace,
                    LAW,
                    server=server,
                    replica=f"replica-{server}",
                    offset=self.offsets[server],
                    lost=self.lost,
                    until=self.gone if server else math.inf,
                    phase=self.phase if server else 0.0,
                    unseen=self.unseen,
                    cached=self.cached,
                )
                for server in range(self.servers)
            )
        )

        async def follow() -> WatchReport:
            servers, now = WatchedServers(self.asked, 5.0), 0.0
            received = Received()
            for at, body in sent:
                for span in requests_of(body, "peer"):
                    assert not isinstance(span, str)
                    assert servers.fleet.add(span, at) is None
                    received.requests += 1
                now = at
                await servers.advance(now)
            await servers.advance(now + 5.0, last=True)
            if servers.ready:
                await servers.live_model().assess()
            if look is not None:
                await look(servers)
            report = report_of(
                servers, received, None, why_not_lost=None, now=now, seconds=self.seconds
            )
            if servers.live is not None:
                await servers.live.close()
            return report

        return asyncio.run(follow())


def checked(scene: Scene) -> tuple[WatchReport, dict[str, Any]]:
    """With the check, in JSON."""
    report = scene.watched()
    assert report.reason is None
    found = report.as_json()
    assert found["check"]["verdict"] == "agree", found["check"]
    assert found["check"]["ratio"] == pytest.approx(1, abs=CLOSE)
    return report, found


def test_the_check_the_law_and_the_slots() -> None:
    """The requests' own delays, and a forecast in whose interval the simulated mean lies."""
    scene = Scene()
    report, found = checked(scene)
    run, _ = scene.run()
    assert report.policy == "continuous:max_batch_size=4"
    assert (report.slots_from, report.servers) == ("observed", 1)
    assert found["law"]["from"] == "spans"
    for name in ("k3", "k4", "k1", "kp"):
        assert found["law"][name] == pytest.approx(getattr(LAW, name), rel=0.1), name
    assert found["check"]["observed"] == pytest.approx(run.sojourn_time.mean(), rel=CLOSE)
    names = {each["name"] for each in found["conditions"]}
    assert names == {
        "all_ended",
        "no_lost_spans",
        "slots_known",
        "no_prefix_hits",
        "no_preemptions",
    }


@pytest.mark.left_out
@pytest.mark.parametrize("load", [0.85, 0.9])
def test_an_engine_that_many_share(load: float) -> None:
    """A slower one holds more at once, which slows it again: the model of the same requests has the
    measured speed all the same.
    """
    scene = Scene(slots=64, load=load, asked=WatchedQueueOptions(max_num_seqs=64))
    check = scene.watched().as_json()["check"]
    assert check["ratio"] == pytest.approx(1, abs=CLOSE)


def test_the_law_of_served_requests() -> None:
    """With intervals that hold it; equal prompts and equal answers are said to tell less."""
    seen: list[ServedTimes] = []

    async def look(servers: WatchedServers) -> None:
        seen.append(servers.fleet.served_times())

    Scene(seconds=300.0).watched(look)
    (times,) = seen
    found = observed_law(times, np.random.default_rng(0))
    assert found is not None
    assert found.requests == times.started.size
    assert found.error < 0.05
    assert found.doubts == ()
    for name in ("k1", "k3", "k4", "kp"):
        value, (low, high) = getattr(found.law, name), found.intervals[name]
        assert value == pytest.approx(getattr(LAW, name), rel=0.15), name
        assert low <= value <= high
    assert 0 <= found.law.turnaround < LAW.step(1)
    alike = dataclasses.replace(times, prompts=np.full(times.prompts.size, 100.0))
    same = observed_law(alike, np.random.default_rng(0))
    assert same is not None
    assert same.doubts[0] == "prompts are alike: kp is a part of k1"
    assert same.law.kp == 0
    few = times.part(np.arange(50))
    assert observed_law(few, np.random.default_rng(0)) is None


def test_one_span_in_twenty_is_lost() -> None:
    report, _ = checked(Scene(slots=8, lost=0.05))
    assert report.policy == "continuous:max_batch_size=8"


@pytest.mark.left_out
def test_prompts_that_a_cache_holds_in_part() -> None:
    """Which no span tells: the law has what a prompt takes on average."""
    checked(Scene(cached=512, seconds=300.0))


@pytest.mark.left_out
def test_two_servers_whose_clocks_differ_by_two_seconds() -> None:
    report, found = checked(Scene(servers=2, offsets=(0.0, 2.0)))
    assert report.servers == 2
    assert [each["gone"] for each in found["replicas"]] == [False, False]
    assert any(each["name"] == "routing" for each in found["conditions"])
    # which clocks that are set by when spans come can hardly tell apart
    assert found["setting"]["routing"]["rule"] in ("central", "least_requests")


@pytest.mark.left_out
@pytest.mark.parametrize("routing", ["round_robin", "least_requests", "random"])
def test_servers_with_a_queue_each(routing: str) -> None:
    """The rule of the balancer is named, each server's requests are checked by its own queue, and
    the forecast knows what the rule costs.
    """
    scene = Scene(servers=2, routing=routing, seconds=200.0, load=0.8, phase=2.3, unseen=0.1)
    _, found = checked(scene)
    run, _ = scene.run()
    assert found["setting"]["routing"]["rule"] == routing
    assert found["check"]["observed"] == pytest.approx(run.sojourn_time.mean(), rel=CLOSE)
    judged = found["comparison"]["assumptions"]["enough_memory"]
    assert judged["holds"] is True, judged
    sojourn = found["forecast"]["sojourn_time_interval"]
    assert sojourn["low"] < run.sojourn_time.mean() < sojourn["high"], sojourn


@pytest.mark.left_out
def test_a_clock_that_is_two_seconds_ahead_changes_nothing() -> None:
    """Each instant is of one server's own clock."""
    plain, ahead = (Scene(offsets=(offset, 0.0)).watched().as_json() for offset in (0.0, 2.0))
    assert ahead["check"]["ratio"] == pytest.approx(plain["check"]["ratio"], abs=1e-4)


@pytest.mark.left_out
def test_a_server_that_goes_begins_an_epoch() -> None:
    """What came before it went is not averaged with what follows."""
    report = Scene(servers=2, seconds=200.0, gone=100.0).watched()
    assert report.servers == 1
    gone = {each.name: each.gone for each in report.replicas}
    assert gone == {"replica-0": False, "replica-1": True}


def test_given_law_and_slots_are_kept() -> None:
    asked = WatchedQueueOptions(max_num_seqs=4, latency=str(LAW))
    _, found = checked(Scene(asked=asked))
    assert found["law"]["text"] == str(LAW)
    assert (found["law"]["from"], found["setting"]["slots_from"]) == ("option", "option")


@pytest.mark.left_out
def test_slots_are_unknown_where_nothing_waits() -> None:
    """Said, not guessed: they are at least as many as were in service."""
    report = Scene(slots=64, load=0.1, seconds=60.0).watched()
    assert report.slots_from == "unknown"
    slots = next(each for each in report.conditions if each.name == "slots_known")
    assert slots.holds is False


def test_too_few_requests_are_no_law() -> None:
    report = Scene(seconds=8.0).watched()
    assert report.prediction is None
    assert report.reason is not None
    assert "expected some 120" in report.reason


def test_the_routes_of_the_live_model() -> None:
    """As a gateway has them: prediction, advice, metrics, and the page with its numbers."""
    asked = WatchedQueueOptions(slo="p95_sojourn_time<=2s")
    found: dict[str, httpx.Response] = {}
    shown: dict[str, Any] = {}

    async def look(servers: WatchedServers) -> None:
        await servers.live_model().update_what_if()
        app = create_app(servers, lambda: pytest.fail("asked for"))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://watch") as client:
            for path in (
                "/admin/prediction",
                "/admin/advice?target=servers&slo=p95_sojourn_time<=2s",
                "/metrics",
                "/",
                "/health",
            ):
                found[path] = await client.get(path)
            refused = await client.put("/admin/policy", json={"policy": "single"})
            assert refused.status_code in (404, 405)
        shown.update(topics(servers, 0.0))
        Feed(servers).tick()

    Scene(asked=asked).watched(look)
    assert {path: answer.status_code for path, answer in found.items()} == dict.fromkeys(found, 200)
    prediction, advice, metrics, *_ = found.values()
    assert prediction.json()["prediction"]["check"]["verdict"] == "agree"
    other = {(each["policy"], each["servers"]) for each in prediction.json()["what_if"]}
    assert ("continuous:max_batch_size=8", 1) in other
    assert ("continuous:max_batch_size=4", 2) in other
    assert all(policy.startswith("continuous") for policy, _ in other)
    assert advice.json()["advice"][0]["target"] == "servers"
    assert "kendall_replicas_needed 1.0" in metrics.text
    # by which dashboards find it, and mark where an epoch begins
    assert 'kendall_engine_info{engine="watched",model="watched",version=' in metrics.text
    in_force = 'max_output_tokens="none",policy="continuous:max_batch_size=4"} 1.0'
    assert re.search(rf'^kendall_policy_info{{epoch="\d+",{in_force}$', metrics.text, re.MULTILINE)
    assert 'kendall_checked_sojourn_time_seconds{policy="continuous:max' in metrics.text
    assert shown["gateway"]["in_force"]["policy"] == "continuous:max_batch_size=4"
    assert shown["look"]["prediction"]["comparison"] is not None
