"""A model folder that Kendall makes is whole or absent, whatever ends its making."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kendall.queueing.errors import CommandError
from kendall.server.engines.checkouts import FILES, is_whole, make_folder

PATIENCE = 30.0  # seconds


def write(folder: Path) -> None:
    for name in FILES:
        (folder / name).write_text(name)


def never(folder: Path) -> None:
    raise AssertionError(f"{folder} was there already")


KILLED = """
import os, signal, sys
from pathlib import Path
from kendall.server.engines.checkouts import make_folder

def write(folder):
    (folder / "config.json").write_text("half")
    (folder / "fetched").mkdir()
    (folder / "fetched" / "more").write_text("left behind")
    os.kill(os.getpid(), signal.SIGKILL)

make_folder(Path(sys.argv[1]), "some", write)
"""


def test_what_a_killed_maker_has_left_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "some-1"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not folder.exists()
    assert len(os.listdir(tmp_path)) == 1, "what it left has another name"
    assert make_folder(folder, "some", write) == folder
    assert sorted(os.listdir(folder)) == sorted(FILES)
    assert os.listdir(tmp_path) == ["some-1"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, CommandError, MemoryError])
def test_an_interrupted_making_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def interrupted(folder: Path) -> None:
        write(folder)
        raise error

    with pytest.raises(error):
        make_folder(tmp_path / "some-1", "some", interrupted)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("lost", FILES)
def test_a_folder_that_lost_a_file_is_made_anew(tmp_path: Path, lost: str) -> None:
    folder = make_folder(tmp_path / "some-1", "some", write)
    make_folder(folder, "some", never)
    (folder / lost).unlink()
    assert not is_whole(folder)
    make_folder(folder, "some", write)
    assert is_whole(folder)


def test_a_second_maker_waits_for_the_first_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, begun, go_on = tmp_path / "some-1", threading.Event(), threading.Event()

    def slowly(building: Path) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        write(building)

    class Waiting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for it" in record.getMessage():
                go_on.set()

    first = threading.Thread(target=make_folder, args=(folder, "some", slowly))
    first.start()
    assert begun.wait(PATIENCE)
    log = logging.getLogger("kendall.engine")
    log.addHandler(handler := Waiting())
    try:
        with caplog.at_level(logging.INFO):
            make_folder(folder, "some", never)
    finally:
        log.removeHandler(handler)
        go_on.set()
        first.join()
    assert "the model `some` is being made by another process: waiting for it" in caplog.messages
    assert os.listdir(tmp_path) == ["some-1"]


def test_a_second_maker_makes_it_where_the_first_one_fails(tmp_path: Path) -> None:
    folder, begun, go_on = tmp_path / "some-1", threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def fails(building: Path) -> None:
        (building / "config.json").touch()
        begun.set()
        assert go_on.wait(PATIENCE)
        raise OSError("the disk is gone")

    def first() -> None:
        try:
            make_folder(folder, "some", fails)
        except CommandError as error:
            failures.append(error)

    threads = [
        threading.Thread(target=first),
        threading.Thread(target=make_folder, args=(folder, "some", write)),
    ]
    threads[0].start()
    assert begun.wait(PATIENCE)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(failures) == 1
    assert is_whole(folder)
    assert os.listdir(tmp_path) == ["some-1"]
