"""openai-python's own API-resource tests against the whole gateway: every one passes, but those
named with their reason.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from tests.conformance.junit import Case
from tests.conformance.openai_python import EXPECTED_FAILURES, as_expected, run, version
from tests.conformance.served import served

ENGINES = [
    pytest.param("emulated", marks=pytest.mark.slow),
    pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.engine]),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_openai_pythons_own_tests_pass(engine: str, tmp_path: Path) -> None:
    with served(engine, tmp_path) as url:
        cases = run(url, tmp_path / "openai.xml")
    assert len(cases) > 150, "their tests have moved"
    surprising = {
        case.name: case.message[-800:] or "passes now: take it off the list"
        for case in cases
        if not as_expected(case)
    }
    assert not surprising


def test_every_expected_failure_has_a_reason_and_its_statuses() -> None:
    assert all(len(reason) > 20 and statuses for reason, statuses in EXPECTED_FAILURES.values())
    refused = Case(
        "tests.api_resources.test_models.TestModels.test_method_delete[loose]",
        True,
        False,
        "Error code: 500 - {}",
    )
    assert not as_expected(refused)


def test_the_tests_are_those_of_the_client_that_is_installed() -> None:
    assert version() == metadata.version("openai")
