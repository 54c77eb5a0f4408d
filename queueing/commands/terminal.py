"""Text for people, on a terminal, in a pipe or in a file: its width, tables that lose no digit,
sentences that break at words.

The width is COLUMNS where that is set, else the terminal's, else 80. A table that is wider takes,
in this order: the short forms of its first column, narrower gaps, blocks one below the other that
repeat its `keys`, one line per value.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TextIO

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style

NO_TERMINAL = 80  # columns of a pipe or a file
LEAST_SENTENCE = 24  # columns that a sentence in a table needs
GAPS = (2, 1)  # blanks between two columns
# seconds before the first word on what takes long, on a terminal and elsewhere; between the others
SOON, SILENT, AGAIN = 0.3, 2.0, 10.0
HEADING = Style(bold=True)
_TOGETHER = re.compile(r"(?<=\d) (?=(?:%|ms|s|min|h)(?!\w))|(?<=±) ")  # 95 %, ± 3 ms


def console(stream: TextIO | None = None) -> Console:
    """For stdout, or another stream: text is printed as it is, without markup; what the encoding
    cannot write becomes a `?`.
    """
    stream = sys.stdout if stream is None else stream
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    # of a terminal rich knows the width, and follows it
    width = None if stream.isatty() else _columns() or NO_TERMINAL
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Say on stderr what takes long: on a terminal beside something that moves, elsewhere in a line
    after SILENT seconds and then from time to time. What it yields changes the text.
    """
    to, ended, said = console(sys.stderr), threading.Event(), [text]
    status = to.status(text) if to.is_terminal else None

    def tell(newer: str) -> None:
        said.append(newer)
        if status is not None:
            status.update(newer)

    def speak() -> None:
        seconds = pause = SILENT if status is None else SOON
        while not ended.wait(pause):
            if status is not None:
                status.start()
                return
            say(to, f"{said[-1]} ({seconds:.0f} s)")
            pause = AGAIN
            seconds += pause

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield tell
    finally:
        ended.set()
        speaker.join()
        if status is not None:
            status.stop()


def _columns() -> int | None:
    given = os.environ.get("COLUMNS", "")
    return int(given) if given.isdecimal() and int(given) > 0 else None


