"""What the counters of watched servers tell beside their spans."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kendall.remote import SYSTEM
from kendall.server.watch import lost
from kendall.server.watch.fleet import Fleet
from kendall.server.watch.lost import LostSpans, ServersState
from kendall.server_metrics import NoMetricsError


def exposition(
    ended: int, hits: int = 0, asked: int = 0, preempted: int = 0, aborted: int = 7
) -> str:
    return f"""
vllm:request_success_total{{finished_reason="stop",engine="0"}} {ended}.0
vllm:request_success_total{{finished_reason="abort",engine="0"}} {aborted}.0
vllm:prefix_cache_hits_total{{engine="0"}} {hits}.0
vllm:prefix_cache_queries_total{{engine="0"}} {asked}.0
vllm:num_preemptions_total{{engine="0"}} {preempted}.0
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
"""


class Told(Fleet):
    """Every span is here at once; so many requests ended."""

    ended = 0

    def known_until(self, now: float) -> float:
        return now

    def ended_between(self, start: float, end: float) -> int:
        assert (start, end) == (0.0, 10.0)
        return self.ended


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LostSpans]:
    """Reads two servers once for each pair of texts, 10 seconds apart."""

    def read(*pairs: tuple[str, str]) -> LostSpans:
        found = LostSpans(("http://a", "http://b"), {}, SYSTEM)
        for number, pair in enumerate(pairs):
            given = dict(zip(found.urls, pair, strict=True))

            async def answer(url: str, *_: object, texts: dict[str, str] = given) -> str:
                if not texts[url]:
                    raise NoMetricsError(f"no answer from {url}/metrics")
                return texts[url]

            monkeypatch.setattr(lost, "metrics_of", answer)
            asyncio.run(found.read(10.0 * number))
        return found

    return read


def test_hits_preemptions_and_memory_of_all_servers(answers: Callable[..., LostSpans]) -> None:
    first = exposition(5, 100, 1000, 1), exposition(5, 0, 0)
    last = exposition(9, 400, 2000, 4), exposition(7, 100, 1000)
    assert answers(first).state() is None
    found = answers(first, last).state()
    assert found == ServersState(prefix_hits=0.2, preemptions=3, kv_usage=0.25)


def test_a_server_that_began_anew_begins_the_count_anew(
    answers: Callable[..., LostSpans],
) -> None:
    old, new = (exposition(9, 900, 1000),) * 2, (exposition(1, 10, 100),) * 2
    assert answers(old, new).state() is None
    found = answers(old, new, (exposition(3, 60, 200),) * 2).state()
    assert found is not None
    assert found.prefix_hits == pytest.approx(0.5)


def test_counters_that_do_not_move_tell_nothing_of_the_cache(
    answers: Callable[..., LostSpans],
) -> None:
    """Nor those of a server that lacks the others; the last reading is the newest of all."""
    still = (exposition(5, preempted=2),) * 2
    assert answers(still, still).state() == ServersState(
        prefix_hits=None, preemptions=0, kv_usage=0.25
    )
    bare = ("vllm:request_success_total 5",) * 2
    assert answers(bare, bare).state() == ServersState(
        prefix_hits=None, preemptions=None, kv_usage=None
    )
    readings = [(exposition(5, hits, asked),) * 2 for hits, asked in ((0, 0), (0, 10), (10, 20))]
    found = answers(*readings).state()
    assert found is not None
    assert found.prefix_hits == 0.5


def test_spans_that_did_not_come(answers: Callable[..., LostSpans]) -> None:
    """Aborted requests send none."""
    fleet = Told()
    read = answers(
        (exposition(5), exposition(5)), (exposition(9, aborted=8), exposition(6, aborted=9))
    )
    for ended, missing in ((0, 5), (3, 2), (9, 0)):
        fleet.ended = ended
        found = [read.lost(fleet, now) for now in (10.0, 30.0)]
        assert found == [(missing, 5)] * 2
    assert read.lost(fleet, 9.9) is None  # the last reading is not known of yet


def test_a_server_that_does_not_tell_is_named(
    answers: Callable[..., LostSpans], caplog: pytest.LogCaptureFixture
) -> None:
    silent = answers((exposition(5), exposition(5)), *[(exposition(6), "")] * 2)
    assert silent.why_not == "http://b: no answer from http://b/metrics"
    assert [each.getMessage() for each in caplog.records] == [
        "lost spans are not counted: http://b: no answer from http://b/metrics"
    ]
    assert silent.state() is None
    again = answers((exposition(5), ""), (exposition(5), exposition(5)))
    assert again.why_not is None
    other = answers(("sglang:num_requests_total 4", exposition(5)))
    assert other.why_not is not None
    assert "expected the /metrics of a vLLM server" in other.why_not
