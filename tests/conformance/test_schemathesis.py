"""Whatever the OpenAPI document allows, and what it does not, is answered as the document says,
and never by a failure.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.conformance.schema_fuzz import run
from tests.conformance.served import served
from tests.support import missing

ENGINES = [
    pytest.param("emulated", 25, marks=pytest.mark.slow),
    pytest.param("vllm", 50, marks=[pytest.mark.slow, pytest.mark.engine]),
]


@pytest.mark.parametrize(("engine", "max_examples"), ENGINES)
def test_every_check_of_schemathesis_holds(engine: str, max_examples: int, tmp_path: Path) -> None:
    if importlib.util.find_spec("schemathesis") is None:
        missing("schemathesis", "`make setup` installs it")
    with served(engine, tmp_path) as url:
        for admin in (False, True):
            outcome = run(url, tmp_path, engine=engine, admin=admin, max_examples=max_examples)
            assert outcome.good, outcome.output[-6000:]
            assert len(outcome.cases) >= 4, "the document has lost its routes"
