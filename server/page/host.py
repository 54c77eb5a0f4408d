"""What the page reads of the gateway, or of watched servers. It changes nothing: its controls use
`/admin`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from kendall.server.calibration.host import ObservedQueue

if TYPE_CHECKING:
    from kendall.server.admission.limits_in_force import LimitsInForce
    from kendall.server.calibration.in_force import LatencyModelInForce
    from kendall.server.engines.proxied import ProxyingEngine
    from kendall.server.live import LiveModel
    from kendall.server.predictors.lengths import LengthPredictor
    from kendall.server.queue.sequence import SequenceState
    from kendall.server.settings import Settings
    from kendall.server.supervision.lifecycle import EngineState
    from kendall.server.supervision.replicas.servers import Servers
    from kendall.server.telemetry.metrics import Metrics


class ShownQueue(ObservedQueue, Protocol):
    """What is in service, and what failed."""

    @property
    def in_service(self) -> int: ...
    @property
    def unanswered(self) -> int: ...
    @property
    def failures(self) -> Mapping[str, int]: ...
    def running(self) -> Sequence[Sequence[object]]: ...
    def in_service_sequences(self) -> Sequence[Sequence[SequenceState]]: ...


class ShownLife(Protocol):
    """What the process is doing."""

    @property
    def started(self) -> bool: ...
    @property
    def ready(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    @property
    def state(self) -> EngineState: ...
    @property
    def reason(self) -> str | None: ...


class Restarting(Protocol):
    """How often an engine was started again."""

    @property
    def restarts(self) -> int: ...


class Rejections(Protocol):
    """Requests rejected so far."""

    def by_reason(self) -> Mapping[str, float]: ...


class Rejecting(Protocol):
    """Admission."""

    @property
    def rejections(self) -> Rejections: ...


class PageHost(Protocol):
    """`batcher` and `live_model` raise ApiError 503 before the engine is up."""

    @property
    def settings(self) -> Settings: ...
    @property
    def lifecycle(self) -> ShownLife: ...
    @property
    def limits(self) -> LimitsInForce: ...
    @property
    def latency(self) -> LatencyModelInForce: ...
    @property
    def supervisor(self) -> Restarting: ...
    @property
    def overload(self) -> Rejecting: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def now(self) -> Callable[[], float]: ...
    @property
    def batcher(self) -> ShownQueue: ...
    @property
    def length_predictor(self) -> LengthPredictor | None: ...
    @property
    def servers(self) -> Servers | None: ...
    @property
    def proxying(self) -> ProxyingEngine | None: ...
    def live_model(self) -> LiveModel: ...
