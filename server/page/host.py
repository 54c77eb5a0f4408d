"""What the page reads of the gateway. It changes nothing: its controls use `/admin`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from server.admission.control import Overload
    from server.admission.limits_in_force import LimitsInForce
    from server.calibration.in_force import LatencyModelInForce
    from server.engines.base import Capabilities
    from server.live import LiveModel
    from server.queue.sequence import SequenceState
    from server.settings import Settings
    from server.supervision.lifecycle import Lifecycle
    from server.supervision.supervisor import Supervisor
    from server.telemetry.metrics import Metrics


class PageQueue(Protocol):
    """What the page reads of the queue."""

    @property
    def queue_length(self) -> int: ...
    @property
    def in_service(self) -> int: ...
    @property
    def unanswered(self) -> int: ...
    @property
    def failures(self) -> Mapping[str, int]: ...
    @property
    def capabilities(self) -> Capabilities: ...
    def in_service_sequences(self) -> Sequence[Sequence[SequenceState]]: ...


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
    def batcher(self) -> PageQueue: ...
    def live_model(self) -> LiveModel: ...
