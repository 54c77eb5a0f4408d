"""`kendall watch` on counters: which server it is, a real Prometheus, `/metrics` of servers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from kendall.cli import main
from kendall.loadgen.gateway.gateway_process import free_port
from kendall.policies.text import SpecError
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
from kendall.server.watch.signals import Series, samples_of
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

SLOTS = 8
FAST = Law(k1=0.0001, k3=0.0002, k4=0.002, kp=0.00001)  # seconds of load are enough


def served(load: float, seconds: float, law: Law, seed: int = 1) -> Served:
    """Answers of 100 tokens, prompts of 200, on average."""
    rng = np.random.default_rng(seed)
    capacity = SLOTS / ((law.k4 + law.k3 * SLOTS) * 100 + SLOTS * (law.k1 + law.kp * 200))
    return of_lengths(poisson(np.array([load * capacity]), seconds, rng), 100, 200, law, SLOTS, rng)


@contextmanager
def exporting(answer: Callable[[], str], status: int = 200) -> Iterator[str]:
    """A server whose every page is this text; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answer().encode()
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


# ---- metrics of running servers ----


def replaying(engine: Served, seconds: float) -> Callable[[], str]:
    """The exposition of a server that has run for so long before it is first asked."""
    begun = time.monotonic() - seconds  # noqa: TID251 - another machine's clock

    def answer() -> str:
        now = np.array([time.monotonic() - begun])  # noqa: TID251 - as above
        return exposition(counters(engine, now), 0)

    return answer


def test_watching_metrics_for_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    engine = served(0.5, 120.0, FAST)
    with exporting(replaying(engine, 30.0)) as url:
        status, out, err = run(
            capsys, url, "--once", "--for", "12s", "--max-num-seqs", str(SLOTS), "--json"
        )
    assert status == 0, err
    (found,) = json.loads(out)["models"]
    assert found["check"] is None
    own = (engine.finished >= 30) & (engine.finished < 42)
    assert found["observed"]["sojourn_time"] == pytest.approx(engine.sojourn[own].mean(), rel=0.15)
    forecast = found["forecast"]["sojourn_time"]
    assert forecast["value"] == pytest.approx(found["observed"]["sojourn_time"], rel=0.1)
    assert forecast["low"] < found["observed"]["sojourn_time"] < forecast["high"]


def test_a_server_at_which_little_comes(capsys: pytest.CaptureFixture[str]) -> None:
    engine = served(0.01, 40.0, FAST)
    with exporting(replaying(engine, 5.0)) as url:
        status, out, _ = run(capsys, f"{url}/metrics", "--once", "--for", "2s")
    assert status == 0
    assert "no prediction" in out
    assert engine.arrived.size < 20


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


def test_a_record_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of four seconds: what was counted, each as predicted from the one before, as JSON, HTML
    and metrics; what is no exposition is a gap.
    """
    engine, clock = served(0.5, 120.0, FAST), SimpleNamespace(now=30.0)
    for module in (scraping, live_record):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: clock.now))

    def answer() -> str:
        if clock.now == 36.5:
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
