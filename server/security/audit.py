"""Calls refused by authentication or authorization, counted and logged within a rate; calls that
changed something, logged each.

A key is named by its digest (`Key.name`), never shown. Behind a proxy the address is the proxy's:
what the proxy says of the client is logged beside it, as the client's word.
"""

from __future__ import annotations

import asyncio
import logging
import math

from prometheus_client import Counter
from starlette.types import Message, Scope, Send

from kendall.server.runtime.wording import brief
from kendall.server.security.denials import REASONS
from kendall.server.security.guard import CALLER

log = logging.getLogger("kendall.audit")
LINES = 10  # of one reason
MINUTE = 60.0  # seconds
READS = frozenset({"GET", "HEAD", "OPTIONS"})


class AuditTrail:
    """One gateway's."""

    def __init__(self, denied: Counter) -> None:
        self._denied = {reason: (denied.labels(reason), _Rate()) for reason in REASONS}

    def denied(self, scope: Scope, reason: str) -> None:
        """A call that may not be."""
        counter, rate = self._denied[reason]
        counter.inc()
        withheld = rate.take(asyncio.get_running_loop().time())
        if withheld is None:
            return
        more = f"; {withheld} more since the last such line" if withheld else ""
        log.warning(
            "denied (%s): %s from %s%s",
            reason,
            _call(scope),
            _address(scope),
            more,
            extra={"event": "denied", **_facts(scope)},
        )

    def changing(self, scope: Scope, send: Send) -> Send:
        """`send` for a call to /admin; one that is no mere question is logged with its outcome."""
        if scope["method"] in READS:
            return send

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                key = scope.get(CALLER)
                who = f"with admin key {key}" if key else "without a key"
                facts = {"event": "admin", "key": key, "status": message["status"], **_facts(scope)}
                log.info(
                    "admin: %s from %s %s: %d",
                    _call(scope),
                    _address(scope),
                    who,
                    message["status"],
                    extra=facts,
                )
            await send(message)

        return sending


class _Rate:
    """Limit of LINES log lines a minute; the next line written says how many were withheld."""

    def __init__(self) -> None:
        self._since, self._written, self._withheld = -math.inf, 0, 0

    def take(self, now: float) -> int | None:
        """How many were withheld before this one; None where this one is withheld too."""
        if now - self._since >= MINUTE:
            self._since, self._written = now, 0
        if self._written >= LINES:
            self._withheld += 1
            return None
        self._written += 1
        withheld, self._withheld = self._withheld, 0
        return withheld


def _call(scope: Scope) -> str:
    return f"{scope['method']} {brief(ascii(scope['path'])[1:-1])}"


def _address(scope: Scope) -> str:
    client = scope.get("client")
    address = client[0] if client else "an unknown address"
    forwarded = next(
        (value for name, value in scope["headers"] if name in (b"x-forwarded-for", b"forwarded")),
        None,
    )
    return (
        address
        if forwarded is None
        else f"{address} (forwarded for {brief(ascii(forwarded.decode('latin-1')))})"
    )


def _facts(scope: Scope) -> dict[str, str]:
    return {"method": scope["method"], "route": brief(scope["path"]), "address": _address(scope)}
