"""A trace of every call, in OpenTelemetry's form: how long it waited, in which batch it was served,
and for how long.

    chat MODEL        from the arrival to the last byte; kind SERVER
      queue           from the arrival, or the preemption, to the dispatch
      batch           from the dispatch until its server is free again
        service       from the dispatch to its own last token

One group of queue, batch and service for each sequence of a call, and for each stint of one that
was preempted. The caller's `traceparent` is the parent, and decides with the sampler of the
environment (OTEL_TRACES_SAMPLER) what is recorded; the engine is handed the context of `service`.
Spans leave in a thread of the SDK; a receiver that does not answer costs spans, never requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Span,
    SpanKind,
    StatusCode,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kendall.policies.text import SpecError
from kendall.queueing.measurement.record import Record
from kendall.server.engines.base import EngineRequest
from kendall.server.engines.proxied import TRACE_HEADERS
from kendall.server.queue.observers import Observer
from kendall.server.queue.sequence import Batch, SequenceState

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"  # as vLLM reads it: grpc | http/protobuf
PATH = "/v1/traces"  # of receivers that speak HTTP
# of gen_ai, by the last word of a path; of others that word
OPERATIONS = {"completions": "text_completion", "responses": "chat", "messages": "chat"}
SAME_OFFSET = 60.0  # seconds
LAST_SPANS = 5.0  # seconds that the exit waits for the receiver
PROPAGATOR = TraceContextTextMapPropagator()
TRACE_ID: ContextVar[str | None] = ContextVar("trace_id", default=None)  # of the call in hand
log = logging.getLogger("kendall")


def check_endpoint(endpoint: str) -> str:
    """The protocol by which it is reached. Raises SpecError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SpecError(
            f"got --otlp-traces-endpoint {endpoint}; expected a URL, for example "
            "http://localhost:4317 (gRPC) or http://localhost:4318/v1/traces"
        )
    protocol = os.environ.get(PROTOCOL, "http/protobuf" if parts.path.endswith(PATH) else "grpc")
    if protocol not in ("grpc", "http/protobuf"):
        raise SpecError(f"got {PROTOCOL}={protocol}; expected grpc or http/protobuf")
    return protocol


def exporting_provider(endpoint: str) -> TracerProvider:
    """What records spans and sends them there. Raises SpecError."""
    exporter = _exporter(check_endpoint(endpoint))
    named = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "kendall"}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(exporter(endpoint=endpoint, timeout=LAST_SPANS)))
    return provider


def _exporter(protocol: str) -> Any:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc  # noqa: PLC0415 - one of the two

        return over_grpc.OTLPSpanExporter
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http  # noqa: PLC0415

    return over_http.OTLPSpanExporter


class CallTrace:
    """The trace of one call. `moment` turns an instant of the event loop's clock into the
    nanoseconds that spans have.
    """

    def __init__(self, root: Span, moment: Callable[[float], int]) -> None:
        self.root, self.moment = root, moment
        self.context: Context = set_span_in_context(root)
        self.id = format_trace_id(root.get_span_context().trace_id)
        self.left = 0  # sequences whose records are awaited
        self.tokens = [0, 0]  # of prompts and answers, of all of them
        self._handed: dict[str, Context] = {}

    @property
    def recorded(self) -> bool:
        """Whether it was sampled: else it is handed on as such, and nothing is made of it."""
        return self.root.is_recording()

    def handed_on(self, request_id: str) -> Mapping[str, str]:
        """Headers that make what the engine records of a sequence a child of its service."""
        carrier: dict[str, str] = {}
        PROPAGATOR.inject(carrier, self._handed.get(request_id, self.context))
        return carrier

    def hand_on(self, request_id: str, context: Context) -> None:
        """See `handed_on`."""
        self._handed[request_id] = context

    def refused(self, error: BaseException, at: float) -> None:
        """It is not queued."""
        reason = getattr(error, "code", type(error).__name__)
        self.root.set_attribute("error.type", reason)
        self.end(at, failed=reason)

    def end(self, at: float, failed: str | None = None) -> None:
        """Its last byte has left, or nothing will come."""
        if failed is not None:
            self.root.set_status(StatusCode.ERROR, failed)
        self.root.end(self.moment(at))


class _Spans:
    """The open spans of one sequence."""

    __slots__ = ("batch", "queue", "service", "trace")

    def __init__(self, trace: CallTrace, queue: Span) -> None:
        self.trace, self.queue = trace, queue
        self.batch: Span | None = None
        self.service: Span | None = None


