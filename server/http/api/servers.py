"""`/admin/servers`: the servers of the queue, and how many replicas there are of the engine."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request

from server.gateway import Gateway
from server.http.api.openapi import body, errors
from server.http.api.validation import parse
from server.runtime.errors import ApiError
from server.supervision.replicas.servers import ServersChange


def servers_of(gateway: Gateway) -> dict[str, Any]:
    """What each server does. Raises ApiError 503 before the engine is up."""
    batcher = gateway.batcher
    if gateway.servers is not None:
        return gateway.servers.state()
    in_use, serves = batcher.servers_in_use, gateway.lifecycle.ready
    return {
        "replicas": batcher.capabilities.servers,
        "last_failure": None,
        "servers": [
            {
                "id": server_id,
                "state": "serving" if serves and server_id in in_use else "lost",
                "in_service": len(running),
            }
            for server_id, running in enumerate(batcher.running())
        ],
    }


def add_servers(app: FastAPI, gateway: Gateway) -> None:
    """The route, for operators."""

    @app.get("/admin/servers", responses=errors(401, 403, 500, 503))
    async def servers() -> dict[str, Any]:
        return servers_of(gateway)

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
        gateway.admit()
        if gateway.servers is None:
            raise ApiError(
                409,
                "no_replicas",
                f"got replicas {change.replicas} for a gateway that starts one engine, or none; "
                "expected one that was started with --replicas 2 or more",
                param="replicas",
            )
        return gateway.servers.resize(change.replicas)
