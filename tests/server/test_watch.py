"""`kendall watch` on counters: which server it is, a real Prometheus, `/metrics` of servers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from kendall.cli import main
from kendall.loadgen.gateway.gateway_process import free_port
from kendall.policies.text import SpecError
from kendall.queueing.errors import CommandError
from kendall.queueing.estimation.counters.fleet import FleetPrediction
from kendall.queueing.estimation.counters.track_record import TrackRecord
from kendall.queueing.estimation.interval import Estimate
from kendall.queueing.measurement.server_signals import (
    LLAMA_CPP,
    SERVERS,
    SGLANG,
    VLLM,
    server_of,
)
from kendall.server.watch import live_record, scraping
from kendall.server.watch.live_record import LiveRecord, create_app
from kendall.server.watch.options import SourceOptions, WatchedQueueOptions, WatchOptions
from kendall.server.watch.prometheus import Prometheus as Client
from kendall.server.watch.prometheus import client_of
from kendall.server.watch.record_metrics import STATS, RecordMetrics
from kendall.server.watch.record_page import picture
from kendall.server.watch.record_text import seconds
from kendall.server.watch.signals import Series, samples_of
from kendall.server.watch.track_record import records_from
from tests.counted_engine import (
    Law,
    Served,
    backfilled,
    counters,
    exposition,
    of_lengths,
    poisson,
    seen,
)
from tests.eventually import eventually
from tests.prometheus_server import Prometheus
from tests.test_tables import track_record as kept_record

SLOTS = 8
FAST = Law(k1=0.0001, k3=0.0002, k4=0.002, kp=0.00001)  # seconds of load are enough


def served(load: float, seconds: float, law: Law, seed: int = 1) -> Served:
    """Answers of 100 tokens, prompts of 200, on average."""
    rng = np.random.default_rng(seed)
    capacity = SLOTS / ((law.k4 + law.k3 * SLOTS) * 100 + SLOTS * (law.k1 + law.kp * 200))
    return of_lengths(poisson(np.array([load * capacity]), seconds, rng), 100, 200, law, SLOTS, rng)


def exporting(answer: Callable[[], str], status: int = 200) -> AbstractContextManager[str]:
    """A server whose every page is this text; its URL."""
    return answering(lambda _: answer(), status)


@contextmanager
def answering(answer: Callable[[str], str], status: int = 200) -> Iterator[str]:
    """The same by the path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answer(self.path).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["watch", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


# ---- which server ----


@pytest.mark.parametrize("server", [each for each in SERVERS if each is not LLAMA_CPP])
def test_a_server_is_known_by_its_names(server: Any) -> None:
    assert server_of(server.names, "it") is server


def test_a_server_without_a_count_of_requests_is_refused() -> None:
    with pytest.raises(SpecError, match=r"llama.cpp, which does not count requests; expected"):
        server_of(LLAMA_CPP.names, "http://x")
    with pytest.raises(SpecError, match="vLLM, which does not count requests; expected vllm:"):
        server_of({"vllm:num_requests_running"}, "http://x")


def test_something_else_is_refused() -> None:
    with pytest.raises(SpecError, match="without a metric of vLLM, SGLang"):
        server_of({"node_cpu_seconds_total"}, "http://x")


def test_of_several_names_of_a_signal_one_counts() -> None:
    at = np.array([0.0, 1.0])
    names = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm:request_success_total")
    (found,) = samples_of(VLLM, [Series(name, {}, at, at + 1) for name in names], "here")
    assert found.gauges["kv_usage"].tolist() == [1, 2]
    assert found.replica == "here"


def test_series_of_other_ranks_are_the_same_requests() -> None:
    at = np.array([0.0, 1.0])
    series = [
        Series("sglang:num_requests_total", {"tp_rank": rank, "model_name": model}, at, at)
        for rank in ("0", "1")
        for model in ("one", "two")
    ]
    found = samples_of(SGLANG, series)
    assert [(each.model, each.counters["finished"].tolist()) for each in found] == [
        ("one", [0, 1]),
        ("two", [0, 1]),
    ]


# ---- a real Prometheus ----


def test_samples_are_those_that_were_scraped(tmp_path: Path) -> None:
    """Bit by bit, with a restart between them."""
    instants = np.arange(1.0, 200.0)
    series = counters(served(0.6, 200.0, Law()), instants)
    shown: list[int] = []

    def answer() -> str:
        shown.append(len(shown) if len(shown) < 6 else len(shown) - 6)  # it begins anew
        return exposition(series, shown[-1])

    with exporting(answer) as url, Prometheus(tmp_path, url.removeprefix("http://")) as real:
        start = time.time()  # noqa: TID251 - Prometheus has this clock
        options = WatchOptions(source=SourceOptions(prometheus=real.url))
        with Client(real.url, client_of(options, real.url)) as held:

            def scraped() -> list[Series]:
                found = held.samples(VLLM.names, start, start + 100)
                return found if found and found[0].at.size > 9 else []

            async def wait() -> list[Series]:
                found: list[Series] = await eventually(scraped, seconds=60)
                return found

            found = asyncio.run(wait())
    for each in series:
        own = {name: text for name, text in each.labels.items() if name != "instance"}
        (there,) = (
            other
            for other in found
            if other.name == each.name and own.items() <= other.labels.items()
        )
        number = there.values.size
        assert number >= 9
        assert there.values.tolist() == [float(each.values[index]) for index in shown[:number]]


def test_the_track_record_of_a_real_prometheus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(5)
    law, hours = Law(), 5
    capacity = SLOTS / ((law.k4 + law.k3 * SLOTS) * 100 + SLOTS * (law.k1 + law.kp * 200))
    arrived = poisson(np.full(hours, 0.6 * capacity), 3600.0, rng)
    engine = of_lengths(arrived, 100, 200, law, SLOTS, rng)
    instants = np.arange(0, hours * 3600.0 + 1, 60)
    now = time.time()  # noqa: TID251 - Prometheus has this clock
    backfilled(tmp_path, counters(engine, instants), now)
    page = tmp_path / "record.html"
    with Prometheus(tmp_path, "127.0.0.1:1") as real:
        asked = ("--prometheus", real.url, "--since", f"{hours}h")
        status, out, err = run(capsys, *asked, "--json", "--output", str(page))
        assert status == 0, err
        text_status, text, _ = run(capsys, *asked, "--match", 'instance="a:8000"')
        none = run(capsys, *asked, "--match", 'instance="b"')
        wrong = run(capsys, *asked, "--match", "instance")
        few = run(capsys, "--prometheus", real.url, "--since", "1h", "--every", "1h")
        short = run(capsys, "--prometheus", real.url, "--since", "1h", "--json")
    (record,) = json.loads(out)["records"]
    assert (record["server"], record["model"], record["slots"]) == ("vLLM", "tiny", SLOTS)
    rows = record["rows"]
    assert len(rows) == hours
    for row in rows[1:]:
        begin = row["start"] - rows[0]["start"]
        own = (engine.finished >= begin) & (engine.finished < begin + 3600)
        observed = row["observed"]
        assert observed["queueing_delay"] == pytest.approx(engine.delay[own].mean(), rel=0.1)
        assert observed["sojourn_time"] == pytest.approx(engine.sojourn[own].mean(), rel=0.03)
        assert row["same_hour"]["sojourn_time"]["value"] == pytest.approx(
            observed["sojourn_time"], rel=0.05
        )
    coverage = record["coverage"]["sojourn_time"]
    assert coverage["hours"] == hours - 1
    assert coverage["inside"] >= hours - 2
    assert text_status == 0
    assert max(map(len, text.splitlines())) <= 80
    assert "inside the interval" in " ".join(text.split())
    written = page.read_text()
    assert "<svg" in written
    assert "http" not in written.replace(real.url, "")
    assert (none[0], wrong[0], few[0]) == (2, 2, 2)
    assert "without a metric of vLLM" in none[2]
    assert "label matchers" in wrong[2]
    assert "expected 2 to" in few[2]
    assert len(json.loads(short[1])["records"][0]["rows"]) == 6


def test_what_is_no_prometheus(capsys: pytest.CaptureFixture[str]) -> None:
    with exporting(lambda: "<html>") as url:
        status, _, err = run(capsys, "--prometheus", url)
        assert (status, err.count("\n")) == (2, 1)
        assert "is not a Prometheus'; expected the URL of a Prometheus" in err
    status, _, err = run(capsys, "--prometheus", url)
    assert (status, err.count("\n")) == (1, 1)
    assert "connection refused" in err
    with exporting(lambda: "no", status=401) as url:
        status, _, err = run(capsys, "--prometheus", url, "--api-key", "abc")
        assert status == 2
        assert "answered 401" in err
        assert "abc" not in err


# ---- what a Prometheus is asked ----


def held_by(answer: object, asked: list[httpx.Request], match: str = "") -> Client:
    """A Prometheus that always answers so."""

    def said(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json=answer)

    return Client("http://p/", httpx.Client(transport=httpx.MockTransport(said)), match)


@pytest.mark.parametrize(
    ("match", "selector"),
    [
        ("", '{__name__=~"a|b"}'),
        ('job="x"', '{__name__=~"a|b",job="x"}'),
        (' {job="x",} ', '{__name__=~"a|b",job="x"}'),
    ],
)
def test_samples_are_asked_for_as_they_were_scraped(match: str, selector: str) -> None:
    """From five minutes before the start."""
    asked: list[httpx.Request] = []
    labels = {"__name__": "a", "job": "x"}
    result = [{"metric": labels, "values": [[100.5, "1"], [101.5, "NaN"]]}, {"metric": {}}]
    answer = {"status": "success", "data": {"resultType": "matrix", "result": result}}
    with held_by(answer, asked, match) as held:
        found, empty = held.samples({"b", "a"}, 100.75, 200.5)
    (request,) = asked
    assert request.url.copy_with(query=None) == "http://p/api/v1/query"
    assert dict(request.url.params) == {"query": f"{selector}[400s]", "time": "200.500"}
    assert (found.name, found.labels, found.at.tolist()) == ("a", labels, [100.5, 101.5])
    assert found.values == pytest.approx([1, np.nan], nan_ok=True)
    assert (empty.name, empty.at.size) == ("", 0)
    assert held.client.is_closed


def test_the_series_that_there_are() -> None:
    asked: list[httpx.Request] = []
    labels = [{"__name__": "a"}]
    with held_by({"status": "success", "data": labels}, asked) as held:
        assert held.labels(1.5, 2.25) == labels
    assert asked[0].url.path == "/api/v1/series"
    params = dict(asked[0].url.params)
    assert (params["start"], params["end"]) == ("1.500", "2.250")
    assert "vllm:request_success_total" in params["match[]"]


def test_a_prometheus_that_refuses_or_has_nothing() -> None:
    with held_by({"status": "success"}, []) as held:
        assert held.samples(["a"], 0, 1) == []
    message = "got 'parse error' from http://p/api/v1/query; expected samples: is --match 'x' a"
    with (
        held_by({"status": "error", "error": "parse error"}, [], "x") as held,
        pytest.raises(SpecError, match=message),
    ):
        held.samples(["a"], 0, 1)


def test_what_is_sent_with_each_request() -> None:
    options = WatchOptions(api_key="key", header=("X-Scope: b",))
    with client_of(options, "HTTP://x") as client:
        assert (client.headers["authorization"], client.headers["x-scope"]) == ("Bearer key", "b")
        assert (client.timeout.connect, client.timeout.read) == (5.0, 60.0)
    with pytest.raises(SpecError, match="got ftp://x; expected http://HOST:PORT"):
        client_of(options, "ftp://x")


def holding(series: list[Series]) -> Callable[[str], str]:
    """What a Prometheus with these samples answers."""

    def answer(path: str) -> str:
        asked = httpx.URL(f"http://p{path}").params
        labels = [{"__name__": each.name, **each.labels} for each in series]
        if path.startswith("/api/v1/series"):
            return json.dumps({"status": "success", "data": labels})
        end, seconds = float(asked["time"]), float(asked["query"].rpartition("[")[2][:-2])
        result = []
        for each, own in zip(series, labels, strict=True):
            kept = (each.at > end - seconds) & (each.at <= end)
            values = zip(each.at[kept].tolist(), map(str, each.values[kept]), strict=True)
            result.append({"metric": own, "values": list(values)})
        return json.dumps({"status": "success", "data": {"result": result}})

    return answer


def test_the_rows_of_a_record() -> None:
    """A sixth of the time each, and an hour from two hours on; the samples are those of the row."""
    engine, instants = served(0.5, 240.0, FAST), np.arange(0.0, 241.0, 2.0)
    with answering(holding(counters(engine, instants))) as url:

        def record(now: float, since: float, every: float | None = None) -> TrackRecord:
            source = SourceOptions(prometheus=url, since=since, every=every)
            options = WatchOptions(source=source, queue=WatchedQueueOptions(max_num_seqs=SLOTS))
            (found,) = records_from(options, now)
            return found

        found = record(240.0, 180.0, 60.0)
        assert [len(record(240.0, since).rows) for since in (7199.0, 7200.0)] == [6, 2]
        with pytest.raises(CommandError, match=r"got no samples of the last 3 min from http://127"):
            record(1e6, 180.0)
        with pytest.raises(SpecError, match="got --since 3 min and --every 91 s; expected 2 to"):
            record(240.0, 180.0, 91.0)
    assert (found.model, found.server, found.slots) == ("tiny", "vLLM", SLOTS)
    starts = [60.0, 120.0, 180.0]
    assert [(row.start, row.end) for row in found.rows] == [(at, at + 60) for at in starts]
    for row, at in zip(found.rows, starts, strict=True):
        came, own = counted(engine, at, at + 60)
        assert row.observed.requests == came
        assert row.observed.sojourn_time == pytest.approx(engine.sojourn[own].mean())
    assert [row.forecast is None for row in found.rows] == [True, False, False]


# ---- a record as a page ----


def test_a_picture_of_a_record() -> None:
    """Of rows without a prediction, inside, outside, and one that was not observed. The axis goes
    to 1.3 times the most, in steps of a 1, 2 or 5; an interval beyond it is cut.
    """
    drawn = ElementTree.fromstring(picture(kept_record().rows, "queueing_delay"))

    def y(value: float) -> float:
        return round(8 + 232 * (1 - value / 40), 1)

    rows = [each for each in drawn if each.tag == "g"]
    assert [row[0].text for row in rows] == [
        "01-01 00:00: observed 1.23 ms, predicted -",
        "01-01 01:00: observed 500 ms, predicted 457 ms",
        "01-01 02:00: observed 23.5 s, predicted 500 ms",
        "01-01 03:00: observed -, predicted 12.3 s",
    ]
    kinds = [[each.get("class") for each in row[1:]] for row in rows]
    both = ["interval", "predicted"]
    assert kinds == [["observed"], [*both, "observed"], [*both, "observed outside"], both]
    centres = [176.0, 400.0, 624.0, 848.0]
    for row, x, low, high, value, observed in zip(
        rows,
        centres,
        (None, 0.0981, 0.101, 1.5),
        (None, 1.234, 1.5, 40.0),
        (None, 0.4567, 0.5, 12.3456),
        (0.00123, 0.5, 23.4567, None),
        strict=True,
    ):
        if low is not None and high is not None and value is not None:
            box, line = row[1].attrib, row[2].attrib
            assert (box["x"], box["width"]) == (f"{x - 67.2:.1f}", "134.4")
            assert float(box["y"]) == y(high)
            assert float(box["height"]) == pytest.approx(y(low) - y(high))
            assert line["d"] == f"M{x - 67.2:.1f} {y(value)}h134.4"
        if observed is not None:
            dot = row[-1].attrib
            assert (float(dot["cx"]), float(dot["cy"])) == (x, y(observed))
    texts = [(each.text, each.get("x"), each.get("y")) for each in drawn if each.tag == "text"]
    grid = [(0, "0"), (10, "10 s"), (20, "20 s"), (30, "30 s"), (40, "40 s")]
    assert texts[:5] == [(text, "56", f"{y(value) + 4}") for value, text in grid]
    assert texts[5:] == [(f"01-01 0{hour}:00", f"{x:.1f}", "264") for hour, x in enumerate(centres)]
    lines = [each.get("d") for each in drawn if each.get("class") == "grid"]
    assert lines == [f"M64 {y(value)}H960" for value, _ in grid]
    assert drawn.get("viewBox") == "0 0 960 268"


def test_pictures_of_nothing_and_of_much() -> None:
    """At most eight instants on an axis; nothing is too narrow or too flat to be seen."""
    row = kept_record().rows[0]
    nothing = dataclasses.replace(row.observed, queueing_delay=0.0)
    assert picture([dataclasses.replace(row, observed=nothing)], "queueing_delay") == ""
    assert row.forecast is None
    exact = FleetPrediction(
        load=0.5,
        queueing_delay=Estimate(0.1, -0.1, 0.1000001, 20.0),
        sojourn_time=Estimate(0.1, 0.1, 0.1000001, 20.0),
        method="approximation",
    )
    row = dataclasses.replace(row, forecast=exact)
    drawn = ElementTree.fromstring(picture([row] * 1000, "sojourn_time"))
    boxes = [each.attrib for each in drawn.iter() if each.get("class") == "interval"]
    assert {(each["width"], each["height"]) for each in boxes} == {("1.0", "0.5")}
    flat = ElementTree.fromstring(picture([row] * 17, "queueing_delay"))
    low = next(each.attrib for each in flat.iter() if each.get("class") == "interval")
    assert float(low["y"]) + float(low["height"]) == 240  # cut at 0
    middles = [each for each in flat if each.get("text-anchor") == "middle"]
    assert len(middles) == 6
    unknown = dataclasses.replace(exact, sojourn_time=Estimate(0.1))
    bare = picture([dataclasses.replace(row, forecast=unknown)], "sojourn_time")
    assert "predicted" in bare
    assert "interval" not in bare


def test_the_metrics_of_a_record() -> None:
    """Of the last row; not a number where nothing was predicted."""
    registry, record = CollectorRegistry(), kept_record()
    metrics = RecordMetrics(registry)

    def shown(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kendall_record_{name}", {"model": "m", **labels})

    def stats(quantity: str) -> list[float | None]:
        return [shown(f"{quantity}_seconds", stat=stat) for stat in STATS]

    metrics.on_row("m", record.rows[0], record.last(1))
    assert stats("queueing_delay") == pytest.approx([0.00123, *[np.nan] * 3], nan_ok=True)
    metrics.on_row("m", record.rows[1], record)
    assert stats("queueing_delay") == pytest.approx([0.5, 0.4567, 0.0981, 1.234])
    assert stats("sojourn_time") == pytest.approx([12.8456, 12.8567, 12.2981, 13.934])
    assert (shown("arrival_rate"), shown("replicas")) == (1.0, 2.0)
    assert (shown("rows", kind="judged"), shown("rows", kind="inside")) == (2.0, 1.0)


def test_series_of_a_replica_are_added_at_the_instants_that_they_have() -> None:
    """A scrape without counters, as of gauges that are pushed, is none; buckets ascend."""
    one, all_of = np.array([1.0, 3.0]), np.array([1.0, 2.0, 3.0])
    name = "vllm:request_success_total"
    upper = "vllm:request_prompt_tokens_bucket"
    series = [
        Series(name, {"engine": "0", "finished_reason": "stop"}, one, np.array([5.0, 6.0])),
        Series(name, {"engine": "0", "finished_reason": "length"}, one[1:], np.array([1.0])),
        Series("vllm:num_requests_running", {"engine": "0"}, all_of, all_of),
        Series(upper, {"engine": "0", "le": "10"}, one, np.array([2.0, 3.0])),
        Series(upper, {"engine": "0", "le": "5"}, one, np.array([1.0, 2.0])),
        Series(upper, {"engine": "0"}, one, np.array([4.0, 5.0])),
        Series(name, {"pod": "p", "instance": "i", "model": "m"}, one, one),
        Series("other", {}, one, one),
    ]
    own, other = samples_of(VLLM, series, "here")
    assert (own.replica, own.model, own.at.tolist()) == ("0", "", [1, 3])
    assert own.counters["finished"].tolist() == [5, 7]
    assert own.gauges["running"].tolist() == [1, 3]
    buckets = own.buckets["prompt_tokens"]
    assert buckets.uppers.tolist() == [5, 10, np.inf]
    assert buckets.counts.tolist() == [[1, 2, 4], [2, 3, 5]]
    assert (other.replica, other.model) == ("p/i", "m")


# ---- metrics of running servers ----


def replaying(engine: Served, seconds: float) -> Callable[[], str]:
    """The exposition of a server that has run for so long before it is first asked."""
    begun = time.monotonic() - seconds  # noqa: TID251 - another machine's clock

    def answer() -> str:
        now = np.array([time.monotonic() - begun])  # noqa: TID251 - as above
        return exposition(counters(engine, now), 0)

    return answer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Shows 30 seconds, and as many more as the watch has rested."""
    found = SimpleNamespace(now=30.0, rests=[])

    def rest(seconds: float) -> None:
        found.now += seconds
        found.rests.append(seconds)

    monkeypatch.setattr(scraping, "time", SimpleNamespace(time=lambda: found.now, sleep=rest))
    return found


def shown_by(engine: Served, clock: SimpleNamespace, model: str = "tiny") -> Callable[[], str]:
    """Its exposition at that instant."""
    return lambda: exposition(counters(engine, np.array([clock.now]), model=model), 0)


def counted(engine: Served, start: float, end: float) -> tuple[float, Any]:
    """By the definition: what came, as the counters of both instants have it, and the rows of what
    ended.
    """
    both = {
        (each.name, *each.labels.values()): np.diff(each.values)[0]
        for each in counters(engine, np.array([start, end]))
    }
    came = sum(
        value
        for (name, *_), value in both.items()
        if name in ("vllm:num_requests_running", "vllm:num_requests_waiting")
        or name == "vllm:request_success_total"
    )
    return came, (engine.finished > start) & (engine.finished <= end)


def test_watching_metrics_for_a_while(
    capsys: pytest.CaptureFixture[str], clock: SimpleNamespace
) -> None:
    engine = served(0.5, 120.0, FAST)
    with exporting(shown_by(engine, clock)) as url:
        status, out, err = run(
            capsys, url, "--once", "--for", "12s", "--max-num-seqs", str(SLOTS), "--json"
        )
    assert status == 0, err
    assert clock.rests == [1.0] * 12
    shown = json.loads(out)
    assert shown["source"] == [url]
    (found,) = shown["models"]
    observed, (came, own) = found["observed"], counted(engine, 30, 42)
    assert (found["model"], found["server"], found["seconds"]) == ("tiny", "vLLM", 12.0)
    assert (found["check"], found["reason"], found["slots"]) == (None, None, SLOTS)
    assert (observed["requests"], observed["replicas"]) == (came, 1)
    assert observed["arrival_rate"] == pytest.approx(came / 12)
    assert observed["sojourn_time"] == pytest.approx(engine.sojourn[own].mean())
    assert observed["queueing_delay"] == pytest.approx(engine.delay[own].mean())
    began = (engine.first > 30) & (engine.first <= 42)
    first = (engine.first - engine.arrived)[began]
    assert observed["time_to_first_token"] == pytest.approx(first.mean())
    forecast = found["forecast"]["sojourn_time"]
    assert forecast["value"] == pytest.approx(observed["sojourn_time"], rel=0.1)
    assert forecast["low"] < observed["sojourn_time"] < forecast["high"]
    step = found["law"]["k4"] + 4 * found["law"]["k3"]
    assert step == pytest.approx(FAST.k4 + 4 * FAST.k3, rel=0.1)


def test_what_was_watched_in_words(
    capsys: pytest.CaptureFixture[str], clock: SimpleNamespace
) -> None:
    """Of two servers, each with a model of its own: of the second one too little came."""
    busy, idle = served(0.5, 120.0, FAST), served(0.01, 120.0, FAST)
    law = "k1=0.0001,k2=0,k3=0.0002,k4=0.002,kp=0.00001"
    with (
        exporting(shown_by(busy, clock)) as url,
        exporting(shown_by(idle, clock, "small")) as other,
    ):
        asked = ("--once", "--for", "12s", "--latency", law)
        status, out, _ = run(capsys, url, f"{other}/metrics", *asked)
    assert status == 0
    small, tiny = (" ".join(part.split()) for part in out.split("\n\n"))
    for shown, engine, name in ((small, idle, "small"), (tiny, busy, "tiny")):
        came, own = counted(engine, 30, 42)
        rate = f"{came:.0f} requests in 12 s at 1 replica, {came / 12:.3g} a second"
        began = (engine.first > 30) & (engine.first <= 42)
        assert shown.startswith(
            f"vLLM serves {name}: {rate} mean of observed predicted 9 of 10 such times in "
            f"queueing delay {seconds(engine.delay[own].mean())} "
        )
        assert f" sojourn {seconds(engine.sojourn[own].mean())} " in shown
        first = (engine.first - engine.arrived)[began].mean()
        assert f" time to first token {seconds(first)} gap between tokens " in shown
        assert shown.endswith(
            f" slots not known, {0 if name == 'small' else 3} ran at most and nothing waited: no "
            "wait for a slot is predicted; --max-num-seqs says how many there are step law: "
            "k1=0.0001,k2=0,k3=0.0002,k4=0.002,kp=1e-05 (seconds), as given counters know means "
            "only: no check of single requests, no quantiles"
        )
    assert "queueing delay 0 ms - - sojourn" in small
    why = "no prediction: 5 requests came; a prediction takes 20: watch for longer with --for slots"
    assert why in small
    assert re.search(r"sojourn 319 ms 3\d\d ms \d{3}\.\.\d{3} ms time", tiny)
    assert "no prediction" not in tiny


def test_a_scrape_that_takes_long_shortens_the_rest(
    capsys: pytest.CaptureFixture[str], clock: SimpleNamespace
) -> None:
    engine, asked = served(0.5, 60.0, FAST), []

    def answer() -> str:
        asked.append(clock.now)
        clock.now += 0.25
        return shown_by(engine, clock)()

    with exporting(answer) as url:
        assert run(capsys, url, "--once", "--for", "2.5s", "--json")[0] == 0
    # once to know what it is; then from 30.25 on once a second, and at the end
    assert asked == pytest.approx([30.0, 30.25, 31.25, 32.25, 33.0])


def test_a_server_may_leave_nine_scrapes_in_a_row_unanswered() -> None:
    answers = iter([True, *[False] * 9, True, *[False] * 10])

    def answer(request: httpx.Request) -> httpx.Response:
        if not next(answers):
            raise httpx.ConnectTimeout("late", request=request)
        return httpx.Response(200, text="vllm:num_requests_running 1.0\nup 1.0\n")

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        target = scraping.ScrapedServer("http://x/metrics", client, VLLM, [], {})
        for _ in range(20):
            target.scrape()
        assert (len(target.scrapes), target.failed) == (2, 9)
        with pytest.raises(CommandError, match="cannot reach http://x/metrics: no answer in time"):
            target.scrape()
        assert set(target.values) == {("vllm:num_requests_running", ())}
        target.forget()
        assert [len(each) for each in (target.scrapes, *target.values.values())] == [1, 1]


@pytest.mark.parametrize(
    ("status", "text", "error", "message"),
    [
        (500, "", CommandError, "cannot read http://x/metrics: status 500"),
        (200, "<html>", SpecError, "got text from http://x/metrics that is no exposition"),
        (403, "", SpecError, "http://x/metrics answered 403"),
    ],
)
def test_an_answer_without_metrics(
    status: int, text: str, error: type[Exception], message: str
) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, text=text))
    with httpx.Client(transport=transport) as client, pytest.raises(error, match=message):
        scraping.ScrapedServer("http://x/metrics", client, VLLM, [], {}).scrape()


def test_the_parts_of_a_watched_time() -> None:
    """A second each, at least 60 and at most 600."""
    assert np.diff(scraping.edges_of(5.0, 17.0)) == pytest.approx([0.2] * 60)
    assert scraping.edges_of(5.0, 95.5)[:3] == pytest.approx([5.0, 5 + 90.5 / 90, 5 + 181 / 90])
    long = scraping.edges_of(0.0, 3600.0)
    assert (len(long), long[0], long[1], long[-1]) == (601, 0.0, 6.0, 3600.0)


def test_a_server_at_which_little_comes(
    capsys: pytest.CaptureFixture[str], clock: SimpleNamespace
) -> None:
    engine = served(0.01, 40.0, FAST)
    with exporting(shown_by(engine, clock)) as url:
        status, out, _ = run(capsys, f"{url}/metrics", "--once", "--for", "2s")
    assert status == 0
    came, _ = counted(engine, 30, 32)
    assert f"no prediction: {came:.0f} request" in out
    assert "a prediction takes 20: watch for longer with --for" in " ".join(out.split())


def test_what_has_no_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    with exporting(lambda: "no", status=404) as url:
        status, _, err = run(capsys, url, "--once")
        assert (status, err.count("\n")) == (2, 1)
        assert "got status 404" in err
    with exporting(lambda: "# no metrics\n") as url:
        status, _, err = run(capsys, url, "--once")
        assert status == 2
        assert "without a metric of vLLM" in err
    status, _, err = run(capsys, url)
    assert (status, err.count("\n")) == (1, 1)
    assert "connection refused" in err


def test_a_record_that_grows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of four seconds: what was counted, each as predicted from the one before, as JSON, HTML
    and metrics; what is no exposition is a gap, of which the log has the begin.
    """
    engine, clock = served(0.5, 120.0, FAST), SimpleNamespace(now=30.0)
    for module in (scraping, live_record):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: clock.now))

    def answer() -> str:
        if clock.now in (36.5, 37.0, 40.5):
            return "<html>"
        return exposition(counters(engine, np.array([clock.now])), 0)

    options, rows = WatchOptions(queue=WatchedQueueOptions(max_num_seqs=SLOTS)), []
    with exporting(answer) as url:
        record = LiveRecord.of(options, [url])
        record.every = 4.0
        page = TestClient(create_app(record))
        assert "the first one is not complete yet" in page.get("/").text
        for clock.now in np.arange(30.0, 42.5, 0.5):
            record.scrape()
            rows += record.rows()
        for target in record.targets:
            target.client.close()
        shown, found = page.get("/").text, page.get("/admin/watch").json()
        told = page.get("/metrics").text
    assert [name for name, _ in rows] == ["tiny"] * 3
    first, second, _ = (row for _, row in rows)
    assert first.forecast is None
    assert second.forecast is not None
    own = (engine.finished >= 30) & (engine.finished < 42)
    sojourn = engine.sojourn[own].mean()
    assert np.mean([row.observed.sojourn_time for _, row in rows]) == pytest.approx(
        sojourn, rel=0.2
    )
    (json_record,) = found["records"]
    assert len(json_record["rows"]) == 3
    assert json_record["rows"][1]["forecast"]["sojourn_time"]["value"] > 0
    assert 'http-equiv="refresh"' in shown
    assert "each row as predicted from the row before" in shown
    assert 'kendall_record_sojourn_time_seconds{model="tiny",stat="observed"} ' in told
    assert 'kendall_record_rows{kind="judged",model="tiny"} 2.0' in told
    assert max(len(target.scrapes) for target in record.targets) < 10  # the last row's alone
    assert caplog.text.count(": a gap until it answers") == 2


