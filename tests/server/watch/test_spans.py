"""Spans of vLLM read from the protocol: one request each, or the reason why it is none."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kendall.server.watch.fleet import Fleet
from kendall.server.watch.spans import MalformedExportError, RequestSpan, requests_of
from tests.server.watch.exports import BASE_NS, GIVEN, export

pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")


def read(attributes: dict[str, Any], name: str = "llm_request") -> RequestSpan | str:
    (found,) = requests_of(export([(name, BASE_NS, attributes)]), "10.0.0.7")
    return found


def test_every_field_of_a_request() -> None:
    found = read(GIVEN)
    assert found == RequestSpan(
        request_id="cmpl-1",
        replica="replica-a",
        started_ns=BASE_NS,
        queued=0.1,
        prefill=0.02,
        decode=0.3,
        first_token=0.13,
        whole=0.45,
        prompt_tokens=12,
        output_tokens=7,
        max_tokens=16,
    )
    assert found.ended_ns == BASE_NS + 450_000_000


def test_without_an_instance_the_server_is_where_it_sent_from() -> None:
    (found,) = requests_of(export([("llm_request", BASE_NS, GIVEN)], None), "10.0.0.7")
    assert isinstance(found, RequestSpan)
    assert found.replica == "10.0.0.7"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"gen_ai.latency.e2e": None}, "without_attributes"),
        ({"gen_ai.usage.prompt_tokens": None}, "without_attributes"),
        ({"gen_ai.latency.e2e": -1.0}, "impossible_values"),
        ({"gen_ai.latency.e2e": math.inf}, "impossible_values"),
        ({"gen_ai.latency.e2e": math.nan}, "impossible_values"),
        ({"gen_ai.latency.e2e": "fast"}, "impossible_values"),
        ({"gen_ai.latency.e2e": 86_401.0}, "impossible_values"),
        # parts of more than 1.1 times the whole and a second
        ({"gen_ai.latency.time_in_queue": 1.18}, "impossible_values"),
        ({"gen_ai.latency.time_in_model_prefill": 1.1}, "impossible_values"),
        ({"gen_ai.latency.time_in_model_decode": 1.38}, "impossible_values"),
        ({"gen_ai.usage.prompt_tokens": -1}, "impossible_values"),
        ({"gen_ai.usage.prompt_tokens": 2**31}, "impossible_values"),
        ({"gen_ai.usage.completion_tokens": 0}, "impossible_values"),
        ({"gen_ai.usage.completion_tokens": 2**31}, "impossible_values"),
    ],
)
def test_spans_that_are_not_used_have_a_reason(changed: dict[str, Any], reason: str) -> None:
    given = {name: value for name, value in (GIVEN | changed).items() if value is not None}
    assert read(given) == reason


@pytest.mark.parametrize(
    "changed",
    [
        {"gen_ai.latency.e2e": 86_400.0},
        {"gen_ai.latency.time_in_queue": 1.17},
        {"gen_ai.latency.time_in_model_prefill": 1.09},
        {"gen_ai.latency.time_in_model_decode": 1.37},
        {"gen_ai.usage.prompt_tokens": 0},
        {"gen_ai.usage.prompt_tokens": 2**31 - 1},
        {"gen_ai.usage.completion_tokens": 1},
        {"gen_ai.usage.completion_tokens": 2**31 - 1},
    ],
)
def test_spans_at_the_bounds_are_used(changed: dict[str, Any]) -> None:
    assert isinstance(read(GIVEN | changed), RequestSpan)


@pytest.mark.parametrize(
    ("limit", "known"), [(1, 1), (2**31 - 1, 2**31 - 1), (0, None), (2**31, None), ("many", None)]
)
def test_a_limit_that_cannot_be_is_none(limit: int | str, known: int | None) -> None:
    found = read(GIVEN | {"gen_ai.request.max_tokens": limit})
    assert isinstance(found, RequestSpan)
    assert found.max_tokens == known


def test_a_request_without_an_id_or_a_start() -> None:
    found = read({name: value for name, value in GIVEN.items() if name != "gen_ai.request.id"})
    assert isinstance(found, RequestSpan)
    assert found.request_id == b"12345678".hex()
    for start, reason in ((0, "impossible_values"), (1, None)):
        (other,) = requests_of(export([("llm_request", start, GIVEN)]), "peer")
        assert (other if isinstance(other, str) else None) == reason


def message(number: int, content: bytes) -> bytes:
    """A field that is a message or a text."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def test_fields_that_are_not_known_are_passed_over() -> None:
    """Of every wire type, beside each message of the export and within it."""
    largest = varint(2**64 - 1)
    other = b"".join(
        [b"\x38", largest, b"\x31", bytes(8), b"\x35", bytes(4), message(7, b"\x07text")]
    )
    assert list(requests_of(other, "peer")) == []
    empty = message(2, b"")
    assert list(requests_of(other + message(1, other + message(2, other + empty)), "peer")) == [
        "other_span"
    ]
    with pytest.raises(MalformedExportError, match="a number without an end"):
        list(requests_of(b"\x38" + b"\x80" * 10 + b"\x01", "peer"))


