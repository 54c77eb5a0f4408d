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
    """A file that was moved would leave its group, its nearest tests and its known faults."""
    settings = tool.SETTINGS
    patterns = [pattern for group in settings["groups"].values() for pattern in group]
    assert [pattern for pattern in patterns if not list(ROOT.glob(pattern))] == []
    tests = [test for near in settings["nearest"].values() for test in near]
    assert [place for place in settings["nearest"] if not (ROOT / place).exists()] == []
    files = [
        *settings["on_vllm"],
        *tests,
        *(row["file"] for row in settings["known"]),
    ]
    assert sorted({file for file in files if not (ROOT / file).is_file()}) == []


def test_the_nearest_tests_are_those_of_the_file_or_of_its_innermost_folder(
    tool: ModuleType,
) -> None:
    near = tool.SETTINGS["nearest"]
    assert tool.nearest_of("server/queue/batcher.py") == near["server/queue/batcher.py"]
    assert tool.nearest_of("queueing/arrivals/modulated.py") == near["queueing/arrivals"]
    assert tool.nearest_of("kendall/help.py") == []


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
