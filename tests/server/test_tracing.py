"""Traces of calls, as a receiver of OpenTelemetry's protocol gets them."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kendall.policies import SpecError
from kendall.server.engines.proxied import ProxiedCall, in_trace
from kendall.server.runtime.logs import JsonFormatter
from kendall.server.settings import Settings
from tests.server.asgi import Call, call, running
from tests.server.passing_gateway import before
from tests.server.upstream_stub import MODEL, Stub, sockets
from tests.virtual_time import run_virtual

pytest.importorskip("opentelemetry.sdk")  # comes with vLLM
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kendall.server.telemetry import tracing

COMPLETIONS = "/v1/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-2] + "00"


class Receiver:
    """What came, span by span."""

    def __init__(self) -> None:
        receiver = self
        self.spans: list[Any] = []
        self.came = threading.Condition()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = self.rfile.read(int(self.headers["content-length"]))
                request = ExportTraceServiceRequest.FromString(sent)
                with receiver.came:
                    for resource in request.resource_spans:
                        for scope in resource.scope_spans:
                            receiver.spans += scope.spans
                    receiver.came.notify_all()
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def roots(self, count: int) -> list[Any]:
        """Of so many traces, once they are there: on virtual time nobody waits for them."""

        def roots() -> list[Any]:
            return [each for each in self.spans if each.name not in ("queue", "batch", "service")]

        with self.came:
            self.came.wait_for(lambda: len(roots()) >= count, timeout=5)
            found = roots()
        assert len(found) == count
        return found

    def below(self, parent: Any) -> list[Any]:
        """In the order of their beginnings."""
        return sorted(
            (span for span in self.spans if span.parent_span_id == parent.span_id),
            key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano),
        )


def attributes(span: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


def body(tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "max_tokens": tokens,
        "kendall_forced_output_tokens": tokens,
        **more,
    }


def test_every_call_is_one_trace_with_its_wait_its_batch_and_its_service(
    receiver: Receiver,
) -> None:
    async def serve() -> None:
        async with running("capped:max_batch_size=2", otlp_traces_endpoint=receiver.url) as (
            app,
            _,
        ):
            made = [
                Call(app, "POST", COMPLETIONS, body(tokens, n=n), {"traceparent": PARENT})
                for tokens, n in ((40, 1), (4, 2))
            ]
            await asyncio.gather(*(each.task for each in made))
            assert [each.status for each in made] == [200, 200]

    run_virtual(serve())
    roots = receiver.roots(2)
    for root in roots:
        assert root.trace_id.hex() == PARENT[3:35]
        assert root.parent_span_id.hex() == PARENT[36:52]
        assert root.name == "text_completion tiny"
    first, pair = sorted(roots, key=lambda root: len(receiver.below(root)))
    queue, batch = receiver.below(first)
    assert (queue.name, batch.name) == ("queue", "batch")
    assert queue.start_time_unix_nano == first.start_time_unix_nano
    assert queue.end_time_unix_nano == batch.start_time_unix_nano
    (service,) = receiver.below(batch)
    assert service.name == "service"
    assert service.end_time_unix_nano <= batch.end_time_unix_nano <= first.end_time_unix_nano
    assert attributes(batch)["kendall.policy"] == "capped:max_batch_size=2"
    assert attributes(first)["gen_ai.usage.output_tokens"] == 40
    assert attributes(pair)["gen_ai.usage.output_tokens"] == 2 * 4
    assert attributes(pair)["gen_ai.usage.input_tokens"] == 2 * 3
    assert len(receiver.below(pair)) == 4
    # both waited for the batch before them, and are served together
    waited = [span for span in receiver.below(pair) if span.name == "queue"]
    assert all(span.end_time_unix_nano == batch.end_time_unix_nano for span in waited)


def test_a_preempted_sequence_waits_and_is_served_once_more(receiver: Receiver) -> None:
    async def serve() -> None:
        policy = "single:order=sprpt"
        async with running(policy, otlp_traces_endpoint=receiver.url) as (app, _):
            long = Call(app, "POST", COMPLETIONS, body(60, predicted_output_tokens=60))
            await asyncio.sleep(0.02)
            short = Call(app, "POST", COMPLETIONS, body(3, predicted_output_tokens=3))
            await asyncio.gather(long.task, short.task)

    run_virtual(serve())
    spans = {len(receiver.below(root)): receiver.below(root) for root in receiver.roots(2)}
    assert sorted(spans) == [2, 4]
    names = [span.name for span in spans[4]]
    assert names == ["queue", "batch", "queue", "batch"]
    for one, following in zip(spans[4], spans[4][1:], strict=False):
        assert one.end_time_unix_nano == following.start_time_unix_nano
    assert [len(receiver.below(batch)) for batch in spans[4][1::2]] == [1, 1]


def test_what_is_refused_or_fails_has_a_trace_that_says_so(receiver: Receiver) -> None:
    async def serve() -> None:
        async with running("single", otlp_traces_endpoint=receiver.url, patience=0.01) as (app, _):
            refused = await call(app, "POST", COMPLETIONS, body(10**6))
            assert refused.status == 400
            served = Call(app, "POST", COMPLETIONS, body(60))
            late = await call(app, "POST", COMPLETIONS, body(3))
            assert late.status in (429, 503)
            await served.task
            gone = Call(app, "POST", COMPLETIONS, body(60))
            await asyncio.sleep(0.01)
            gone.leave()
            await gone.task

    run_virtual(serve())
    said = sorted((root.status.code, root.status.message) for root in receiver.roots(4))
    assert [code for code, _ in said] == [0, 2, 2, 2]
    messages = [message for _, message in said[1:]]
    assert "cancelled" in messages
    assert "context_length_exceeded" in messages
    assert any("patience ran out" in message for message in messages)
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for span in receiver.spans)


def test_the_callers_sampling_is_respected(receiver: Receiver) -> None:
    async def serve() -> None:
        async with running(otlp_traces_endpoint=receiver.url) as (app, _):
            await call(app, "POST", COMPLETIONS, body(2), {"traceparent": UNSAMPLED})
            await call(app, "POST", COMPLETIONS, body(2), {"traceparent": "no trace"})

    run_virtual(serve())
    (root,) = receiver.roots(1)
    assert root.parent_span_id == b""


def test_a_server_behind_gets_the_context_of_the_service(receiver: Receiver) -> None:
    async def serve(stub: Stub) -> None:
        async with before(stub, otlp_traces_endpoint=receiver.url) as behind:
            answered = await behind.answer({"model": MODEL, "prompt": "a"}, traceparent=PARENT)
            assert answered.status == 200

    with sockets(1) as (stub,):
        run_virtual(serve(stub))
    (root,) = receiver.roots(1)
    (service,) = [span for span in receiver.spans if span.name == "service"]
    (headers,) = [seen.headers for seen in stub.calls]
    trace_id, span_id = root.trace_id.hex(), service.span_id.hex()
    assert headers["traceparent"] == f"00-{trace_id}-{span_id}-01"
    assert root.name.startswith("text_completion ")


def test_a_server_behind_hears_that_a_call_is_not_recorded(receiver: Receiver) -> None:
    async def serve(stub: Stub) -> None:
        async with before(stub, otlp_traces_endpoint=receiver.url) as behind:
            for parent in (UNSAMPLED, PARENT):
                answered = await behind.answer({"model": MODEL, "prompt": "a"}, traceparent=parent)
                assert answered.status == 200

    with sockets(1) as (stub,):
        run_virtual(serve(stub))
    receiver.roots(1)
    unsampled, _ = [seen.headers["traceparent"] for seen in stub.calls]
    assert unsampled.startswith(UNSAMPLED[:36])
    assert unsampled.endswith("-00")


def test_headers_of_a_trace_replace_the_clients() -> None:
    passed = ProxiedCall("/v1/completions", b"{}", (("traceparent", "a"), ("x-b", "c")))
    assert in_trace(passed, {"traceparent": "d"}).headers == (("x-b", "c"), ("traceparent", "d"))
    assert in_trace(passed, {}) is passed


@pytest.mark.parametrize(
    ("endpoint", "protocol", "expected"),
    [
        ("http://localhost:4317", None, "grpc"),
        ("http://localhost:4318/v1/traces", None, "http/protobuf"),
        ("http://localhost:4317", "http/protobuf", "http/protobuf"),
    ],
)
def test_the_protocol_follows_the_endpoint(
    endpoint: str, protocol: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(tracing.PROTOCOL, raising=False)
    if protocol is not None:
        monkeypatch.setenv(tracing.PROTOCOL, protocol)
    assert tracing.check_endpoint(endpoint) == expected


def test_what_is_no_endpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tracing.PROTOCOL, raising=False)
    for endpoint in ("localhost:4317", "ftp://a", "http://", ""):
        with pytest.raises(SpecError, match=r"got --otlp-traces-endpoint .*; expected a URL"):
            tracing.check_endpoint(endpoint)
    monkeypatch.setenv(tracing.PROTOCOL, "thrift")
    with pytest.raises(SpecError, match=r"PROTOCOL=thrift; expected grpc or http/protobuf"):
        tracing.check_endpoint("http://localhost:4317")


def test_operations_have_the_names_of_the_convention() -> None:
    paths = ("/openai/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
    assert [tracing.operation_of(path) for path in (*paths, "/v1/messages", "/v1/rerank")] == [
        *("chat", "text_completion", "embeddings", "chat", "chat", "rerank")
    ]


def test_log_lines_of_a_call_have_its_trace_id(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = logging.getLogRecordFactory()
    monkeypatch.setattr(tracing, "TRACE_ID", tracing.ContextVar("trace_id", default=None))
    try:
        tracing.log_trace_ids()
        make = logging.getLogger("kendall").makeRecord
        plain = make("kendall", logging.INFO, "f", 1, "said", (), None)
        tracing.TRACE_ID.set("0af7")
        within = make("kendall", logging.INFO, "f", 1, "said", (), None)
    finally:
        logging.setLogRecordFactory(factory)
    shown = [json.loads(JsonFormatter().format(record)) for record in (plain, within)]
    assert "trace_id" not in shown[0]
    assert shown[1]["trace_id"] == "0af7"


def test_nothing_is_traced_without_an_endpoint() -> None:
    async def serve() -> None:
        async with running() as (app, gateway):
            assert gateway.tracing is None
            answered = await call(app, "POST", COMPLETIONS, body(2), {"traceparent": PARENT})
            assert answered.status == 200

    run_virtual(serve())
    assert Settings(model="tiny", served_model_name="tiny").otlp_traces_endpoint is None


def test_the_last_spans_have_been_sent_when_the_gateway_has_ended(receiver: Receiver) -> None:
    async def serve() -> None:
        async with running(otlp_traces_endpoint=receiver.url) as (app, _):
            assert (await call(app, "POST", COMPLETIONS, body(2))).status == 200

    asyncio.run(serve())
    assert sorted(span.name for span in receiver.spans)[:3] == ["batch", "queue", "service"]


@pytest.mark.slow
def test_a_receiver_that_is_not_there_harms_no_call(caplog: pytest.LogCaptureFixture) -> None:
    async def serve() -> int | None:
        async with running(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as (app, _):
            return (await call(app, "POST", COMPLETIONS, body(2))).status

    assert asyncio.run(serve()) == 200
