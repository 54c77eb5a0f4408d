"""Each server of the queue: its state, what it has in service, how busy and how fast it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from kendall.server.calibration.host import ObservedQueue
from kendall.server.engines.capabilities import ServersSummary, ServerSummary
from kendall.server.engines.proxied import ProxyingEngine
from kendall.server.live.answers import AssessmentSummary
from kendall.server.live.model import LiveModel
from kendall.server.supervision.replicas.servers import Servers


class RunningQueue(ObservedQueue, Protocol):
    """What each server has in service."""

    def running(self) -> Sequence[Sequence[object]]: ...


class Ready(Protocol):
    """Whether the engine serves."""

    @property
    def ready(self) -> bool: ...


class ServersHost(Protocol):
    """`batcher` and `live_model` raise ApiError 503 before the engine is up."""

    @property
    def batcher(self) -> RunningQueue: ...
    @property
    def lifecycle(self) -> Ready: ...
    @property
    def servers(self) -> Servers | None: ...
    @property
    def proxying(self) -> ProxyingEngine | None: ...
    def live_model(self) -> LiveModel: ...


def servers_of(gateway: ServersHost) -> ServersSummary:
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
            ServerSummary(id=number, state="serving" if serves and number in in_use else "lost")
            for number in range(len(running))
        ]
    return ServersSummary(
        replicas=sum(server.state != "draining" for server in known),
        last_failure=None,
        servers=[
            replace(each, in_service=running[each.id] if each.id < len(running) else 0)
            for each in known
        ],
    )


def servers_seen(gateway: ServersHost) -> ServersSummary:
    """The same with how busy and how fast each was."""
    live, known = gateway.live_model(), servers_of(gateway)
    speeds = _speeds(live.prediction, known.servers)
    servers = [
        replace(
            each,
            utilisation=live.activity.utilisation_of(each.id),
            speed=speeds.get(each.id),
        )
        for each in known.servers
    ]
    return replace(known, servers=servers)


def _speeds(
    prediction: AssessmentSummary | None, servers: Sequence[ServerSummary]
) -> Mapping[int, float]:
    """That of all is that of the only one."""
    if prediction is None:
        return {}
    return {servers[0].id: prediction.speed} if len(servers) == 1 else prediction.server_speeds
