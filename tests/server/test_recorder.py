"""The gateway's run file: written within a second, never over an older one, in whole lines, and
nothing waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kendall.cli
from kendall.loadgen.gateway.gateway_process import GatewayProcess, free_port
from kendall.policies import SpecError
from kendall.queueing.measurement.paths import check_writable
from kendall.queueing.measurement.record import Header, Record, read_run, to_line
from kendall.server.operations import cli, serving
from kendall.server.telemetry import recorder
from kendall.server.telemetry.recorder import Recorder
from tests.eventually import eventually_here
from tests.server.asgi import LAW, call, completion, running
from tests.server.processes import SocketCall

HEADER = Header(writer="gateway")


def record(name: str) -> Record:
    return Record(request_id=name, outcome="completed", arrived_at=1.0)


def names(path: Path) -> list[str]:
    """Of the records in the file; fails where a line is not whole."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    return [each.request_id for each in read_run(path)[1]]


def soon(path: Path, count: int) -> None:
    """That many records are in the file, and nobody asks the recorder for them."""
    eventually_here(lambda: len(read_run(path)[1]) >= count)


@pytest.fixture(autouse=True)
def a_patient_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of these tests answers in the end; where it does not, a test says how long it is
    waited for.
    """
    assert (recorder.PATIENCE, recorder.LAST_LINES) == (0.5, 2.0)
    monkeypatch.setattr(recorder, "PATIENCE", 30.0)
    monkeypatch.setattr(recorder, "LAST_LINES", 30.0)


@contextmanager
def room(more: int, path: Path) -> Iterator[None]:
    """A disk with so many bytes left: no file of this process grows beyond."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_record_is_in_the_file_soon_without_anybody_asking(tmp_path: Path) -> None:
    kept = Recorder(tmp_path / "run.jsonl", HEADER)
    assert read_run(tmp_path / "run.jsonl")[0].writer == "gateway", (
        "the header is there from the start"
    )
    for count, name in enumerate(("a", "b"), start=1):
        kept.on_record(record(name))
        soon(tmp_path / "run.jsonl", count)
    kept.close()


def test_many_records_are_written_before_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "LONGEST_UNWRITTEN", 3600.0)
    kept = Recorder(tmp_path / "run.jsonl", HEADER)
    for number in range(recorder.MOST_UNWRITTEN):
        kept.on_record(record(str(number)))
    soon(tmp_path / "run.jsonl", recorder.MOST_UNWRITTEN)
    kept.close()


