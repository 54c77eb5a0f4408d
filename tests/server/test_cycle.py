"""One request and its answer on a connection: how an answer is framed, and what an application may
not send.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kendall.server.http.connection import StampedProtocol
from tests.serving import on_a_socket

App = Callable[[Any, Any, Any], Coroutine[Any, Any, None]]
Header = tuple[bytes, bytes]


def sending(
    *bodies: bytes, status: int = 200, headers: tuple[Header, ...] = (), ends: bool = True
) -> App:
    """An application that answers so."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        for number, body in enumerate(bodies, 1):
            more = not ends or number < len(bodies)
            await send({"type": "http.response.body", "body": body, "more_body": more})

    return app


def asked(app: App, request: bytes) -> bytes:
    """All that comes on a connection that sends this, until its end."""
    with (
        on_a_socket(app, StampedProtocol, asyncio.new_event_loop, date_header=False) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as client,
    ):
        client.sendall(request)
        found = b""
        while piece := client.recv(1 << 16):
            found += piece
        return found.replace(b"server: uvicorn\r\n", b"")


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
FIRST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
LAST = b"connection: close\r\n\r\n"
FAILED = (
    b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 21\r\nconnection: close\r\n\r\nInternal Server Error"
)


@pytest.mark.parametrize(
    ("request_", "app", "answer"),
    [
        (
            GET,
            sending(b"one", b"", b"three"),
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
            b"3\r\none\r\n5\r\nthree\r\n0\r\n\r\n",
        ),
        (
            GET,
            sending(b"one", b"two", headers=((b"Content-Length", b"6"),)),
            b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n" + LAST + b"onetwo",
        ),
        (
            b"GET / HTTP/1.0\r\n\r\n",
            sending(b"one", b"two"),
            b"HTTP/1.1 200 OK\r\n" + LAST + b"onetwo",
        ),
        (
            GET.replace(b"GET", b"HEAD"),
            sending(b"one", headers=((b"content-length", b"3"),)),
            b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n" + LAST,
        ),
        (GET, sending(b"", status=204), b"HTTP/1.1 204 No Content\r\n" + LAST),
        (
            FIRST + GET,
            sending(b"", status=304),
            b"HTTP/1.1 304 Not Modified\r\n\r\nHTTP/1.1 304 Not Modified\r\n" + LAST,
        ),
        (
            FIRST + GET,
            sending(b"", status=204, headers=((b"connection", b"Keep, Close"),)),
            b"HTTP/1.1 204 No Content\r\nconnection: Keep, Close\r\n\r\n",
        ),
    ],
    ids=["chunks", "a length", "HTTP/1.0", "HEAD", "no body", "pipelined", "the last one"],
)
def test_answers_are_framed(request_: bytes, app: App, answer: bytes) -> None:
    assert asked(app, request_) == answer


@pytest.mark.parametrize(
    "headers",
    [
        ((b"a b", b"c"),),
        ((b"a", b"b\r\nc: d"),),
        ((b"a", b"\0"),),
        ((b"good", b"good"), (b"a:", b"b")),
    ],
)
def test_an_illegal_header_is_an_error_of_the_application(headers: tuple[Header, ...]) -> None:
    assert asked(sending(b"", headers=headers), GET) == FAILED


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    del scope, receive, send


async def failing(scope: Any, receive: Any, send: Any) -> None:
    raise ArithmeticError


async def out_of_turn(scope: Any, receive: Any, send: Any) -> None:
    del scope, receive
    await send({"type": "http.response.body", "body": b"x"})


@pytest.mark.parametrize("app", [nothing, failing, out_of_turn])
def test_an_application_that_does_not_answer_is_answered_for(app: App) -> None:
    assert asked(app, GET) == FAILED


@pytest.mark.parametrize(
    ("app", "sent"),
    [
        (sending(b"one", ends=False), b"3\r\none\r\n"),
        (sending(b"one", headers=((b"content-length", b"4"),)), b"one"),
        (sending(b"one", b"two", headers=((b"content-length", b"4"),)), b"one"),
    ],
    ids=["no end", "too short", "too long"],
)
def test_an_answer_that_is_not_whole_ends_its_connection(app: App, sent: bytes) -> None:
    head, _, body = asked(app, GET).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert body == sent, "no last chunk"


def test_a_body_is_received_in_parts_and_its_sender_gets_leave_to_send() -> None:
    parts = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["more_body"]:
            parts.append(message["body"])
        parts.append(message["body"])
        await sending(b"", status=204)(scope, receive, send)
        assert (await receive())["type"] == "http.disconnect"

    with (
        on_a_socket(app, StampedProtocol, asyncio.new_event_loop) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as client,
    ):
        client.sendall(
            b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 6\r\n\r\n"
        )
        assert client.recv(100) == CONTINUE
        client.sendall(b"one")
        client.sendall(b"two")
        assert client.recv(100).startswith(b"HTTP/1.1 204 No Content\r\n")
    assert b"".join(parts) == b"onetwo"
