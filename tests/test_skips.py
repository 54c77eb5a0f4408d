"""A skipped test is visible, and a failure where every part of the system has to be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ONE = """
import pytest

def test_with_a_part_that_is_missing():
    pytest.skip("a part is missing")

@pytest.mark.xfail(strict=True)
def test_that_is_expected_to_fail():
    raise AssertionError
"""
WHOLE_FILE = """
import pytest

pytest.importorskip("no_such_module_anywhere")
"""


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("text", "on_ci", "elsewhere"),
    [(ONE, "1 failed, 1 xfailed", "1 skipped, 1 xfailed"), (WHOLE_FILE, "1 error", "1 skipped")],
    ids=["a test", "a file"],
)
def test_what_is_skipped_fails_on_ci(text: str, on_ci: str, elsewhere: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        "/dev/null",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    for value, expected in (("true", on_ci), ("", elsewhere)):
        ended = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"CI": value},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert expected in ended.stdout.splitlines()[-1], ended.stdout
