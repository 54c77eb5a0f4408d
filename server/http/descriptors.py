"""Files that the process may have open: each connection takes one, and the usual soft limit of 1024
is soon met.

The kernel gives the lowest free number: a connection's own number says how many are taken, by
whomever. The last numbers below the limit are kept for probes (`/health`, `/ready`, `/metrics`),
and the very last for what the gateway opens itself: a restarted engine's sockets, for example. A
connection that has sent no head yet is nobody's: near the limit a new one closes the one that has
been silent for longest, or silent ones alone would fill the room for probes, too. The lowest free
number may be a low one while the high ones are taken, so what counts from there on, for a minute,
is the number of connections.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Literal

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kendall.policies.text import counted
from kendall.server.http.headers import stamped
from kendall.server.runtime.errors import ApiError
from kendall.server.security.early_answer import RejectionResponse

log = logging.getLogger("kendall")
ENOUGH = 65536  # more is not asked for: some programs walk through every number below their limit
KEPT = 64  # numbers below the limit that no call gets
CROWDED = 32  # numbers before these, from which on connections without a request are closed
CROWDED_FOR = 60.0  # seconds
SILENT = 0.1  # seconds without a whole request, at least, of a connection that is closed
AT_ONCE = 32  # connections too many, beyond which none is too young to be closed
OWN = 16  # of these, numbers that no connection gets
PROBES = frozenset({"/health", "/ready", "/metrics"})
LOG_EVERY = 10.0  # seconds between two lines about refused connections
Place = Literal["any", "probes", "address", "descriptors"]
Reason = Literal["descriptors", "silent", "address"]
_STATUS_LINES = {
    429: b"HTTP/1.1 429 Too Many Requests\r\n",
    503: b"HTTP/1.1 503 Service Unavailable\r\n",
}


def raise_descriptor_limit() -> None:
    """The soft limit up to the hard one, where the system permits it."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415 - not on every system

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning(
            "cannot raise the limit on open files above %d (%s): enough for %d connections",
            soft,
            error,
            soft,
        )


def descriptor_limit() -> float:
    """Files that the process may have open now."""
    if sys.platform == "win32":
        return math.inf
    import resource  # noqa: PLC0415 - not on every system

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return math.inf if soft == resource.RLIM_INFINITY else soft