def test_rows_are_printed_as_they_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each scrape takes five seconds of this clock, after which the next one is due at once."""
    engine, clock, asked = served(0.5, 170.0, FAST), SimpleNamespace(now=30.0), list[float]()

    def now() -> float:
        clock.now += 0.001
        return clock.now

    for module in (scraping, live_record):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=now, monotonic=now))

    def answer() -> str:
        asked.append(clock.now)
        shown = shown_by(engine, clock)()
        clock.now += 5.0
        if len(asked) == 25:
            signal.raise_signal(signal.SIGTERM)
        return shown

    with exporting(answer) as url:
        flags = ("--every", "1m", "--port", "0", "--max-num-seqs", str(SLOTS))
        status, out, err = run(capsys, url, *flags)
    assert (status, out.count("tiny: ")) == (0, 2)
    assert "watching 1 server: a row every 60 s on http://127.0.0.1:" in err
    first, second = " ".join(out.split()).split(" tiny: ")
    lines = first.removeprefix("tiny: "), second
    for number, line in enumerate(lines):  # the first answer tells what server it is
        came, own = counted(engine, asked[1 + 11 * number], asked[12 * (number + 1)])
        delay, sojourn = (seconds(each[own].mean()) for each in (engine.delay, engine.sojourn))
        predicted = ", predicted [0-9.]+ m?s [(][^)]+[)]" if number else ""
        expected = f"{came:.0f} requests; queueing delay {delay}{predicted}; sojourn {sojourn}"
        assert re.match(f"{expected}{predicted}", line), (expected, line)


def test_urls_are_watched_until_a_signal() -> None:
    engine, port = served(0.5, 60.0, FAST), free_port(0)
    with exporting(replaying(engine, 10.0)) as url:
        command = [sys.executable, "-m", "kendall", "watch", url, "--port", str(port)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as watch:
            try:
                assert watch.stderr is not None
                said = watch.stderr.readline()
                found = httpx.get(f"http://127.0.0.1:{port}/admin/watch", trust_env=False).json()
                watch.terminate()
                status = watch.wait(20)
            finally:
                watch.kill()
    assert said == f"watching 1 server: a row every 5 min on http://127.0.0.1:{port}/\n"
    assert (found["records"], status) == ([], 0)


def test_only_one_source(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "http://x", "--prometheus", "http://y")
    assert status == 2
    assert "expected one of them" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("http://127.0.0.1:9", "http://127.0.0.1:9", "--once"),
            "got http://127.0.0.1:9 twice; expected each server once",
        ),
        (("http://127.0.0.1:9", "--json"), "got --json without --once; expected both"),
        (("http://127.0.0.1:9", "--once", "--every", "2m"), "got --every; expected it with"),
        (("--otlp", ":9", "--port", "9"), "got --otlp :9 with --port 9; expected two ports"),
        (("http://127.0.0.1:9", "--once", "--latency", "nonsense"), "got latency"),
        (("http://127.0.0.1:9", "--once", "--max-num-seqs", "0"), "expected a whole number >= 1"),
        (("http://127.0.0.1:9", "--once", "--since", "1h"), "got --since without --prometheus"),
        (("http://127.0.0.1:9", "--once", "--match", "a='b'"), "got --match without --prometheus"),
        (("http://127.0.0.1:9", "--once", "--output", "x.html"), "without --prometheus; expected"),
        (("--otlp", ":9", "--for", "5s"), "got --for without --once; expected both"),
        (("http://127.0.0.1:9", "--once", "--port", "1"), "got --port with --once, which serves"),
        (("--prometheus", "http://x", "--once"), "got --once with --prometheus, which ends anyway"),
        (("http://127.0.0.1:9", "--once", "--header", "a b:c"), "got --header a b; expected NAME"),
        (
            ("http://127.0.0.1:9", "--once", "--header", "Authorization:c", "--api-key", "k"),
            "got --header authorization with --api-key; expected one of them",
        ),
    ],
)
def test_what_cannot_be_watched_is_said_before_the_watch(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, *arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert message in err


def test_scrapes_that_are_left_out_are_gaps() -> None:
    instants = np.arange(0.0, 100.0)
    series = seen(counters(served(0.5, 100.0, FAST), instants), (instants < 40) | (instants > 60))
    (found,) = samples_of(VLLM, series)
    totals = found.between([0.0, 99.0])[0]
    assert totals.missing == 22
