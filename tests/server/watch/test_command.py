"""`kendall watch --otlp --once` as a command: spans that come while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from kendall.cli import main
from kendall.loadgen.gateway.gateway_process import free_port
from tests.server.watch.exports import exports_of
from tests.server.watch.test_watched_servers import LAW, Scene

pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")
SECONDS = 14.0  # of requests; the first spans set the clock
GIVEN = ("--max-num-seqs", "4", "--latency", "k1=0.004,k2=0,k3=0.0005,k4=0.006,kp=0.00004")


@contextmanager
def sending(port: int) -> Iterator[None]:
    """The exports of a simulated server, each when it is due."""
    run, trace = Scene(seconds=SECONDS).run()
    exports = list(exports_of(run, trace, LAW, every=1.0))
    ended = threading.Event()

    def send() -> None:
        began, url = time.monotonic(), f"http://127.0.0.1:{port}/v1/traces"  # noqa: TID251
        headers = {"content-type": "application/x-protobuf"}
        with httpx.Client(trust_env=False) as client:
            for at, body in exports:
                late = began + at - time.monotonic()  # noqa: TID251
                if ended.wait(max(0.0, late)):
                    return
                while not ended.is_set():
                    try:
                        client.post(url, content=body, headers=headers).raise_for_status()
                    except httpx.ConnectError:
                        ended.wait(0.1)  # until it listens
                    else:
                        break

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_spans_that_come_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port(0)
    command = ["watch", "--otlp", f"127.0.0.1:{port}", "--once", "--for", "17s", *GIVEN]
    with sending(port), pytest.raises(SystemExit) as ended:
        main(command)
    out, err = capsys.readouterr()
    assert not ended.value.code, err
    assert f"waiting for spans on port {port}: start vLLM with --otlp-traces-endpoint" in err
    assert "spans of requests" in out
    assert "continuous:max_batch_size=4" in out
    assert "no_lost_spans: no URL of a server was given, whose counters tell" in out
    assert "what if" in out


def test_without_spans_it_says_what_was_expected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["watch", "--otlp", f"127.0.0.1:{free_port(0)}", "--once", "--for", "1s"])
    err = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1
    assert "got no span of a request; expected a running `vllm serve" in " ".join(err[1:])
