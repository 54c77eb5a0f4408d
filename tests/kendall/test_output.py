"""How a command ends: its status, and one line where something fails, stdout itself included."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kendall import cli, output


@pytest.fixture(autouse=True)
def failing_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "policies", ("tests.kendall.failing_command", "fail"))
    monkeypatch.delenv("KENDALL_DEBUG", raising=False)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    return int(stop.value.code or 0)


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("well", 0, ""),
        ("status", 7, ""),
        ("interrupted", 130, ""),
        ("aborted", 130, ""),
        ("known", 1, "kendall: nobody answers\n"),
        (
            "disk",
            1,
            "kendall: OSError: [Errno 28] No space left on device (KENDALL_DEBUG=1 shows where)\n",
        ),
        ("odd", 1, "kendall: ZeroDivisionError: division by zero (KENDALL_DEBUG=1 shows where)\n"),
    ],
)
def test_whatever_happens_is_a_status_and_at_most_one_line(
    how: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("policies", how) == status
    found = capsys.readouterr()
    assert (found.out, found.err) == ("well\n" if how == "well" else "", said)


@pytest.mark.parametrize(("how", "error"), [("odd", ZeroDivisionError), ("disk", OSError)])
def test_under_debug_an_error_shows_where_it_is(
    how: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KENDALL_DEBUG", "1")
    with pytest.raises(error):
        cli.main(["policies", how])


FULL = Path("/dev/full")
without_room = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


@contextmanager
def full(unbuffered: bool) -> Iterator[None]:
    """stdout is a disk without room."""
    raw = io.FileIO(FULL, "wb")
    under = raw if unbuffered else io.BufferedWriter(raw)
    with (
        io.TextIOWrapper(under, write_through=unbuffered) as to,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "stdout", to)
        patch.setattr(sys, "__stdout__", to)
        yield
        sys.stdout.flush()


@without_room
@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("arguments", [("--version",), ("policies", "well")])
def test_a_full_disk_behind_stdout_is_one_line(
    arguments: tuple[str, ...], unbuffered: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with full(unbuffered):
        assert run(*arguments) == 1
    assert capsys.readouterr().err == "kendall: cannot write to stdout: No space left on device\n"


@without_room
def test_under_debug_a_full_disk_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KENDALL_DEBUG", "1")
    with full(unbuffered=False):
        with pytest.raises(OSError, match="No space left"):
            cli.main(["--version"])
        output.discard()


def test_a_reader_that_has_left_gets_no_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as to:
        monkeypatch.setattr(sys, "stdout", to)
        monkeypatch.setattr(sys, "__stdout__", to)
        assert run("--version") == 1
        sys.stdout.flush()
    assert capsys.readouterr().err == ""


def test_the_stream_that_is_watched_is_like_the_one_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    raw = io.BufferedWriter(io.FileIO(tmp_path / "out", "wb"))
    with io.TextIOWrapper(raw, "latin-1", errors="replace", line_buffering=True) as to:
        monkeypatch.setattr(sys, "stdout", to)
        output.watch()
        assert sys.stdout is to, "a test has put it there"
        monkeypatch.setattr(sys, "__stdout__", to)
        output.watch()
        assert sys.stdout is not to
        found = sys.stdout
        assert isinstance(found, io.TextIOWrapper)
        assert (found.encoding, found.errors) == ("latin-1", "replace")
        assert (found.line_buffering, found.write_through) == (True, False)
        found.write("é\N{SNOWMAN}\n")
        assert (tmp_path / "out").read_bytes() == b"\xe9?\n"
        assert output.failure() is None


def test_without_a_stdout_nothing_is_watched_or_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process without a terminal."""
    monkeypatch.setattr(sys, "stdout", None)
    output.watch()
    output.flush()
    assert output.failure() is None
