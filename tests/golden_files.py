"""Texts that somebody has looked at, in tests/golden. `WRITE_GOLDEN=1 pytest FILE` writes them
anew; look at the difference before it is committed.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def is_as_kept(name: str, text: str) -> bool:
    """Whether it is the text of tests/golden/NAME."""
    path = FOLDER / name
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    return text == path.read_text(encoding="utf-8")
