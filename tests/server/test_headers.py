"""The headers that a call may name itself by, and those of its answer."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest

from kendall.server.http.headers import (
    asked_id,
    delay_headers,
    early_headers,
    of_server_behind,
    stamped,
)


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ([], None),
        ([(b"other", b"a"), (b"x-request-id", b"a.B-0_:")], "a.B-0_:"),
        ([(b"x-request-id", b"i" * 128)], "i" * 128),
        ([(b"x-request-id", b"i" * 129)], None),
        ([(b"x-request-id", b"")], None),
        ([(b"x-request-id", b"not fit"), (b"x-request-id", b"second")], None),
        ([(b"x-request-id", b"\xff")], None),
    ],
)
def test_a_name_is_repeated_where_it_is_fit(
    headers: list[tuple[bytes, bytes]], name: str | None
) -> None:
    assert asked_id(headers) == name


def sent(status: int, asked: list[tuple[bytes, bytes]], *own: tuple[bytes, bytes]) -> Any:
    """What leaves of an answer of this status."""
    messages = list[Any]()

    async def send(message: Any) -> None:
        messages.append(message)

    async def main() -> None:
        stamping = stamped({"headers": asked}, send)
        await stamping({"type": "http.response.start", "status": status, "headers": own})
        await stamping({"type": "http.response.body", "body": b"x"})

    asyncio.run(main())
    start, body = messages
    assert body == {"type": "http.response.body", "body": b"x"}
    assert (start["type"], start["status"]) == ("http.response.start", status)
    return start["headers"]


def test_an_answer_has_its_name_and_says_when_to_come_again() -> None:
    asked = [(b"x-request-id", b"mine")]
    name = (b"x-request-id", b"mine")
    for status in (200, 428, 430, 500, 502, 504):
        assert sent(status, asked, (b"a", b"b")) == [(b"a", b"b"), name]
    for status in (429, 503):
        assert sent(status, asked, (b"a", b"b")) == [(b"a", b"b"), name, (b"retry-after", b"5")]
        assert sent(status, asked, (b"retry-after", b"9")) == [(b"retry-after", b"9"), name]
    ((key, made),) = sent(200, [])
    assert key == b"x-request-id"
    assert re.fullmatch(b"[0-9a-f]{32}", made)


@pytest.mark.parametrize(
    ("estimate", "headers"),
    [
        (None, []),
        ((3, None), [(b"x-kendall-queue-position", b"3")]),
        (
            (0, 1.2345678),
            [
                (b"x-kendall-queue-position", b"0"),
                (b"x-kendall-predicted-wait-ms", b"1234.568"),
            ],
        ),
    ],
)
def test_what_is_known_at_the_arrival_is_said_of_the_last_sequence(
    estimate: Any, headers: list[tuple[bytes, bytes]]
) -> None:
    last: Any = SimpleNamespace(wait_estimate=estimate)
    assert early_headers("mine", last) == [(b"x-request-id", b"mine"), *headers]
    assert early_headers("mine", None) == [(b"x-request-id", b"mine")]


def test_delays_are_milliseconds() -> None:
    assert delay_headers(12.5) == [
        (b"x-kendall-queueing-delay-ms", b"12.5"),
        (b"x-llm-d-flow-queue-duration-ms", b"12"),
        (b"server-timing", b"queue;dur=12.5"),
    ]
    assert delay_headers(0.75, 3.25)[1:] == [
        (b"x-llm-d-flow-queue-duration-ms", b"1"),
        (b"server-timing", b"queue;dur=0.75, service;dur=3.25"),
    ]


def test_another_gateways_delays_are_dropped_and_all_else_is_kept() -> None:
    kept = [(b"a", b"b"), (b"server-timing", b"cache;dur=1, queued;dur=2")]
    delays = [name for name, _ in delay_headers(1.0)[:2]]
    own = [(name, b"1") for name in (*delays, b"x-kendall-queue-position")]
    own.append((b"x-kendall-predicted-wait-ms", b"1"))
    for timing in (b"queue;dur=1", b" service;dur=2,queue", b"queue , service ;dur=1"):
        assert of_server_behind([*own, *kept, (b"server-timing", timing)]) == kept
    mixed = (b"server-timing", b"queue;dur=1,cache;dur=1,service;dur=2, db;dur=3")
    assert of_server_behind([mixed]) == [(b"server-timing", b"cache;dur=1, db;dur=3")]
