"""Which lines of a run file are read: all, but for a last one whose writer was killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kendall.queueing.measurement.record import (
    SCHEMA_VERSION,
    Header,
    Record,
    read_cut_run,
    read_run,
    to_line,
    write_run,
)

HEADER = to_line(Header(writer="gateway"))
LINES = [to_line(Record(request_id=name, outcome="completed")) for name in ("a", "b")]


@pytest.mark.parametrize(
    ("data", "ids", "cut"),
    [
        (b"".join([HEADER, *LINES]), ["a", "b"], False),
        (b"".join([HEADER, *LINES]).rstrip(b"\n"), ["a", "b"], False),  # whole, but for its end
        (b"".join([HEADER, *LINES])[:-5], ["a"], True),
        (b"".join([HEADER, LINES[0], b"\n", LINES[1]]), ["a", "b"], False),
        (HEADER, [], False),
        (HEADER.rstrip(b"\n"), [], False),
    ],
    ids=["whole", "no newline", "cut", "empty line", "header", "header without newline"],
)
def test_only_a_last_line_that_was_cut_is_left_out(
    data: bytes, ids: list[str], cut: bool, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(data)
    _, records, found = read_cut_run(path)
    assert ([each.request_id for each in records], found) == (ids, cut)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"model,rate\n", "line 1: got 'model,rate'; expected a run file, as `kendall load`"),
        (b"".join([HEADER, b"[1]\n", LINES[0]]), "line 2: got '[1]'; expected a record (Expected"),
        (b"x" * 81 + b"\n", f"line 1: got '{'x' * 80}'; expected a run file"),
        (b"a\tb\n", r"line 1: got 'a\tb'; expected a run file"),
        (b"\x07\n", "line 1: got 1 bytes that are no text; expected a run file"),
        (b"\xff\xfe\x00\n", "line 1: got 3 bytes that are no text; expected a run file"),
    ],
)
def test_a_line_that_is_none_is_named_with_what_was_expected(
    data: bytes, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(f"{path}, {said}")):
        read_cut_run(path)


def test_a_run_is_written_into_folders_that_are_made_and_read_as_it_was(tmp_path: Path) -> None:
    path, header = tmp_path / "not" / "yet" / "run.jsonl", Header(writer="simulator", seed=3)
    records = [Record(request_id=name, outcome="completed", policy="single") for name in ("a", "b")]
    for given in (records, records[:1]):
        write_run(path, header, given)
        assert read_run(path) == (header, given)


def test_files_of_this_schema_and_of_older_ones_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    assert Header(writer="gateway").schema_version == SCHEMA_VERSION == 2
    for version in (1, 2):
        write_run(path, Header(writer="gateway", schema_version=version), [])
        assert read_run(path)[0].schema_version == version
    write_run(path, Header(writer="gateway", schema_version=3), [])
    with pytest.raises(ValueError, match="got schema version 3; this Kendall reads up to 2"):
        read_run(path)


def test_a_header_is_given_by_name_and_neither_it_nor_a_record_changes() -> None:
    with pytest.raises(TypeError, match="positional"):
        Header("gateway")  # type: ignore[misc]
    for made in (Header(writer="gateway"), Record(request_id="a", outcome="completed")):
        for name in made.__struct_fields__:
            with pytest.raises(AttributeError, match="immutable"):
                setattr(made, name, None)


def test_a_header_that_was_cut_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(HEADER[:-5])
    with pytest.raises(ValueError, match=r"run\.jsonl"):
        read_cut_run(path)
