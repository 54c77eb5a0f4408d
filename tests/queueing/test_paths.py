"""A file that a command is to write is tried before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from kendall.policies.text import SpecError
from kendall.queueing.measurement.paths import (
    FileToWrite,
    Folder,
    file_or_folder,
    folder_to_write,
    is_folder,
)


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    there, new, far = (
        tmp_path / "there.json",
        tmp_path / "new.json",
        tmp_path / "not" / "yet" / "made.json",
    )
    there.write_text("kept")
    for path in (there, new, far, Path("/dev/null")):
        assert FileToWrite("law.json")(str(path)) == path
    assert there.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [there]


def test_a_folder_that_will_be_made_for_a_file_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name may be mistyped. A folder that is asked for as one is made without a word."""
    monkeypatch.chdir(tmp_path)
    FileToWrite("law.json")(tmp_path / "new.json")
    FileToWrite("law.json")("new.json")
    folder_to_write(tmp_path / "not" / "yet")
    assert not caplog.messages
    FileToWrite("law.json")(tmp_path / "not" / "yet" / "made.json")
    assert caplog.messages == [
        f"the folder {tmp_path}/not/yet does not exist; it will be made for made.json"
    ]


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("/proc/x.json", tmp_path / "file" / "below.json"):
        with pytest.raises(SpecError, match=r"expected a file that can be written \(.*\)"):
            FileToWrite("law.json")(path)
    assert FileToWrite("law.json", tried=False)("/proc/x.json") == Path("/proc/x.json")


def test_a_folder_where_nothing_can_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    assert folder_to_write(tmp_path / "not" / "yet") == tmp_path / "not" / "yet"
    with pytest.raises(SpecError, match="got the file"):
        folder_to_write(tmp_path / "file")
    for path in ("/proc/x", tmp_path / "file" / "below"):
        with pytest.raises(
            SpecError, match=r"got the folder .*; expected a folder that can be written to \(.*\)"
        ):
            folder_to_write(path)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_folder_is_what_ends_with_a_slash_or_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a checkout may have a folder `runs`
    for text in ("runs/", str(tmp_path)):
        meant = file_or_folder(text)
        assert isinstance(meant, Folder)
        assert is_folder(meant)
        assert meant == Path(text)
    for text in ("runs", str(tmp_path / "run.json")):
        assert not is_folder(file_or_folder(text))
        assert not isinstance(file_or_folder(text), Folder)
