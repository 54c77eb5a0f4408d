"""Write docs/documents.md, every system, equation, figure and table of the documents with the
command that answers it: `python -m papers.documents` (`make reference`). The rows are in
documents.toml.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kendall.queueing.measurement.paths import writing
from papers.reproduction.report import DOCUMENTS as REPRODUCED

ROWS = Path(__file__).with_name("documents.toml")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "documents.md"
DOCUMENTS = {
    "yang": REPRODUCED["yang"],
    "inoue": REPRODUCED["inoue"],
    "blog": "The blog, Queueing theory in LLM serving (in Chinese)",
    "chapter": REPRODUCED["chapter"],
    "slides": REPRODUCED["slides"],
}
_HEADER = """\
# The documents, command by command

<!-- written by `make reference` from papers/documents.toml -->

Five documents led to Kendall. These tables have every system, equation, figure and table of theirs,
with the command that answers it, or the reason why there is none. A **fault** is an error of the
document.

`kendall reproduce` recomputes a figure or a table with the document's own numbers
([results](reproduction/README.md)); it needs a clone, and some of them take minutes. The other
commands take seconds and are meant for numbers of your own. [Theory](why/theory.md) has the models.

An M/G/1 queue of mean service 1 s with exponential sizes is
`--output-tokens geometric:mean=1000 --latency a=0.001`: a token takes 1 ms, and whole tokens change
a mean by less than 0.1 %. In simulations of orders a token takes 10 ms. The letters are those of
each document; times are in seconds, as the commands print them.
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system, equation, figure or table."""

    what: str
    note: str
    command: str = ""  # that answers it
    pending: str = ""  # a command that the product does not have yet
    shows: dict[str, str] = field(default_factory=dict)  # fields of its --json, printed digits


@dataclass(frozen=True)
class Section:
    """A table of the page."""

    document: str  # a key of DOCUMENTS
    title: str
    rows: tuple[Row, ...]


def sections() -> tuple[Section, ...]:
    """In the order of the page."""
    read = tomllib.loads(ROWS.read_text(encoding="utf-8"))["section"]
    return tuple(
        Section(each["document"], each["title"], tuple(Row(**row) for row in each["row"]))
        for each in read
    )


def page() -> str:
    """The page in Markdown."""
    return "\n".join([_HEADER, *_tables()])


def _tables() -> Iterator[str]:
    document = ""
    for section in sections():
        if section.document != document:
            document = section.document
            yield f"## {DOCUMENTS[document]}\n"
        yield f"### {section.title}\n"
        yield "| what | command | note |\n|---|---|---|"
        for row in section.rows:
            command = f"`{row.command}`" if row.command else "none"
            yield f"| {row.what} | {command} | {row.note} |"
        yield ""


def main() -> None:
    """Write the page."""
    text = page()
    with writing(PAGE):
        PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
