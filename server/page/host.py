"""What the page reads of the gateway. It changes nothing: its controls use `/admin`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from server.admission.control import Overload
    from server.admission.limits_in_force import LimitsInForce
    from server.calibration.in_force import LatencyModelInForce
    from server.engines.proxied import ProxyingEngine
    from server.live import LiveModel
    from server.queue.batcher import Batcher
    from server.settings import Settings
    from server.supervision.lifecycle import Lifecycle
    from server.supervision.replicas.servers import Servers
    from server.supervision.supervisor import Supervisor
    from server.telemetry.metrics import Metrics


class Host(Protocol):
    """`batcher` and `live_model` raise ApiError 503 before the engine is up."""

    @property
    def settings(self) -> Settings: ...
    @property
    def lifecycle(self) -> Lifecycle: ...
    @property
    def limits(self) -> LimitsInForce: ...
    @property
    def latency(self) -> LatencyModelInForce: ...
    @property
    def supervisor(self) -> Supervisor: ...
    @property
    def overload(self) -> Overload: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def now(self) -> Callable[[], float]: ...
    @property
    def batcher(self) -> Batcher: ...
    @property
    def servers(self) -> Servers | None: ...
    @property
    def proxying(self) -> ProxyingEngine | None: ...
    def live_model(self) -> LiveModel: ...
