"""What the gateway is doing: whether an engine serves, and whether new requests are taken."""

from __future__ import annotations

from enum import Enum

from kendall.server.runtime.errors import ApiError
from kendall.server.supervision.supervisor import Supervisor


class EngineState(Enum):
    """Of several that hold, the last one in this list is shown."""

    SERVING = "serving"
    DRAINING = "draining"  # it serves what has arrived, and nothing new is taken
    RESTARTING = "restarting"
    STARTING = "starting"
    STUCK = "stuck"  # nothing moved: it is replaced
    LOST = "lost"  # for good


class Lifecycle:
    """From the start to the end of one gateway. Only its methods change what it holds."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.started = False  # there is a queue: the engine came up once
        self.draining = False  # no new requests are taken
        self.leaving = False  # the process ends soon: not ready, but requests are taken until then
        self.stuck: str | None = None  # why nothing moves, until another engine serves
        self.lost: str | None = None  # why the engine is lost for good

    @property
    def state(self) -> EngineState:
        """For those who watch."""
        if self.lost is not None:
            return EngineState.LOST
        if self.stuck is not None:
            return EngineState.STUCK
        if not self.started:
            return EngineState.STARTING
        if not self._supervisor.serving:
            return EngineState.RESTARTING
        return EngineState.DRAINING if self.draining else EngineState.SERVING

    @property
    def reason(self) -> str | None:
        """Of a state that needs words: why the engine is stuck or lost."""
        return self.stuck if self.lost is None else self.lost

    @property
    def ready(self) -> bool:
        """Whether the engine serves."""
        return self.started and self.lost is None and self._supervisor.serving

    @property
    def healthy(self) -> bool:
        """Whether the gateway starts, serves or replaces its engine: each ends in bounded time,
        with an engine that serves or with one that is lost.
        """
        return self.lost is None

    def came_up(self) -> None:
        """An engine serves, the first one or another."""
        self.started, self.stuck = True, None

    def replace_stuck_engine(self, reason: str) -> None:
        """It serves, and makes no token."""
        self.stuck = reason
        self._supervisor.lost(reason)

    def fail(self, reason: str) -> None:
        """No engine will serve any more."""
        self.lost = reason

    def drain(self) -> None:
        """Take nothing new, until `reopen`."""
        self.draining = True

    def leave(self) -> None:
        """The process ends soon."""
        self.leaving = True

    def end(self) -> None:
        """The process ends: take nothing new, for good."""
        self.draining = self.leaving = True

    def reopen(self) -> None:
        """Take requests again. Raises ApiError 409: the gateway shuts down."""
        if self.leaving:
            raise ApiError(
                409, "shutting_down", "the gateway is shutting down; this drain cannot be undone"
            )
        self.draining = False
