"""A plain `vllm serve` that sends its spans to `kendall watch`, over each of the two protocols."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bench.gateway_cost.servers import small_vllm
from kendall.loadgen.gateway.gateway_process import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]
SLOTS, SECONDS, MEAN = 4, 60.0, 24
CALIBRATING = 120  # requests
LATER = 15.0  # seconds after which the server's exporter has tried again
WATCH = "from kendall.server.watch.cli import app; app()"


def new_client() -> httpx.AsyncClient:
    """A connection for each call: the server closes one that is idle."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=120, limits=limits, trust_env=False)


async def send(url: str, seconds: float, rate: float, seed: int) -> list[tuple[int, int]]:
    """Poisson arrivals of known lengths; prompt and output tokens of every answer."""
    rng = np.random.default_rng(seed)
    instants = np.cumsum(rng.exponential(1 / rate, int(1.5 * seconds * rate)))
    instants = instants[instants < seconds]
    outputs = np.minimum(rng.geometric(1 / MEAN, instants.size), 200)
    prompts = rng.integers(8, 128, instants.size)
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def one(client: httpx.AsyncClient, i: int) -> tuple[int, int]:
        await asyncio.sleep(max(0.0, began + float(instants[i]) - loop.time()))
        body = {"model": "tiny", "prompt": rng.integers(300, 900, int(prompts[i])).tolist()}
        body |= {"max_tokens": int(outputs[i]), "ignore_eos": True, "temperature": 0}
        answer = await client.post(f"{url}/v1/completions", json=body)
        answer.raise_for_status()
        usage = answer.json()["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"]

    async with new_client() as client:
        return await asyncio.gather(*(one(client, i) for i in range(instants.size)))


def capacity(url: str) -> float:
    """Requests a second, in a closed loop that keeps every slot busy."""

    async def measure() -> float:
        loop = asyncio.get_running_loop()
        count, began = CALIBRATING, loop.time()
        todo = list(range(count))
        rng = np.random.default_rng(1)
        lengths = np.minimum(rng.geometric(1 / MEAN, count), 200)

        async def user(client: httpx.AsyncClient) -> None:
            while todo:
                i = todo.pop()
                body = {"model": "tiny", "prompt": rng.integers(300, 900, 64).tolist()}
                body |= {"max_tokens": int(lengths[i]), "ignore_eos": True}
                (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()

        async with new_client() as client:
            await asyncio.gather(*(user(client) for _ in range(2 * SLOTS)))
        return count / (loop.time() - began)

    return asyncio.run(measure())


def watched(port: int, url: str, seconds: float) -> subprocess.Popen[str]:
    """Once it listens, and the server has found that out."""
    command = [sys.executable, "-c", WATCH, url, "--otlp", f"127.0.0.1:{port}", "--once"]
    process = subprocess.Popen(
        [*command, "--for", f"{seconds + LATER:g}s", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "waiting for spans" in process.stderr.readline()
    time.sleep(LATER)
    return process


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_the_check_of_a_vllm_that_nobody_changed(tmp_path: Path, protocol: str) -> None:
    """Every request has its span, the slots are found, and model and observation agree."""
    port = free_port(0)
    endpoint = f"http://127.0.0.1:{port}{'/v1/traces' if protocol != 'grpc' else ''}"
    with small_vllm(
        tmp_path,
        SLOTS,
        arguments=["--otlp-traces-endpoint", endpoint],
        environment={"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol},
    ) as server:
        rate = 0.6 * capacity(server.url)
        watching = watched(port, server.url, SECONDS + 15)
        try:
            sent = asyncio.run(send(server.url, SECONDS, rate, 7))
            out, _ = watching.communicate(timeout=240)
        finally:
            watching.kill()
    found: dict[str, Any] = json.loads(out)
    (tmp_path / "watch.json").write_text(out)
    assert watching.returncode == 0
    spans = found["spans"]
    assert 0 <= spans["received"] - len(sent) <= CALIBRATING  # some of its spans come late
    assert spans["lost"] == 0, spans
    assert found["setting"]["policy"] == f"continuous:max_batch_size={SLOTS}"
    assert found["check"]["verdict"] == "agree", found["check"]
    mean = sum(tokens for _, tokens in sent) / len(sent)
    assert found["estimates"]["output_tokens"]["mean"]["value"] == pytest.approx(mean, rel=0.1)
