"""The head of an answer goes out with what follows it: one system call and one packet in place of
two.

uvicorn writes a head as soon as it has it. It is held until the next write, or until the event loop
has its next turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

_HEAD, _INTERIM = b"HTTP/1.1 ", b"HTTP/1.1 1"  # an interim response has nothing behind it


class JoiningTransport:
    """A connection's transport for whoever writes answers. Behind the head of an answer its
    `write` is the transport's own.
    """

    __slots__ = ("_held", "_loop", "_transport", "is_closing", "write")

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop, self._transport = loop, transport
        self._held = b""
        self.is_closing = transport.is_closing
        self.write: Callable[[bytes], None]
        self.expect_head()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the transport's."""
        return getattr(self._transport, name)

    def expect_head(self) -> None:
        """The answer before is whole."""
        if self._held:
            self._flush()
        self.write = self._write_head

    def close(self) -> None:
        """What is held goes out first."""
        self._flush()
        self._transport.close()

    def let_go(self) -> None:
        """The connection is lost."""
        self._held, self.write = (
            b"",
            self._transport.write,
        )  # else it holds itself until it is collected

    def _write_head(self, data: bytes) -> None:
        if not data.startswith(_HEAD) or data.startswith(_INTERIM):
            self._transport.write(data)
            return
        self._held, self.write = data, self._write_joined
        self._loop.call_soon(self._flush)

    def _write_joined(self, data: bytes) -> None:
        head, self._held = self._held, b""
        self.write = self._transport.write
        self.write(head + data)

    def _flush(self) -> None:
        if self._held:
            self._write_joined(b"")
