"""A hundred thousand bodies on every POST route: each is answered, other clients hardly notice, and
the memory comes back.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from kendall.loadgen.gateway.gateway_process import GatewayProcess
from kendall.server.runtime import garbage
from tests.server.counts import resident, tell
from tests.server.processes import gateway

BODIES = 100_000
CLIENTS = 16
LATE = 0.3  # seconds that /health may take
KEPT = 50.0  # MiB that may stay
LAW = "k1=0,k2=0,k3=0,k4=0.00001"
SEED = 20_150

# of each route one body that is served, and fields that it knows besides
TEXT = {"model": "tiny", "prompt": [5, 6], "max_tokens": 3}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
SAMPLING = (
    *("n", "best_of", "stream", "stream_options", "stop", "seed", "temperature", "top_p", "top_k"),
    *("logprobs", "top_logprobs", "echo", "suffix", "user", "logit_bias", "presence_penalty"),
    *("min_tokens", "ignore_eos", "bad_words", "priority", "tools", "tool_choice"),
    *("response_format", "guided_json", "guided_regex", "structured_outputs", "max_output_tokens"),
    *("max_completion_tokens", "previous_response_id", "system", "thinking", "metadata", "input"),
    *("add_special_tokens", "tokens", "return_token_strs", "dimensions", "encoding_format"),
)
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": TEXT,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": "tiny", "input": "hello", "max_output_tokens": 3},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"model": "tiny", "messages": CHAT["messages"]},
    "/v1/embeddings": {"model": "tiny", "input": "hello"},
    "/tokenize": {"model": "tiny", "prompt": "hello"},
    "/detokenize": {"model": "tiny", "tokens": [5, 6]},
}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 64, 10**6, 2**31, 2**63, 2**64, 10**40, 0.5, -0.0, 4.0),
    *(1e308, 1e-320, float("nan"), float("inf"), "", "a", "64", "4e2", "\x00", "\ud800", "é", "🎈"),
    *("x" * 5000, "<|im_end|>", "{{ 7 * 7 }}", [], {}, [[]], [None], [5], ["a"], [1.5], [-1]),
    *([[5, 6], [7]], [2**70], {"": ""}, {"type": "function"}, {"type": "json_object"}),
    *({"role": "user"}, [{"role": "tool", "content": 3}], [{"role": "user", "content": [{}]}]),
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
)
BYTES = (b"", b"{", b"[]", b"null", b'"', b"\xff\xfe{}", b'{"model": "tiny", "model": 3}', b"{}{}")


def bodies(rng: np.random.Generator, route: str) -> bytes:
    """One body for the route: mostly a good one in which some parts are replaced."""
    if rng.random() < 0.03:
        return BYTES[rng.integers(len(BYTES))]
    body = json.loads(json.dumps(GOOD.get(route, TEXT)))
    for _ in range(rng.integers(0, 4)):
        mutate(rng, body)
    text = json.dumps(body).encode()
    if rng.random() < 0.02:
        at = int(rng.integers(len(text)))
        return text[:at] + rng.bytes(int(rng.integers(0, 3))) + text[at + 1 :]
    return text


def mutate(rng: np.random.Generator, body: dict[str, Any]) -> None:
    kind, value = rng.random(), any_value(rng)
    names = list(body)
    if kind < 0.2 and names:
        del body[names[rng.integers(len(names))]]
    elif kind < 0.5 and names:
        body[names[rng.integers(len(names))]] = value
    elif kind < 0.95:
        body[SAMPLING[rng.integers(len(SAMPLING))]] = value
    elif names:  # somewhere within
        name = names[rng.integers(len(names))]
        body[name] = [body[name], value] if rng.random() < 0.5 else {"content": body[name]}


def any_value(rng: np.random.Generator) -> Any:
    value = VALUES[rng.integers(len(VALUES))]
    if rng.random() < 0.05:
        for _ in range(rng.integers(1, 80)):
            value = [value] if rng.random() < 0.5 else {"a": value}
    elif rng.random() < 0.02:
        value = [value] * int(rng.integers(1, 3000))
    return value


PROBE = """
import http.client, sys, time
worst, count = 0.0, 0
print("probing", flush=True)
while not sys.stdin.closed:
    began = time.monotonic()
    probe = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=30)
    probe.request("GET", "/health")
    status = probe.getresponse().status
    worst = max(worst, time.monotonic() - began) if status == 200 else 1e9
    count += 1
    print(worst, count, flush=True)
    time.sleep(0.05)
