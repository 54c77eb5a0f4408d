"""The parts of the gateway that calibration and the live model read, and what they change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kendall.server.admission.limits_in_force import LimitsInForce
from kendall.server.calibration.in_force import LatencyModelInForce
from kendall.server.engines.base import Engine
from kendall.server.queue.batcher import Batcher
from kendall.server.settings import Settings
from kendall.server.supervision.lifecycle import Lifecycle
from kendall.server.supervision.supervisor import Supervisor
from kendall.server.telemetry.metrics import Metrics


class Serving(Protocol):
    """The parts that both read. `batcher` raises ApiError 503 before the engine is up."""

    @property
    def settings(self) -> Settings: ...
    @property
    def batcher(self) -> Batcher: ...
    @property
    def latency(self) -> LatencyModelInForce: ...
    @property
    def now(self) -> Callable[[], float]: ...
    @property
    def limits(self) -> LimitsInForce: ...


class LiveHost(Serving, Protocol):
    """The parts for the live model and the autopilot. Read only, but for `limits.change`."""

    @property
    def metrics(self) -> Metrics: ...
    @property
    def lifecycle(self) -> Lifecycle: ...


class CalibrationHost(Serving, Protocol):
    """The parts for a calibration. Read only, but for `limits.begin_epoch`."""

    @property
    def engine(self) -> Engine: ...
    @property
    def supervisor(self) -> Supervisor: ...
    @property
    def lifecycle(self) -> Lifecycle: ...
