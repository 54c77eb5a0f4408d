"""A server with OpenAI's API that costs next to nothing: its answers are bytes that it has, a
stream's events leave one by one, in turn with those of the other streams.

`python -m bench.gateway_cost.stub PORT` serves `/v1/chat/completions`, `/v1/models` and `/health`.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import cast

import uvloop

TOKENS = 128  # events of a stream, before the one with its end
MODEL = "tiny"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STREAMED = re.compile(rb'"stream": *true')


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(delta: dict[str, str], reason: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    body = {
        "id": "chatcmpl-1a2b",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": MODEL,
        "choices": [choice],
    }
    return _chunk(b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n")


def _whole(status: str, body: object) -> bytes:
    raw = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}"
    return head.encode() + b"\r\n\r\n" + raw


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [_event({"content": f" word{number}"}, None) for number in range(100, 100 + TOKENS)]
END = _event({}, "length") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
ANSWER = _whole(
    "200 OK",
    {
        "id": "chatcmpl-1a2b",
        "object": "chat.completion",
        "created": 1700000000,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": " word17"},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": 16, "completion_tokens": 1, "total_tokens": 17},
    },
)
GETS = {
    b"/v1/models": _whole("200 OK", {"object": "list", "data": [{"id": MODEL, "object": "model"}]}),
    b"/health": _whole("200 OK", {}),
    b"/ready": _whole("200 OK", {}),
}
MISSING = _whole("404 Not Found", {"error": {"message": "not served", "type": "not_found"}})


class Stub(asyncio.Protocol):
    """One connection, whose requests come one after the other."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._received = bytearray()
        self._left = 0  # events of the stream that is being sent

    def data_received(self, data: bytes) -> None:
        """Answer a request that is complete."""
        self._received += data
        end = self._received.find(b"\r\n\r\n") + 4
        if end < 4:
            return
        head = bytes(self._received[:end])
        length = _LENGTH.search(head)
        end += int(length[1]) if length else 0
        if len(self._received) < end:
            return
        asked = bytes(self._received[:end])
        del self._received[:end]
        self._answer(asked)

    def _answer(self, asked: bytes) -> None:
        method, path, _ = asked.split(b" ", 2)
        if method == b"GET":
            self._transport.write(GETS.get(path, MISSING))
        elif path != b"/v1/chat/completions":
            self._transport.write(MISSING)
        elif _STREAMED.search(asked) is None:
            self._transport.write(ANSWER)
        else:
            self._transport.write(HEAD)
            self._left = TOKENS
            self._next()

    def _next(self) -> None:
        """The others' events come between two of one stream."""
        if self._transport.is_closing():
            return
        self._transport.write(EVENTS[-self._left] if self._left else END)
        if self._left:
            self._left -= 1
            asyncio.get_running_loop().call_soon(self._next)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
