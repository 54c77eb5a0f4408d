"""`/admin/servers`: the servers of the queue; how many replicas there are of the engine, or which
servers behind are passed calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from kendall.policies.text import SpecError
from kendall.queueing.json_form import json_object
from kendall.server.engines.proxied import each_once, server_url
from kendall.server.gateway import Gateway
from kendall.server.http.api.openapi import body, errors
from kendall.server.http.api.validation import parse
from kendall.server.live.servers_seen import servers_of
from kendall.server.runtime.errors import ApiError
from kendall.server.settings import Settings
from kendall.server.supervision.settings import MOST_REPLICAS

_Asked = TypeVar("_Asked")
_Checked = TypeVar("_Checked")
MOST_URLS = 1024
HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


class ServersChange(BaseModel):
    """`PUT /admin/servers`: how many replicas are to serve, or the servers behind that are."""

    model_config = ConfigDict(extra="forbid", strict=True)
    replicas: int | None = Field(default=None, ge=1, le=MOST_REPLICAS)
    urls: list[str] | None = Field(default=None, min_length=1, max_length=MOST_URLS)

    @model_validator(mode="after")
    def _one(self) -> ServersChange:
        if (self.replicas is None) == (self.urls is None):
            got = "neither" if self.replicas is None else "both"
            raise ValueError(
                f"got {got} of replicas and urls; expected replicas, of a gateway that starts its "
                "engines, or urls, of one with --engine http"
            )
        return self


def is_own(url: str, settings: Settings) -> bool:
    """Whether the gateway itself listens there, as far as its name tells."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return port == settings.port and parts.hostname in (*HERE, settings.host)


def add_servers(app: FastAPI, gateway: Gateway) -> None:
    """The route, for operators."""

    @app.get("/admin/servers", responses=errors(401, 403, 500, 503))
    async def servers() -> dict[str, Any]:
        return json_object(servers_of(gateway))

    @app.put(
        "/admin/servers",
        responses=errors(400, 401, 403, 409, 413, 500, 503),
        openapi_extra=body(ServersChange),
    )
    async def change_servers(request: Request) -> dict[str, Any]:
        """Returns at once: GET tells when a new one serves, or an old one has ended."""
        change = await parse(
            request.receive, ServersChange, gateway.settings.security.max_body_bytes
        )
        if change.urls is not None:
            return _serve_on(gateway, change.urls)
        gateway.admit()
        assert change.replicas is not None
        if gateway.servers is None:
            raise ApiError(
                409,
                "no_replicas",
                f"got replicas {change.replicas} for a gateway that starts one engine, or none; "
                "expected one that was started with --replicas 2 or more",
                param="replicas",
            )
        return json_object(gateway.servers.resize(change.replicas))


def _checked(check: Callable[[_Asked, str], _Checked], asked: _Asked, *, param: str) -> _Checked:
    """Raises ApiError 400."""
    try:
        return check(asked, "url")
    except SpecError as error:
        raise ApiError(400, "invalid_url", str(error), param=param) from None


def _serve_on(gateway: Gateway, asked: list[str]) -> dict[str, Any]:
    """Also while it drains. Raises ApiError 400, 409, and 503 before the first server was there."""
    _ = gateway.batcher
    if gateway.proxying is None:
        raise ApiError(
            409,
            "no_urls",
            "got urls for a gateway that starts its engines; expected one with --engine http",
            param="urls",
        )
    roots = [_checked(server_url, url, param=f"urls[{place}]") for place, url in enumerate(asked)]
    urls = _checked(each_once, roots, param="urls")
    if own := next((url for url in urls if is_own(url, gateway.settings)), None):
        message = f"got url {own}, which is this gateway; expected a server behind it"
        raise ApiError(400, "invalid_url", message, param="urls")
    try:
        gateway.proxying.serve_on(urls)
    except ValueError as error:
        raise ApiError(409, "no_server_left", str(error), param="urls") from None
    return json_object(servers_of(gateway))
