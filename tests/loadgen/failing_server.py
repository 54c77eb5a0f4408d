"""A server as a process of its own that fails as it is told: `python -m
tests.loadgen.failing_server --dies-at 20`.

Its first line on standard output is its port.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from tests.loadgen.fake_server import answer


@contextlib.contextmanager
def failing_server(*arguments: str) -> Iterator[int]:
    """Its port; ended afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.loadgen.failing_server", *arguments], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class FailingServer:
    """Counts what it is asked."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._requests = self._answered = self._looks = 0

    async def models(self, _: web.Request) -> web.Response:
        """Not ready at first, or never heard of again."""
        self._looks += 1
        if self._arguments.silent:
            await asyncio.Event().wait()
        if self._arguments.html:
            return web.Response(text="<html></html>", content_type="text/html")
        if self._arguments.moved:
            return web.Response(status=307, headers={"location": self._arguments.moved})
        if self._looks <= self._arguments.not_ready:
            return web.json_response(
                {"error": {"message": "loading the model", "code": "starting"}}, status=503
            )
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answered until it dies."""
        self._requests += 1
        if 0 < self._arguments.dies_at <= self._requests:
            await self._die()
        body: dict[str, Any] = await request.json()
        await asyncio.sleep(self._arguments.delay)
        if self._arguments.moved:
            return web.Response(status=307, headers={"location": self._arguments.moved})
        if self._arguments.status != web.HTTPOk.status_code:
            return web.json_response(
                {"error": {"message": "no", "code": "no"}}, status=self._arguments.status
            )
        response = await answer(request, body)
        await response.write_eof()
        self._answered += 1
        return response

    async def _die(self) -> None:
        """With the answers to all the requests before that one, and no other, on their way."""
        while self._answered < self._arguments.dies_at - 1:  # noqa: ASYNC110 - it is over with the first who finds it so
            await asyncio.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)


async def _main(arguments: argparse.Namespace) -> None:
    server = FailingServer(arguments)
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    context = None
    if arguments.tls:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*arguments.tls)
    site = web.TCPSite(runner, "127.0.0.1", arguments.port, ssl_context=context)
    await site.start()
    print(site._server.sockets[0].getsockname()[1], flush=True)  # type: ignore[union-attr]  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--dies-at",
        type=int,
        default=0,
        help="the request at which it kills itself; those before it are answered",
    )
    parser.add_argument(
        "--not-ready", type=int, default=0, help="the looks that it answers with 503"
    )
    parser.add_argument(
        "--html", action="store_true", help="a page in the place of the list of models"
    )
    parser.add_argument("--moved", help="the Location of every answer, 307")
    parser.add_argument("--silent", action="store_true")
    parser.add_argument("--status", type=int, default=200, help="of every answer")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before every answer")
    parser.add_argument("--tls", nargs=2, metavar=("CERTIFICATE", "KEY"))
    asyncio.run(_main(parser.parse_args()))
