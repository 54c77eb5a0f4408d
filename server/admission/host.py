"""What admission reads of the gateway around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from queueing.control.wait_ahead import BatchService, SlotService
from server.admission.limits import OverloadSettings
from server.queue.batcher import Batcher
from server.telemetry.metrics import Metrics


class ServiceModel(Protocol):
    """The live model, as wait estimates need it."""

    @property
    def ahead(self) -> BatchService | SlotService | None:
        """Service under the policy in force; None before anything is known."""

    def sequence_rate(self) -> float:
        """Sequences that arrive per second."""


class Arrivals(Protocol):
    """The audit of arrivals."""

    def saw(self, instant: float, epoch: int, *, retry: bool) -> None:
        """A call has arrived."""


class Configured(Protocol):
    """The gateway's settings."""

    @property
    def overload(self) -> OverloadSettings: ...


class Host(Protocol):
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
    def patience(self) -> float | None: ...
    @property
    def policy_text(self) -> str: ...
    @property
    def ready(self) -> bool: ...
    @property
    def started(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    def live_model(self) -> ServiceModel: ...
    def next_call_id(self, prefix: str) -> str: ...
