"""An answer to a call whose body has not been read: at once, and without leaving the connection in
disorder.

The rejection is written first. Then what the client is still sending is read and thrown away, so
that the connection can carry the next call; where that would be too much, or the client waits for
leave to send (`Expect: 100-continue`), the connection is closed, after a while in which the
rejection can be read: a close with unread bytes would be a reset, which takes it away from the
client.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from kendall.server.runtime.errors import ApiError

MOST_BYTES = 1 << 20  # of a body that are read for the sake of the connection
MOST_SECONDS = 5.0  # that a client may take over them
LINGER = 1.0  # seconds before a close
# that are read meanwhile: a client that sends more is left to wait for the close
LINGER_BYTES = 16 << 20
LEASE = "kendall.body"  # key of a request's scope: what tells whether its body has been read


class Read(Protocol):
    """The value under LEASE."""

    whole: bool  # nothing of the body is left


class RejectionResponse(JSONResponse):
    """`error` to a call whose body may still be on its way; to another one a plain answer."""

    def __init__(
        self, error: ApiError, request_id: str | None = None, body: dict[str, Any] | None = None
    ) -> None:
        named = {} if request_id is None else {"x-request-id": request_id}
        super().__init__(body or error.body(), error.status, error.headers() | named)
        self.error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write, then let the body pass."""
        read: Read | None = scope.get(LEASE)
        if read is not None and read.whole:
            await super().__call__(scope, receive, send)
            return
        length, expects = _announced(scope)
        keeps = not expects and length is not None and length <= MOST_BYTES
        headers = self.raw_headers if keeps else [*self.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        if length != 0 and not expects:
            bounds = (MOST_BYTES, MOST_SECONDS) if keeps else (LINGER_BYTES, LINGER)
            await _pass(receive, *bounds)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _announced(scope: Scope) -> tuple[int | None, bool]:
    """The body's length, None where only its end will tell, and whether the client waits for
    leave to send it.
    """
    length: int | None = 0
    expects = False
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = int(value) if value.isdigit() else None
        elif name == b"transfer-encoding":
            length = None
        elif name == b"expect":
            expects = True
    return length, expects


async def _pass(receive: Receive, most: int, seconds: float) -> None:
    """Read to the end of the body, but no more than `most` bytes, for at most so long, or until
    the client is gone; nothing is kept.
    """
    try:
        async with asyncio.timeout(seconds):
            while most > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                most -= len(message["body"])
            await asyncio.Event().wait()
    except TimeoutError:
        return
