"""The page says of client libraries what the tests hold them to."""

from __future__ import annotations

from pathlib import Path

from tests.clients import libraries, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "why" / "conformance.md"


def test_the_page_has_the_table_of_the_tests() -> None:
    assert table.section() in PAGE.read_text(encoding="utf-8"), "make conformance writes it"


def test_every_library_that_is_called_is_in_the_table() -> None:
    assert {*libraries.LIBRARIES, "openai-node"} == set(table.LIBRARIES)