class Room:
    """Admits the connections of one server, by their descriptors and, if asked for, by their
    number for each address.
    """

    longest_probe = 2.0  # seconds that a connection in the room for probes may be idle

    def __init__(
        self,
        registry: CollectorRegistry,
        most_per_address: int | None = None,
        limit: float | None = None,
    ) -> None:
        self._limit = descriptor_limit() if limit is None else limit
        self._most = most_per_address
        self._of_address: Counter[str] = Counter()
        self._open = 0
        # whose request is not whole: since when; the one that has been silent for longest first
        self._unfinished: OrderedDict[Callable[[], None], float] = OrderedDict()
        self._comfortable = math.inf  # connections that there is room for
        self._crowded_until = -math.inf
        self._untold: Counter[Reason] = Counter()  # refused since the last line about them
        self._told_at: dict[Reason, float] = {}
        self._refused = prometheus_client.Counter(
            "kendall_refused_connections",
            (
                "Refused connections, by reason: descriptors (near the limit on open files), "
                "silent (closed near that limit, its request not whole), "
                "address (--max-connections-per-address)"
            ),
            ["reason"],
            registry=registry,
        )
        for reason in ("descriptors", "silent", "address"):
            self._refused.labels(reason)
        Gauge("kendall_connections", "Open client connections", registry=registry).set_function(
            lambda: self._open
        )

    def enter(
        self,
        descriptor: int,
        client: tuple[str, int] | None,
        close: Callable[[], None] | None = None,
    ) -> Place:
        """Where a new connection belongs; `leave` follows in any case. `close` closes it, until
        its request is `whole`.
        """
        self._open += 1
        self._make_room(descriptor)
        if close is not None:
            self._unfinished[close] = asyncio.get_running_loop().time()
        if client is not None and self._most is not None:
            self._of_address[client[0]] += 1
            if self._of_address[client[0]] > self._most:
                self._refuse(
                    "address",
                    f"one address has more than --max-connections-per-address {self._most}",
                )
                return "address"
        if descriptor < self._limit - KEPT:
            return "any"
        self._refuse(
            "descriptors",
            f"{self._open} are open, near the limit of {self._limit:g} open files (ulimit -n)",
        )
        return "probes" if descriptor < self._limit - OWN else "descriptors"

    def unfinished(self, close: Callable[[], None], *, in_body: bool) -> None:
        """A connection has sent a part of a request, and no call of it is in service. Bytes of a
        body end its silence; bytes of a head do not, which clients send at once.
        """
        if in_body or close not in self._unfinished:
            self._unfinished[close] = asyncio.get_running_loop().time()
            self._unfinished.move_to_end(close)

    def whole(self, close: Callable[[], None]) -> None:
        """The request of a connection is whole. No effect the second time."""
        self._unfinished.pop(close, None)

    def _make_room(self, descriptor: int) -> None:
        """Of the unfinished ones those that have been silent for longest are closed, as many as
        are too many.
        """
        now = asyncio.get_running_loop().time()
        if now >= self._crowded_until:
            self._comfortable = math.inf
        if descriptor >= self._limit - KEPT - CROWDED:
            self._comfortable = min(self._comfortable, self._open - 2)
            self._crowded_until = now + CROWDED_FOR
        if self._open <= self._comfortable:
            return
        excess = math.ceil(self._open - self._comfortable)
        old = (close for close, since in self._unfinished.items() if since <= now - SILENT)
        chosen = list(islice(old, excess))
        if not chosen and excess > AT_ONCE:
            chosen = list(islice(self._unfinished, 2))
        for close in chosen:
            del self._unfinished[close]
            self._refuse("silent", "their requests had not come whole, near the limit")
            close()

    def leave(
        self, client: tuple[str, int] | None, close: Callable[[], None] | None = None
    ) -> None:
        """A connection is lost."""
        self._open -= 1
        if close is not None:
            self.whole(close)
        if client is not None and self._most is not None:
            self._of_address[client[0]] -= 1
            if self._of_address[client[0]] <= 0:
                del self._of_address[client[0]]

    def rejection(self, place: Place) -> bytes:
        """The answer to a connection beyond the limit; the connection is then closed."""
        error = _error(place)
        body = json.dumps(error.body()).encode()
        headers = error.headers() | {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return _STATUS_LINES[error.status] + lines.encode() + b"\r\n" + body

    def probes_only(self, app: ASGIApp) -> ASGIApp:
        """The application for a connection in the room for probes: one answer each, and none to
        a call.
        """

        async def probed(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] not in PROBES:
                await RejectionResponse(_error("descriptors"))(
                    scope, receive, stamped(scope, _closing(send))
                )
            else:
                await app(scope, receive, _closing(send))

        return probed

    def _refuse(self, reason: Reason, why: str) -> None:
        self._refused.labels(reason).inc()
        self._untold[reason] += 1
        now = asyncio.get_running_loop().time()
        if now - self._told_at.get(reason, -math.inf) >= LOG_EVERY:
            self._told_at[reason] = now
            log.warning("refused %s: %s", counted(self._untold.pop(reason), "connection"), why)


def _error(place: Place) -> ApiError:
    if place == "address":
        return ApiError(
            429,
            "too_many_connections",
            "got too many connections from this address; close or reuse some",
        )
    return ApiError(
        503, "too_many_connections", "the gateway has no room for another connection; retry later"
    )


def _closing(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [
                header for header in message.get("headers", ()) if header[0] != b"connection"
            ]
            message = {**message, "headers": [*headers, (b"connection", b"close")]}
        await send(message)

    return sent
