"""What a sweep says on the terminal while it runs."""

from __future__ import annotations

import asyncio
import io

import pytest

from kendall.loadgen.sending.job import Counters
from kendall.loadgen.sweep.status import Status, duration
from tests.virtual_time import run_virtual


class Terminal(io.StringIO):
    """Rewrites its line."""

    def isatty(self) -> bool:
        return True


async def follow(status: Status) -> None:
    """Three seconds of a cell of ten, and a note."""
    async with status:
        status.left_after = 60.0
        status.phase("cell 1", 10.0)
        counting = asyncio.create_task(
            status.show(Counters(asked=20, sent=9, completed=5, other=1))
        )
        await asyncio.sleep(2.0)
        status.note("a note")
        counting.cancel()
        await asyncio.sleep(2.0)


def test_a_file_gets_a_line_now_and_then_and_every_note() -> None:
    said = io.StringIO()
    run_virtual(follow(Status(said)))
    assert said.getvalue().splitlines() == ["     2 s  a note"], (
        "no line of its own in four seconds"
    )
    said = io.StringIO()
    run_virtual(follow(Status(said, period=1.9)))
    assert said.getvalue().splitlines() == [
        "     2 s  cell 1; sent 9/20, 3 unanswered; 1 failed; about 1 min still",
        "     2 s  a note",
        "     4 s  cell 1; about 1 min still",
    ]


def test_a_terminal_has_one_line_which_is_rewritten() -> None:
    said = Terminal()
    run_virtual(follow(Status(said)))
    first, *others, last = said.getvalue().split("\r\x1b[2K")[1:]
    assert first == "     0 s  cell 1; about 1 min still"
    assert "     1 s  cell 1; sent 9/20, 3 unanswered; 1 failed; about 1 min still" in others
    assert "     2 s  a note\n" in others
    assert last == "", "nothing of it is left at the end"


def test_what_is_left_is_counted_from_the_phase_and_what_follows() -> None:
    async def lines() -> list[str]:
        status = Status(io.StringIO())
        found = [status.line]
        status.phase("first", 10.0)
        found.append(status.line)
        await asyncio.sleep(4.0)
        found.append(status.line)
        status.left_after = 5.0
        await asyncio.sleep(20.0)
        found.append(status.line)
        return found

    assert run_virtual(lines()) == [
        "starting",
        "first; about 10 s still",
        "first; about 6 s still",
        "first; about 5 s still",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (3569, "59 min"),
        (3600, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
