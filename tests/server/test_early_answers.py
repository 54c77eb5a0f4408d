"""A response sent before the end of a request's body says whether the connection is closed;
where it is not, it can be reused.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from tests.serving import started

CALLS = {
    401: b"POST /admin/drain HTTP/1.1\r\n",
    404: b"POST /a/b/c HTTP/1.1\r\n",
    405: b"POST /v1/models HTTP/1.1\r\n",
}


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder: Path = tmp_path_factory.mktemp("early")
    arguments = [
        "tiny",
        "--engine",
        "emulated",
        "--latency",
        "k1=0,k2=0,k3=0,k4=0.001",
        "--admin-key",
        "some-admin-key-1",
    ]
    gateway = GatewayProcess(arguments, free_port(0), folder / "log")
    with started(gateway):
        yield int(gateway.url.rpartition(":")[2])


def head_of(client: socket.socket) -> bytes:
    found = b""
    while b"\r\n\r\n" not in found:
        data = client.recv(1 << 16)
        assert data, found
        found += data
    head, _, body = found.partition(b"\r\n\r\n")
    length = int(
        next(
            line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
        ).split(b":")[1]
    )
    while len(body) < length:
        body += client.recv(1 << 16)
    return head.lower()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("status", sorted(CALLS))
@pytest.mark.parametrize(
    "body",
    [b"content-length: 3000000\r\n\r\n", b"content-length: 5\r\nexpect: 100-continue\r\n\r\n"],
)
def test_it_says_that_the_connection_ends(port: int, status: int, body: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(CALLS[status] + b"host: localhost\r\n" + body)
        head = head_of(client)
        assert head.startswith(b"http/1.1 %d" % status)
        assert b"connection: close" in head


@pytest.mark.parametrize("path", [b"/v1/embeddings", b"/a/b/c", b"/v1/models"])
def test_a_client_that_sends_a_large_body_gets_its_answer_not_a_reset(
    port: int, path: bytes
) -> None:
    size = 12_000_000
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(
            b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (path, size)
            + b"x" * size
        )
        assert head_of(client).startswith(b"http/1.1 40")


@pytest.mark.parametrize("status", sorted(CALLS))
@pytest.mark.parametrize(
    "body", [b"\r\n", b"content-length: 0\r\n\r\n", b"content-length: 5\r\n\r\nhello"]
)
def test_it_can_be_used_on(port: int, status: int, body: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        for _ in range(3):
            client.sendall(CALLS[status] + b"host: localhost\r\n" + body)
            head = head_of(client)
            assert head.startswith(b"http/1.1 %d" % status)
            assert b"connection: close" not in head
