"""A request that asks for another protocol is served without it, body and all; HTTP/1.0 clients
get no chunks.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kendall.server.http.bounds import LimitedProtocol
from kendall.server.http.connection import protocol_with
from tests.serving import on_a_socket

UPGRADE = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: "
    b"AAMAAABkAARAAAAAAAIAAAAA\r\n"
)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what it got, in two pieces where the path says so."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    names = sorted(name.decode() for name, _ in scope["headers"])
    text = f"[{scope['method']} {scope['path']} {body.decode()} {','.join(names)}]".encode()
    streamed = scope["path"] == "/stream"
    headers = [] if streamed else [(b"content-length", b"%d" % len(text))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if streamed:
        await send({"type": "http.response.body", "body": text[:5], "more_body": True})
        await asyncio.sleep(0)
        text = text[5:]
    await send({"type": "http.response.body", "body": text})


@pytest.fixture
def port() -> Iterator[int]:
    with on_a_socket(app, protocol_with(LimitedProtocol, 0.0), asyncio.new_event_loop) as found:
        yield found


def request(
    path: str = "/a",
    body: bytes = b"",
    more: bytes = b"",
    method: bytes = b"POST",
    version: bytes = b"1.1",
) -> bytes:
    head = b"%b %b HTTP/%b\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n" % (
        method,
        path.encode(),
        version,
        more,
        len(body),
    )
    return head + body


def received(client: socket.socket) -> bytes:
    """Everything until the connection is closed."""
    return b"".join(iter(lambda: client.recv(1 << 16), b""))


def answers(port: int, *pieces: bytes, pause: float = 0.02) -> bytes:
    """Everything that comes back, up to the end of a last request that closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            client.sendall(piece)
            time.sleep(pause)
        client.sendall(request("/last", more=b"Connection: close\r\n", method=b"GET"))
        return received(client)


def served(found: bytes) -> list[bytes]:
    return [part.split(b"]")[0] for part in found.split(b"[")[1:]]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0", b"h2c, websocket"])
@pytest.mark.parametrize("later", [False, True])
def test_its_body_is_its_body_and_no_request(port: int, protocol: bytes, *, later: bool) -> None:
    body = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    whole = request("/a", body, UPGRADE % protocol)
    pieces = (whole[: -len(body)], body) if later else (whole,)
    found = served(answers(port, *pieces))
    assert found == [
        b"POST /a " + body + b" content-length,host",
        b"GET /last  connection,content-length,host",
    ]


def test_it_is_heard_whole_byte_by_byte(port: int) -> None:
    whole = request("/a", b"body", UPGRADE % b"h2c")
    found = served(answers(port, *(whole[at : at + 1] for at in range(len(whole))), pause=0.001))
    assert found[0] == b"POST /a body content-length,host"
    assert len(found) == 2


def test_a_chunked_body_is_heard_too(port: int) -> None:
    chunked = (
        b"POST /a HTTP/1.1\r\nHost: x\r\n"
        + UPGRADE % b"h2c"
        + b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"
    )
    assert served(answers(port, chunked))[0] == b"POST /a body host,transfer-encoding"


def test_what_is_pipelined_behind_it_is_answered(port: int) -> None:
    many = [
        request(f"/{number}", b"x" * (number % 3), UPGRADE % b"h2c" if number % 2 else b"")
        for number in range(300)
    ]
    found = served(answers(port, b"".join(many)))
    assert [part.split()[1] for part in found] == [
        *(b"/%d" % number for number in range(300)),
        b"/last",
    ]


def test_the_rest_of_its_connection_header_holds(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(
            request("/a", b"body", b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n")
            + request("/b")
        )
        found = received(client)
    assert served(found) == [b"POST /a body connection,content-length,host"]


def test_connect_is_refused(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"CONNECT other:443 HTTP/1.1\r\nHost: other\r\n\r\n" + request("/b"))
        found = received(client)
    assert found.startswith(b"HTTP/1.1 400 ")
    assert served(found.partition(b"\r\n\r\n")[2]) == []


@pytest.mark.parametrize(("path", "framed"), [("/stream", b""), ("/a", b"content-length: ")])
def test_http_1_0_gets_no_chunks(port: int, path: str, framed: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(request(path, b"body", version=b"1.0"))
        found = received(client)
    head, _, body = found.partition(b"\r\n\r\n")
    assert body == f"[POST {path} body content-length,host]".encode()
    assert b"chunked" not in head
    assert b"connection: close" in head
    assert framed in head
