"""`kendall load` as a user meets it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from loadgen.cli import app
from policies.text import SpecError
from queueing.record import read_run
from tests.loadgen.fake_server import Handler, answer, serving


@pytest.fixture
def server_url() -> Iterator[str]:
    yield from _serve(answer)


def _serve(handler: Handler) -> Iterator[str]:
    """A server on a loop of its own, in a thread."""
    loop, started, urls = asyncio.new_event_loop(), threading.Event(), []
    stop = asyncio.Event()

    async def main() -> None:
        async with serving(handler) as server:
            urls.append(server.url)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert started.wait(10)
    yield urls[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def load(url: str, *more: str) -> Result:
    return invoke(
        "load", "--base-url", url, "--request-rate", "200", "--num-prompts", "30", "--output-tokens", "uniform:low=1,high=9", *more
    )


def test_load_prints_one_json_object_and_writes_the_run(server_url: str, tmp_path: Path) -> None:
    result = load(server_url, "--json", "--result-dir", str(tmp_path), "--save-result", "run.jsonl", "--seed", "7")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["outcomes"] == {"completed": 30}
    assert summary["queueing_delay"]["mean"] == pytest.approx(0.0015)
    assert summary["send_lateness"]["n"] == 30
    assert summary["asked_rate"] == 200
    header, records = read_run(tmp_path / "run.jsonl")
    assert (header.writer, header.seed, header.configuration["request_rate"], len(records)) == ("load", 7, 200.0, 30)
    assert header.configuration["output_tokens"] == "uniform:low=1,high=9"
    assert sum(record.output_tokens or 0 for record in records) == summary["output_tokens"]["mean"] * 30


def test_load_prints_a_table(server_url: str) -> None:
    result = load(server_url)
    assert result.exit_code == 0
    for word in ("30 completed", "asked 200", "delivered", "lateness", "time to first token", "queueing delay"):
        assert word in result.stdout


def test_nobody_there_is_one_line_and_exit_1() -> None:
    result = load("http://127.0.0.1:9")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "is the server up" in result.stderr


def test_no_success_is_exit_1() -> None:
    result = load("http://127.0.0.1:9", "--model", "m", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["outcomes"] == {"failed": 30}


@pytest.mark.parametrize(
    "more",
    [
        ("--request-rate", "0"),
        ("--num-prompts", "0"),
        ("--output-tokens", "gaussian:mean=3"),
        ("--max-tokens", "0"),
        ("--drain-limit", "-1"),
    ],
)
def test_wrong_arguments_raise_a_spec_error(more: tuple[str, str]) -> None:
    result = load("http://127.0.0.1:9", "--model", "m", *more)
    assert isinstance(result.exception, SpecError)


def test_every_flag_says_what_it_does() -> None:
    shown = CliRunner().invoke(app, ["load", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
    for flag in (
        "--base-url",
        "--request-rate",
        "--num-prompts",
        "--max-tokens",
        "--ignore-eos",
        "--save-result",
        "--drain-limit",
        "--json",
    ):
        assert flag in shown
    assert "KENDALL_REQUEST_RATE" in shown


def test_ctrl_c_keeps_what_was_recorded(server_url: str, tmp_path: Path) -> None:
    # a shell's background job inherits SIGINT ignored; this process must not
    start = (
        "import signal, runpy; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "runpy.run_module('loadgen.cli', run_name='__main__')"
    )
    command = [sys.executable, "-c", start, "load", "--base-url", server_url, "--request-rate", "20", "--num-prompts", "5000"]
    process = subprocess.Popen([*command, "--save-result", str(tmp_path / "run.jsonl")], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.readline()  # the first line of progress: the run is under way
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert b"interrupted" in out, err
    _, records = read_run(tmp_path / "run.jsonl")
    assert 5 < len(records) < 500
