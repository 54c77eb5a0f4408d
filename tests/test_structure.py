"""Sizes of folders, files, classes and functions. The exceptions are in structure.toml, each with
its reason.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_name("structure.toml")
PACKAGES = ("kendall", "policies", "queueing", "server", "loadgen")
ENTRIES, SHORTEST, METHODS, LINES, PARAMETERS = 15, 50, 20, 40, 6
Function = ast.FunctionDef | ast.AsyncFunctionDef


def files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def large_folders() -> Iterator[str]:
    """With more modules and folders than a reader takes in."""
    code = [path for path in files() if path.name != "__init__.py"]
    folders = {path.parent for path in files()} - {ROOT / package for package in PACKAGES}
    entries = Counter(path.parent for path in code) + Counter(each.parent for each in folders)
    yield from (name(folder) for folder, number in entries.items() if number > ENTRIES)


def short_files() -> Iterator[str]:
    """A policy may have a file of its own, however short."""
    for path in files():
        lines = path.read_text(encoding="utf-8").count("\n")
        exempt = path.name in ("__init__.py", "__main__.py") or path.parent == ROOT / "policies"
        if not exempt and lines < SHORTEST:
            yield name(path)


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for path in files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield name(path), node


def large_classes() -> Iterator[str]:
    for file, node in nodes():
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(each, Function) for each in node.body)
            if methods > METHODS:
                yield f"{file}: {node.name}"


def functions() -> Iterator[tuple[str, Function]]:
    """Commands aside: their parameters are flags, a line or more each."""
    for file, node in nodes():
        if isinstance(node, Function) and not any(map(makes_command, node.decorator_list)):
            yield file, node


def makes_command(decorator: ast.expr) -> bool:
    made = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(made, ast.Attribute) and made.attr == "command"


def long_functions() -> Iterator[str]:
    for file, node in functions():
        if (node.end_lineno or 0) - node.lineno >= LINES:
            yield f"{file}: {node.name}"


def functions_of_many_parameters() -> Iterator[str]:
    for file, node in functions():
        given = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        own = [each for each in given if each not in ("self", "cls")]
        if len(own) + len(node.args.kwonlyargs) > PARAMETERS:
            yield f"{file}: {node.name}"


LOOKS = {
    look.__name__: look
    for look in (
        large_folders,
        short_files,
        large_classes,
        long_functions,
        functions_of_many_parameters,
    )
}


def exceptions() -> dict[str, dict[str, str]]:
    """By look: the reason of each."""
    return tomllib.loads(LIST.read_text(encoding="utf-8"))


@pytest.mark.parametrize("look", LOOKS)
def test_nothing_becomes_too_large_and_what_has_shrunk_leaves_the_list(look: str) -> None:
    listed, found = set(exceptions()[look]), set(LOOKS[look]())
    assert found - listed == set(), f"make it smaller, or give the reason in {LIST.name}"
    assert listed - found == set(), f"no exception any more: remove it from {LIST.name}"


@pytest.mark.parametrize("look", LOOKS)
def test_each_exception_has_a_reason(look: str) -> None:
    assert [each for each, reason in exceptions()[look].items() if len(reason.split()) < 2] == []


def test_policies_need_nothing_but_python() -> None:
    """And no clock: a driver says what time it is."""
    imported = {
        module
        for file, node in nodes()
        if file.startswith("policies/")
        for module in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    tops = {module.partition(".")[0] for module in imported}
    assert tops - sys.stdlib_module_names == {"policies"}
    assert tops & {"asyncio", "datetime", "random", "time"} == set()
