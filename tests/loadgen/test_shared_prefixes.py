"""Prompts of a trace with `hash_ids`: blocks of one id have the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from kendall.loadgen.report.load_report import parse_wishes, report_on
from kendall.loadgen.report.options import ReportOptions
from kendall.loadgen.report.summary_text import load_lines
from kendall.policies.text import SpecError
from kendall.queueing.arrivals.timetable import save_timetable
from tests.loadgen.fake_server import DONE, chunk, stream, usage
from tests.loadgen.loading import loaded, planned

SAMPLE = Path(__file__).parent / "samples" / "mooncake.jsonl"


def trace(tmp_path: Path, *rows: tuple[int, str], kind: str = "") -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        f'{{"timestamp": {place}, "input_length": {length}, "output_length": 2{kind}{ids}}}'
        for place, (length, ids) in enumerate(rows)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def prompts(path: Path, **options: Any) -> list[list[int]]:
    plan = planned(request_rate=None, num_prompts=None, trace=path, **options)
    return [np.asarray(prompt).tolist() for prompt in plan.prompts]


def test_prompts_share_the_blocks_that_the_trace_names(tmp_path: Path) -> None:
    path = trace(
        tmp_path,
        (1000, ', "hash_ids": [7, 8]'),
        (1200, ', "hash_ids": [7, 8, 9]'),
        (700, ', "hash_ids": [7, 10]'),
        (600, ', "hash_ids": []'),
        (600, ""),
    )
    first, second, third, own, other = prompts(path)
    assert list(map(len, (first, second, third, own, other))) == [1000, 1200, 700, 600, 600]
    assert first == second[:1000]
    assert first[:512] == third[:512]
    assert first[512:520] != third[512:520]
    assert own[:8] != other[:8]
    assert own[512:520] != other[512:520]
    assert set(first) <= set(range(10, 250))
    # by id alone, whatever else is in the file; another seed has other tokens
    assert prompts(trace(tmp_path, (512, ', "hash_ids": [8]')))[0][:488] == first[512:]
    assert prompts(trace(tmp_path, (512, ', "hash_ids": [8]')), seed=1)[0][:8] != first[512:520]


def test_instants_and_lengths_are_those_without_sharing() -> None:
    shared = planned(request_rate=None, num_prompts=None, trace=SAMPLE)
    alone = planned(request_rate=None, num_prompts=None, trace=SAMPLE, ignore_hash_ids=True)
    assert np.array_equal(shared.timetable.intended_at, alone.timetable.intended_at)
    assert np.array_equal(shared.timetable.prompt_tokens, alone.timetable.prompt_tokens)
    assert alone.timetable.hash_ids is None
    assert "shared_prompt_tokens" not in alone.header
    rows = [np.asarray(prompt) for prompt in shared.prompts]
    assert np.array_equal(rows[0][:4096], rows[1][:4096])


def test_blocks_of_a_bailian_trace_have_16_tokens(tmp_path: Path) -> None:
    kind = ', "chat_id": 1'
    first, second = prompts(
        trace(tmp_path, (40, ', "hash_ids": [1, 2, 3]'), (40, ', "hash_ids": [1, 2, 4]'), kind=kind)
    )
    assert first[:32] == second[:32]
    assert first[32:] != second[32:]


def test_a_saved_timetable_gives_the_same_prompts(tmp_path: Path) -> None:
    plan = planned(request_rate=None, num_prompts=None, trace=SAMPLE, seed=3)
    save_timetable(tmp_path / "t", plan.timetable, {"seed": plan.seed, **plan.header})
    again = planned(request_rate=None, num_prompts=None, timetable=tmp_path / "t")
    assert all(map(np.array_equal, plan.prompts, again.prompts))


def test_a_prefix_cache_hits_as_the_trace_says(tmp_path: Path) -> None:
    """A server that keeps every block of 16 tokens: what it reports is what the trace has."""
    cache: set[tuple[int, ...]] = set()

    async def caching(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        prompt = body["prompt"]
        prefixes = [tuple(prompt[:end]) for end in range(16, len(prompt) + 1, 16)]
        hits = next((n for n, each in enumerate(prefixes) if each not in cache), len(prefixes))
        cache.update(prefixes)
        details = {"prompt_tokens_details": {"cached_tokens": 16 * hits}}
        parts = [chunk(), chunk(finish="length"), usage(len(prompt), 2, **details), DONE]
        return await stream(request, parts)

    path = trace(
        tmp_path,
        (1024, ', "hash_ids": [0, 1]'),
        (1536, ', "hash_ids": [0, 1, 2]'),
        (1024, ', "hash_ids": [0, 3]'),
    )
    result, _ = loaded(caching, request_rate=None, num_prompts=None, trace=path, time_scale=100.0)
    assert [record.cached_tokens for record in result.records] == [0, 1024, 512]
    summary = report_on(result, parse_wishes(ReportOptions())).summary
    assert summary.cached_prompt_tokens == summary.shared_prompt_tokens == 1536 / 3584
    said = "prefix cache  of the prompt tokens: 42.9 % the server reports, 42.9 % the trace has"
    assert said in load_lines(summary)


@pytest.mark.parametrize("ids", ['"x"', "[1.5]", "[-1]", "[4611686018427387904]", "3"])
def test_ids_that_are_none_are_refused_with_their_line(ids: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        prompts(trace(tmp_path, (512, ""), (512, f', "hash_ids": {ids}')))
    assert "trace.jsonl, line 2: got" in str(caught.value)