class Tracing(Observer):
    """Starts a trace for each call and observes its sequences for the spans below it."""

    def __init__(self, provider: TracerProvider, model: str, clock: Callable[[], float]) -> None:
        self._provider, self._model, self._clock = provider, model, clock
        self._tracer = provider.get_tracer("kendall")
        self._open: dict[str, _Spans] = {}
        self._offset, self._offset_at = 0, -math.inf

    def begin(
        self, headers: Sequence[tuple[bytes, bytes]], call_id: str, path: str, at: float
    ) -> CallTrace:
        """Of a call that has arrived."""
        carrier = {
            name: value.decode("latin-1")
            for key, value in headers
            if (name := key.decode("latin-1")) in TRACE_HEADERS
        }
        parent = PROPAGATOR.extract(carrier)
        offset = self._offset_now()
        operation = operation_of(path)
        root = self._tracer.start_span(
            f"{operation} {self._model}",
            parent,
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.request.model": self._model,
                "gen_ai.response.id": call_id,
            },
            start_time=offset + round(at * 1e9),
        )
        trace = CallTrace(root, lambda instant: offset + round(instant * 1e9))
        TRACE_ID.set(trace.id)
        return trace

    def _offset_now(self) -> int:
        """From the event loop's clock to the calendar's, ns: looked at again and again, as they
        drift apart.
        """
        now = self._clock()
        if now - self._offset_at > SAME_OFFSET:
            self._offset, self._offset_at = time.time_ns() - round(now * 1e9), now
        return self._offset

    async def close(self) -> None:
        """Send what is left, within `LAST_SPANS`."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def send() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(over.set)

        threading.Thread(target=send, name="last-spans", daemon=True).start()
        try:
            await asyncio.wait_for(over.wait(), LAST_SPANS)
        except TimeoutError:
            log.warning("the receiver of traces does not answer: the last spans are lost")

    # as an observer

    def on_arrival(self, sequence: SequenceState) -> None:
        """It begins to wait."""
        trace = trace_of(sequence.engine_request)
        if trace is None or not trace.recorded:
            return
        trace.left += 1
        arrived_at = sequence.engine_request.request.arrived_at
        self._open[sequence.id] = _Spans(trace, self._begin("queue", trace, arrived_at))

    def on_dispatch(self, batch: Batch) -> None:
        """Service begins; of one that was preempted, once more."""
        for sequence in batch.sequences:
            spans = self._open.get(sequence.id)
            if spans is None:
                continue
            if sequence.stints and spans.batch is not None:
                self._stint(spans, sequence.stints[-1][1])
            self._dispatched(spans, sequence, batch)

    def _dispatched(self, spans: _Spans, sequence: SequenceState, batch: Batch) -> None:
        trace, at = spans.trace, batch.dispatched_at
        forming = batch.forming_delay(sequence.engine_request.request)
        spans.queue.set_attribute("kendall.batch_forming_delay", forming)
        spans.queue.end(trace.moment(at))
        spans.batch = self._begin("batch", trace, at)
        spans.batch.set_attributes(
            {
                "kendall.policy": batch.policy_text,
                "kendall.batch.id": batch.id,
                "kendall.batch.size": sequence.batch_size or 1,
                "kendall.server.id": batch.server_id,
            }
        )
        within = set_span_in_context(spans.batch)
        spans.service = self._tracer.start_span("service", within, start_time=trace.moment(at))
        trace.hand_on(sequence.id, set_span_in_context(spans.service))

    def _stint(self, spans: _Spans, at: float) -> None:
        """It was preempted: its next wait began."""
        self._end_service(spans, at, at)
        spans.queue = self._begin("queue", spans.trace, at)

    def on_record(self, record: Record) -> None:
        """All of its instants are known."""
        spans = self._open.pop(record.request_id, None)
        if spans is None:
            return
        trace, now = spans.trace, self._clock()
        trace.left -= 1
        trace.tokens[0] += record.prompt_tokens or 0
        trace.tokens[1] += record.output_tokens or 0
        free = record.server_free_at or record.released_at or now
        if spans.batch is None:
            spans.queue.end(trace.moment(record.released_at or now))
        else:
            assert spans.service is not None
            if record.first_token_at is not None:
                spans.service.add_event("first token", {}, trace.moment(record.first_token_at))
            spans.service.set_attribute("gen_ai.usage.output_tokens", record.output_tokens or 0)
            self._end_service(spans, record.last_token_at or free, free)
        if not trace.left:
            self._end_call(trace, record, now)

    def _end_service(self, spans: _Spans, last_token_at: float, free_at: float) -> None:
        assert spans.service is not None
        assert spans.batch is not None
        spans.service.end(spans.trace.moment(last_token_at))
        spans.batch.end(spans.trace.moment(free_at))
        spans.service = spans.batch = None

    def _end_call(self, trace: CallTrace, record: Record, now: float) -> None:
        root = trace.root
        root.set_attributes(
            {
                "gen_ai.usage.input_tokens": trace.tokens[0],
                "gen_ai.usage.output_tokens": trace.tokens[1],
                "kendall.outcome": record.outcome,
                "kendall.queueing_delay": record.queueing_delay or 0.0,
            }
        )
        if record.finish_reason is not None:
            root.set_attribute("gen_ai.response.finish_reasons", (record.finish_reason,))
        failed = None if record.outcome == "completed" else record.error or record.outcome
        trace.end(record.released_at or now, failed)

    def _begin(self, name: str, trace: CallTrace, at: float) -> Span:
        return self._tracer.start_span(name, trace.context, start_time=trace.moment(at))


def trace_of(engine_request: EngineRequest) -> CallTrace | None:
    """None where nothing is traced, or the request is one of the gateway's own."""
    trace = engine_request.trace
    return trace if isinstance(trace, CallTrace) else None


def operation_of(path: str) -> str:
    """Of a call to that endpoint."""
    if path.endswith("/chat/completions"):
        return "chat"
    last = path.rpartition("/")[2]
    return OPERATIONS.get(last, last)


def log_trace_ids() -> None:
    """Log lines written while a call is in hand have its `trace_id`."""
    make = logging.getLogRecordFactory()

    def made(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = make(*arguments, **named)
        if (trace_id := TRACE_ID.get()) is not None:
            record.trace_id = trace_id
        return record

    logging.setLogRecordFactory(made)
