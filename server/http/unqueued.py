"""Calls that are answered without the queue: tokenizing and counting tokens. They count against the
rates of their keys, and callers take turns at a few places, so that nobody's fill the processors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Scope

from kendall.server.admission.control import caller_of
from kendall.server.gateway import Gateway
from kendall.server.runtime.errors import ApiError
from kendall.server.runtime.turns import Turns

PLACES = 4  # calls at once
MOST_WAITING = 64  # calls of one caller


class Unqueued:
    """Turns and rate limits of these calls, in one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._turns = Turns(PLACES)

    def admit(self, scope: Scope) -> None:
        """Before the body is read. Raises ApiError 429."""
        rejection = self._gateway.overload.admit_unqueued(scope)
        if rejection is None and self._turns.waiting_of(caller_of(scope)) >= MOST_WAITING:
            rejection = ApiError(
                429,
                "rate_limit_exceeded",
                f"{MOST_WAITING} calls of this key wait to be tokenized; retry later",
                retry_after=1.0,
            )
        if rejection is not None:
            self._gateway.metrics.calls.refused.labels(rejection.code).inc()
            raise rejection

    @asynccontextmanager
    async def turn(self, scope: Scope) -> AsyncIterator[None]:
        """Once the body is read."""
        caller = caller_of(scope)
        await self._turns.take(caller)
        try:
            yield
        finally:
            self._turns.give(caller)
