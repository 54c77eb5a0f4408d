"""The environments of client libraries."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import missing

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / ".venv-clients" / "bin"
REMEDY = "`make setup-clients` makes it"


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of the programs of most of them."""
    return _programs(PROGRAMS)


@pytest.fixture(scope="session")
def llama_index_programs() -> Path:
    """LlamaIndex needs an older client of OpenAI than the others."""
    return _programs(ROOT / ".venv-clients-llama-index" / "bin")


@pytest.fixture(scope="session")
def node() -> str:
    """The program, where OpenAI's client for it is installed."""
    program = shutil.which("node") or missing("node", "install Node.js 20 or newer with npm")
    if not Path(__file__).with_name("node").joinpath("node_modules", "openai").exists():
        missing("openai for Node.js", REMEDY)
    return program


def _programs(folder: Path) -> Path:
    if not (folder / "python").exists():
        missing("the environment of client libraries", REMEDY)
    return folder
