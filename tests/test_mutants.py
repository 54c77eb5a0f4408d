"""`make mutants` draws its faults from every file of the product."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("kendall", "policies", "queueing", "server", "loadgen", "papers")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("mutants")


def test_every_file_of_the_product_is_in_one_group(tool: ModuleType) -> None:
    grouped = Counter(
        str(file.relative_to(ROOT))
        for group in tool.SETTINGS["groups"]
        for file in tool.files_of(group)
    )
    product = {
        str(file.relative_to(ROOT)) for name in PRODUCT for file in (ROOT / name).rglob("*.py")
    }
    assert product - grouped.keys() == set(), "in no group of tools/mutants.toml"
    assert grouped.keys() - product == set()
    assert {file for file, groups in grouped.items() if groups > 1} == set()


def test_every_pattern_and_every_listed_file_is_there(tool: ModuleType) -> None:
    """A file that was moved would leave its group and its known faults."""
    patterns = [pattern for group in tool.SETTINGS["groups"].values() for pattern in group]
    assert [pattern for pattern in patterns if not list(ROOT.glob(pattern))] == []
    files = {row["file"] for row in tool.SETTINGS["known"]}
    assert sorted(file for file in files if not (ROOT / file).is_file()) == []


@pytest.fixture
def by_line(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With a record in which a test of three cases executes `parse_policy` and two others what
    calls the kernel of batches.
    """
    module: ModuleType = tool.tests_by_line
    policies = (ROOT / "policies/text.py").read_text(encoding="utf-8").splitlines()
    parses = next(n for n, line in enumerate(policies, 1) if line.startswith("def parse_policy"))
    rows = range(parses + 1, parses + 40)
    executed = {"policies/text.py": {row: ["", "a.py::one[1]", "a.py::one[2]"] for row in rows}}
    monkeypatch.setattr(module, "contexts", lambda file: executed.get(file, {}))
    monkeypatch.setattr(
        module, "recorded", lambda: {"a.py::one[1]": (1.0, 9), "a.py::one[2]": (1.0, 8)}
    )
    return module


def test_a_line_has_the_tests_that_execute_it_the_most_specific_first(by_line: ModuleType) -> None:
    """A definition has those of its body."""
    text = (ROOT / "policies/text.py").read_text(encoding="utf-8").splitlines()
    begins = next(n for n, line in enumerate(text, 1) if line.startswith("def parse_policy"))
    for line in (begins, begins + 5):
        assert by_line.tests_of("policies/text.py", line) == ["a.py::one[2]", "a.py::one[1]"]
    assert by_line.tests_of("policies/core.py", 60) == []


def test_a_compiled_function_has_the_tests_of_those_that_import_it(
    by_line: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of what has a method of its name: the simulator's driver pops dicts."""
    executed = {
        "papers/sample_paths.py": {key: ["a.py::one[1]"] for key in range(1, 200)},
        "queueing/simulation/reference.py": {key: ["a.py::one[2]"] for key in range(1, 500)},
    }
    monkeypatch.setattr(by_line, "contexts", lambda file: executed.get(file, {}))
    kernels = "queueing/simulation/orders/kernels.py"
    text = (ROOT / kernels).read_text(encoding="utf-8").splitlines()
    begins = next(n for n, line in enumerate(text, 1) if line.startswith("def pop"))
    assert by_line.tests_of(kernels, begins + 3) == ["a.py::one[1]"]


def test_a_sample_is_that_of_its_seed_with_as_many_of_each_group(tool: ModuleType) -> None:
    groups = ["supervision", "operations"]
    chosen = tool.sample(groups, 1, 12)
    assert Counter(mutant.group for mutant in chosen) == dict.fromkeys(groups, 6)
    assert chosen == tool.sample(groups, 1, 12)
    assert chosen != tool.sample(groups, 2, 12)
    for mutant in chosen:
        before = (ROOT / mutant.file).read_text(encoding="utf-8")
        assert mutant.text != before
        assert mutant.was != mutant.now
        compile(mutant.text, mutant.file, "exec")


@pytest.mark.parametrize(
    ("killed", "survived", "known", "enough"),
    [
        (90, 10, 0, True),
        (90, 10, 6, False),
        (89, 11, 0, False),
        (90, 0, 10, True),
        (80, 0, 20, False),
        (0, 0, 0, True),
    ],
)
def test_known_faults_count_as_survivors_in_the_second_figure(
    tool: ModuleType, killed: int, survived: int, known: int, enough: bool
) -> None:
    fates = ["killed"] * killed + ["SURVIVED"] * survived + ["known"] * known
    assert tool.is_enough(fates, of_all=True) == enough