def test_an_export_of_as_many_spans_as_are_read() -> None:
    """20,000 messages: that of the server, that of its library, and the spans."""
    body = message(1, message(2, message(2, b"") * 19_998))
    assert len(list(requests_of(body, "peer"))) == 19_998
    body = message(1, message(2, message(2, b"") * 19_999))
    with pytest.raises(MalformedExportError, match="more than 20000 spans in one export"):
        list(requests_of(body, "peer"))


def test_the_largest_span() -> None:
    """64 KiB, of which four bytes say what the others are."""
    for length, refused in ((65_532, False), (65_533, True)):
        body = message(1, message(2, message(2, message(5, b"x" * length))))
        if refused:
            with pytest.raises(MalformedExportError, match="a message of more than 65536 bytes"):
                list(requests_of(body, "peer"))
        else:
            assert list(requests_of(body, "peer")) == ["other_span"]


def test_spans_of_the_start_are_other_spans() -> None:
    assert read({}, "EngineCore.load_model") == "other_span"


@pytest.mark.parametrize(
    "body", [b"\x0a", b"\x0b\x00", b"\x0a\x02\x12\x05", b"\x80" * 11, b"\x09\x00"]
)
def test_bytes_that_are_no_export(body: bytes) -> None:
    with pytest.raises(MalformedExportError):
        list(requests_of(body, "peer"))


def test_an_empty_export_has_no_spans() -> None:
    assert list(requests_of(b"", "peer")) == []


def test_replicas_are_bounded_and_a_clock_that_jumps_is_told() -> None:
    """What a stranger sends under many names, or from another century, is counted."""
    fleet = Fleet()

    def add(replica: str, started_ns: int) -> str | None:
        (span,) = requests_of(export([("llm_request", started_ns, GIVEN)], replica), "peer")
        assert isinstance(span, RequestSpan)
        return fleet.add(span, 100.0)

    assert [add(f"r{i}", BASE_NS) for i in range(64)] == [None] * 64
    assert add("r64", BASE_NS) == "too_many_replicas"
    assert add("r0", BASE_NS + 10**18) == "clock_jumped"


def test_a_clock_that_was_set_for_good_is_followed() -> None:
    """Also one whose first span was of 1970; a single stray one changes nothing."""
    fleet = Fleet()

    def add(number: int, started_ns: int, now: float) -> str | None:
        made = GIVEN | {"gen_ai.request.id": f"cmpl-{number}"}
        (span,) = requests_of(export([("llm_request", started_ns, made)], "r0"), "peer")
        assert isinstance(span, RequestSpan)
        return fleet.add(span, now)

    assert add(0, 10**9, 1.0) is None
    said = [add(1 + i, BASE_NS + i * 10**9, 2.0 + i) for i in range(20)]
    assert said == ["clock_jumped"] * 9 + [None] * 11
    assert add(30, 10**9, 30.0) == "clock_jumped"
    assert add(31, BASE_NS + 29 * 10**9, 31.0) is None


def test_a_span_that_is_sent_again_counts_once() -> None:
    fleet = Fleet()
    (span,) = requests_of(export([("llm_request", BASE_NS, GIVEN)], "r0"), "peer")
    assert isinstance(span, RequestSpan)
    assert [fleet.add(span, 1.0), fleet.add(span, 2.0)] == [None, "repeated"]


def test_replicas_that_are_gone_make_room_for_others() -> None:
    """An autoscaled fleet has more than 64 in its life."""
    fleet = Fleet()

    def add(replica: str, now: float) -> str | None:
        started = BASE_NS + round(now * 1e9)
        (span,) = requests_of(export([("llm_request", started, GIVEN)], replica), "peer")
        assert isinstance(span, RequestSpan)
        return fleet.add(span, now)

    assert {add(f"r{i}", 1.0) for i in range(64)} == {None}
    fleet.advance(50.0)
    assert add("r0", 95.0) is None
    assert add("new", 100.0) is None
    assert set(fleet.replicas) == {"r0", "new"}
    assert fleet.served_times().arrived == pytest.approx([0.55] * 64)  # their clocks were ours
