"""The gateway before a real, plain `vllm serve`: the same bytes with and without it, the backlog in
its own queue, its law and its records.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.gateway_cost.servers import Server, small_vllm
from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.queueing.measurement.record import read_run
from tests.eventually import eventually
from tests.serving import started

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
SLOTS = 4
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
SAID = [{"role": "user", "content": "hello there"}]
PLAIN: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}
CHOSEN = {"type": "function", "function": {"name": "f"}}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/completions", {"prompt": ["hello", "there"], "n": 2, "temperature": 0.7, "seed": 3}),
    ("/v1/completions", {"prompt": [5, 6, 7], "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": "hello", "stream": True}),
    (
        "/v1/completions",
        {"prompt": "hello", "stream": True, "stream_options": {"include_usage": True}},
    ),
    ("/v1/chat/completions", {"messages": SAID}),
    ("/v1/chat/completions", {"messages": SAID, "stream": True}),
    ("/v1/chat/completions", {"messages": SAID, "tools": [TOOL], "tool_choice": CHOSEN}),
    (
        "/v1/chat/completions",
        {"messages": SAID, "tools": [TOOL], "tool_choice": CHOSEN, "stream": True},
    ),
    ("/v1/chat/completions", {"messages": SAID, "tools": [TOOL], "tool_choice": "none"}),
    ("/v1/chat/completions", {"messages": SAID, "odd_field": [1, 2.5]}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 8}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 8, "stream": True}),
    ("/v1/messages", {"messages": SAID}),
    ("/v1/messages", {"messages": SAID, "stream": True}),
    ("/tokenize", {"prompt": "hello there"}),
    # errors
    ("/v1/completions", {"prompt": "hello", "max_tokens": -1}),
    ("/v1/completions", {"prompt": "hello", "model": "unknown"}),
    ("/v1/completions", {}),
    ("/v1/chat/completions", {"messages": "no list"}),
    ("/v1/chat/completions", {"messages": SAID, "max_tokens": 10**6}),
    ("/v1/embeddings", {"input": "hello"}),
]
# what differs between two answers to one call
IDS = re.compile(rb"(chatcmpl-tool|chatcmpl|cmpl|msg|rs|resp|call)[-_][\w-]+")
OWN = re.compile(
    rb'"(id|request_id|item_id)":\s*"[^"]*"'
    rb'|"(created|created_at|completed_at|sequence_number)":\s*[\d.]+'
)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with small_vllm(tmp_path_factory.mktemp("vllm"), SLOTS) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(
    vllm: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[GatewayProcess, asyncio.Runner, Path]]:
    folder = tmp_path_factory.mktemp("passing")
    arguments = ["--engine", "http", "--engine-url", f"{vllm.url}/v1"]
    arguments += ["--max-num-seqs", str(SLOTS), "--prediction-interval", "0"]
    arguments += ["--record-file", str(folder / "records.jsonl")]
    process = GatewayProcess(arguments, free_port(0), folder / "gateway.log")
    with started(process) as runner:
        yield process, runner, folder


def sent(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        return client.post(path, json=body)


def comparable(answer: httpx.Response) -> Any:
    """Without what differs between two answers to one call. vLLM puts several tokens into one
    event where its reader is slow: of a stream the kinds of events, and what they say together.
    """
    data = IDS.sub(b"own", OWN.sub(b'"own": 0', answer.content))
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return data
    lines = data.decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    kinds = [(event.get("type"), tuple(event)) for event in events]
    texts = [text for event in events for text in said(event)]
    last = [event for event in events if event.get("usage") or "type" in event][-1:]
    return [kind for kind, _ in itertools.groupby(kinds)], "".join(texts), last, lines[-2:]


def said(event: Any, name: str = "") -> Iterator[str]:
    """The texts of what an event adds."""
    if isinstance(event, dict):
        for key, value in event.items():
            if key not in ("response", "item", "part", "message"):
                yield from said(value, key)
    elif isinstance(event, list):
        for value in event:
            yield from said(value, name)
    elif isinstance(event, str) and name in ("text", "content", "arguments", "delta", "reasoning"):
        yield event


@pytest.mark.parametrize(
    ("path", "fields"), CALLS, ids=[f"{path} {sorted(fields)}" for path, fields in CALLS]
)
def test_status_and_bytes_are_those_of_the_server_behind(
    path: str,
    fields: dict[str, Any],
    vllm: Server,
    gateway: tuple[GatewayProcess, asyncio.Runner, Path],
) -> None:
    body = fields if path == "/tokenize" else PLAIN | fields
    direct = sent(vllm.url, path, body)
    through = sent(gateway[0].url, path, body)
    assert through.status_code == direct.status_code
    assert through.headers["content-type"] == direct.headers["content-type"]
    assert comparable(through) == comparable(direct)


def test_records_have_what_the_server_counted(
    gateway: tuple[GatewayProcess, asyncio.Runner, Path],
) -> None:
    """Whole with usage; streamed, by its frames and by /tokenize."""
    process, runner, folder = gateway
    whole = sent(process.url, "/v1/completions", PLAIN | {"prompt": "one two three"})
    usage = whole.json()["usage"]
    chat = PLAIN | {"messages": SAID, "ignore_eos": True}
    sent(process.url, "/v1/chat/completions", chat | {"stream": True})
    streamed = sent(process.url, "/v1/chat/completions", chat).json()["usage"]

    async def flushed() -> None:
        await process.ask("GET", "/admin/state")

    runner.run(flushed())
    _, records = read_run(folder / "records.jsonl")
    first, second, third = records[-3:]
    assert (first.prompt_tokens, first.output_tokens) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert second.prompt_tokens == third.prompt_tokens == streamed["prompt_tokens"]
    assert second.output_tokens == third.output_tokens == streamed["completion_tokens"] == 12
    assert (second.finish_reason, second.clipped) == ("length", False)


async def waiting_and_running(port: int) -> tuple[float, float]:
    """In vLLM, by its own metrics."""
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    found = {
        name: float(value)
        for name, value in re.findall(
            r"^vllm:num_requests_(waiting|running)\{.*\} (.*)$", text, re.MULTILINE
        )
    }
    return found["waiting"], found["running"]


def test_the_backlog_is_in_the_gateway_and_who_leaves_is_let_go(
    vllm: Server, gateway: tuple[GatewayProcess, asyncio.Runner, Path]
) -> None:
    process, runner, _ = gateway
    body = PLAIN | {"prompt": "hello", "max_tokens": 1500, "ignore_eos": True, "stream": True}

    async def test() -> None:
        async with httpx.AsyncClient(base_url=process.url, timeout=120) as client:
            calls = [
                asyncio.create_task(client.post("/v1/completions", json=body))
                for _ in range(3 * SLOTS)
            ]

            async def full() -> bool:
                return (await waiting_and_running(vllm.port))[1] == SLOTS

            await eventually(full)
            assert (await waiting_and_running(vllm.port)) == (0, SLOTS)
            state = await process.ask("GET", "/admin/state")
            assert (state["in_service"], state["queue_length"]) == (SLOTS, 2 * SLOTS)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

            async def empty() -> bool:
                return await waiting_and_running(vllm.port) == (0, 0)

            await eventually(empty)
        state = await process.ask("GET", "/admin/state")
        assert (state["in_service"], state["queue_length"], state["unanswered"]) == (0, 0, 0)

    runner.run(test())


def test_a_calibration_through_the_gateway_finds_a_law(
    gateway: tuple[GatewayProcess, asyncio.Runner, Path],
) -> None:
    process, runner, _ = gateway

    async def test() -> dict[str, Any]:
        plan = {"repeats": 2, "max_batch_size": SLOTS, "max_output_tokens": 32}
        return dict(await process.ask("POST", "/admin/calibrate", plan))

    profile = runner.run(test())
    law = profile["law"]
    assert law["k4"] + law["k3"] > 0
    assert profile["engine"] == "http"
    assert json.dumps(profile)
