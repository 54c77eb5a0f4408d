"""Each server of the queue: its state, what it has in service, how busy and how fast it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kendall.server.engines.proxied import ProxyingEngine
from kendall.server.live.model import LiveModel
from kendall.server.queue.batcher import Batcher
from kendall.server.supervision.lifecycle import Lifecycle
from kendall.server.supervision.replicas.servers import Servers


class ServersHost(Protocol):
    """`batcher` and `live_model` raise ApiError 503 before the engine is up."""

    @property
    def batcher(self) -> Batcher: ...
    @property
    def lifecycle(self) -> Lifecycle: ...
    @property
    def servers(self) -> Servers | None: ...
    @property
    def proxying(self) -> ProxyingEngine | None: ...
    def live_model(self) -> LiveModel: ...


def servers_of(gateway: ServersHost) -> dict[str, Any]:
    """What each server does, and how many there are."""
    batcher = gateway.batcher
    if gateway.servers is not None:
        return gateway.servers.state()
    running = [len(each) for each in batcher.running()]
    if gateway.proxying is not None:
        known = gateway.proxying.servers()
    else:
        in_use, serves = batcher.servers_in_use, gateway.lifecycle.ready
        known = [
            {"id": server_id, "state": "serving" if serves and server_id in in_use else "lost"}
            for server_id in range(len(running))
        ]
    return {
        "replicas": sum(server["state"] != "draining" for server in known),
        "last_failure": None,
        "servers": [
            server | {"in_service": running[server["id"]] if server["id"] < len(running) else 0}
            for server in known
        ],
    }


def servers_seen(gateway: ServersHost) -> dict[str, Any]:
    """The same with the share of the last minute in which each was busy, and its speed in the
    window: a factor on the law's times, null where it has served too little.
    """
    live, found = gateway.live_model(), servers_of(gateway)
    speeds = _speeds(live.prediction, found["servers"])
    for server in found["servers"]:
        server["utilisation"] = live.activity.utilisation_of(server["id"])
        server["speed"] = speeds.get(server["id"])
    return found


def _speeds(
    prediction: Mapping[str, Any] | None, servers: Sequence[Mapping[str, Any]]
) -> Mapping[int, float]:
    """That of all is that of the only one."""
    if prediction is None:
        return {}
    if len(servers) == 1:
        return {servers[0]["id"]: prediction["speed"]}
    speeds: Mapping[int, float] = prediction["server_speeds"]
    return speeds
