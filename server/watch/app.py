"""The routes of `kendall watch`: the live model's, as a gateway has them, over servers that are
somebody else's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from importlib import metadata
from typing import Any

import uvicorn
from fastapi import FastAPI, Response

from kendall.queueing.errors import CommandError
from kendall.server.http.api.failures import add_failures
from kendall.server.http.live_routes import add_live
from kendall.server.page import Feed, add_page
from kendall.server.telemetry.metrics import exposition
from kendall.server.watch.options import WatchOptions
from kendall.server.watch.receiver import QuietServer
from kendall.server.watch.report import WatchReport
from kendall.server.watch.servers import WatchedServers

STOPPED = 2  # seconds that open connections have at the end


def create_app(servers: WatchedServers, report: Callable[[], WatchReport]) -> FastAPI:
    """Nothing can be changed by it."""
    feed = Feed(servers)
    app = plain_app(lambda: exposition(servers.metrics), lambda _: _showing(feed))

    @app.get("/admin/watch")
    async def watched() -> dict[str, Any]:
        return report().as_json()

    add_live(app, servers)
    add_page(app, feed)
    return app


def plain_app(
    exposed: Callable[[], bytes],
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """With `/health`, and what is `exposed` to a Prometheus."""
    app = FastAPI(
        title="Kendall watch",
        version=metadata.version("kendall"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )

    @app.get("/health", response_class=Response)
    async def health() -> Response:
        return Response()

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(exposed(), media_type=kind)

    add_failures(app)
    return app


@asynccontextmanager
async def _showing(feed: Feed) -> AsyncIterator[None]:
    """The page follows while the routes are served."""
    ticking = asyncio.create_task(feed.run())
    try:
        yield
    finally:
        ticking.cancel()


@asynccontextmanager
async def serving(app: FastAPI, options: WatchOptions) -> AsyncIterator[int]:
    """The port, while it serves. Raises CommandError where the address cannot be had."""
    host, port = options.report.host, options.report.port
    config = uvicorn.Config(
        app,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STOPPED,
    )
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise CommandError(
            f"got --host {host} --port {port}, which cannot be listened on "
            f"({error.strerror or error}); expected a free port of this machine"
        ) from None
    server = QuietServer(config)
    task = asyncio.create_task(server.serve([listening]))
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        with suppress(TimeoutError):
            await asyncio.wait_for(task, 2 * STOPPED)