def test_records_of_many_bytes_are_written_before_there_is_no_room_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or some would be dropped although the disk has room."""
    monkeypatch.setattr(recorder, "LONGEST_UNWRITTEN", 3600.0)
    monkeypatch.setattr(recorder, "QUEUE_BYTES", 20 * len(to_line(record("00"))))
    dropped: list[int] = []
    kept = Recorder(tmp_path / "run.jsonl", HEADER, dropped.append)
    for number in range(30):
        kept.on_record(record(f"{number:02}"))
        if number % 10 == 9:
            soon(tmp_path / "run.jsonl", number + 1)
    assert dropped == []
    kept.close()


def test_a_run_file_that_was_there_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.jsonl"
    with caplog.at_level(logging.INFO):
        for group in (("a", "b"), (), ("c",)):
            kept = Recorder(path, HEADER)
            for name in group:
                kept.on_record(record(name))
            kept.close()
    (older,) = set(tmp_path.iterdir()) - {path}  # of the second gateway nothing was worth keeping
    assert names(older) == ["a", "b"]
    assert names(path) == ["c"]
    assert f"{path} existed already and was renamed to {older}" in caplog.text


def test_a_file_of_another_kind_is_kept_too(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("one line")
    Recorder(path, HEADER).close()
    (older,) = set(tmp_path.iterdir()) - {path}
    assert older.read_text() == "one line"


def test_a_full_disk_leaves_whole_lines_and_once_there_is_room_nothing_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, dropped = tmp_path / "run.jsonl", list[int]()
    kept = Recorder(path, HEADER, dropped.append)
    kept.on_record(record("first"))
    assert kept.flush()
    with room(7 * len(to_line(record("0"))) // 2, path):
        for number in range(10):
            kept.on_record(record(str(number)))
        assert not kept.flush()
        assert names(path) == ["first", "0", "1", "2"], (
            "what there was room for, and no part of a line"
        )
        kept.on_record(record("late"))
        assert not kept.flush()
    assert kept.flush()
    assert names(path) == ["first", *map(str, range(10)), "late"]
    assert dropped == []
    kept.close()
    said = [each.getMessage() for each in caplog.records]
    assert [text for text in said if "cannot write to" in text] == [
        (
            f"cannot write to {path} (File too large): each write is retried; see "
            "kendall_dropped_records_total"
        )
    ]
    assert f"writing to {path} works again; 0 records were dropped in the meantime" in said


def test_what_no_longer_fits_in_memory_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "QUEUE_BYTES", 20 * len(to_line(record("00"))))
    path, dropped = tmp_path / "run.jsonl", list[int]()
    kept = Recorder(path, HEADER, dropped.append)
    with room(0, path):
        for number in range(100):
            kept.on_record(record(f"{number:02}"))
        assert not kept.flush()
    assert kept.flush()
    kept.on_record(record("after"))
    kept.close()
    assert len(names(path)) + sum(dropped) == 101
    assert names(path)[-1] == "after"
    assert sum(dropped) >= 80
    assert f"{sum(dropped)} records were dropped in the meantime" in caplog.text


def test_records_that_the_end_finds_unwritten_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    dropped = list[int]()
    kept = Recorder(Path("/dev/full"), HEADER, dropped.append)
    for name in ("a", "b"):
        kept.on_record(record(name))
    kept.close()
    assert sum(dropped) == 2
    assert caplog.text.count("No space left on device") == 1
    assert "the last 2 records could not be written to /dev/full" in caplog.text


def test_a_disk_that_hangs_is_waited_for_once_and_not_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait has a bound; a wait without one hangs this test."""
    waits, answers = [], threading.Event()
    kept = Recorder(tmp_path / "run.jsonl", HEADER)
    append = kept._file.append
    monkeypatch.setattr(kept._file, "append", lambda data: (answers.wait(), append(data))[1])
    wait_for = kept._changed.wait_for

    def watched(predicate: object, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            waits.append(timeout)
        return wait_for(predicate, timeout)  # type: ignore[arg-type]

    monkeypatch.setattr(kept._changed, "wait_for", watched)
    monkeypatch.setattr(recorder, "PATIENCE", 0.1)
    kept.on_record(record("a"))
    assert not any(kept.flush() for _ in range(5))
    assert waits == [recorder.PATIENCE]
    monkeypatch.setattr(recorder, "LAST_LINES", 0.01)
    kept.close()
    answers.set()
    kept._thread.join(30)
    assert names(tmp_path / "run.jsonl") == ["a"]


def test_a_pipe_that_nobody_reads_is_like_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    kept = Recorder(path, HEADER)
    kept.on_record(record("a"))
    assert not kept.flush()
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    assert kept.flush()
    kept.close()
    assert len(os.read(reader, 1 << 16).splitlines()) == 2
    os.close(reader)


def test_state_drain_and_metrics_do_not_depend_on_the_file() -> None:
    async def main() -> None:
        async with running(record_file=Path("/dev/full")) as (app, gateway):
            assert (await call(app, "POST", "/v1/completions", completion())).status == 200
            assert (await call(app, "GET", "/admin/state")).status == 200
            assert (await call(app, "POST", "/admin/drain")).json() == {"drained": True}
            text = gateway.metrics.exposition().decode()
            assert "kendall_unwritten_records 1.0" in text, "it waits in memory"
            assert gateway.lost_records == 0
        text = gateway.metrics.exposition().decode()
        assert "kendall_dropped_records_total 1.0" in text
        assert gateway.lost_records == 1

    asyncio.run(main())


def test_a_path_that_cannot_be_written_is_found_before_an_engine_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()

    def no_engine(_: object) -> None:
        raise AssertionError("an engine was chosen")

    monkeypatch.setattr(serving, "choose_engine", no_engine)
    monkeypatch.setattr(cli, "configure_logs", lambda _: None)
    for option in ("--record-file", "--state-file"):
        with pytest.raises(SystemExit) as stop:
            kendall.cli.main(
                [
                    "serve",
                    "tiny",
                    "--engine",
                    "emulated",
                    "--port",
                    "0",
                    option,
                    str(file / "below" / "run.jsonl"),
                ]
            )
        assert stop.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith(
            f"kendall: got {option} {file}/below/run.jsonl; expected a file that can be written "
            "(Not a directory)"
        )
        assert said.count("\n") == 1


def test_the_check_of_a_path_leaves_no_file_behind_and_changes_none(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "run.jsonl"
    check_writable(path, "--record-file")
    assert list(tmp_path.iterdir()) == []
    path.parent.mkdir()
    path.write_text("there")
    check_writable(path, "--record-file")
    assert path.read_text() == "there"
    os.mkfifo(tmp_path / "pipe")
    check_writable(tmp_path / "pipe", "--record-file")  # its reader may come later
    with pytest.raises(SpecError, match="Is a directory"):
        check_writable(tmp_path, "--record-file")


def test_a_gateway_that_has_stopped_has_let_its_run_file_go(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(record_file=tmp_path / "run.jsonl") as (app, gateway):
            await call(app, "POST", "/v1/completions", completion(max_tokens=2))
        assert gateway._recorder is not None
        assert gateway._recorder._file._descriptor is None
        assert len(read_run(tmp_path / "run.jsonl")[1]) == 1

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(("file", "status"), [("/dev/full", 1), ("run.jsonl", 0)])
def test_a_gateway_that_lost_records_says_so_and_exits_with_status_1(
    file: str, status: int, tmp_path: Path
) -> None:
    async def main() -> int | None:
        arguments = ["--record-file", str(tmp_path / file), "--prediction-interval", "0"]
        engine = ["tiny", "--engine", "emulated", "--latency", LAW]
        served = GatewayProcess([*engine, *arguments], free_port(0), tmp_path / "log")
        async with served:
            await served.ready()
            sent = await SocketCall(served.url, completion(max_tokens=2)).send()
            assert b" 200 " in await sent.reader.readline()
            sent.writer.close()
            os.kill(served.pid, signal.SIGTERM)
            await served.finished()
        assert served._process is not None
        return served._process.returncode

    assert asyncio.run(main()) == status
    said = (tmp_path / "log").read_text()
    assert ("exit status 1: 1 record could not be written to /dev/full" in said) is bool(status)


def test_one_file_for_records_and_state_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "configure_logs", lambda _: None)
    (tmp_path / "link").symlink_to(tmp_path)
    path, same = tmp_path / "file", tmp_path / "link" / "file"
    arguments = ["--record-file", str(path), "--state-file", str(same)]
    with pytest.raises(SystemExit) as stop:
        kendall.cli.main(["serve", "tiny", "--engine", "emulated", "--port", "0", *arguments])
    assert stop.value.code == 2
    assert "which are one file; expected two" in capsys.readouterr().err
    assert not path.exists()
