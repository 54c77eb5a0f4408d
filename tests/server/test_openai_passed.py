"""The official client with and without the gateway between it and the same server: the same
requests arrive, the same bytes come back. Tools, structured output and responses, which the
gateway does not know.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.server.passing_gateway import before
from tests.server.upstream_stub import Asked, Stub, sockets
from tests.virtual_time import run_with_sockets

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASKED = [{"role": "user", "content": "Wetter in Zürich? \U0001f327"}]
CALLED = {"index": 0, "id": "call_1", "type": "function"}
CALLED |= {"function": {"name": "weather", "arguments": '{"city": "Z\\u00fcrich"}'}}
GATEWAYS_OWN = ("x-kendall-", "x-llm-d-", "server-timing", "x-accel-buffering")


def tool_chunks() -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"tool_calls": [{"index": 0, "function": {"arguments": " "}}]},
        {},
    ]
    finishes = [None, None, "tool_calls"]
    return [
        {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
            "odd": [1.50, 1e3],
        }
        for delta, finish in zip(deltas, finishes, strict=True)
    ]


def whole(path: str) -> dict[str, Any]:
    if path == "/v1/responses":
        text = {"type": "output_text", "text": "a", "annotations": []}
        message = {"type": "message", "id": "m", "role": "assistant", "status": "completed"}
        usage = {"input_tokens": 4, "output_tokens": 2, "total_tokens": 6}
        return {
            "id": "r",
            "object": "response",
            "created_at": 1,
            "status": "completed",
            "model": "m",
            "output": [message | {"content": [text]}],
            "usage": usage,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "error": None,
        }
    message = {"role": "assistant", "content": None, "tool_calls": [CALLED]}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14},
    }


async def behave(asked: Asked) -> None:
    """Odd, but valid JSON: other separators, escapes, numbers."""
    if not asked.fields.get("stream"):
        asked.whole(json.dumps(whole(asked.path), indent=1).encode(), x_own="theirs")
        return
    asked.begin(x_own="theirs")
    if asked.path == "/v1/responses":
        response = whole(asked.path)
        events = [
            {"type": "response.created", "response": response | {"status": "in_progress"}},
            {"type": "response.output_text.delta", "delta": "a", "item_id": "m"},
            {"type": "response.completed", "response": response},
        ]
        stream = b"".join(
            b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json.dumps(event).encode())
            for event in events
        )
    else:
        data = [json.dumps(chunk).encode() for chunk in tool_chunks()]
        stream = b": hello\n\n" + b"".join(b"data: %b\r\n\r\n" % each for each in data)
        stream += b"data: [DONE]\n\n"
    for start in range(0, len(stream), 37):  # in pieces that respect no event
        asked.piece(stream[start : start + 37])
    asked.end()


async def tools(client: AsyncOpenAI) -> Any:
    return await client.chat.completions.create(
        model="m", messages=ASKED, tools=[TOOL], tool_choice="required", extra_body={"odd": [1]}
    )


async def tools_streamed(client: AsyncOpenAI) -> Any:
    stream = await client.chat.completions.create(
        model="m", messages=ASKED, tools=[TOOL], stream=True, parallel_tool_calls=False
    )
    return [chunk async for chunk in stream]


async def structured(client: AsyncOpenAI) -> Any:
    schema = {"name": "s", "schema": {"type": "object"}, "strict": True}
    return await client.chat.completions.create(
        model="m",
        messages=ASKED,
        max_completion_tokens=50,
        response_format={"type": "json_schema", "json_schema": schema},
    )


async def response(client: AsyncOpenAI) -> Any:
    return await client.responses.create(model="m", input="a", reasoning={"effort": "low"})


async def response_streamed(client: AsyncOpenAI) -> Any:
    stream = await client.responses.create(model="m", input="a", stream=True)
    return [event async for event in stream]


class Wire(httpx.AsyncBaseTransport):
    """Keeps the bytes and the headers of answers."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport
        self.body = b""
        self.headers: list[tuple[str, str]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await self._transport.handle_async_request(request)
        self.headers = [
            (name, value)
            for name, value in answer.headers.items()
            if not name.startswith(GATEWAYS_OWN) and name != "x-request-id"
        ]
        return httpx.Response(
            answer.status_code, headers=answer.headers, content=self._read(answer)
        )

    async def _read(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        assert isinstance(answer.stream, httpx.AsyncByteStream)
        async for data in answer.stream:
            self.body += data
            yield data
        await answer.aclose()

    async def aclose(self) -> None:
        await self._transport.aclose()


async def ask(
    call: Callable[[AsyncOpenAI], Awaitable[Any]], transport: httpx.AsyncBaseTransport, host: str
) -> tuple[Any, Wire]:
    wire = Wire(transport)
    async with httpx.AsyncClient(transport=wire) as http:
        client = AsyncOpenAI(base_url=f"http://{host}/v1", api_key="k", http_client=http)
        return await call(client), wire


@pytest.mark.parametrize(
    "call",
    [tools, tools_streamed, structured, response, response_streamed],
    ids=lambda f: f.__name__,
)
def test_the_official_client_sees_no_gateway(call: Callable[[AsyncOpenAI], Awaitable[Any]]) -> None:
    async def test(stub: Stub) -> None:
        stub.behave = behave
        async with before(stub) as kendall:
            without, plain = await ask(call, httpx.AsyncHTTPTransport(uds=stub.path), "stub-0")
            through, passed = await ask(call, httpx.ASGITransport(kendall.app), "kendall")
            assert through == without
            assert passed.body == plain.body
            hop = ("transfer-encoding", "connection")
            assert sorted(passed.headers) == sorted(
                each for each in plain.headers if each[0] not in hop
            )
            direct, gatewayed = stub.calls
            assert gatewayed.body == direct.body
            assert gatewayed.path == direct.path
            own = {"authorization", "x-request-id", "content-length", "host", "connection"}
            own |= {"accept-encoding", "x-forwarded-for"}
            assert {
                name: value for name, value in gatewayed.headers.items() if name not in own
            } == {name: value for name, value in direct.headers.items() if name not in own}
            (record,) = kendall.records
            assert record.outcome == "completed"
            if call in (tools, structured):
                assert (record.finish_reason, record.output_tokens) == ("tool_calls", 5)
            elif call is tools_streamed:
                assert (record.finish_reason, record.output_tokens) == ("tool_calls", 3)
            else:
                assert (record.finish_reason, record.output_tokens) == ("stop", 2)

    with sockets() as (stub,):
        run_with_sockets(test(stub))
