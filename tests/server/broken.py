"""Servers that are broken, each in its own way, and answers that say whose they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.server.upstream_stub import USAGE, Asked, Behaviour, Stub, frame, hangs

SERVICE = 0.1  # seconds that a good server takes
DEEP = b"[" * 100_000
HUGE = 1 << 16  # bytes of a piece of an answer without an end
NORMAL = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}], "usage": USAGE}


def text_for(prompt: str) -> str:
    """What a good server makes of a prompt."""
    return f"<{prompt}>"


async def good(asked: Asked) -> None:
    """Whole or streamed, as it is asked for, after SERVICE seconds."""
    await asyncio.sleep(SERVICE)
    prompt = asked.fields["prompt"]
    if not asked.fields.get("stream"):
        choice = {"index": 0, "text": text_for(prompt), "finish_reason": "stop"}
        asked.whole({"model": "m", "choices": [choice], "usage": USAGE})
        return
    asked.begin()
    asked.piece(frame("<") + frame(prompt))
    asked.piece(frame(">", "stop") + b"data: [DONE]\n\n")
    asked.end()


def said(call: Any, *, streamed: bool) -> str | None:
    """The text of an answer as its client reads it; None where it is none."""
    if call.status != 200 or not call.whole:
        return None
    if not streamed:
        return str(json.loads(call.body)["choices"][0]["text"])
    events = call.events()
    if events[-1:] != ["[DONE]"] or any("error" in event for event in events[:-1]):
        return None
    return "".join(event["choices"][0]["text"] for event in events[:-1])


def status(code: int, **headers: str) -> Behaviour:
    """At once, always."""

    async def behave(asked: Asked) -> None:
        asked.whole({"error": {"message": "no"}}, code, **headers)

    return behave


def whole(body: bytes) -> Behaviour:
    """This, with a good status."""

    async def behave(asked: Asked) -> None:
        asked.whole(body)

    return behave


def events(*pieces: bytes, end: bool = True) -> Behaviour:
    """These as a stream; without an end the connection is closed in the middle."""

    async def behave(asked: Asked) -> None:
        asked.begin()
        for piece in pieces:
            asked.piece(piece)
            await asyncio.sleep(0.01)
        if end:
            asked.end()
        else:
            asked.writer.close()

    return behave


async def resets(asked: Asked) -> None:
    """RST."""
    asked.abort()


async def closes(asked: Asked) -> None:
    """FIN."""
    asked.writer.close()


async def no_http(asked: Asked) -> None:
    asked.writer.write(bytes(range(256)) * 8)


async def cut(asked: Asked) -> None:
    """In the middle of the body."""
    asked.head(200, content_type="application/json", content_length="500")
    asked.writer.write(b'{"choices": [')
    asked.writer.close()


async def huge(asked: Asked) -> None:
    """Without an end."""
    asked.head(200, content_type="application/json", transfer_encoding="chunked")
    asked.piece(b'{"choices": [{"text": "')
    while not asked.writer.is_closing():
        asked.piece(b"a" * HUGE)
        await asked.writer.drain()
        await asyncio.sleep(0.001)


async def begins_and_hangs(asked: Asked) -> None:
    asked.begin()
    asked.piece(frame("t"))
    await hangs(asked)


async def slow(asked: Asked) -> None:
    """Right, after a while."""
    await asyncio.sleep(20 * SERVICE)
    await good(asked)


async def latin(asked: Asked) -> None:
    """A header beyond ASCII: as Latin-1, and as UTF-8."""
    head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Latin: \xe9\xe8\r\n".encode(
        "latin-1"
    )
    body = json.dumps(NORMAL | {"choices": [{"text": text_for(asked.fields["prompt"])}]}).encode()
    length = b"X-Utf: \xe2\x82\xac\r\nContent-Length: %d\r\n\r\n" % len(body)
    asked.writer.write(head + length + body)


def sometimes(behaviour: Behaviour, share: float) -> Behaviour:
    """That share of its calls; the others are answered."""
    left = 0.0

    async def behave(asked: Asked) -> None:
        nonlocal left
        left += share
        bad = left >= 1
        left -= bad
        await (behaviour if bad else good)(asked)

    return behave


def another_model(stub: Stub) -> None:
    """It was started again with another one, between two probes; it knows the old one no more."""
    stub.routes["/v1/models"] = (200, {"data": [{"id": "another"}]})
    stub.behave = status(404)


def answers_as_another(stub: Stub) -> None:
    """The same, and it answers whatever model is asked for."""
    stub.routes["/v1/models"] = (200, {"data": [{"id": "another"}]})
    choice = {"index": 0, "text": "wrong", "finish_reason": "stop"}
    stub.behave = whole(json.dumps({"model": "another", "choices": [choice]}).encode())


@dataclass(frozen=True)
class Broken:
    """`breaks` makes it so, once the gateway serves. `begun`: answers break off after their first
    bytes have reached the client, where none can answer in its place.
    """

    name: str
    breaks: Callable[[Stub], None]
    streamed: bool = False
    begun: bool = False


def behaves(
    name: str, behaviour: Behaviour, *, streamed: bool = False, begun: bool = False
) -> Broken:
    def breaks(stub: Stub) -> None:
        stub.behave = behaviour

    return Broken(name, breaks, streamed, begun)


def probed(name: str, **routes: Any) -> Broken:
    """What it says of itself is odd, and its calls fail."""

    def breaks(stub: Stub) -> None:
        stub.routes |= {f"/{path.replace('__', '/')}": (200, body) for path, body in routes.items()}
        stub.behave = resets

    return Broken(name, breaks)


async def encoded(asked: Asked) -> None:
    """As it says, and it cannot be decoded."""
    asked.whole(b"garbage", content_encoding="br")


OTHER_JSON = (
    "{}",
    '{"detail": "Not authenticated"}',
    '{"choices": []}',
    '{"choices": "x"}',
    '{"choices": [null, 7, {}]}',
)
CUT = events(frame("t"), end=False)
BROKEN = (
    *(behaves(f"status {code}", status(code)) for code in (500, 501, 502, 503, 401, 404, 400)),
    *(behaves(f"status {code}", status(code)) for code in (201, 203, 204, 206, 300, 302, 304)),
    behaves("an encoding", encoded),
    *(behaves(f"JSON {text}", whole(text.encode())) for text in OTHER_JSON),
    behaves("a last event alone", events(b"data: [DONE]\n\n")),
    behaves("JSON for events", whole(json.dumps(NORMAL).encode()), streamed=True),
    behaves("a last event alone of a stream", events(b"data: [DONE]\n\n"), streamed=True),
    behaves("status 500 of three in ten", sometimes(status(500), 0.3)),
    behaves("retry after nan", status(503, retry_after="nan")),
    behaves("retry after infinity", status(429, retry_after="inf")),
    behaves("reset", resets),
    behaves("reset of three in ten", sometimes(resets, 0.3)),
    behaves("closed", closes),
    behaves("no HTTP", no_http),
    behaves("no JSON", whole(b"\x00\xff garbage")),
    behaves("an error in a good answer", whole(b'{"error": {"message": "oom"}}')),
    behaves("deep JSON", whole(DEEP)),
    behaves("deep JSON in its usage", whole(b'{"usage": ' + DEEP + b"]" * 100_000 + b"}")),
    behaves("NaN", whole(b'{"choices": [{"text": "x", "logprobs": NaN}]}')),
    behaves("cut", cut),
    behaves("huge", huge),
    behaves("no events", events(b"\x00\xff garbage\n\n"), streamed=True),
    behaves("a line without an end", events(*[b"data: " + b"x" * HUGE] * 8), streamed=True),
    behaves("an empty stream", events(), streamed=True),
    behaves("an error as first event", events(b'data: {"error": {}}\n\n'), streamed=True),
    behaves("deep JSON as event", events(b"data: " + DEEP + b"\n\n"), streamed=True),
    behaves("cut streams", CUT, streamed=True, begun=True),
    behaves(
        "cut streams of three in ten",
        sometimes(CUT, 0.3),
        streamed=True,
        begun=True,
    ),
    behaves("streams without a last event", events(frame("t")), streamed=True, begun=True),
    behaves("silent", hangs),
    behaves("silent streams", hangs, streamed=True),
    behaves("streams that fall silent", begins_and_hangs, streamed=True, begun=True),
    behaves("slow", slow),
    behaves("Latin-1", latin),
    Broken("another model", another_model),
    Broken("answers as another model", answers_as_another),
    probed("deep JSON at a probe", v1__models=DEEP, props=DEEP, server_info=DEEP),
    probed("NaN at a probe", v1__models=b'{"data": [{"id": "m", "max_model_len": Infinity}]}'),
)
