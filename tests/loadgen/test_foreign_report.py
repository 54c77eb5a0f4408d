"""The report of a server that tells nothing of its queue: histogram, status codes, intervals, time.

`kendall summary` prints it again from the file.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from typer.testing import CliRunner

from kendall.loadgen.commands import load_cli, summary_cli
from kendall.loadgen.measures.failures import status_counts
from kendall.queueing.measurement.record import Record
from tests.loadgen.answers import answered
from tests.loadgen.fake_server import DONE, chunk, row_of, serving_in_a_thread, stream, usage

ERRORS = {3: 429, 4: 500}  # by the last digit of a request's number
ROOT = Path(__file__).parents[2]


async def foreign(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """None of Kendall's headers; some answers are errors, or break off."""
    row = row_of(request)
    if status := ERRORS.get(row % 10):
        error = {"error": {"message": "not now", "code": "busy"}}
        return web.json_response(error, status=status)
    if row % 50 == 7:
        return await stream(request, [chunk()])
    await asyncio.sleep(0.01 * (row % 5))
    tokens = body["max_tokens"]
    return await stream(request, [*[chunk()] * tokens, usage(4, tokens), DONE])


def kendall(*arguments: str) -> str:
    """What it prints where stdout is no terminal."""
    apps = {"load": load_cli.app, "summary": summary_cli.app}
    return CliRunner().invoke(apps[arguments[0]], list(arguments[1:])).stdout


def load(url: str, path: Path, *more: str) -> str:
    flags = ("--num-prompts", "100", "--max-tokens", "3", "--output", str(path))
    return kendall("load", "--base-url", url, *flags, *more)


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with serving_in_a_thread(foreign) as url:
        yield url


@pytest.fixture(scope="module")
def run(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Its file, and what was printed at its end."""
    path = tmp_path_factory.mktemp("foreign") / "run.jsonl"
    return path, load(server_url, path, "--request-rate", "100")


def test_the_report_has_a_histogram_and_the_status_codes_in_80_columns(
    run: tuple[Path, str],
) -> None:
    lines = run[1].splitlines()
    assert max(map(len, lines)) <= 80
    completed = next(int(line.split()[1]) for line in lines if line.startswith("requests  "))
    place = next(row for row, line in enumerate(lines) if line.startswith("end to end (ms)"))
    bars = lines[place + 1 : lines.index("", place)]
    counts = [int(line.split()[3]) for line in bars]
    marks = [line.count("\N{BLACK SQUARE}") for line in bars]
    assert 70 < sum(counts) <= completed  # less the warm-up
    assert max(marks) == marks[counts.index(max(counts))] == 32
    place = next(row for row, line in enumerate(lines) if line.startswith("status code"))
    codes = [line.split("  ")[0] for line in lines[place + 1 : place + 5]]
    assert codes == ["200", "429", "500", "no whole answer"]
    assert [
        line[len("no whole answer") :].split()[:2] for line in lines[place + 1 : place + 5]
    ] == [["78", "78.0"], ["10", "10.0"], ["10", "10.0"], ["2", "2.0"]]


def test_a_summary_of_the_file_says_the_same(run: tuple[Path, str]) -> None:
    path, live = run
    again = kendall("summary", str(path))
    assert "status code" in again
    assert again.split() == live.replace(f"written: {path}", "").split()
    found = json.loads(kendall("summary", str(path), "--json"))
    assert {name: each["requests"] for name, each in found["status_codes"].items()} == {
        "200": 78,
        "429": 10,
        "500": 10,
        "none": 2,
    }
    assert sum(each["count"] for each in found["e2el"]["histogram"]) == found["e2el"]["n"]


@pytest.mark.slow
def test_bars_are_written_with_what_the_encoding_has(run: tuple[Path, str]) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "kendall", "summary", str(run[0])],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
        text=True,
    ).stdout
    assert "####" in printed
    assert "????" not in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "states"),
    [
        (("--request-rate", "100"), True),
        (("--max-concurrency", "4"), True),
        (("--request-rate", "inf"), False),
        (("--request-rate", "inf", "--max-concurrency", "4"), False),
    ],
)
def test_a_short_run_says_how_long_one_would_do_at_this_rate(
    flags: tuple[str, ...], states: bool, server_url: str, tmp_path: Path
) -> None:
    """Delays of requests due at once grow with their number: no time would do."""
    text = load(server_url, tmp_path / "run.jsonl", *flags, "--num-prompts", "30")
    printed = " ".join(text.split())
    assert "requests would do" not in printed
    assert "too short: the run does not know this mean to 25 %" in printed
    assert ("s at this rate would do for the end-to-end time" in printed) is states


def record(outcome: str, error: str | None = None) -> Record:
    return msgspec.structs.replace(answered(0, 0.0), outcome=outcome, error=error)


def test_a_status_is_read_from_the_answer_and_from_nothing_else() -> None:
    records = [
        record("completed"),
        record("rejected", "429 queue_full: no"),
        record("abandoned", "503 queue_timeout"),
        record("failed", "500"),
        record("failed", "Internal Server Error"),
        record("failed", "5000 things went wrong"),
        record("failed", "127.0.0.1:9: connection refused"),
        record("cancelled", "the run ended before the answer did"),
    ]
    counted = {
        name: each.requests for name, each in status_counts(records, cut_short=False).items()
    }
    assert counted == {"200": 1, "429": 1, "500": 2, "503": 1, "none": 3}
    cut = status_counts(records, cut_short=True)
    assert cut["none"].requests == 2, "what an interrupted run cancels is no answer of the server"
    assert sum(each.share for each in cut.values()) == pytest.approx(1.0)
    assert status_counts([], cut_short=False) == {}


def test_shares_have_an_interval_unless_a_status_came_in_a_few_bursts() -> None:
    """One burst of a hundred refusals says nothing of how often there will be another one."""
    ok, refused = record("completed"), record("rejected", "429 busy")
    spread = status_counts(
        [refused if row % 20 == 5 else ok for row in range(2000)], cut_short=False
    )
    burst = status_counts(
        [refused if 900 <= row < 1000 else ok for row in range(2000)], cut_short=False
    )
    for name, share in (("200", 0.95), ("429", 0.05)):
        assert spread[name].share == burst[name].share == pytest.approx(share)
        assert spread[name].low is not None
        assert spread[name].high is not None
        assert spread[name].low < share < spread[name].high
        assert (burst[name].low, burst[name].high) == (None, None)
    alone = status_counts([ok] * 100, cut_short=False)["200"]
    assert alone.low is not None
    assert 0.9 < alone.low < 1.0
