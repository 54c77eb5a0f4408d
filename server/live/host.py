"""What the live model and the autopilot read of the gateway, and what the autopilot asks of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from server.calibration.in_force import LatencyModelInForce
from server.queue.batcher import Batcher
from server.queue.change import PolicyChange
from server.settings import Settings
from server.telemetry.metrics import Metrics


class Host(Protocol):
    """Read only, but for `change`. `batcher` raises ApiError 503 before the engine is up."""

    @property
    def settings(self) -> Settings: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def batcher(self) -> Batcher: ...
    @property
    def latency(self) -> LatencyModelInForce: ...
    @property
    def now(self) -> Callable[[], float]: ...
    @property
    def max_output_tokens(self) -> int | None: ...
    @property
    def patience(self) -> float | None: ...
    def engine_identity(self) -> dict[str, Any]: ...
    def change(self, change: PolicyChange, *, by_autopilot: bool = False) -> dict[str, Any]: ...
