"""What serves while a test that is no coroutine looks on: a gateway in a process of its own, an
application on a socket in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from kendall.loadgen.gateway.gateway_process import GatewayError, GatewayProcess
from kendall.server.wire.listener import ListeningServer

PATIENCE = 3  # times as long as a gateway may take that is measured: an engine on a busy machine


@contextlib.contextmanager
def started(gateway: GatewayProcess) -> Iterator[asyncio.Runner]:
    """Ready to serve, and ended afterwards. Yields what runs coroutines with it."""

    async def start() -> None:
        await gateway.__aenter__()
        for _ in range(PATIENCE):
            with contextlib.suppress(GatewayError):
                return await gateway.ready()
            if gateway.ended:
                break
        raise GatewayError(gateway.last_line())

    with asyncio.Runner() as runner:
        try:
            runner.run(start())
            yield runner
        finally:
            runner.run(gateway.__aexit__(None, None, None))


@contextlib.contextmanager
def on_a_socket(
    app: Any,
    protocol: type[asyncio.Protocol],
    make: Callable[[], asyncio.AbstractEventLoop],
    sock: socket.socket | None = None,
    **options: Any,
) -> Iterator[int]:
    """The port of uvicorn with this protocol, on an event loop of its own. `sock` listens
    already; `options`: more of `uvicorn.Config`.
    """
    sock = sock or socket.create_server(("127.0.0.1", 0))
    server = ListeningServer(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            timeout_graceful_shutdown=1,
            **options,
        )
    )

    def serve() -> None:
        with asyncio.Runner(loop_factory=make) as runner:
            runner.run(server.serve(sockets=[sock]))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate for this machine and its key, valid for a day."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    command += [
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
