"""docs/documents.md: the page is that of the rows, nothing of a document is left out, and every
text in a command is one. tests/test_printed_commands.py runs the commands.
"""

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise

import pytest

import kendall
from papers.documents import DOCUMENTS, PAGE, Row, page, sections
from papers.reproduction.catalogue import CATALOGUE

ROWS = [(section.document, row) for section in sections() for row in section.rows]
NUMBERED = re.compile(r"(Eq\.|Fig\.|Table|25\.) ?([\dI]+(?:(?:–|, )\d+(?![\d.]))*)")
ROMAN = {"I": 1}


def numbers(document: str, kind: str) -> list[int]:
    """Every number of a kind that the rows of a document name, ranges spelled out."""
    found: list[int] = []
    for key, row in ROWS:
        if key != document:
            continue
        for name, text in NUMBERED.findall(row.what):
            for part in text.split(", ") if name == kind else ():
                first, _, last = part.partition("–")
                start = ROMAN.get(first) or int(first)
                found += range(start, int(last or start) + 1)
    return sorted(set(found))


def reproduced(row: Row) -> list[str]:
    words = row.command.split()
    return words[2:] if words[:2] == ["kendall", "reproduce"] else []


def options(command: str) -> Iterator[tuple[str, str]]:
    """Flags of a command with their values."""
    words = shlex.split(command)
    for flag, value in pairwise(words):
        if flag.startswith("--"):
            yield flag, value


def test_the_page_is_what_the_rows_say() -> None:
    """`make reference` writes it again."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_the_five_documents_are_all_there_in_order() -> None:
    assert list(dict.fromkeys(key for key, _ in ROWS)) == list(DOCUMENTS)


def test_every_artefact_is_named_under_its_document_and_no_other_is() -> None:
    named = [(key, name) for key, row in ROWS for name in reproduced(row)]
    assert {name for _, name in named} == set(CATALOGUE)
    assert [name for key, name in named if name.partition("-")[0] != key] == []


@pytest.mark.parametrize(
    ("document", "kind", "last"),
    [
        ("yang", "Eq.", 26),
        ("yang", "Fig.", 6),
        ("yang", "Table", 1),
        ("inoue", "Eq.", 43),
        ("inoue", "Fig.", 8),
        ("inoue", "Table", 1),
        ("chapter", "25.", 11),
    ],
)
def test_no_number_of_a_document_is_left_out(document: str, kind: str, last: int) -> None:
    assert numbers(document, kind) == list(range(1, last + 1))


def test_the_numbered_tables_and_figures_of_the_slides_are_there() -> None:
    """Their equations have no numbers."""
    assert numbers("slides", "Table") == [1, 2, 4]
    assert numbers("slides", "Fig.") == [5]


@pytest.mark.parametrize("row", [row for _, row in ROWS], ids=lambda row: row.what)
def test_a_row_has_words_and_its_note_repeats_the_digits_that_it_shows(row: Row) -> None:
    assert row.note.endswith(".")
    assert not re.search(r"\n|\|", row.what + row.note + row.command)
    assert [digits for digits in row.shows.values() if digits not in row.note] == []
    assert not row.shows or (row.command and not reproduced(row))


@pytest.mark.parametrize("row", [row for _, row in ROWS if row.command], ids=lambda row: row.what)
def test_every_text_in_a_command_is_one(row: Row) -> None:
    given = dict(options(row.command))
    if "--policy" in given:
        kendall.parse_policy(given["--policy"])
    for flag in ("--output-tokens", "--prompt-tokens"):
        if flag in given:
            kendall.parse_distribution(given[flag], tail=True)
    if "--latency" in given:
        kendall.parse_latency(given["--latency"])


def test_a_command_that_does_not_exist_yet_is_not_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [row.pending for _, row in ROWS if row.pending and row.pending in text] == []
