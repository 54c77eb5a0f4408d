"""What the packages may need: the standard library alone for policies."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_policies_need_nothing_but_python() -> None:
    """And no clock: a driver says what time it is."""
    imported = {
        module
        for file in (ROOT / "policies").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for module in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    own = {module for module in imported if module.startswith("kendall.policies")}
    tops = {module.partition(".")[0] for module in imported - own}
    assert tops <= sys.stdlib_module_names
    assert tops & {"asyncio", "datetime", "random", "time"} == set()
