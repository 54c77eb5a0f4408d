"""What was measured survives the death of who measured it: run files that grow, are cut, are
replaced.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kendall.loadgen.sending.client.target import LoadError
from kendall.loadgen.sending.operating_system import SPARE, raise_file_limit
from kendall.loadgen.sending.run_writer import RunWriter, replace_run
from kendall.queueing.measurement.record import Header, Record, read_run, to_line, write_run
from tests.eventually import eventually_here
from tests.loadgen.fake_server import answer, serving_in_a_thread
from tests.loadgen.growing import completed_in
from tests.loadgen.test_load_cli import server_url

__all__ = ["server_url"]
HEADER = Header(writer="load", seed=3)


def record(name: str) -> Record:
    return Record(request_id=name, outcome="completed", sent_at=1.0)


def test_every_record_is_in_the_file_as_soon_as_it_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    with RunWriter(path, HEADER) as writer:
        assert read_run(path) == (HEADER, [])
        for count in range(1, 4):
            writer.keep(record(f"r-{count}"))
            assert len(read_run(path)[1]) == count


def test_a_last_line_that_was_cut_is_left_out_wherever_the_cut_is(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    last = to_line(record("r-2"))
    for length in range(len(last)):
        path.write_bytes(to_line(HEADER) + to_line(record("r-1")) + last[:length])
        kept = [r.request_id for r in read_run(path)[1]]
        assert kept == (["r-1"] if length < len(last) - 1 else ["r-1", "r-2"]), length


def test_a_broken_line_in_the_middle_or_a_broken_header_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(to_line(HEADER) + b'{"request_id":"r\n' + to_line(record("r-2")))
    with pytest.raises(ValueError, match="line 2"):
        read_run(path)
    path.write_bytes(to_line(HEADER)[:20])
    with pytest.raises(ValueError, match="line 1"):
        read_run(path)
    path.write_bytes(to_line(HEADER) + b'{"outcome":"completed"}')  # whole, but no record
    with pytest.raises(ValueError, match="line 2"):
        read_run(path)


def test_a_run_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_run(path, HEADER, [record("b"), record("a")])
    replace_run(path, HEADER, [record("a"), record("b")])
    assert [r.request_id for r in read_run(path)[1]] == ["a", "b"]
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    replace_run(pipe, HEADER, [record("a")])
    assert pipe.is_fifo()
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_killed_generator_keeps_what_it_measured(
    server_url: str, tmp_path: Path, processes: int
) -> None:
    """SIGKILL in mid-run: every answer that had ended is in a run file, and no sender goes on
    alone.
    """
    command = [
        sys.executable,
        "-m",
        "kendall.loadgen.commands.load_cli",
        "--base-url",
        server_url,
        "--request-rate",
        "30",
        "--num-prompts",
        "6000",
    ]
    flags = [
        "--processes",
        str(processes),
        "--max-tokens",
        "2",
        "--save-result",
        str(tmp_path / "run.jsonl"),
    ]
    names = ["run.jsonl"] if processes == 1 else ["run.sender0.jsonl", "run.sender1.jsonl"]
    with subprocess.Popen(
        [*command, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as child:
        eventually_here(
            lambda: (
                child.poll() is not None
                or all(completed_in(tmp_path / name) > 20 for name in names)
            ),
            seconds=60,
        )
        assert child.returncode is None
        child.send_signal(signal.SIGKILL)
    files = sorted(tmp_path.glob("*.jsonl"))
    assert [path.name for path in files] == names
    for path in files:
        wait_until_it_stops_growing(path)
        header, records = read_run(path)
        assert header.configuration["num_prompts"] == 6000
        assert 20 < len(records) < 1000
        assert sum(r.outcome == "completed" for r in records) > 20
    assert (tmp_path / "run.timetable").exists()


def wait_until_it_stops_growing(path: Path) -> None:
    size = -1
    for _ in range(200):
        if size == (size := path.stat().st_size):
            return
        time.sleep(0.3)
    raise AssertionError(f"{path} still grows")


@pytest.fixture
def slow_server_url() -> Iterator[str]:
    """Nobody is answered before two seconds without a further request: the streams of a burst
    are there at once.
    """
    last = 0.0

    async def later(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal last
        last = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < last + 2.0:  # noqa: ASYNC110 - an instant that moves
            await asyncio.sleep(0.1)
        return await answer(request, body)

    with serving_in_a_thread(later) as url:
        yield url


@pytest.mark.slow
def test_too_few_descriptors_are_named(slow_server_url: str) -> None:
    """60 files for 100 streams at once: those that found none say what to do; nothing hangs."""
    program = f"""
        import asyncio, resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
        import numpy as np
        from kendall.loadgen.sending.client.client import Target
        from kendall.loadgen.sending.run import run_load
        from kendall.queueing.arrivals.timetable import Timetable
        table = Timetable(np.zeros(100), np.full(100, 4), np.full(100, 2))
        target = Target(base_url="{slow_server_url}", model="m")
        result = asyncio.run(run_load(target, table, seed=0))
        print(len(result.records), {{r.error for r in result.records if r.outcome != "completed"}})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.startswith("100 "), done.stderr
    assert "raise `ulimit -n` or use --processes" in done.stdout


@pytest.mark.parametrize(
    ("soft", "hard", "fit"), [(256, 4096, 4096 - SPARE), (4096, 4096, 4096 - SPARE)]
)
def test_so_many_streams_fit_as_files_are_left(
    soft: int, hard: int, fit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
    assert raise_file_limit() == raise_file_limit(fit) == fit
    assert limits == ([] if soft == hard else [(hard, hard)] * 2)
    with pytest.raises(
        LoadError,
        match=rf"^got {fit + 1} requests at once; this system gives a process {hard} files",
    ):
        raise_file_limit(fit + 1)


def test_streams_are_a_million_where_the_system_has_no_limit_or_names_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endless = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: endless)
    assert raise_file_limit() == 1_048_576 - SPARE
    monkeypatch.setitem(sys.modules, "resource", None)
    assert raise_file_limit() == 1_048_576


def test_the_folders_of_a_run_file_are_made(tmp_path: Path) -> None:
    for _ in range(2):
        with RunWriter(tmp_path / "new" / "folder" / "run.jsonl", Header(writer="load")) as writer:
            writer.keep(Record(request_id="a", outcome="completed"))
        _, (record,) = read_run(tmp_path / "new" / "folder" / "run.jsonl")
        assert record.request_id == "a"