def say(to: Console, text: str, *, hang: int = 2, style: str | None = None) -> None:
    """One sentence, whose further lines begin `hang` columns in."""
    text = "\n".join(_at_words(text, to.width, hang))
    to.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _at_words(text: str, width: int, hang: int = 0) -> Iterator[str]:
    """Lines of that width; a longer word, such as a path, stays whole, and so does 1e-05."""
    for line in _TOGETHER.sub("\N{NO-BREAK SPACE}", text).split("\n"):
        parts = textwrap.wrap(
            line,
            width,
            subsequent_indent=" " * hang,
            break_long_words=False,
            break_on_hyphens=False,
        )
        yield from (part.replace("\N{NO-BREAK SPACE}", " ") for part in parts or [""])


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A heading, which may have several lines, and how the cells below it are set."""

    heading: str
    left: bool = False  # text; numbers are set to the right
    sentence: bool = False  # breaks at words, in what the other columns leave of the width
    # a shorter form of a cell, where the table is too wide
    short: Callable[[str], str] | None = None
    least: int = 0  # width


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under columns; rich prints it too."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    keys: int = 1  # first columns, which name a row
    headed: bool = True  # with headings

    def lines(self, width: int) -> list[str]:
        """At most `width` columns wide, without blanks at the end of a line."""
        return [text for text, _ in self._lines(width)]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, heading in self._lines(options.max_width):
            yield Segment(text, HEADING if heading else None)
            yield Segment.line()

    def _lines(self, width: int) -> list[tuple[str, bool]]:
        """Text, and whether it is a heading."""
        every = range(len(self.columns))
        for table in (self, self._shortened()):
            for gap in GAPS if table is not self else GAPS[:1]:
                if (widths := table._fitted(every, width, gap)) is not None:
                    return list(table._block(every, widths, gap))
        return self._shortened()._blocks(width)

    def _shortened(self) -> Table:
        rows = [
            [c.short(cell) if c.short else cell for c, cell in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]
        return Table(self.columns, rows, self.keys, self.headed)

    def _fitted(self, chosen: Sequence[int], width: int, gap: int) -> dict[int, int] | None:
        """Widths of the chosen columns; None where they do not fit."""
        widths = {index: self._natural(index) for index in chosen}
        left_over = width - sum(widths.values()) - gap * (len(chosen) - 1)
        for index in chosen:
            if left_over < 0 and self.columns[index].sentence:
                shrunk = max(widths[index] + left_over, min(widths[index], self._narrowest(index)))
                left_over += widths[index] - shrunk
                widths[index] = shrunk
        return widths if left_over >= 0 else None

    def _narrowest(self, index: int) -> int:
        """Of a sentence."""
        words = (word for row in self.rows for word in row[index].split())
        return max(LEAST_SENTENCE, *map(len, words), 0)

    def _natural(self, index: int) -> int:
        cells = (self.columns[index].heading, *(row[index] for row in self.rows))
        return max(
            self.columns[index].least, *(len(line) for cell in cells for line in cell.split("\n"))
        )

    def _blocks(self, width: int) -> list[tuple[str, bool]]:
        """Blocks that fit, one below the other; where not even the keys and one column fit, a
        line per value.
        """
        keys, rest, groups = [*range(self.keys)], [*range(self.keys, len(self.columns))], []
        if not rest:
            return [(line, False) for line in self._by_value(width)]
        while rest:
            taken = next(
                (
                    n
                    for n in range(len(rest), 0, -1)
                    if self._fitted([*keys, *rest[:n]], width, GAPS[0])
                ),
                0,
            )
            if not taken:
                return [(line, False) for line in self._by_value(width)]
            groups.append([*keys, *rest[:taken]])
            rest = rest[taken:]
        lines: list[tuple[str, bool]] = []
        for group in groups:
            widths = self._fitted(group, width, GAPS[0])
            assert widths is not None
            lines += [*([("", False)] if lines else []), *self._block(group, widths, GAPS[0])]
        return lines

    def _block(
        self, chosen: Sequence[int], widths: dict[int, int], gap: int
    ) -> Iterator[tuple[str, bool]]:
        headings = [self.columns[index].heading.split("\n") for index in chosen]
        height = max(map(len, headings))
        if self.headed:
            padded = [[""] * (height - len(heading)) + heading for heading in headings]
            yield from (
                (self._line(chosen, cells, widths, gap), True)
                for cells in zip(*padded, strict=True)
            )
        for row in self.rows:
            cells = [self._wrapped(index, row[index], widths[index]) for index in chosen]
            yield from (
                (self._line(chosen, line, widths, gap), False)
                for line in zip_longest(*cells, fillvalue="")
            )

    def _wrapped(self, index: int, cell: str, width: int) -> list[str]:
        if not self.columns[index].sentence:
            return cell.split("\n")
        return list(_at_words(cell, width))

    def _line(
        self, chosen: Sequence[int], cells: Sequence[str], widths: dict[int, int], gap: int
    ) -> str:
        left = (self.columns[index].left or self.columns[index].sentence for index in chosen)
        set_in = (
            f"{cell:<{widths[i]}}" if text else f"{cell:>{widths[i]}}"
            for i, cell, text in zip(chosen, cells, left, strict=True)
        )
        return (" " * gap).join(set_in).rstrip()

    def _by_value(self, width: int) -> Iterator[str]:
        headings = [" ".join(column.heading.split()) for column in self.columns]
        for number, row in enumerate(self.rows):
            if number:
                yield ""
            for heading, cell in zip(headings, row, strict=True):
                value = " / ".join(cell.split("\n"))
                yield from textwrap.wrap(
                    f"{heading}: {value}" if heading else value,
                    max(width, 1),
                    break_on_hyphens=False,
                )
