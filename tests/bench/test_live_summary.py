"""The README's numbers come from the files of the validation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.live.summary import BEGIN, END, README, ROOT, cells, table, written


def test_the_readmes_table_is_what_the_cells_files_say() -> None:
    """`python -m bench.live.summary` writes it; a new validation makes this fail until it is
    run.
    """
    text = README.read_text()
    assert written(text, table(cells())) == text


@pytest.mark.parametrize("page", ["live", "production", "memory"])
def test_the_heading_of_a_page_counts_the_cells_of_its_table(page: str) -> None:
    """One number for one claim, in the README too."""
    text = (ROOT / f"docs/{page}-validation.md").read_text()
    (heading,) = (line for line in text.splitlines() if re.match(r"## \d+ of \d+", line))
    last = [
        line.split("|")[-2].strip(" *\\")
        for line in text.splitlines()
        if re.match(r"\| `?(single|dynamic|fixed|capped|elastic|continuous)", line)
    ]
    held, short = last.count("holds"), last.count("too short")
    assert re.findall(r"\d+", heading) == [str(n) for n in (held, len(last), short) if n]
    assert heading.startswith(f"## {held} of {len(last)} cells hold")
    if page == "live":
        assert f"| cells that hold | {held} of {len(last)} |" in text
        assert f"{held} of {len(last)} cells hold" in README.read_text()


def test_a_cell_that_does_not_hold_is_bold_and_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "cells"
    folder.mkdir()
    for path in (ROOT / "docs/live-validation/cells").glob("*load0.5.1.json"):
        result = json.loads(path.read_text())
        mean = result["live"][result["compared"]]["mean"] * (
            3 if result["policy"] == "dynamic" else 1
        )
        half = (0.5 if result["policy"] == "single" else 0.1) * mean
        result["observed"] |= {"value": mean, "low": mean - half, "high": mean + half}
        (folder / path.name).write_text(json.dumps(result))
    found = table(cells(tmp_path))
    (dynamic,) = (line for line in found.splitlines() if line.startswith("| `dynamic`"))
    assert "| **" in dynamic
    (single,) = (line for line in found.splitlines() if line.startswith("| `single`"))
    assert single.endswith("*too short* |")
    assert "4 of 6 cells hold" in found


def test_a_readme_without_the_place_is_an_error() -> None:
    with pytest.raises(ValueError, match="without one place"):
        written(f"{BEGIN} {END} {BEGIN} {END}", "")
