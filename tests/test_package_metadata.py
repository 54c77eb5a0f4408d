"""The package's metadata: complete, the same in every file that holds some of it, and no package
is asked for that nothing imports.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from trove_classifiers import classifiers

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
CITATION: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text())
PACKAGES = (  # folders of the wheel
    "kendall",
    *(path.name for path in (ROOT / "kendall").iterdir() if path.is_symlink()),
)
ONLY_FOR_TESTS = ("tests", "bench", "grafana")


def bare(requirement: str) -> str:
    return re.split(r"[<>=!;\[ ]", requirement, maxsplit=1)[0]


def asked_in(file: str) -> set[str]:
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    return {bare(line) for line in lines if line and line[0] not in "#-"}


@functools.cache
def imported_by(folders: tuple[str, ...]) -> set[str]:
    """Top-level modules, also those that are imported late or under another name."""
    found = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                # uvicorn's module for httptools needs that package
                found |= {node.module.partition(".")[0]} | {
                    name for name in asked_in("base.in") if f".{name}_impl" in node.module
                }
    return found


def test_authors_keywords_and_version_are_those_of_the_citation() -> None:
    assert [author["name"] for author in PROJECT["authors"]] == [
        author["name"] for author in CITATION["authors"]
    ]
    assert set(CITATION["keywords"]) <= set(PROJECT["keywords"])
    assert PROJECT["version"] == CITATION["version"]
    assert PROJECT["license"] == CITATION["license"]


def test_classifiers_exist_and_name_the_pythons_that_are_allowed() -> None:
    assert set(PROJECT["classifiers"]) <= set(classifiers)
    pythons = [
        name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)
    ]
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert pythons == [f"3.{minor}" for minor in range(8, 20) if f"3.{minor}" in allowed]
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert not [name for name in PROJECT["classifiers"] if name.startswith("License ::")], (
        "the licence expression says it"
    )


def test_what_is_asked_for_at_run_time_is_the_list_that_the_locks_are_made_of() -> None:
    assert {bare(requirement) for requirement in PROJECT["dependencies"]} == asked_in("base.in")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", sorted(asked_in("base.in")))
def test_every_package_that_is_asked_for_is_imported(name: str) -> None:
    assert name.replace("-", "_") in imported_by(PACKAGES)


def test_what_is_imported_at_run_time_is_asked_for() -> None:
    """A package that is there only because another one needs it may go with that one's next
    version.
    """
    engines = {
        "vllm",
        "ray",
        "torch",
        "transformers",
        "tqdm",
        "opentelemetry",
        "google",
        "grpc",
    }  # imported only where vLLM is installed, which brings the last four, or the extra `otel`
    brought = {
        "starlette": "fastapi",
        "PIL": "matplotlib",
        "pydantic_core": "pydantic",
    }  # part of what the other one offers
    asked = {name.replace("-", "_") for name in asked_in("base.in")}
    assert set(brought.values()) <= asked
    modules = (
        imported_by(PACKAGES) - set(sys.stdlib_module_names) - {"kendall"} - engines - set(brought)
    )
    assert modules == asked


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openai", "jsonschema"])
def test_what_only_tests_import_is_a_package_of_development(name: str) -> None:
    assert name in imported_by(ONLY_FOR_TESTS)
    assert name not in imported_by(PACKAGES)
    assert name in asked_in("dev.in")
    assert name not in asked_in("base.in")
