"""Keeps one engine alive: starts it, hears of its death, starts it again, and in the end gives up.

    starting -> serving -> restarting -> serving ...
                               |
                               +-> lost (for good)

It knows nothing of requests: `on_down` is called when the engine is lost and another one will be
tried, `on_up` when that one serves, `on_given_up` when none will. The three must not wait.

Nothing is awaited without a bound: each start has a limit (`RestartBudget`) and is cancelled at it,
`LET_GO` bounds how long the engine may take to end a cancelled start and to stop. A restart that
ends in any other way than up or given up is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

from kendall.server.engines.base import (
    Capabilities,
    Engine,
    EngineGoneError,
    EngineStartError,
    InvalidPromptError,
    InvalidSamplingError,
    TellsOfItsStart,
)
from kendall.server.engines.proxied import ProxyingEngine
from kendall.server.runtime.clock import clock_of
from kendall.server.runtime.errors import ApiError
from kendall.server.supervision.bounded import OverdueError, UnendingError, within
from kendall.server.supervision.restarts import RestartBudget
from kendall.server.supervision.settings import SupervisionSettings

log = logging.getLogger("kendall.supervision")
State = Literal["starting", "serving", "restarting", "lost"]
SOON = 2  # seconds: the Retry-After of a gateway whose engine restarts
# seconds that an engine may take to stop, and to end a start that is cancelled; its own bounds are
# shorter
LET_GO = 20.0
QUIET = 10.0  # seconds of a start before the log says that it goes on
_T = TypeVar("_T")


class EngineLostError(RuntimeError):
    """The engine was lost, and starting it again did not help."""


class Supervisor:
    """One engine's lives. Every method is called on the event loop."""

    def __init__(
        self,
        engine: Engine,
        settings: SupervisionSettings,
        *,
        on_down: Callable[[str], None],
        on_up: Callable[[Capabilities], None],
        on_given_up: Callable[[str], None],
        name: str = "the engine",
    ) -> None:
        self._engine = engine
        self._name = name
        self._settings = settings
        self._on_down, self._on_up, self._on_given_up = on_down, on_up, on_given_up
        self._budget = RestartBudget(
            settings.max_restarts,
            settings.restart_window,
            settings.restart_timeout,
            # servers that run already are waited for in the start itself, which the first one that
            # answers ends: a wait before it would only keep calls from them
            0.0 if isinstance(engine, ProxyingEngine) else None,
        )
        self._up = asyncio.Event()  # serving, or lost for good
        self._task: asyncio.Task[None] | None = None
        self._served_from: float | None = None
        self._parked = 0
        self._rejection: str | None = None  # why those that are parked wait no longer
        self._death: str | None = None  # of an engine that came up, before it was known to serve
        self.state: State = "starting"
        self.restarts = 0  # that came up
        self.last_loss: str | None = None

    @property
    def serving(self) -> bool:
        """Whether the engine takes work."""
        return self.state == "serving"

    async def start(self) -> Capabilities:
        """The first start. Raises EngineStartError, EngineLostError where it takes too long:
        what never came up is not tried again.
        """
        self._now = clock_of(asyncio.get_running_loop())
        self._engine.on_death = self.lost
        limit = self._settings.start_timeout
        try:
            return await self._start(limit)
        except OverdueError:
            raise EngineLostError(
                f"{self._name} did not start within {limit:g} s (--start-timeout); the log may "
                "say why"
            ) from None

    async def stop(self) -> None:
        """Try no more and let the engine go; leaves no process behind. Takes a bounded time."""
        self.state = "lost"
        self._up.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await within(self._engine.stop(), LET_GO, 0.0)
        except OverdueError:
            log.error(  # noqa: TRY400 - one line
                "%s did not stop within %g s; the gateway does not wait for it any longer",
                self._name,
                LET_GO,
            )
        except Exception:
            log.exception("%s failed while stopping", self._name)

    def refuse(self, message: str) -> None:
        """The gateway ends: those that wait for the engine to come back are told so."""
        self._rejection = message
        self._up.set()

    def lost(self, reason: str) -> None:
        """The engine is dead, or has to be replaced; one that is just coming up has failed to
        start.
        """
        if not self.serving:
            self._death = reason
            return
        self.last_loss = reason
        log.error("%s failed: %s", self._name, reason)
        wait = self._budget.next_wait(self._now(), self._served_from)
        if wait is None:
            self._give_up(reason)
            return
        self.state = "restarting"
        self._up.clear()
        self._task = asyncio.get_running_loop().create_task(
            self._restart(wait), name="engine-restart"
        )
        self._task.add_done_callback(self._restart_ended)
        self._on_down(reason)

    def forgive(self, losses: int) -> None:
        """So many losses do not count against the restarts that are allowed: a request caused
        them.
        """
        self._budget.forgive(losses)

    def statistics(self) -> dict[str, Any]:
        """For `/admin/state`."""
        return {
            "state": self.state,
            "restarts": self.restarts,
            "last_loss": self.last_loss,
            "parked": self._parked,
        }

    async def across_restarts(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """`call()` by an engine that serves: it waits for a restart, and is made again where the
        engine was lost meanwhile.

        Raises ApiError 503 where the engine is given up, or too many wait.
        """
        while True:
            if self.state == "restarting":
                await self._park()
            if self.state == "lost":
                raise ApiError(
                    503,
                    "engine_unavailable",
                    "the engine has failed for good; restart the gateway",
                    retry_after=10,
                )
            life = self._served_from
            try:
                return await call()
            except (InvalidPromptError, InvalidSamplingError):
                raise
            except Exception:
                if self.serving and self._served_from == life:
                    raise

    async def _park(self) -> None:
        if self._parked >= self._settings.max_parked:
            raise ApiError(
                503,
                "engine_unavailable",
                "the engine is restarting and too many requests wait for it",
                retry_after=SOON,
            )
        self._parked += 1
        try:
            if self._rejection is None:
                await self._up.wait()
        finally:
            self._parked -= 1
        if self._rejection is not None:
            raise ApiError(503, "shutting_down", self._rejection, retry_after=10)

    async def _start(self, limit: float) -> Capabilities:
        """One start, within `limit` seconds. Raises what the engine raises, OverdueError,
        EngineStartError for one that died at once.
        """
        began, self._death = self._now(), None
        telling = None if isinstance(self._engine, TellsOfItsStart) else _Telling(self._name)
        try:
            capabilities = await within(self._engine.start(), limit, LET_GO)
        finally:
            if telling is not None:
                telling.end()
        if self._death is not None:
            raise EngineStartError(f"it ended as soon as it had started: {self._death}")
        self._budget.came_up(self._now() - began)
        self.state, self._served_from = "serving", self._now()
        self._up.set()
        return capabilities

    async def _restart(self, first_wait: float) -> None:
        wait: float | None = first_wait
        while wait is not None:
            await asyncio.sleep(wait)
            try:
                capabilities = await self._start(self._budget.start_limit())
            except (UnendingError, EngineGoneError) as error:
                # a second start beside an unending one would be a second engine
                self._tell_failed(error)
                break
            except Exception as error:  # noqa: BLE001 - whatever it was: the next start may be better
                self._tell_failed(error)
                wait = self._budget.next_wait(
                    self._now(), None, overdue=isinstance(error, OverdueError)
                )
                continue
            self.restarts += 1
            log.warning("%s was restarted (restart %d)", self._name, self.restarts)
            self._tell_up(capabilities)
            return
        self._give_up(self.last_loss or "it did not start")

    def _restart_ended(self, task: asyncio.Task[None]) -> None:
        """Give up where a restart broke off, so that no request waits for ever.

        An engine that dies during `on_up` has begun the next restart before this one ended; the
        next one then decides.
        """
        if self.state == "restarting" and task is self._task:
            reason = "it was cancelled" if task.cancelled() else f"{task.exception()!r}"
            self._give_up(f"the restart was interrupted: {reason}")

    def _tell_failed(self, error: Exception) -> None:
        self.last_loss = str(error) or type(error).__name__
        log.error("%s did not start again: %s", self._name, self.last_loss)

    def _tell_up(self, capabilities: Capabilities) -> None:
        try:
            self._on_up(capabilities)
        except Exception:
            log.exception("the gateway failed after a restart of %s", self._name)
            self._give_up("the gateway failed")

    def _give_up(self, reason: str) -> None:
        self.state = "lost"
        self._up.set()
        log.critical(
            "no further restart of %s after %d restarts: %s", self._name, self.restarts, reason
        )
        self._on_given_up(reason)


class _Telling:
    """A line in the log after `QUIET` seconds of a start, and each time that it has taken twice as
    long, until `end`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(QUIET, self._tell, QUIET)

    def _tell(self, seconds: float) -> None:
        log.info("%s is starting: %g s so far", self._name, seconds)
        self._next = self._loop.call_later(seconds, self._tell, 2 * seconds)

    def end(self) -> None:
        """It is up, or has failed."""
        self._next.cancel()
