"""Which tests execute a line of the product.

`record` runs the quick ones once under coverage.py, a context per test; the processes that a test
starts belong to it. What coverage cannot tell apart (lines executed at import, compiled functions)
has the tests of the lines that name it; the former also that which reads the reference from what
modules declare.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator
from functools import cache
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("policies", "queueing", "server", "loadgen", "kendall", "papers")
FOLDER = ROOT / ".tests-by-line"
LINES, TESTS = FOLDER / "lines", FOLDER / "tests.json"
NOW = "TEST_THAT_RUNS"  # processes that it starts take their context from there
CONFIGURATION = f"""[run]
parallel = true
data_file = {LINES}
include = {", ".join(f"{ROOT}/{folder}/*" for folder in PRODUCT)}
context = ${{{NOW}-}}
concurrency = thread, multiprocessing
patch = _exit
sigterm = true
"""
ARTEFACTS = "tests/papers/test_reproduction.py"
REFERENCE = "tests/test_documentation.py::test_the_generated_reference_is_what_the_code_says"
SECONDS = 60.0  # of tests as recorded, for one line
EACH = 0.05  # seconds that a test takes beside its own
DEEP = 5  # steps from a compiled function to what calls it


def record(processes: int) -> None:
    """Runs the tests and writes the folder. What only `kendall reproduce` computes has slow tests
    alone.
    """
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    configuration = FOLDER / "coveragerc"
    configuration.write_text(CONFIGURATION, encoding="utf-8")
    environment = os.environ | {
        "COVERAGE_PROCESS_START": str(configuration),
        "PYTHONPATH": str(ROOT / "tools"),
    }
    plugin = ("-p", Path(__file__).stem, "-n", str(processes), "--timeout", "300")
    for asked in (("-m", "not slow"), ("-m", "slow", ARTEFACTS)):
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *plugin, *asked],
            cwd=ROOT,
            env=environment,
            check=False,
        )
    coverage.Coverage(config_file=str(configuration)).combine()
    weigh()


def weigh() -> None:
    """Adds to each test how many lines it executes: the fewer, the more it is about one thing."""
    tests: dict[str, float] = {}
    for report in FOLDER.glob("seconds-*"):
        for line in report.read_text(encoding="utf-8").splitlines():
            test, _, seconds = line.rpartition("\t")
            tests[test] = tests.get(test, 0.0) + float(seconds)
    lines = Counter(
        test
        for file in data().measured_files()
        for executing in data().contexts_by_lineno(file).values()
        for test in executing
    )
    known = {test: (seconds, lines[test]) for test, seconds in tests.items()}
    TESTS.write_text(json.dumps(known), encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Lines that are executed from here on are this test's."""
    os.environ[NOW] = item.nodeid
    if (measured := coverage.Coverage.current()) is not None:
        measured.switch_context(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """How long each part of it took, if it passed."""
    report = yield
    if report.passed:
        with (FOLDER / f"seconds-{os.getpid()}").open("a", encoding="utf-8") as file:
            file.write(f"{item.nodeid}\t{report.duration}\n")
    return report


def tests_of(file: str, line: int) -> list[str]:
    """The tests that execute it, together as long as SECONDS and grouped by file: in turn one that
    executes most of this file in its time, and one of which this file is the largest share.
    """
    known, own = recorded(), Counter(test for tests in contexts(file).values() for test in tests)
    found = executing(file, line) & known.keys()
    declared = {REFERENCE} & known.keys() if line not in in_functions(file) else set[str]()
    by_lines = spread(
        sorted(found, key=lambda test: (-own[test] / (known[test][0] + EACH), known[test]))
    )
    by_share = spread(sorted(found, key=lambda test: (-own[test] / known[test][1], known[test])))
    chosen: dict[str, list[str]] = defaultdict(list)
    left = SECONDS
    in_turn = (test for both in zip(by_lines, by_share, strict=True) for test in both)
    for test in dict.fromkeys([*declared, *in_turn]):
        cost = known[test][0] + EACH
        if not chosen or cost < left / 3:  # a long one leaves time for others
            chosen[test.partition("::")[0]].append(test)
            left -= cost
    return [test for tests in chosen.values() for test in tests]


def spread(tests: Iterable[str]) -> list[str]:
    """One case of each function before the second of any."""
    cases = Counter[str]()
    turns: list[tuple[int, str]] = []
    for test in tests:
        function = test.partition("[")[0]
        turns.append((cases[function], test))
        cases[function] += 1
    return [test for _, test in sorted(turns, key=lambda turn: turn[0])]


def executing(file: str, line: int, deep: int = DEEP) -> frozenset[str]:
    """Tests of a line; of what it is a part of, or of what names that, where it has none."""
    scopes, statement = place(file, line)
    for lines in ([line], statement):
        if found := traced(file, lines):
            return found
    function = scopes[-1] if scopes else None
    if isinstance(function, ast.FunctionDef) and line < function.body[0].lineno:
        inside = traced(file, range(function.body[0].lineno, (function.end_lineno or 0) + 1))
        if inside:
            return inside
    names = {each.name for each in scopes[:1]} if function else assigned(file, statement)
    if isinstance(function, ast.ClassDef):
        names = assigned(file, statement) or {function.name}
    places = [
        (other, at)
        for name in names
        for other, lines in named().get(name, {}).items()
        for at in lines
        if (other, at) != (file, line) and deep and at not in statement
    ]
    # others have a function or a method of that name
    if scopes and isinstance(scopes[0], ast.FunctionDef):
        places = [at for at in places if at[0] == file or file in imported(at[0])] or places
    found = frozenset(
        test
        for other, at in places
        for test in (traced(other, [at]) or executing_name(other, at, deep))
    )
    return found & traced(file, contexts(file)) or found


@cache
def imported(file: str) -> set[str]:
    """The product's files that it imports, or a name of."""
    modules = {
        f"{node.module}{end}"
        for node in ast.walk(tree(file))
        if isinstance(node, ast.ImportFrom)
        for end in ("", *(f".{each.name}" for each in node.names))
    }
    return {f"{module.removeprefix('kendall.').replace('.', '/')}.py" for module in modules}


@cache
def executing_name(file: str, line: int, deep: int) -> frozenset[str]:
    """Of a line that names what is asked for; none for an import."""
    scopes, _ = place(file, line)
    return executing(file, line, deep - 1) if scopes else frozenset()


def traced(file: str, lines: Iterable[int]) -> frozenset[str]:
    """Those that coverage has seen there."""
    by_line = contexts(file)
    return frozenset(test for line in lines for test in by_line.get(line, ()) if test)


@cache
def contexts(file: str) -> dict[int, list[str]]:
    """Of the lines in functions: others are executed at import, by whichever test comes first."""
    found = data().contexts_by_lineno(str(ROOT / file))
    return {line: found[line] for line in found.keys() & in_functions(file)}


def in_functions(file: str) -> set[int]:
    """Lines of their bodies."""
    return {
        line
        for node in ast.walk(tree(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
    }


@cache
def data() -> coverage.CoverageData:
    """Of all processes."""
    known = coverage.CoverageData(str(LINES))
    known.read()
    return known


@cache
def recorded() -> dict[str, tuple[float, int]]:
    """Seconds and lines of each test that passed."""
    known: dict[str, tuple[float, int]] = json.loads(TESTS.read_text(encoding="utf-8"))
    return known


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_bytes())


Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def place(file: str, line: int) -> tuple[list[Scope], range]:
    """The classes and functions around a line, and the lines of its statement (of its head, where
    it has a body).
    """
    scopes: list[Scope] = []
    lines = range(line, line + 1)
    inner: ast.AST | None = tree(file)
    while inner is not None:
        below = [each for each in statements(inner) if holds(each, line)]
        inner = below[0] if below else None
        if isinstance(inner, ast.stmt):
            body = getattr(inner, "body", None)
            end = body[0].lineno - 1 if body else inner.end_lineno or line
            lines = range(inner.lineno, max(end, inner.lineno) + 1)
        if isinstance(inner, Scope):
            scopes.append(inner)
    return scopes, lines


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Below it, none of them within another."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.excepthandler | ast.match_case):
            yield from statements(child)


def holds(node: ast.stmt, line: int) -> bool:
    decorators = node.decorator_list if isinstance(node, Scope) else []
    first = min([node.lineno, *(each.lineno for each in decorators)])
    return first <= line <= (node.end_lineno or node.lineno)


def assigned(file: str, lines: range) -> set[str]:
    """Names that a statement gives a value, or the function or class that it begins."""
    return {
        name
        for node in ast.walk(tree(file))
        if isinstance(node, ast.stmt) and node.lineno == lines.start
        for name in (
            *(
                each.id
                for each in ast.walk(node)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            ),
            *([node.name] if isinstance(node, Scope) else []),
        )
    }


@cache
def named() -> dict[str, dict[str, set[int]]]:
    """Where the product names it: file and lines."""
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for folder in PRODUCT:
        for path in (ROOT / folder).rglob("*.py"):
            file = str(path.relative_to(ROOT))
            for node in ast.walk(tree(file)):
                match node:
                    case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                        found[name][file].add(node.lineno)
                    case _:
                        pass
    return found
