"""Tables lose no character at any width; the width follows COLUMNS, the terminal, else 80;
sentences break at words.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kendall.queueing.commands import terminal
from kendall.queueing.commands.terminal import NO_TERMINAL, Column, Table, console, say, working
from tests.eventually import eventually_here

WORD = st.text("abc019.±%", min_size=1, max_size=12)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    count = draw(st.integers(1, 12))
    columns = [Column(heading=draw(WORD), left=draw(st.booleans())) for _ in range(count)]
    rows = draw(st.lists(st.lists(WORD, min_size=count, max_size=count), min_size=1, max_size=5))
    return Table(columns, rows, keys=draw(st.integers(1, count)))


@given(table=tables(), width=st.integers(26, 160))
def test_every_cell_stands_whole_within_the_width(table: Table, width: int) -> None:
    lines = table.lines(width)
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)
    words = " ".join(lines).replace(":", " ").split()
    for row in table.rows:
        for cell in row:
            assert cell in words


@given(table=tables(), width=st.integers(1, 25))
def test_where_not_even_one_value_fits_a_line_its_characters_go_on_in_the_next(
    table: Table, width: int
) -> None:
    lines = table.lines(width)
    assert max(map(len, lines)) <= width
    text = "".join(lines).replace(" ", "")
    for row in table.rows:
        for cell in row:
            assert cell in text


NUMBERS = Table(
    [Column(heading="name", left=True), Column(heading="delay\n(ms)"), Column(heading="n")],
    [["a", "46.12", "1200"], ["b", "9", "7"]],
)


def test_numbers_are_set_to_the_right_below_their_headings_and_units() -> None:
    assert NUMBERS.lines(80) == [
        "      delay",
        "name   (ms)     n",
        "a     46.12  1200",
        "b         9     7",
    ]


def test_blocks_repeat_the_first_column() -> None:
    assert NUMBERS.lines(12) == [
        "      delay",
        "name   (ms)",
        "a     46.12",
        "b         9",
        "",
        "name     n",
        "a     1200",
        "b        7",
    ]


def test_a_line_per_value_where_no_two_columns_fit() -> None:
    assert NUMBERS.lines(10)[:4] == ["name: a", "delay", "(ms):", "46.12"]


def test_short_forms_are_used_only_where_the_table_is_too_wide() -> None:
    table = Table(
        [Column(heading="policy", left=True, short=lambda text: text[:5]), Column(heading="n")],
        [["fixed:batch_size=4", "1"]],
    )
    assert table.lines(40)[-1] == "fixed:batch_size=4  1"
    assert table.lines(12)[-1] == "fixed   1"


def test_a_sentence_takes_what_the_numbers_leave_and_breaks_at_words_only() -> None:
    table = Table(
        [Column(heading="p"), Column(heading="says", sentence=True)],
        [["0.5", "far too many short gaps, by 1e-05 of what 95 % would be"]],
    )
    assert table.lines(35) == [
        *("  p  says", "0.5  far too many short gaps, by", "     1e-05 of what 95 % would be"),
    ]


def test_a_sentence_goes_on_below_its_beginning_and_words_stay_whole() -> None:
    out = io.StringIO()
    say(
        Console(file=out, width=30),
        "arrivals  not Poisson at 95 %, /a/very/long/path/that/stays/whole.jsonl",
        hang=10,
    )
    assert out.getvalue().split("\n")[:2] == [
        "arrivals  not Poisson at 95 %,",
        "          /a/very/long/path/that/stays/whole.jsonl",
    ]


@pytest.mark.parametrize(
    ("columns", "width"),
    [
        (None, NO_TERMINAL),
        ("100", 100),
        ("0", NO_TERMINAL),
        ("wide", NO_TERMINAL),
        ("", NO_TERMINAL),
    ],
)
def test_without_a_terminal_the_width_is_that_of_columns_or_80(
    monkeypatch: pytest.MonkeyPatch, columns: str | None, width: int
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert console(io.StringIO()).width == width


PROGRAM = """
from kendall.queueing.commands.terminal import Column, Table, console, say
to = console()
columns = [Column(heading="±"), *(Column(heading=f"c{i}") for i in range(12))]
to.print(Table(columns, [["46.12"] * 13]))
say(to, "[mean=1ms,p99=5ms] :smile: " + "± 3 " * 20)
"""


def on_a_terminal(width: int) -> list[str]:
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {
        key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")
    } | {"TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        stdin=child,
        stdout=child,
        stderr=child,
        env=environment | {"TERM": "vt100"},
        check=True,
        timeout=240,
    )
    os.close(child)
    assert done.returncode == 0
    return written_to(parent).decode().replace("\r", "").splitlines()


def written_to(terminal: int) -> bytes:
    """All of it: what was written comes through in pieces, when the kernel has the time."""
    written = b""
    with (
        os.fdopen(terminal, "rb") as stream,
        contextlib.suppress(OSError),
    ):  # how a terminal ends on Linux
        while piece := stream.read1(65536):
            written += piece
    return written


@pytest.mark.parametrize("width", [50, 80, 120])
def test_a_real_terminal_is_used_to_its_width(width: int) -> None:
    lines = on_a_terminal(width)
    plain = [line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in lines]
    assert max(map(len, plain)) <= width
    assert " ".join(plain).count("46.12") >= 13
    assert "[mean=1ms,p99=5ms] :smile:" in "\n".join(plain)


def test_an_encoding_without_plus_minus_costs_no_output() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"} | {
        "PYTHONIOENCODING": "ascii"
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        env=environment,
        check=True,
        timeout=240,
    )
    assert done.stdout.count(b"? 3") == 20


def test_what_takes_long_says_so_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "SILENT", 0.01)
    monkeypatch.setattr(terminal, "AGAIN", 0.01)
    heard: list[str] = []

    def twice() -> bool:
        heard.append(capsys.readouterr().err)
        return "".join(heard).count("option 1 of 2 (0 s)\n") >= 2

    with working("planning") as tell:
        tell("option 1 of 2")
        assert eventually_here(twice)


def test_what_is_soon_done_says_nothing_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), working("planning"):
        raise KeyError("a fault ends it too")
    assert capsys.readouterr().err == ""


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_what_takes_long_moves_on_a_terminal_and_leaves_it_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Screen()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    with working("planning"):
        pass
    assert screen.getvalue() == "", "soon done"
    monkeypatch.setattr(terminal, "SOON", 0.0)
    with working("planning") as tell:
        assert eventually_here(lambda: "planning" in screen.getvalue())
        tell("option 1 of 2")
        assert eventually_here(lambda: "option 1 of 2" in screen.getvalue())
        assert "\x1b[?25h" not in screen.getvalue()
    assert "\x1b[?25h" in screen.getvalue(), "the cursor is shown again"
