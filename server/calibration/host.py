"""The parts of the gateway that calibration and the live model read, and what they change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from kendall.policies.orders.order import Order
from kendall.server.admission.limits_in_force import LimitsInForce
from kendall.server.calibration.in_force import LatencyModelInForce
from kendall.server.engines.base import Capabilities, Engine
from kendall.server.queue.batcher import Batcher
from kendall.server.queue.sequence import SequenceState
from kendall.server.settings import Settings
from kendall.server.supervision.lifecycle import Lifecycle
from kendall.server.supervision.supervisor import Supervisor
from kendall.server.telemetry.metrics import Metrics


class ObservedHost(Protocol):
    """The parts that both read."""

    @property
    def settings(self) -> Settings: ...
    @property
    def latency(self) -> LatencyModelInForce: ...
    @property
    def now(self) -> Callable[[], float]: ...
    @property
    def limits(self) -> LimitsInForce: ...


class ObservedQueue(Protocol):
    """The queue, as the live model sees it: the gateway's own, or one of watched servers."""

    @property
    def epoch(self) -> int: ...
    @property
    def policy_text(self) -> str: ...
    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def servers(self) -> int: ...
    @property
    def servers_in_use(self) -> Collection[int]: ...
    @property
    def queue_length(self) -> int: ...
    def unanswered_sequences(self) -> Iterable[SequenceState]: ...
    def rank_by(self, ranking: Order) -> None: ...


class Leaving(Protocol):
    """Whether the process ends soon."""

    @property
    def leaving(self) -> bool: ...


class LiveHost(ObservedHost, Protocol):
    """The parts for the live model and the autopilot. Read only, but for `limits.change`; `batcher`
    raises ApiError 503 before the engine is up.
    """

    @property
    def batcher(self) -> ObservedQueue: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def lifecycle(self) -> Leaving: ...


class CalibrationHost(ObservedHost, Protocol):
    """The parts for a calibration. Read only, but for `limits.begin_epoch`."""

    @property
    def batcher(self) -> Batcher: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def supervisor(self) -> Supervisor: ...
    @property
    def lifecycle(self) -> Lifecycle: ...
