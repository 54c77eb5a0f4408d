"""vLLM's spans of requests, read from OpenTelemetry's protocol: one `llm_request` for each sequence
that met its end, with its instants and token counts.

    start                               arrival at the API server, Unix time
    gen_ai.latency.time_in_queue        until the scheduler gave it a slot
    gen_ai.latency.time_in_model_*      from there to the first token (prefill), and to the last
    gen_ai.latency.e2e                  from the arrival to the end of the answer

An export is walked field by field, and no more than one span of it is an object at a time: a body
of the largest size may hold millions of empty ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kendall.policies.text import SpecError

if TYPE_CHECKING:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

REQUEST = "llm_request"  # name of the span of one request; others are of the server's start
MOST_MESSAGES = 20_000  # of one export: vLLM sends 512 spans at once, a collector 8,192
LARGEST_MESSAGE = 1 << 16  # bytes of one span, and of one resource
LONGEST = 86_400.0  # seconds of a request
MOST_TOKENS = 2**31
DURATIONS = {
    "queued": "gen_ai.latency.time_in_queue",
    "prefill": "gen_ai.latency.time_in_model_prefill",
    "decode": "gen_ai.latency.time_in_model_decode",
    "first_token": "gen_ai.latency.time_to_first_token",
    "whole": "gen_ai.latency.e2e",
}
COUNTS = {
    "prompt_tokens": "gen_ai.usage.prompt_tokens",
    "output_tokens": "gen_ai.usage.completion_tokens",
}
OTHER, WITHOUT, IMPOSSIBLE = "other_span", "without_attributes", "impossible_values"
IGNORED = {
    OTHER: f"spans that are not named {REQUEST}: of the server's start, or of another program",
    WITHOUT: "spans of requests without the durations and token counts that vLLM 0.11 and later "
    "send",
    IMPOSSIBLE: "spans of requests whose durations or token counts cannot be true",
}


class MalformedExportError(ValueError):
    """Bytes that are no export of spans, or more of it than one may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpan:
    """One request, as its server tells of it: durations in seconds."""

    request_id: str
    replica: str  # the server: its instance id, else where the span came from
    started_ns: int  # its arrival, nanoseconds of Unix time on the server's clock
    queued: float
    prefill: float
    decode: float
    first_token: float  # since the arrival
    whole: float  # since the arrival
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None

    @property
    def ended_ns(self) -> int:
        """The end of its answer, on the server's clock."""
        return self.started_ns + round(self.whole * 1e9)


def parser() -> type[Span]:
    """The message of a span. Raises SpecError where OpenTelemetry's is not installed."""
    try:
        from opentelemetry.proto.trace.v1.trace_pb2 import Span  # noqa: PLC0415 - comes with vLLM, or the extra
    except ImportError:
        raise SpecError(
            "got --otlp without OpenTelemetry's messages; expected the package "
            "opentelemetry-proto: pip install 'kendall[otel]'"
        ) from None
    return Span


def requests_of(body: bytes, peer: str) -> Iterator[RequestSpan | str]:
    """Of an ExportTraceServiceRequest that `peer` sent each span of a request, or the reason (of
    `IGNORED`) why a span is none. Raises MalformedExportError, after those before the fault.
    """
    span_of, left = parser(), MOST_MESSAGES
    for field, resource_spans in _fields(memoryview(body)):
        if field != 1:
            continue
        left -= 1
        parts = list(_bounded(resource_spans, left))
        left -= len(parts)
        replica = _replica([part for number, part in parts if number == 1], peer)
        for number, scope_spans in parts:
            if number != 2:
                continue
            for kind, span in _bounded(scope_spans, left):
                left -= 1
                if kind == 2:
                    yield _request(_parsed(span_of, span), replica)


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Number and bytes of every field of a message that is a message or a text itself."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 2:
            size, at = _varint(data, at)
            if size > end - at:
                raise MalformedExportError("a field ends beyond its message")
            yield key >> 3, data[at : at + size]
            at += size
        elif kind == 0:
            _, at = _varint(data, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise MalformedExportError(f"a field of wire type {kind}")
    if at != end:
        raise MalformedExportError("a field ends beyond its message")


def _bounded(data: memoryview, left: int) -> Iterator[tuple[int, memoryview]]:
    for count, field in enumerate(_fields(data), start=1):
        if count > left:
            raise MalformedExportError(f"more than {MOST_MESSAGES} spans in one export")
        yield field


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number that begins there, and where it ends."""
    value = 0
    for place, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise MalformedExportError("a number without an end")


def _parsed(kind: Any, data: memoryview) -> Any:
    from google.protobuf.message import DecodeError  # noqa: PLC0415 - comes with OpenTelemetry

    if len(data) > LARGEST_MESSAGE:
        raise MalformedExportError(f"a message of more than {LARGEST_MESSAGE} bytes")
    try:
        return kind.FromString(bytes(data))
    except DecodeError as error:
        raise MalformedExportError(f"a message that cannot be read: {error}") from None


def _replica(resources: list[memoryview], peer: str) -> str:
    """Of the server: its own id, else where it is and its process."""
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource  # noqa: PLC0415

    known: dict[str, Any] = {}
    for resource in resources[:1]:
        known = _values(_parsed(Resource, resource).attributes)
    own = known.get("service.instance.id")
    return str(own or f"{peer} {known.get('vllm.process_id', '')}").strip()[:200]


def _values(attributes: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, kind)
        for each in attributes
        if (kind := each.value.WhichOneof("value")) is not None
    }


def _request(span: Any, replica: str) -> RequestSpan | str:
    if span.name != REQUEST:
        return OTHER
    known = _values(span.attributes)
    if any(name not in known for name in (*DURATIONS.values(), *COUNTS.values())):
        return WITHOUT
    seconds = {field: _number(known, name) for field, name in DURATIONS.items()}
    tokens = {field: _number(known, name) for field, name in COUNTS.items()}
    limit = _number(known, "gen_ai.request.max_tokens")
    if not _possible(span.start_time_unix_nano, seconds, tokens):
        return IMPOSSIBLE
    return RequestSpan(
        request_id=str(known.get("gen_ai.request.id", span.span_id.hex()))[:200],
        replica=replica,
        started_ns=span.start_time_unix_nano,
        **seconds,
        prompt_tokens=int(tokens["prompt_tokens"]),
        output_tokens=int(tokens["output_tokens"]),
        max_tokens=int(limit) if 1 <= limit < MOST_TOKENS else None,
    )


def _number(known: Mapping[str, Any], name: str) -> float:
    value = known.get(name)
    return float(value) if isinstance(value, int | float) else math.nan


def _possible(start: int, seconds: Mapping[str, float], tokens: Mapping[str, float]) -> bool:
    """Clocks of two processes make durations that differ by a little; nothing else does."""
    parts = seconds["queued"] + seconds["prefill"] + seconds["decode"]
    return (
        start > 0
        and all(0 <= each <= LONGEST for each in seconds.values())
        and parts <= 1.1 * seconds["whole"] + 1.0
        and 0 <= tokens["prompt_tokens"] < MOST_TOKENS
        and 1 <= tokens["output_tokens"] < MOST_TOKENS
    )
