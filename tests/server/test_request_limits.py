"""Requests that come in slowly, without end, or malformed, over a socket: each is answered in
OpenAI's form and let go.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kendall.server.http.bounds import MAX_HEAD_BYTES, MAX_HEADERS, LimitedProtocol
from kendall.server.security.exposure import uvicorn_tls
from kendall.server.security.settings import TlsSettings
from tests.serving import on_a_socket, self_signed

HEAD_TIMEOUT, BODY_TIMEOUT = 0.3, 0.6
MOST_BYTES = 400  # of a head, one every 50 ms: 20 s


class Hasty(LimitedProtocol):
    head_timeout = HEAD_TIMEOUT
    body_timeout = BODY_TIMEOUT


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the size of the body; `/slow` takes longer over it than the limits."""
    if scope["type"] != "http":
        return
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    if scope["path"] == "/slow":
        await asyncio.sleep(BODY_TIMEOUT + 0.1)
    body = b"%d" % size
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(
    params=[asyncio.new_event_loop, uvloop.new_event_loop],
    ids=["asyncio", "uvloop"],
    scope="module",
)
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with on_a_socket(echo, Hasty, request.param) as port:
        yield port


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def rest(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    found = b""
    try:
        while data := client.recv(1 << 16):
            found += data
    except ConnectionResetError:  # it closed with bytes of ours unread
        pass
    return found


def one(client: socket.socket) -> bytes:
    """One whole answer: its head and its body may come apart."""
    found = b""
    while not found.endswith((b"\r\n\r\n0", b"\r\n\r\n5")):
        data = client.recv(1 << 16)
        assert data, found
        found += data
    return found


def refused(answer: bytes, status: int, code: str) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    return (
        head.startswith(b"HTTP/1.1 %d " % status)
        and set(error) == {"message", "type", "param", "code"}
        and error["code"] == code
    )


@pytest.mark.slow
def test_whole_requests_on_one_connection_meet_no_limit(port: int) -> None:
    """Longer than both limits together, with pauses shorter than the keep-alive."""
    with connect(port) as client:
        for _ in range(3):
            client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nabcde")
            assert one(client).endswith(b"5")
            time.sleep(HEAD_TIMEOUT + 0.1)


def test_a_head_that_does_not_end_is_let_go(port: int) -> None:
    """However steadily its bytes come."""
    began = time.perf_counter()
    with connect(port) as client:
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\n")
        client.settimeout(0.05)
        answer = b""
        for _ in range(MOST_BYTES):
            try:
                answer = client.recv(1000)
                break
            except TimeoutError:
                client.sendall(b"x")
        assert refused(answer, 408, "request_timeout")
        assert time.perf_counter() - began > HEAD_TIMEOUT * 0.9, "not before its time"


def test_a_body_that_does_not_end_is_let_go(port: int) -> None:
    began = time.perf_counter()
    with connect(port) as client:
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nab")
        assert refused(rest(client), 408, "request_timeout")
        assert time.perf_counter() - began > BODY_TIMEOUT * 0.9, "not before its time"


@pytest.mark.parametrize("first", [b"", b"\r\n"])
def test_a_client_that_connects_and_says_nothing_is_let_go(port: int, first: bytes) -> None:
    with connect(port) as client:
        client.sendall(first)
        assert rest(client) == b""


def test_blank_lines_between_requests_do_not_hold_a_connection(port: int) -> None:
    with connect(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert one(client).endswith(b"0")
        client.sendall(b"\r\n")
        assert rest(client) == b""


@pytest.mark.parametrize(
    "make", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_a_head_of_too_many_bytes_or_headers_is_431(make: Any) -> None:
    """With the time that a gateway gives a head: it comes in many pieces."""
    with on_a_socket(echo, LimitedProtocol, make) as port:
        check_sizes_of_heads(port)


def check_sizes_of_heads(port: int) -> None:
    with connect(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n")
        for _ in range(40):
            try:
                client.sendall(b"a" * (MAX_HEAD_BYTES // 16))
            except (BrokenPipeError, ConnectionResetError):
                break
            time.sleep(0.001)
        answer = rest(client)
        assert answer == b"" or refused(answer, 431, "head_too_large")
    with connect(port) as client:
        client.sendall(
            b"GET / HTTP/1.1\r\n"
            + b"".join(b"h%d: x\r\n" % n for n in range(MAX_HEADERS + 1))
            + b"\r\n"
        )
        assert refused(rest(client), 431, "head_too_large")
    with connect(port) as client:
        client.sendall(
            b"GET / HTTP/1.1\r\nhost: x\r\n"
            + b"".join(b"h%d: x\r\n" % n for n in range(MAX_HEADERS - 1))
            + b"\r\n"
        )
        assert client.recv(1000).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00",
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_http_is_one_400_in_openais_form(port: int, raw: bytes) -> None:
    with connect(port) as client:
        client.sendall(raw)
        assert refused(rest(client), 400, "invalid_http")


@pytest.mark.slow
def test_a_request_in_service_does_not_end_with_the_slow_one_behind_it(port: int) -> None:
    """Pipelined: the first is answered whole, though the second's limit ran out meanwhile."""
    with connect(port) as client:
        client.sendall(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\nPOST / HTTP/1.1\r\nhost:")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
    with connect(port) as client:
        client.sendall(
            b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\nPOST / HTTP/1.1\r\nhost: x\r\ncontent-length: "
            b"9\r\n\r\nab"
        )
        assert client.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_half_closed_connection_is_let_go(port: int) -> None:
    with connect(port) as client:
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nab")
        client.shutdown(socket.SHUT_WR)
        rest(client)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("own_certificate", [False, True])
def test_tls_serves_and_asks_clients_for_a_certificate_where_it_is_said_whose(
    certificate: tuple[Path, Path], own_certificate: bool
) -> None:
    cert, key = certificate
    tls = TlsSettings(certfile=cert, keyfile=key, ca_certs=cert if own_certificate else None)
    with on_a_socket(echo, Hasty, uvloop.new_event_loop, **uvicorn_tls(tls)) as port:
        context = ssl.create_default_context(cafile=str(cert))
        assert asks(port, context).startswith(b"HTTP/1.1 200") != own_certificate
        context.load_cert_chain(cert, key)
        assert asks(port, context).startswith(b"HTTP/1.1 200")


def asks(port: int, context: ssl.SSLContext) -> bytes:
    try:
        with context.wrap_socket(connect(port), server_hostname="localhost") as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return rest(client)
    except (ssl.SSLError, ConnectionError):
        return b""
