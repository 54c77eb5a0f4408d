"""How much of JSON a body is, so that a large one cannot hold the event loop.

A parser holds the interpreter's lock until it has built every value of a body: a worker thread
alone does not free the event loop. The time goes with the number of values, lists and objects above
all: 180 ms for 1 MiB of empty lists, 10 ms for 1 MiB of token ids, 5 ms for one text of 16 MiB (2
cores of a shared machine, 2026-11). So a large body goes to a thread, which counts its values
first, piece by piece, and gives up at the bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from server.runtime.errors import ApiError

AT_ONCE = 1 << 18  # bytes that are parsed on the event loop: 45 ms at most
MOST_VALUES = 1 << 18  # of a body beyond that: token ids, messages, fields; again 45 ms at most
CONTAINER = 4  # values that a list or an object counts for
PIECE = 1 << 16  # bytes between two chances of the event loop
_T = TypeVar("_T")


async def parsed(body: bytes, parse: Callable[[bytes], _T], most_values: int = MOST_VALUES) -> _T:
    """`parse(body)`, in a thread where the body is large. Raises what `parse` raises, or
    ApiError 413 for too many values.
    """
    if len(body) <= AT_ONCE:
        return parse(body)
    return await asyncio.to_thread(_parsed, body, parse, most_values)


def _parsed(body: bytes, parse: Callable[[bytes], _T], most: int) -> _T:
    if count_values(body, most) > most:
        message = (
            f"got a body of more than {most} JSON values (a list or an object counts for "
            f"{CONTAINER}); expected fewer: split the call, or send text in place of token ids"
        )
        raise ApiError(413, "too_many_values", message)
    return parse(body)


def count_values(body: bytes, most: int) -> int:
    """Commas and opening brackets outside strings, brackets `CONTAINER` times; stops beyond
    `most`.
    """
    count, inside, escape = 0, False, b""
    for at in range(0, len(body), PIECE):
        piece = escape + body[at : at + PIECE]
        slashes = len(piece) - len(piece.rstrip(b"\\"))
        escape = b"\\" if slashes % 2 else b""  # of the next piece's first character
        whole = piece[: len(piece) - len(escape)].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = whole.split(b'"')
        plain = b"".join(parts[inside::2])
        count += plain.count(b",") + CONTAINER * (plain.count(b"[") + plain.count(b"{"))
        if count > most:
            break
        inside ^= len(parts) % 2 == 0
    return count
