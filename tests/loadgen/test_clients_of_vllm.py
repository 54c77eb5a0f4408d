"""Prefixes of a trace, conversations, clients that hang up: before a real, plain `vllm serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.gateway_cost.servers import Server, small_vllm
from kendall.loadgen.sending.run import LoadResult
from tests.loadgen.loading import planned

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
FLAGS = ("--enable-prefix-caching", "--enable-prompt-tokens-details", "--no-enable-chunked-prefill")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("vllm")
    with small_vllm(folder, 4, arguments=(*FLAGS, "--max-num-batched-tokens", "4096")) as server:
        yield server


def run(server: Server, **options: Any) -> LoadResult:
    async def main() -> LoadResult:
        plan, _ = await planned(base_url=server.url, **options).for_server()
        return await plan.run()

    return asyncio.run(main())


def test_the_prefix_cache_hits_as_the_trace_says(vllm: Server, tmp_path: Path) -> None:
    rows = ((1024, [0, 1]), (1500, [0, 1, 2]), (700, [0, 3]), (600, [4, 5]))
    lines = [
        f'{{"timestamp": {2000 * place}, "input_length": {length}, "output_length": 4, '
        f'"hash_ids": {ids}}}'
        for place, (length, ids) in enumerate(rows)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    result = run(vllm, request_rate=None, num_prompts=None, trace=tmp_path / "trace.jsonl")
    assert [(r.outcome, r.cached_tokens) for r in result.records] == [
        ("completed", hits) for hits in (0, 1024, 512, 0)
    ]


def test_later_turns_hit_what_was_said_before(vllm: Server) -> None:
    """Prompts grow by the question and the server's own answer; whole blocks of them are there."""
    result = run(
        vllm,
        turns="deterministic:value=3",
        num_prompts=3,
        prompt_tokens="deterministic:value=200",
        output_tokens="deterministic:value=8",
        seed=5,
    )
    assert {record.outcome for record in result.records} == {"completed"}
    for turn in (2, 3):
        for record in result.records:
            if record.turn == turn:
                assert (record.prompt_tokens or 0) > 200 * turn
                assert (record.cached_tokens or 0) >= 200 * (turn - 1) - 32


def test_the_server_stops_work_for_clients_that_hang_up(vllm: Server) -> None:
    result = run(
        vllm,
        request_rate=20.0,
        num_prompts=12,
        output_tokens="deterministic:value=1500",
        cancel=1.0,
        cancel_after="tokens:3",
    )
    assert {record.outcome for record in result.records} == {"cancelled"}
    assert max(record.output_tokens or 0 for record in result.records) < 500
    metrics = httpx.get(f"{vllm.url}/metrics").text
    (running,) = [
        line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running")
    ]
    assert float(running.split()[-1]) <= 1
