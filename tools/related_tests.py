"""Which files of tests have to do with a place in the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("policies", "queueing", "server", "loadgen")  # links to them are in kendall/


def dotted(path: Path) -> str:
    """The module's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    within = ("kendall",) if parts[0] in ROOMS else ()
    return ".".join((*within, *parts)).removesuffix(".__init__")


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules that a file imports or names in a string, and the names that it takes from them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            base = ".".join((*package, *filter(None, [node.module])))
            found |= {base, *(f"{base}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"^[a-z_]+(?:\.[a-z_]+)+$", node.value))
    return frozenset(found)


@cache
def words(test: str) -> frozenset[str]:
    """Of a file of tests."""
    return frozenset(re.findall(r"\w+", (ROOT / test).read_text(encoding="utf-8")))


@cache
def users(path: Path, names: tuple[str, ...]) -> frozenset[str]:
    """The functions and classes of a file that use one of these names, or use such a one."""
    uses = {
        each.name: {
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(each)
            if isinstance(node, ast.Name | ast.Attribute)
        }
        for each in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    known = set(names)
    while more := {name for name, used in uses.items() if used & known} - known:
        known |= more
    return frozenset(known.difference(names))


@cache
def tests_of(file: str, within: tuple[str, ...]) -> tuple[str, ...]:
    """Test files that import it, or what imports it, in three steps at most, and those in a folder
    with the name of its own; first those of its package with its name or that of its folders, then
    those that name what is around it.

    Then those that name what uses that in the same file, the nearest and shortest first.
    """
    code = [
        path
        for folder in (*ROOMS, "kendall", "papers", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    reached, found, own = (
        {dotted(ROOT / file)},
        dict[str, int](),
        f"tests/{file.partition('/')[0]}/",
    )
    for step in range(3):
        near = [path for path in code if imports(path) & reached]
        tests = [
            str(path.relative_to(ROOT)) for path in sorted(near) if path.name.startswith("test_")
        ]
        found = dict.fromkeys(tests, step) | found
        reached |= {dotted(path) for path in near}
    folder, names = Path(file).parent.name, Path(file).with_suffix("").parts[1:]
    beside = (ROOT / own).rglob(f"{folder}/test_*.py")
    found = dict.fromkeys((str(path.relative_to(ROOT)) for path in sorted(beside)), 3) | found
    around = users(ROOT / file, within)

    def rank(test: str) -> tuple[float, ...]:
        named = len(words(test).intersection(within)), len(words(test) & around)
        return (
            not test.startswith(own),
            -sum(name in test for name in names),
            -named[0],
            -named[1],
            found[test],
            (ROOT / test).stat().st_size,
        )

    return tuple(sorted(found, key=rank))
