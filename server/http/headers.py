"""What a call's headers name, itself and the flow that it counts to. The headers of answers:
`x-request-id`, the caller's own name for its call or one made here; `Retry-After` on 429 and 503;
how long the call waited, and how long it is predicted to wait.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence

from starlette.types import Message, Scope, Send

from kendall.server.queue.sequence import SequenceState

REQUEST_ID = r"[A-Za-z0-9_.:-]{1,128}"
_REQUEST_ID = re.compile(REQUEST_ID)
FLOW = b"x-llm-d-inference-fairness-id"
_DELAY, _FLOW_DELAY = b"x-kendall-queueing-delay-ms", b"x-llm-d-flow-queue-duration-ms"
_PLACE, _WAIT = b"x-kendall-queue-position", b"x-kendall-predicted-wait-ms"
# of the gateway that answers, not of one behind it
_DELAYS = frozenset({_DELAY, _FLOW_DELAY, _PLACE, _WAIT})
_TIMING = b"server-timing"
_OWN_TIMING = re.compile(rb"\s*(queue|service)\s*(;|$)")
_RETRY_AFTER = b"5"  # seconds, where the route says nothing better


def asked_id(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """The header's value, if it is fit to be repeated."""
    for name, value in headers:
        if name == b"x-request-id":
            asked: str = value.decode("latin-1")
            return asked if _REQUEST_ID.fullmatch(asked) else None
    return None


def stamped(scope: Scope, send: Send) -> Send:
    """`send` for an answer that has none of it yet."""
    name = (asked_id(scope["headers"]) or uuid.uuid4().hex).encode()

    async def stamping(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"x-request-id", name)]
            if message["status"] in (429, 503) and not any(
                key == b"retry-after" for key, _ in headers
            ):
                headers.append((b"retry-after", _RETRY_AFTER))
            message = {**message, "headers": headers}
        await send(message)

    return stamping


def early_headers(request_id: str, last: SequenceState | None) -> list[tuple[bytes, bytes]]:
    """Headers known when the call joins the queue; `last`: its sequence that is served last."""
    headers = [(b"x-request-id", request_id.encode())]
    if last is not None and last.wait_estimate is not None:
        place, wait = last.wait_estimate
        headers.append((_PLACE, b"%d" % place))
        if wait is not None:
            headers.append((_WAIT, b"%.3f" % (wait * 1e3)))
    return headers


def of_server_behind(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Drop the headers about its own queue and service, where that server is a gateway too."""
    kept = []
    for name, value in headers:
        if name == _TIMING:
            others = [part for part in value.split(b",") if not _OWN_TIMING.match(part)]
            kept += [(name, b",".join(others))] if others else []
        elif name not in _DELAYS:
            kept.append((name, value))
    return kept


def delay_headers(queue: float, service: float | None = None) -> list[tuple[bytes, bytes]]:
    """Queueing delay, and service where it has ended; milliseconds."""
    delay = str(queue).encode()
    timing = b"queue;dur=" + delay
    return [
        (_DELAY, delay),
        (_FLOW_DELAY, b"%d" % round(queue)),
        (
            _TIMING,
            timing if service is None else timing + f", service;dur={service}".encode(),
        ),
    ]
