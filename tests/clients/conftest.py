"""The environment of client libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import missing

PROGRAMS = Path(__file__).resolve().parents[2] / ".venv-clients" / "bin"


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of its programs."""
    if not (PROGRAMS / "python").exists():
        missing("the environment of client libraries", "`make setup-clients` makes it")
    return PROGRAMS
