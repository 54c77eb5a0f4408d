"""What the live model and the autopilot read of the gateway, and what the autopilot asks of it."""

from __future__ import annotations

from typing import Any, Protocol

from server.calibration.host import Serving
from server.queue.change import PolicyChange
from server.telemetry.metrics import Metrics


class Host(Serving, Protocol):
    """Read only, but for `change`."""

    @property
    def metrics(self) -> Metrics: ...
    @property
    def patience(self) -> float | None: ...
    def engine_identity(self) -> dict[str, Any]: ...
    def change(self, change: PolicyChange, *, by_autopilot: bool = False) -> dict[str, Any]: ...
