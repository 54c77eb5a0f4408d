"""What the page reads of the gateway. It changes nothing: its controls use `/admin`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kendall.server.admission.control import Overload
    from kendall.server.admission.limits_in_force import LimitsInForce
    from kendall.server.calibration.in_force import LatencyModelInForce
    from kendall.server.engines.proxied import ProxyingEngine
    from kendall.server.live import LiveModel
    from kendall.server.predictors.lengths import LengthPredictor
    from kendall.server.queue.batcher import Batcher
    from kendall.server.settings import Settings
    from kendall.server.supervision.lifecycle import Lifecycle
    from kendall.server.supervision.replicas.servers import Servers
    from kendall.server.supervision.supervisor import Supervisor
    from kendall.server.telemetry.metrics import Metrics


class PageHost(Protocol):
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
    def length_predictor(self) -> LengthPredictor | None: ...
    @property
    def servers(self) -> Servers | None: ...
    @property
    def proxying(self) -> ProxyingEngine | None: ...
    def live_model(self) -> LiveModel: ...
