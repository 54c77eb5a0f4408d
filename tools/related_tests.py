"""Which files of tests have to do with a place in the code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def dotted(path: Path) -> str:
    """The module's name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules that a file imports, and the names that it takes from them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            base = ".".join((*package, *filter(None, [node.module])))
            found |= {base, *(f"{base}.{each.name}" for each in node.names)}
    return frozenset(found)


@cache
def words(test: str) -> frozenset[str]:
    """Of a file of tests."""
    return frozenset(re.findall(r"\w+", (ROOT / test).read_text(encoding="utf-8")))


@cache
def tests_of(file: str, within: tuple[str, ...]) -> tuple[str, ...]:
    """Test files that import it, or what imports it, in three steps at most; first those of its package that name what is around it."""
    code = [path for folder in ("policies", "queueing", "server", "loadgen", "kendall", "tests") for path in (ROOT / folder).rglob("*.py")]
    reached, found, own = {dotted(ROOT / file)}, dict[str, None](), f"tests/{file.partition('/')[0]}/"
    for _ in range(3):
        near = [path for path in code if imports(path) & reached]
        found |= dict.fromkeys(str(path.relative_to(ROOT)) for path in sorted(near) if path.name.startswith("test_"))
        reached |= {dotted(path) for path in near}
    return tuple(sorted(found, key=lambda test: (not test.startswith(own), -len(words(test).intersection(within)))))
