"""Asks a policy until it waits, and again when the instant comes that it named."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

log = logging.getLogger("kendall.batcher")


class DecisionLoop:
    """`step` carries out one decision and returns None, or the instant at which the policy wants
    to be asked again (infinity: after the next event).
    """

    def __init__(self, step: Callable[[], float | None]) -> None:
        self._step = step
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        self._asking = self._again = False
        self.failing: str | None = None  # the error of the last decision, if it failed

    def ask(self) -> None:
        """Carry out decisions until the policy waits. A call from within a decision makes the
        outer one ask again.
        """
        self._again = True
        if self._asking:
            return
        self._asking = True
        try:
            while self._again:
                self._again = False
                self._run()
            self.failing = None
        except Exception as error:
            if self.failing is None:
                log.exception("a dispatch decision failed; the queue continues with the next event")
            self.failing = str(error) or type(error).__name__
        finally:
            self._asking = False

    def ask_soon(self) -> None:
        """Ask after what is under way in this turn of the event loop: an engine step brings the
        tokens of all its sequences one after the other.
        """
        if self._soon is None:
            self._soon = self._loop.call_soon(self._asked_soon)

    def _asked_soon(self) -> None:
        self._soon = None
        self.ask()

    def _run(self) -> None:
        while (deadline := self._step()) is None:
            pass
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self.ask) if deadline < math.inf else None
