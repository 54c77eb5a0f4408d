"""What the empty page tells a person to type, works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.printed_commands import ROOT, reader


@pytest.mark.slow
@pytest.mark.parametrize("calibrated", [False, True])
def test_the_command_on_the_empty_page_works(calibrated: bool, tmp_path: Path) -> None:
    (parts,) = re.findall(
        r'\["kendall load", [^\]]*\]', (ROOT / "server/page/static/verdict.js").read_text()
    )
    text = " ".join(re.findall(r"[\"`]([^\"`]*)[\"`]", parts))
    with reader(tmp_path) as someone:
        someone.run(f"kendall serve tiny --policy dynamic{' --calibrate' * calibrated}")
        command = text.replace("${location.origin}", "http://localhost:8080")
        assert command.startswith("kendall load --base-url http://localhost:8080 ")
        someone.run(command)
