"""openai-python's own API-resource tests against the whole gateway: every one passes, but those named with their reason."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from tests.conformance.openai_python import EXPECTED_FAILURES, expected_failure, run, version
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
    surprising = {case.name: case.message[-800:] for case in cases if case.failed and expected_failure(case) is None}
    assert not surprising
    better = [case.name for case in cases if not case.failed and not case.skipped and expected_failure(case) is not None]
    assert not better, "these pass now: take them off the list"


def test_every_expected_failure_has_a_reason() -> None:
    assert all(len(reason) > 20 for reason in EXPECTED_FAILURES.values())


def test_the_tests_are_those_of_the_client_that_is_installed() -> None:
    assert version() == metadata.version("openai")