"""


async def worst_health(port: int, work: asyncio.Future[Any]) -> tuple[float, int]:
    """The longest time that /health took while the work went on, by a process of its own, seconds;
    and how often it was asked.
    """
    probe = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROBE, str(port), stdout=asyncio.subprocess.PIPE
    )
    assert probe.stdout is not None
    said = await probe.stdout.readline()
    try:
        while not work.done():
            said = await probe.stdout.readline() or said
    finally:
        with suppress(ProcessLookupError):
            probe.kill()
        await probe.wait()
    worst, count = said.split()
    return float(worst), int(count)


async def send_all(
    client: httpx.AsyncClient, calls: Iterator[tuple[str, bytes]], seen: Counter[tuple[str, int]]
) -> None:
    for route, body in calls:
        try:
            answer = await client.post(route, content=body)
        except httpx.TransportError as error:
            raise AssertionError((route, body[:2000], error)) from error
        seen[route, answer.status_code] += 1
        if answer.status_code >= 500:
            assert answer.status_code in (501, 503), (route, body[:500], answer.text[:500])


async def settled(pid: int, before: float) -> float:
    for _ in range(80):
        if resident(pid) / 2**20 - before < KEPT / 2:
            break
        await asyncio.sleep(0.25)
    return resident(pid) / 2**20 - before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_any_body_on_every_post_route_is_answered_and_leaves_nothing(tmp_path: Path) -> None:
    running = gateway(
        tmp_path, "tiny", "--engine", "emulated", "--latency", LAW, "--policy", "continuous"
    )
    seen: Counter[tuple[str, int]] = Counter()
    rng = np.random.default_rng(SEED)

    async def play(process: GatewayProcess) -> tuple[tuple[float, int], float]:
        await process.ready()
        port = int(process.url.rpartition(":")[2])
        async with httpx.AsyncClient(base_url=process.url, timeout=60) as client:
            document = (await client.get("/openapi.json")).json()
            routes = sorted(
                path
                for path, methods in document["paths"].items()
                if "post" in methods and "{" not in path and not path.startswith("/admin")
            )
            assert set(GOOD) <= set(routes) | {"/v1/embeddings"}, routes

            def calls(count: int) -> Iterator[tuple[str, bytes]]:
                for _ in range(count):
                    route = routes[rng.integers(len(routes))]
                    yield route, bodies(rng, route)

            await send_all(client, calls(BODIES // 50), Counter())  # what is made once is there
            await asyncio.sleep(3 * garbage.PERIOD)
            before = resident(process.pid) / 2**20
            shared = calls(BODIES)
            work = asyncio.gather(*(send_all(client, shared, seen) for _ in range(CLIENTS)))
            late = await worst_health(port, work)
            await work
        return late, await settled(process.pid, before)

    async def main() -> tuple[tuple[float, int], float]:
        async with running:
            return await play(running)

    (worst, asked), kept = asyncio.run(main())
    tell(
        "fuzzed bodies",
        worst_health=round(worst, 3),
        probes=asked,
        kept_mebibytes=round(kept, 1),
        statuses={f"{route} {status}": count for (route, status), count in sorted(seen.items())},
    )
    assert sum(seen.values()) == BODIES
    assert "Traceback" not in running.log()
    assert worst <= LATE
    assert kept <= KEPT
