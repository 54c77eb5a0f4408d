"""What a calibration reads of the gateway around it, and what it asks of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from server.calibration.in_force import LatencyModelInForce
from server.engines.base import Engine
from server.queue.batcher import Batcher
from server.settings import Settings
from server.supervision.supervisor import Supervisor


class Serving(Protocol):
    """What the live model reads too. `batcher` raises ApiError 503 before the engine is up."""

    @property
    def settings(self) -> Settings: ...
    @property
    def batcher(self) -> Batcher: ...
    @property
    def latency(self) -> LatencyModelInForce: ...
    @property
    def now(self) -> Callable[[], float]: ...
    @property
    def max_output_tokens(self) -> int | None: ...


class Host(Serving, Protocol):
    """Read only, but for `begin_epoch`."""

    @property
    def engine(self) -> Engine: ...
    @property
    def supervisor(self) -> Supervisor: ...
    @property
    def ready(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    def begin_epoch(self) -> int: ...
