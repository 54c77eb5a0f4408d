"""Every answer carries `x-request-id`: the caller's own name for its call, or one made here."""

from __future__ import annotations

import re
import uuid

from starlette.types import Message, Scope, Send

REQUEST_ID = r"[A-Za-z0-9_.:-]{1,128}"
_REQUEST_ID = re.compile(REQUEST_ID)


def asked_id(scope: Scope) -> str | None:
    """The header's value, if it is fit to be repeated."""
    asked = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
    return asked if _REQUEST_ID.fullmatch(asked) else None


def stamped(scope: Scope, send: Send) -> Send:
    """`send` for an answer that has no id yet."""
    name = (asked_id(scope) or uuid.uuid4().hex).encode()

    async def stamping(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", name)]}
        await send(message)

    return stamping
