"""Small faults in a file: an operator, a number, a condition, a result or a call is another one,
or missing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAIRS = "Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, Mult Div, And Or"
SWAPS = {
    one: other for pair in PAIRS.split(", ") for one, other in (pair.split(), pair.split()[::-1])
}
SWAPS |= {"FloorDiv": "Div", "Mod": "Mult", "Pow": "Mult"}


@dataclass(frozen=True)
class Mutant:
    """A file with one fault: `was` is `now`."""

    group: str
    file: str  # from the root
    line: int
    text: str
    was: str
    now: str


def swapped(operator: ast.AST) -> Any:
    """Its opposite or neighbour; None where it has none."""
    other = SWAPS.get(type(operator).__name__)
    return None if other is None else getattr(ast, other)()


def fault(node: Any) -> ast.AST | None:  # noqa: C901, PLR0911 - a table
    """The node with one small change; None where there is none."""
    match node:
        case ast.Compare(ops=[only]):
            return (other := swapped(only)) and ast.Compare(node.left, [other], node.comparators)
        case ast.BinOp():
            return (other := swapped(node.op)) and ast.BinOp(node.left, other, node.right)
        case ast.BoolOp():
            return ast.BoolOp(swapped(node.op), node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            return node.operand
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            return ast.Constant(value + 1 if isinstance(value, int) else 2 * value + (value == 0))
        case ast.IfExp():
            return ast.IfExp(node.test, node.orelse, node.body)
        case ast.Return() if not isinstance(node.value, ast.Constant | None):
            return ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Await()):
            return ast.Pass()
        case _:
            return None


def mutants(group: str, path: Path, root: Path) -> Iterator[Mutant]:
    """All of a file; annotations, decorators, the texts of errors and the `strict` of zip apart."""
    source = path.read_bytes()
    tree, begins = ast.parse(source), [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    apart = [
        getattr(node, name, None) or []
        for node in ast.walk(tree)
        for name in ("annotation", "returns", "exc", "decorator_list")
    ]
    apart += [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "strict"
    ]
    roots = [each for part in apart for each in (part if isinstance(part, list) else [part])]
    left_out = {id(node) for root in roots for node in ast.walk(root)}
    for node in ast.walk(tree):
        changed = None if id(node) in left_out else fault(node)
        if changed is not None and isinstance(node, ast.expr | ast.stmt):
            begin, end = (
                begins[node.lineno - 1] + node.col_offset,
                begins[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0),
            )
            now = ast.unparse(ast.fix_missing_locations(changed))
            text = (
                source[:begin]
                + (now if isinstance(node, ast.stmt) else f"({now})").encode()
                + source[end:]
            )
            was = " ".join(source[begin:end].decode().split())
            yield Mutant(
                group,
                str(path.relative_to(root)),
                node.lineno,
                text.decode(),
                was,
                now,
            )
