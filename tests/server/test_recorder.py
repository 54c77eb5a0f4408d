"""The gateway's run file: written within a second, and never over an older one."""

from __future__ import annotations

import asyncio
import io
import logging
from pathlib import Path

import pytest

from queueing.record import Header, Record, read_run
from server.recorder import LONGEST_UNWRITTEN, Recorder
from tests.virtual_time import run_virtual


def record(name: str) -> Record:
    return Record(request_id=name, outcome="completed", arrived_at=1.0)


def test_a_record_is_in_the_file_within_a_second_without_anybody_asking(tmp_path: Path) -> None:
    async def main() -> list[int]:
        recorder, counts = Recorder(tmp_path / "run.jsonl", Header(writer="gateway")), []
        for name in ("a", "b"):
            recorder.on_record(record(name))
            await asyncio.sleep(LONGEST_UNWRITTEN + 0.1)
            counts.append(len(read_run(tmp_path / "run.jsonl")[1]))
        recorder.close()
        return counts

    assert run_virtual(main()) == [1, 2]


def test_a_run_file_that_was_there_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.jsonl"

    async def serve(*names: str) -> None:
        recorder = Recorder(path, Header(writer="gateway"))
        for name in names:
            recorder.on_record(record(name))
        recorder.close()

    with caplog.at_level(logging.INFO):
        for names in (("a", "b"), (), ("c",)):
            asyncio.run(serve(*names))
    (kept,) = set(tmp_path.iterdir()) - {path}  # of the second gateway nothing was worth keeping
    assert [each.request_id for each in read_run(kept)[1]] == ["a", "b"]
    assert [each.request_id for each in read_run(path)[1]] == ["c"]
    assert f"{path} was there before: it is kept as {kept}" in caplog.text


def test_a_full_disk_is_said_once_and_stops_no_request(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        recorder = Recorder(Path("/dev/null"), Header(writer="gateway"))
        recorder._file.close()
        recorder._file = io.BufferedWriter(io.FileIO("/dev/full", "wb"))
        for name in ("a", "b"):
            recorder.on_record(record(name))
            await asyncio.sleep(LONGEST_UNWRITTEN + 0.1)
        recorder.close()

    run_virtual(main())
    assert caplog.text.count("No space left on device") == 1
