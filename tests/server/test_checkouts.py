"""A model folder that Kendall makes is whole or absent, whatever ends its making."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kendall.queueing.errors import CommandError
from kendall.server.engines.checkouts import (
    FILES,
    JSON_FILES,
    is_whole,
    make_folder,
    models_home,
    write_json,
    write_weights,
)

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


def test_a_folder_is_for_every_user_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        folder = make_folder(tmp_path / "some-1", "some", write)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o755


def test_a_folder_that_cannot_be_made_says_where_and_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CommandError) as caught:
        make_folder(tmp_path / "file" / "some-1", "some", never)
    assert str(caught.value) == (
        f"got {tmp_path}/file for the model `some`; expected a folder that can be written to "
        f"({caught.value.__context__.strerror}): set XDG_CACHE_HOME to another one"  # type: ignore[union-attr]
    )


def test_weights_are_written_in_the_safetensors_format(tmp_path: Path) -> None:
    """The header's length, a JSON header to a multiple of 8 bytes, the data in its order."""
    shapes = {"a": (2, 3), "b": (), "long name": (1,)}
    tensors = [np.arange(6, dtype=np.uint16).reshape(2, 3), np.uint16([7])[0], np.uint16([258])]
    write_weights(tmp_path, shapes, tensors)  # type: ignore[arg-type]
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    assert json.loads(data[8 : 8 + length]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [12, 14]},
        "long name": {"dtype": "BF16", "shape": [1], "data_offsets": [14, 16]},
    }
    assert data[8 + length :] == bytes([0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 7, 0, 2, 1])


def test_json_files_are_readable_by_people(tmp_path: Path) -> None:
    write_json(tmp_path, {name: {"name": name} for name in JSON_FILES})
    for name in JSON_FILES:
        assert (tmp_path / name).read_text() == f'{{\n "name": "{name}"\n}}\n'


@pytest.mark.parametrize("cache", ["/own", ""])
def test_models_are_in_the_cache_of_the_user(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setenv("HOME", "/home/some")
    assert models_home("m") == Path(cache or "/home/some/.cache") / "kendall" / "models"
