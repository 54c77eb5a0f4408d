"""The parts of the gateway that admission reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kendall.queueing.control.wait_ahead import BatchService, SlotService
from kendall.server.admission.limits_in_force import LimitsInForce
from kendall.server.admission.settings import OverloadSettings
from kendall.server.queue.batcher import Batcher
from kendall.server.runtime.ids import CallIds
from kendall.server.supervision.lifecycle import Lifecycle
from kendall.server.telemetry.metrics import Metrics


class RecentActivity(Protocol):
    """Rates over the last minute."""

    def sequence_rate(self) -> float:
        """Sequences that arrive per second."""


class ServiceModel(Protocol):
    """The live model, as wait estimates need it."""

    @property
    def ahead(self) -> BatchService | SlotService | None:
        """Service under the policy in force; None before anything is known."""

    @property
    def activity(self) -> RecentActivity: ...
    def on_refused(self, limit: str) -> None:
        """A call is kept out of the queue by this limit."""


class Arrivals(Protocol):
    """The gateway's audit of arrivals."""

    def saw(self, instant: float, epoch: int, *, retry: bool) -> None:
        """A call has arrived."""


class Configured(Protocol):
    """The gateway's settings."""

    @property
    def overload(self) -> OverloadSettings: ...


class AdmissionHost(Protocol):
    """Read only. `batcher` and `live_model` raise ApiError 503 before the engine is up."""

    @property
    def settings(self) -> Configured: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def batcher(self) -> Batcher: ...
    @property
    def arrivals(self) -> Arrivals: ...
    @property
    def live(self) -> ServiceModel | None: ...
    @property
    def now(self) -> Callable[[], float]: ...
    @property
    def lifecycle(self) -> Lifecycle: ...
    @property
    def limits(self) -> LimitsInForce: ...
    @property
    def call_ids(self) -> CallIds: ...
    def live_model(self) -> ServiceModel: ...
