"""What `kendall watch` says of spans: why there is nothing to show, what the numbers take for
granted, and the page for a terminal.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest

from kendall.queueing.commands.terminal import console
from kendall.queueing.estimation.interval import Estimate
from kendall.queueing.estimation.routing import Routing
from kendall.queueing.estimation.served_times import ObservedLaw, ServedTimes
from kendall.queueing.latency.law import parse_law
from kendall.queueing.measurement.check import Check
from kendall.queueing.result import Quantiles
from kendall.server.calibration.in_force import LatencyModelInForce
from kendall.server.live.answers import DatedCheck
from kendall.server.runtime.errors import ApiError
from kendall.server.watch.lost import ServersState
from kendall.server.watch.options import WatchedQueueOptions
from kendall.server.watch.receiver import Received
from kendall.server.watch.report import WatchReport, report_of, show
from kendall.server.watch.servers import WatchedServers
from tests.server.made_answers import what_if
from tests.server.watch.test_fleet import add, span

LAW = "k1=0.001,k2=0,k3=0.0019,k4=0.0204,kp=0.0001"


def watched(stay: float = 1.0, number: int = 1, **asked: Any) -> WatchedServers:
    """So many servers at our instant 640, each of which has sent one span of such a stay."""
    servers = WatchedServers(WatchedQueueOptions(**asked), 5.0)
    for name in "abc"[:number]:
        add(servers.fleet, 600.0, span(f"x{name}", 600 - stay, stay, replica=name))
    asyncio.run(servers.advance(640.0))
    return servers


def said(
    servers: WatchedServers,
    received: Received | None = None,
    lost: tuple[int, int] | None = None,
    why_not: str | None = None,
    state: ServersState | None = None,
) -> WatchReport:
    return report_of(
        servers,
        received or Received(),
        lost,
        why_not_lost=why_not,
        now=640.0,
        seconds=60.0,
        state=state,
    )


def conditions(report: WatchReport) -> dict[str, tuple[bool | None, str]]:
    return {each.name: (each.holds, each.says) for each in report.conditions}


def test_before_there_is_a_span() -> None:
    servers = WatchedServers(WatchedQueueOptions(), 5.0)
    expected = "; expected a running `vllm serve --otlp-traces-endpoint` with requests"
    report = said(servers)
    assert report.nothing == f"got no span of a request{expected}"
    assert report.conditions == ()
    received = Received()
    received.ignored.update({"other_span": 3, "new_reason": 1})
    other = (
        "3 spans that are not named llm_request: of the server's start, or of another program; 1 "
        "new_reason"
    )
    assert said(servers, received).nothing == f"got no span of a request but {other}{expected}"
    assert (servers.lifecycle.ready, servers.lifecycle.state.value) == (False, "starting")
    assert servers.lifecycle.draining is False
    with pytest.raises(ApiError, match="no spans of requests have come yet") as refused:
        servers.live_model()
    assert (refused.value.status, refused.value.headers()["retry-after"]) == (503, "10")


def test_before_the_law_is_known() -> None:
    servers = watched()
    servers.fleet.early = 2
    received = Received(requests=9)
    received.ignored.update({"repeated": 1})
    report = said(servers, received)
    assert report.nothing == (
        "got 7 spans of requests; expected some 120, from which the law and the slots are read: "
        "watch longer, or give --latency and --max-num-seqs"
    )
    assert report.spans.ignored == {"repeated": 1, "before_the_start": 2}
    found = report.as_json()
    assert (found["source"], found["seconds"], found["law"], found["check"]) == (
        ("otlp", 60.0, None, None)
    )
    assert found["setting"] == {
        "policy": "continuous:max_batch_size=1",
        "servers": 1,
        "slots_from": "unknown",
        "routing": None,
    }
    assert found["replicas"] == [{"name": "a", "requests": 1, "gone": False}]
    assert (servers.lifecycle.ready, servers.lifecycle.state.value) == (True, "serving")
    assert (servers.batcher.capabilities.max_num_seqs, list(servers.batcher.servers_in_use)) == (
        (64, [0])
    )


class Predicting:
    """In place of the predicting process: what it was asked, and what it has found."""

    def __init__(self, routing: Routing | None = None, law: ObservedLaw | None = None) -> None:
        self.found: dict[str, Any] = {"learn_law": law, "learn_routing": routing}
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, question: str, times: ServedTimes, *_: int) -> Any:
        self.asked.append((question, times.arrived.size))
        return self.found[question]


def served(servers: WatchedServers, first: int, last: int, replica: str = "a") -> None:
    """Requests of a second each, a quarter of one apart."""
    for number in range(first, last):
        at = 640 + number / 4
        add(servers.fleet, at + 1, span(f"{replica}{number}", at, 1.0, replica=replica))
    asyncio.run(servers.advance(648 + last / 4))


def test_a_law_is_fitted_to_120_requests_and_again_to_twice_as_many() -> None:
    """The slots are as many as were in service, where nothing waited."""
    servers, law = watched(), parse_law(LAW)
    assert servers.live is not None
    servers.live.ask = predicting = Predicting()
    served(servers, 0, 118)
    assert (servers.requests, predicting.asked, servers.ready) == (119, [], False)
    served(servers, 118, 119)
    assert (predicting.asked, servers.ready) == ([("learn_law", 120)], False)
    assert (servers.batcher.policy_text, servers.batcher.epoch) == (
        ("continuous:max_batch_size=4", 1)
    )
    assert servers.slots_from == "unknown"
    assert servers.limits.state()["epoch"] == 1
    served(servers, 119, 238)
    assert len(predicting.asked) == 1
    predicting.found["learn_law"] = ObservedLaw(law, {}, 0.01, 240, ())
    served(servers, 238, 239)
    assert predicting.asked[1:] == [("learn_law", 240)]
    assert (servers.ready, servers.latency.law, servers.batcher.epoch) == (True, law, 1)
    asyncio.run(servers.advance(800.0, last=True))
    assert len(predicting.asked) == 2
    text = servers.metrics.exposition().decode()
    assert re.search(
        r'^kendall_policy_info.*epoch="1".*max_batch_size=4"} 1.0$', text, re.MULTILINE
    )
    for slots in (1, 4):  # as it was told of then
        assert f'_count{{policy="continuous:max_batch_size={slots}"}} 120.0' in text


def test_the_last_time_a_law_is_fitted_to_what_there_is() -> None:
    """With the rule by which requests are sent to several servers, which begins an epoch."""
    servers = watched(number=2)
    assert servers.live is not None
    found = Routing(rule="round_robin", requests=90, likelihoods={}, out_of_turn=None)
    servers.live.ask = predicting = Predicting(found)
    served(servers, 0, 20, "a")
    served(servers, 0, 20, "b")
    assert (servers.batcher.servers, predicting.asked) == (2, [])
    assert servers.batcher.capabilities.routing == "central"
    epoch = servers.batcher.epoch
    asyncio.run(servers.advance(660.0, last=True))
    assert predicting.asked == [("learn_routing", 42), ("learn_law", 42)]
    assert servers.batcher.capabilities.routing == "round_robin"
    assert servers.batcher.capabilities.servers == 2
    assert servers.batcher.epoch == epoch + 2  # the slots, and the rule
    assert servers.routing == found
    assert [list(each) for each in servers.batcher.running()] == [[], []]
    assert [list(each) for each in servers.batcher.in_service_sequences()] == [[], []]


@pytest.mark.parametrize(("interval", "what_ifs"), [(5.0, 30.0), (40.0, 40.0)])
def test_what_ifs_of_watched_servers_are_asked_for_twice_a_minute(
    interval: float, what_ifs: float
) -> None:
    servers = WatchedServers(WatchedQueueOptions(slo="p99_queueing_delay<=2s"), interval)
    assert servers.settings.prediction_interval == interval
    assert servers.settings.what_if_interval == what_ifs
    assert servers.settings.overload.slo == "p99_queueing_delay<=2s"
    assert dict(servers.overload.rejections.by_reason()) == {}


def test_what_is_given_is_ready_at_once() -> None:
    servers = watched(max_num_seqs=20, latency=LAW)
    report = said(servers)
    assert report.reason is not None
    assert report.reason.startswith("no prediction yet")
    assert report.policy == "continuous:max_batch_size=20"
    assert servers.batcher.capabilities.max_num_seqs == 80
    given = {"from": "option", "intervals": None, "error": None, "doubts": []}
    assert report.law == {"text": LAW} | parse_law(LAW).as_dict() | given
    state = servers.limits.state()
    assert state == {
        "policy": "continuous:max_batch_size=20",
        "effective_max_batch_size": 20,
        "padded": False,
        "max_output_tokens": None,
        "patience": None,
        "epoch": 0,
    }
    assert [each["name"] for each in servers.limits.policies] == ["continuous"]
    known = said(watched(latency=LAW))  # the slots are still to be seen
    assert known.reason is not None
    assert known.reason.startswith("got 0 spans")


@pytest.mark.parametrize(
    ("stay", "holds", "says"),
    [
        (
            # known until 634, and a request may stay for 4 seconds
            4.0,
            True,
            "the window ends 10 s ago: what arrived later may still be in service, and has sent no "
            "span",
        ),
        (
            120.0,
            True,
            "the window ends 126 s ago: what arrived later may still be in service, and has sent "
            "no span",
        ),
        (
            121.0,
            False,
            "requests stay for up to 121 s: those of the last minutes that go on are missing",
        ),
    ],
)
def test_what_may_still_be_in_service(stay: float, holds: bool, says: str) -> None:
    assert conditions(said(watched(stay)))["all_ended"] == (holds, says)


@pytest.mark.parametrize(
    ("lost", "why_not", "holds", "says"),
    [
        (None, None, None, "no URL of a server was given, whose counters tell"),
        (None, "http://a: silent", None, "http://a: silent"),
        ((1, 100), None, True, "1 of 100 spans did not come"),
        ((2, 100), None, False, "2 of 100 spans did not come"),
        ((0, 0), None, None, "0 of 0 spans did not come"),
    ],
)
def test_spans_that_are_lost(
    lost: tuple[int, int] | None, why_not: str | None, holds: bool | None, says: str
) -> None:
    report = said(watched(), lost=lost, why_not=why_not)
    assert conditions(report)["no_lost_spans"] == (holds, says)
    assert (report.spans.lost, report.spans.ended) == (lost or (None, None))


@pytest.mark.parametrize(
    ("hits", "preemptions", "expected"),
    [
        (
            None,
            None,
            [
                (
                    None,
                    "spans do not tell what the prefix cache saved: a prompt takes as long as on "
                    "average",
                ),
                (None, "spans do not tell preemptions"),
            ],
        ),
        (
            0.01,
            0,
            [
                (
                    True,
                    "the prefix cache held 1% of the prompt tokens: a prompt takes as long as on "
                    "average, whatever it held",
                ),
                (True, "0 preemptions, which the model does not have: KV memory"),
            ],
        ),
        (
            0.25,
            1,
            [
                (
                    False,
                    "the prefix cache held 25% of the prompt tokens: a prompt takes as long as on "
                    "average, whatever it held",
                ),
                (False, "1 preemption, which the model does not have: KV memory"),
            ],
        ),
    ],
)
def test_what_counters_tell_beside_spans(
    hits: float | None, preemptions: int | None, expected: list[tuple[bool | None, str]]
) -> None:
    state = ServersState(prefix_hits=hits, preemptions=preemptions, kv_usage=0.5)
    report = said(watched(), state=state)
    told = conditions(report)
    assert [told["no_prefix_hits"], told["no_preemptions"]] == expected
    assert report.as_json()["counters"]["kv_usage"] == 0.5
    assert conditions(said(watched()))["no_preemptions"][0] is None


def test_where_the_slots_are_from_and_how_requests_are_sent() -> None:
    servers = watched(number=2)
    servers.slots_from = "observed"
    found = conditions(said(servers))
    words = "the slots are the most that a server ran while something waited"
    assert found["slots_known"] == (True, words)
    assert found["routing"] == (
        None,
        "2 servers are taken as one queue: too few requests tell how they are sent",
    )
    servers.routing = Routing(rule="random", requests=400, likelihoods={}, out_of_turn=None)
    servers.slots_from = "unknown"
    found = conditions(said(servers))
    assert found["slots_known"] == (
        False,
        "nothing waited for a slot: there are at least as many as were in service; --max-num-seqs "
        "says how many",
    )
    assert found["routing"] == (
        True,
        "requests are sent by the rule random, as 400 of them say",
    )
    one = conditions(said(watched(max_num_seqs=3)))
    assert one["slots_known"] == (True, "the slots are those of --max-num-seqs")
    assert "routing" not in one


def page_of(
    report: WatchReport, capsys: pytest.CaptureFixture[str], **prediction: Any
) -> list[str]:
    """Of an assessment whose numbers are round, as 80 columns have it."""
    predicted = {"queueing_delay": Quantiles(mean=0.25), "sojourn_time": Quantiles(mean=2.5)}
    found: Any = SimpleNamespace(
        arrival_rate=12.344,
        load_interval=Estimate(0.618, 0.5, 0.7),
        law=parse_law(LAW),
        observed_mean=0.2,
        predicted=SimpleNamespace(**predicted),
        **prediction,
    )
    show(dataclasses.replace(report, prediction=found), console())
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_the_page_for_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Observed beside modelled where the sojourn is compared, and what does not hold."""
    servers = watched(number=2)
    assert servers.live is not None
    servers.live.what_if = [
        what_if("continuous:max_batch_size=16", max_output_tokens=64, servers=3),
        what_if("continuous:max_batch_size=4", queueing_delay=None, sojourn_time=Quantiles()),
    ]
    servers.latency = LatencyModelInForce(parse_law(LAW))
    servers.law = ObservedLaw(
        parse_law(LAW), {"k1": (0.0, 0.002)}, 0.03, 200, ("prompts are alike",)
    )
    received = Received(requests=330)
    received.ignored.update({"repeated": 2, "without_attributes": 1})
    received.refused.update({"too_slow": 4})
    report = said(servers, received, lost=(5, 100))
    assert report.law == {"text": LAW} | parse_law(LAW).as_dict() | {
        "from": "spans",
        "intervals": {"k1": [0.0, 0.002]},
        "error": 0.03,
        "doubts": ["prompts are alike"],
    }
    check = Check(
        observed=3.0, modelled=2.0, half_width=0.2, requests=321, suspects=("it stalls: often",)
    )
    assert page_of(report, capsys, check=DatedCheck(check, 600.0), compared="sojourn_time") == [
        "330 spans of requests; 2 ignored: spans that had come before; 1 ignored: spans",
        "  of requests without the durations and token counts that vLLM 0.11 and later",
        "  send; 4 exports refused: a body that took longer than 10 s; 5 lost",
        "continuous:max_batch_size=1, servers: 2; 12.3 requests/s, load 0.62; law",
        "  k1=0.001,k2=0,k3=0.0019,k4=0.0204,kp=0.0001",
        "                observed  by the model  forecast",
        "queueing delay    200 ms             -    250 ms",
        "sojourn time         3 s           2 s     2.5 s",
        "check of 321 requests (sojourn time): disagree; observed / modelled 1.500",
        "  ± 0.100",
        "  cause: it stalls: often",
        "what if        token limit  servers  load  queueing delay  sojourn time",
        "continuous 16           64        3  0.50          100 ms        200 ms",
        "continuous 4          none        1  0.50               -             -",
        "law: prompts are alike",
        "no_lost_spans: 5 of 100 spans did not come",
        "slots_known: nothing waited for a slot: there are at least as many as were in",
        "  service; --max-num-seqs says how many",
        "no_prefix_hits: spans do not tell what the prefix cache saved: a prompt takes as",
        "  long as on average",
        "no_preemptions: spans do not tell preemptions",
        "routing: 2 servers are taken as one queue: too few requests tell how they are",
        "  sent",
    ]


def test_the_page_of_a_queueing_delay(capsys: pytest.CaptureFixture[str]) -> None:
    """Which is the mean of the window where there is no check of it."""
    report = said(watched(), Received(requests=1), lost=(0, 100))
    check = DatedCheck(Check(observed=0.3, modelled=0.29, half_width=0.01, requests=60), 600.0)
    with_check = page_of(report, capsys, check=check, compared="queueing_delay")
    without = page_of(report, capsys, check=None, compared="queueing_delay")
    assert with_check[0] == without[0] == "1 spans of requests; 0 lost"
    assert with_check[4:7] == [
        "queueing delay    300 ms        290 ms    250 ms",
        "sojourn time           -             -     2.5 s",
        "check of 60 requests (queueing delay): agree; observed / modelled 1.034 ± 0.034",
    ]
    assert without[4] == "queueing delay    200 ms             -    250 ms"
    assert not any(line.startswith(("check", "what if", "law:")) for line in without)
