"""The gateway's bench: its counting on the wire, its intervals and its verdicts."""

from __future__ import annotations

import itertools
import json
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import wilcoxon

from bench.gateway_cost import wire
from bench.gateway_cost.judging import Finding, conclusion, difference_of, mean_of, ratio_of
from bench.gateway_cost.page import measured_on, put, table
from bench.gateway_cost.servers import used
from bench.gateway_cost.turns import Counted, together
from bench.gateway_cost.wire import Pool, WireError, post

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- run:gateway -->", "<!-- end:gateway -->"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM = (
    HEAD + chunk(b'data: {"a":0}\n\n') + chunk(b'data: {"a":1}\n\ndata: [DONE]\n\n') + b"0\r\n\r\n"
)
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n12345"


@contextmanager
def talking(speak: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of a server that speaks with each client in a thread of its own; all of them have
    ended when it is left.

    A client that went away ends its thread and fails nothing: what the client saw is what a test
    asks for.
    """
    server, clients, threads = socket.create_server(("127.0.0.1", 0)), [], []

    def speak_with(client: socket.socket) -> None:
        with client, suppress(OSError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            speak(client)

    def accept() -> None:
        with suppress(OSError):
            while True:
                clients.append(server.accept()[0])
                threads.append(threading.Thread(target=speak_with, args=clients[-1:], daemon=True))
                threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)  # wakes what waits in accept; closing it alone does not
        accepting.join(60)
        server.close()
        for client in clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in (accepting, *threads))


def answering(pieces: Sequence[bytes]) -> AbstractContextManager[int]:
    """A server that answers every request with these pieces, each its own packet."""

    def speak(client: socket.socket) -> None:
        while data := client.recv(65536):
            for _ in range(data.count(b"POST ")):
                for piece in pieces:
                    client.sendall(piece)
                    threading.Event().wait(0.002)

    return talking(speak)


def cut(data: bytes, *places: int) -> list[bytes]:
    edges = [0, *(place % len(data) for place in places), len(data)]
    return [data[low:high] for low, high in itertools.pairwise(edges)]


@pytest.mark.parametrize(
    "places", [(), (10,), (len(HEAD),), (-1,), (-4,), (-6,), (len(HEAD) + 8, -5)]
)
def test_a_stream_is_over_with_its_last_chunk_however_it_is_cut(places: tuple[int, ...]) -> None:
    with answering(cut(STREAM, *places)) as port, Pool(port, 2) as pool:
        load = pool.keep_asking([post("/x", {"n": 1})] * 5)
        assert (load.answers, load.events, load.sizes) == (5, 15, {3})


@pytest.mark.parametrize("places", [(), (20,), (-5,), (-1,)])
def test_a_whole_answer_is_over_with_its_length(places: tuple[int, ...]) -> None:
    with answering(cut(WHOLE, *places)) as port, Pool(port, 1) as pool:
        load = pool.keep_asking([post("/x", {})] * 3)
        assert (load.answers, load.events) == (3, 0)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes by looks at the clock, 10 ms each."""
    instants = itertools.count(0.0, 0.01)
    monkeypatch.setattr(
        wire,
        "time",
        SimpleNamespace(perf_counter=lambda: next(instants), process_time=time.process_time),
    )


@pytest.mark.usefixtures("looks")
def test_a_closed_loop_ends_with_its_time_and_waits_for_what_it_asked() -> None:
    with answering([WHOLE]) as port, Pool(port, 3) as pool:
        load = pool.keep_asking(iter(lambda: post("/x", {}), None), 0.1)
        assert load.answers >= 3
        assert 0.1 <= load.seconds < 2
        assert pool.keep_asking([post("/x", {})]).answers == 1, "nothing was left behind"


def test_a_connection_that_was_closed_while_idle_is_opened_anew() -> None:
    """Servers close what was idle for seconds; the answers of the others take longer than that
    on a slow machine.
    """

    def speak(client: socket.socket) -> None:
        client.recv(65536)
        client.sendall(WHOLE)

    with talking(speak) as port, Pool(port, 1) as pool:
        for _ in range(2):
            assert pool.keep_asking([post("/x", {})]).answers == 1
            assert list(pool.answered(5.0)) == [], (
                "it was closed behind the answer, and opened anew"
            )


@pytest.mark.parametrize("closes", ["idle", "at once"])
def test_a_request_that_meets_a_closing_connection_is_sent_again(closes: str) -> None:
    """Only where the connection had answered before: a server that answers nobody is at fault."""

    def speak(client: socket.socket) -> None:
        if client.recv(65536) and closes == "idle":
            client.sendall(WHOLE)
            client.recv(65536)

    with talking(speak) as port, Pool(port, 1) as pool:
        if closes == "idle":
            assert pool.keep_asking([post("/x", {})] * 4).answers == 4
        else:
            with pytest.raises(WireError, match="closed within an answer"):
                pool.keep_asking([post("/x", {})])


@pytest.mark.usefixtures("looks")
def test_an_open_loop_sends_at_its_instants_and_times_the_first_event() -> None:
    with answering(cut(STREAM, len(HEAD), -10)) as port, Pool(port, 8) as pool:
        found = pool.ask_at([(0.02 * k, post("/x", {})) for k in range(5)])
        assert len(found) == 5
        assert all(0 < first <= end < 1 for first, end in found)


def test_an_error_status_is_no_answer() -> None:
    with (
        answering([b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"]) as port,
        Pool(port, 1) as pool,
        pytest.raises(WireError, match="503"),
    ):
        pool.keep_asking([post("/x", {})])


def test_ratios_are_of_rounds_and_their_interval_is_students() -> None:
    found = ratio_of([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert math.isclose(found.value, 2.0)
    assert math.isclose(found.low, 2.0)
    assert math.isclose(found.high, 2.0)
    assert math.isclose(ratio_of([1.0, 3.0], [2.0, 6.0]).value, 0.5), "half of theirs"
    spread = ratio_of(
        [1.0, 4.0], [1.0, 1.0]
    )  # log 1 and log 4: mean log 2, t of one degree is 12.706
    assert math.isclose(spread.value, 2.0)
    assert math.isclose(
        math.log(spread.high / spread.value),
        12.706 * math.log(4) / math.sqrt(2) / math.sqrt(2),
        rel_tol=1e-3,
    )
    assert mean_of([3.0]).high == math.inf, "one round says nothing about the next"


def test_differences_of_delays_have_the_interval_of_signed_ranks() -> None:
    assert math.isclose(difference_of([5.0, 7.0], [1.0, 3.0]).value, 4.0)
    assert math.isclose(difference_of([1.0, 3.0], [5.0, 7.0]).value, -4.0)
    assert difference_of([1.0] * 5, [0.0] * 5).high == math.inf, (
        "five rounds cannot be sure to 95 %"
    )
    for rounds in (6, 10, 20):
        seen = np.random.default_rng(rounds).normal(3.0, 1.0, rounds)
        found = difference_of(seen.tolist(), [0.0] * rounds)
        for end, outwards in ((found.low, -1e-9), (found.high, 1e-9)):
            assert (
                wilcoxon(seen - end - outwards).pvalue
                <= 0.05
                < wilcoxon(seen - end + outwards).pvalue
            )
    stalled = difference_of([*seen[:-1].tolist(), 1000.0], [0.0] * rounds)
    assert stalled.high - stalled.low < 2, "one round that stood still moves nothing"


def test_a_bound_is_held_against_the_value_or_against_the_upper_end() -> None:
    three = mean_of([2.9, 3.0, 3.1])
    assert Finding("x", three).holds is None
    assert Finding("x", three, at_least=3.0).holds is True
    assert Finding("x", three, at_least=3.001).holds is False
    assert (
        Finding("x", three, upper_end_at_most=3.248).holds is False
    )  # the value is below, the interval is not: 3 + 4.303 * 0.1 / sqrt(3)
    assert Finding("x", three, upper_end_at_most=3.249).holds is True
    assert "BROKEN" in Finding("x", three, at_least=3.1).line()


def test_a_bound_on_an_interval_that_so_few_rounds_do_not_have_is_undecided() -> None:
    """Three rounds have no interval of signed ranks: that is neither kept nor broken."""
    few = Finding(
        "delay", difference_of([5.0, 6.0, 7.0], [1.0, 1.0, 1.0]), "ms", upper_end_at_most=2.0
    )
    assert few.holds is None
    assert few.line().endswith("upper end <= 2 ms  undecided: 3 rounds give no interval")
    assert "inf" not in few.line()
    assert few.to_dict()["undecided"] == "undecided: 3 rounds give no interval"
    kept, broken = (
        Finding("rate", mean_of([1.0, 1.0]), at_least=0.5),
        Finding("share", mean_of([1.0, 1.0]), at_least=2.0),
    )
    assert conclusion([kept]) == "every bound is kept"
    assert conclusion([kept, few]) == "delay (undecided: 3 rounds give no interval)"
    assert (
        conclusion([few, broken]) == "BROKEN: share\ndelay (undecided: 3 rounds give no interval)"
    )


def test_processor_time_is_counted_by_process_and_over_all() -> None:
    assert used({1: 5.0, 2: 1.0}, {1: 7.0, 2: 4.0, 3: 0.5}) == (2.0, 5.5)


def test_the_page_has_the_numbers_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    findings = [
        Finding("ratio", mean_of([0.5, 0.7]), at_least=0.6),
        Finding("delay", mean_of([1.0, 3.0]), "ms", upper_end_at_most=2.0),
        Finding("rate", mean_of([7.0]), "/s"),
        Finding("few", difference_of([1.0] * 3, [0.0] * 3), "ms", upper_end_at_most=2.0),
    ]
    report = {"hardware": {"cpu": "One", "cores": 2}, "versions": {"python": "3.11"}}
    section = f"{table('On an edge', 2, findings)}\n\n{measured_on(report)}"
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):  # the second writing changes nothing
        put(section, page, "gateway")
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\nOn an edge; 2 rounds:\n")
    assert text.endswith(f"\nOne, 2 cores; python 3.11.\n{END}\nafter\n")
    assert "| ratio | 0.6 | -0.6706 to 1.871 | >= 0.6: holds |" in text
    assert "| delay | 2 ms | -10.71 to 14.71 | upper end <= 2 ms: **broken** |" in text
    assert "| rate | 7 /s |  |  |" in text
    assert "| few | 1 ms |  | upper end <= 2 ms: undecided: 3 rounds give no interval |" in text
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match="without one"):
        put(section, page, "gateway")


def test_the_slices_of_a_round_count_as_one_run() -> None:
    slices = [
        Counted("gateway", "stream", 100, 1.0, 0.5, 0.75, 0.25),
        Counted("gateway", "stream", 300, 2.0, 1.5, 1.75, 0.5),
    ]
    assert together(slices) == Counted("gateway", "stream", 400, 3.0, 2.0, 2.5, 0.75)
    assert together(slices).by_cpu == 200
    assert (
        together([*slices, Counted("gateway", "stream", 900, 1.0, 1.0, 1.0, 0.5)]).by_cpu
        == 1300 / 3
    )


@pytest.mark.slow
def test_the_command_measures_the_edge_beside_a_checkout_and_writes_what_it_found(
    tmp_path: Path,
) -> None:
    file, page = tmp_path / "found.json", tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    command = [sys.executable, "bench/gateway.py", "--part", "edge", "--rounds", "2"]
    command += ["--seconds", "0.05", "--json", str(file), "--before", str(ROOT)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode in (0, 1), done.stderr  # a second on a busy machine judges nothing
    found = json.loads(file.read_text())["edge"]
    assert len(found["measured"]) == 2 * 6
    assert {each["kind"] for each in found["measured"]} == {"whole", "stream"}
    assert sum(each["holds"] is not None for each in found["findings"]) == 4
    again = [sys.executable, "bench/gateway.py", "--from", str(file), "--page", str(page)]
    subprocess.run(again, cwd=ROOT, check=True, timeout=250)
    assert "gateway / before: tokens by processor second" in page.read_text()
    assert json.loads(file.read_text())["edge"]["findings"] == found["findings"]


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "bench/gateway.py", "--before", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert f"got --before {tmp_path}; expected the folder of a checkout" in done.stderr
