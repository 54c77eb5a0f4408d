"""The page's routes: the document and its files for anyone, the numbers for whoever may read
`/metrics`.

Nothing here changes the gateway: the page's controls speak to `/admin`, with the operator's key.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from kendall.server.page.assets import ASK_AGAIN, KEEP, SECURITY, Asset, load_assets
from kendall.server.page.feed import Feed
from kendall.server.runtime.errors import ApiError

LIVE = {
    "cache-control": "no-store",
    "x-accel-buffering": "no",
    **SECURITY,
}  # a proxy must not collect the events


class _Events(StreamingResponse):
    """The feed for one viewer, or 429 where there are too many."""

    def __init__(self, feed: Feed, address: str) -> None:
        super().__init__(feed.follow(), media_type="text/event-stream", headers=LIVE)
        self._feed, self._address = feed, address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The seat is taken and given back here: a stream that never began would keep it."""
        if not self._feed.enter(self._address):
            error = ApiError(
                429,
                "too_many_viewers",
                "got one more viewer of the page than this gateway serves; close another one",
            )
            await JSONResponse(error.body(), error.status, error.headers())(scope, receive, send)
            return
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.leave(self._address)


def add_page(app: FastAPI, feed: Feed) -> None:
    """`/`, its files, the stream and the history."""

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return _answer(request.headers, load_assets().document, ASK_AGAIN)

    @app.get("/live/static/{version}/{name:path}", include_in_schema=False)
    async def file(request: Request, version: str, name: str) -> Response:
        assets = load_assets()
        found = assets.files.get(name) if version == assets.version else None
        if found is None:
            raise ApiError(
                404,
                "not_found",
                (
                    f"got {request.url.path}; expected a file of this version of the page: load it "
                    "again"
                ),
            )
        return _answer(request.headers, found, KEEP)

    @app.get("/live/events", include_in_schema=False)
    async def events(request: Request) -> Response:
        return _Events(feed, "" if request.client is None else request.client.host)

    @app.get("/live/history", include_in_schema=False)
    async def history(request: Request) -> Response:
        zipped, headers = await feed.history(), LIVE | {"vary": "accept-encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(
                zipped,
                media_type="application/json",
                headers=headers | {"content-encoding": "gzip"},
            )
        return Response(
            await asyncio.to_thread(gzip.decompress, zipped),
            media_type="application/json",
            headers=headers,
        )


def _answer(asked: Mapping[str, str], asset: Asset, cache_control: str) -> Response:
    accepted = "gzip" in asked.get("accept-encoding", "")
    headers = asset.headers(cache_control, gzip_accepted=accepted)
    if asset.etag in asked.get("if-none-match", ""):
        return Response(
            status_code=304, headers={name: headers[name] for name in ("etag", "cache-control")}
        )
    return Response(asset.body(gzip_accepted=accepted), headers=headers)
