"""How much of JSON a body is, so that a large one cannot hold the event loop.

A parser holds the interpreter's lock until it has built every value of a body: a worker thread
alone does not free the event loop. The time goes with the number of values, lists and objects above
all: 180 ms for 1 MiB of empty lists, 10 ms for 1 MiB of token ids, 5 ms for one text of 16 MiB (2
cores of a shared machine, 2026-11). So a large body goes to a thread, which counts its values
first, piece by piece, and gives up at the bound.

What is made of a body goes with its lists and objects: each message, item of an input, tool and
part of a schema is one, is checked, becomes an object and is rendered. Their number is bounded on
every route before the route's own code, by the context of the model: the least of them takes a
token of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from kendall.server.runtime.errors import ApiError
from kendall.server.security.settings import MAX_BODY_BYTES

AT_ONCE = 1 << 18  # bytes that are parsed on the event loop: 45 ms at most
MOST_VALUES = 1 << 18  # of a body beyond that: token ids, messages, fields; again 45 ms at most
CONTAINER = 4  # values that a list or an object counts for
# lists and objects of a body: these, and four for each token of the context, up to the most
FEW_CONTAINERS, MOST_CONTAINERS = 1 << 12, 1 << 15
FREE_BYTES = 1 << 18  # of each body
BUDGET = 128 << 20  # bytes of all bodies, or eight of the largest
PIECE = 1 << 16  # bytes between two chances of the event loop
_T = TypeVar("_T")


class BodyBudget:
    """Bytes of the bodies of all calls together that are held while they come in and until their
    prompts are made. What a call sends of its first `FREE_BYTES` is not counted: small calls pass
    whatever the large ones hold.
    """

    def __init__(self, most: int) -> None:
        self._most = max(most, BUDGET)
        self.held = 0

    def lease(self, receive: Receive) -> BodyLease:
        """The lease of a call that reads by `receive`; the caller ends it in any case."""
        return BodyLease(self, receive)

    def take(self, size: int) -> None:
        """Raises ApiError 503 where there is not so much left."""
        if self.held + size > self._most:
            message = "the bodies of other calls fill this gateway's memory for them; retry later"
            raise ApiError(503, "too_many_bodies", message)
        self.held += size


class BodyLease:
    """Bytes that one call holds, and whether its body has been read to the end."""

    whole = False

    def __init__(self, budget: BodyBudget, receive: Receive) -> None:
        self._budget, self._receive = budget, receive
        self._read = self._held = 0
        self._ended = False

    async def receive(self) -> Message:
        """The next part of the body. Raises ApiError 503; no more is read then."""
        message = await self._receive()
        self.whole = not message.get("more_body", False)
        size = len(message.get("body", b""))
        if size:
            self._read += size
            counted = max(0, self._read - FREE_BYTES) - self._held
            if counted > 0 and not self._ended:
                try:
                    self._budget.take(counted)
                except ApiError:
                    self.end()  # what is read from now on is thrown away
                    raise
                self._held += counted
        return message

    def end(self) -> None:
        """It holds nothing any more. No effect the second time."""
        self._ended = True
        self._budget.held -= self._held
        self._held = 0


async def read_body(receive: Receive, most: int = MAX_BODY_BYTES) -> bytes:
    """The whole body. Raises ApiError 413, or ClientDisconnect."""
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > most:
            raise ApiError(
                413, "body_too_large", f"got a body of more than {most} bytes; expected less"
            )
        more = message.get("more_body", False)
    return bytes(body)


async def parsed(body: bytes, parse: Callable[[bytes], _T], context: int | None = None) -> _T:
    """`parse(body)`, in a thread where the body is large. Raises what `parse` raises, or
    ApiError 413 for too many values, lists or objects. `context`: of the model, tokens.
    """
    if len(body) <= AT_ONCE:
        return _parsed(body, parse, context)
    return await asyncio.to_thread(_parsed, body, parse, context)


def most_containers(context: int | None) -> int:
    """Lists and objects that a body may have; `context`: of the model, tokens."""
    if context is None:
        return MOST_CONTAINERS
    return min(MOST_CONTAINERS, FEW_CONTAINERS + 4 * context)


def _parsed(body: bytes, parse: Callable[[bytes], _T], context: int | None) -> _T:
    most = most_containers(context)
    # the plain count takes a tenth of the time, and is no less
    if body.count(b"{") + body.count(b"[") > most and count_containers(body, most) > most:
        message = (
            f"got a body of more than {most} lists and objects; expected fewer, by the context of "
            "this model: split the call"
        )
        raise ApiError(413, "too_many_values", message)
    values = max(MOST_VALUES, 2 * (context or 0))  # two contexts full of token ids
    if len(body) > AT_ONCE and count_values(body, values) > values:
        message = (
            f"got a body of more than {values} JSON values (a list or an object counts for "
            f"{CONTAINER}); expected fewer: split the call, or send text in place of token ids"
        )
        raise ApiError(413, "too_many_values", message)
    return parse(body)


def count_values(body: bytes, most: int) -> int:
    """Commas and opening brackets outside strings, brackets `CONTAINER` times; stops beyond
    `most`.
    """
    count = 0
    for plain in _outside_strings(body):
        count += plain.count(b",") + CONTAINER * (plain.count(b"[") + plain.count(b"{"))
        if count > most:
            break
    return count


def count_containers(body: bytes, most: int) -> int:
    """Opening brackets outside strings; stops beyond `most`."""
    count = 0
    for plain in _outside_strings(body):
        count += plain.count(b"[") + plain.count(b"{")
        if count > most:
            break
    return count


def _outside_strings(body: bytes) -> Iterator[bytes]:
    inside, escape = False, b""
    for at in range(0, len(body), PIECE):
        piece = escape + body[at : at + PIECE]
        slashes = len(piece) - len(piece.rstrip(b"\\"))
        escape = b"\\" if slashes % 2 else b""  # of the next piece's first character
        whole = piece[: len(piece) - len(escape)].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = whole.split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= len(parts) % 2 == 0
