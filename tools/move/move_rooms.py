"""Move modules to the rooms of rooms.toml: files with `git mv`, imports, and names in strings, comments and documents.

`python tools/move/move_rooms.py CHECKOUT`; nothing is rewritten but names. `move.sh` does the rest.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

TOP = ("queueing", "server", "loadgen", "tests")
HERE = Path(__file__).parent
SETTINGS = tomllib.loads((HERE / "rooms.toml").read_text(encoding="utf-8"))
MOVES: dict[str, str] = {old: new for part in TOP for old, new in SETTINGS[part].items()}
LEFT_ALONE = ("docs/live-validation/cells", "tests/loadgen/samples", "tools/move/", "CHANGELOG.md")
TEXTS = {".md", ".toml", ".yaml", ".yml", ".sh", ".cfg", ".ipynb", ".html", ".js", ".txt", ".json", ".conf", ""}
NAME = re.compile(r"(?<![\w./-])(?:" + "|".join(TOP) + r")(?:\.[A-Za-z_]\w*)+")
PATH = re.compile(r"(?<![\w.-])(?:" + "|".join(TOP) + r")(?:/[\w-]+)+(?:\.py\b)?")


def moved(name: str) -> str:
    """A dotted name, of a module or of something in one, as it is afterwards."""
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        if (new := MOVES.get(".".join(parts[:size]))) is not None:
            return ".".join([new, *parts[size:]])
    return name


def moved_path(path: str) -> str:
    """The same of a path from the root."""
    stem, ending = path.removesuffix(".py"), ".py" if path.endswith(".py") else ""
    return moved(stem.replace("/", ".")).replace(".", "/") + ending if "." not in stem else path


def in_text(text: str) -> str:
    """Every name and path in a text."""
    return PATH.sub(lambda match: moved_path(match[0]), NAME.sub(lambda match: moved(match[0]), text))


def in_code(text: str, package: str, modules: frozenset[str]) -> str:
    """Imports by the tree, strings and comments by their tokens; other code is left as it is."""
    lines = text.splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line))
    changes: list[tuple[int, int, str]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom) and (new := imported(node, package, modules)) is not None:
            start = begins[node.lineno - 1] + len(lines[node.lineno - 1].encode()[: node.col_offset].decode())
            end = begins[node.end_lineno - 1] + len(lines[node.end_lineno - 1].encode()[: node.end_col_offset].decode())
            changes.append((start, end, ("\n" + " " * node.col_offset).join(new)))
    spans = [change[:2] for change in changes]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT) and (new_text := in_text(token.string)) != token.string:
            start, end = (begins[row - 1] + column for row, column in (token.start, token.end))
            if not any(low <= start < high for low, high in spans):
                changes.append((start, end, new_text))
    for start, end, new_text in sorted(changes, reverse=True):
        text = text[:start] + new_text + text[end:]
    return text


def imported(node: ast.Import | ast.ImportFrom, package: str, modules: frozenset[str]) -> list[str] | None:
    """The statements in place of this one; None where nothing moved."""
    if isinstance(node, ast.Import):
        new = [ast.alias(moved(each.name), each.asname) for each in node.names]
        return (
            None if all(a.name == b.name for a, b in zip(new, node.names, strict=True)) else [f"import {', '.join(map(ast.unparse, new))}"]
        )
    above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
    origin = ".".join([*above, *filter(None, [node.module])])
    if origin.split(".")[0] not in TOP:
        return None
    found: dict[str, list[str]] = {}
    for each in node.names:
        whole = f"{origin}.{each.name}"
        if whole in modules:  # a module
            base, _, name = moved(whole).rpartition(".")
            alias = each.asname or (each.name if name != each.name else None)
        else:
            base, name, alias = moved(origin), each.name, each.asname
        alias = None if alias == name and each.asname != each.name else alias  # `a as a` exports it again
        found.setdefault(base, []).append(name if alias is None else f"{name} as {alias}")
    new = [f"from {base} import {', '.join(names)}" for base, names in found.items()]
    return None if new == [ast.unparse(node)] or list(found) == [node.module] else new


def rewrite(path: Path, name: str, modules: frozenset[str]) -> None:
    """The names in one file."""
    if path.suffix not in {*TEXTS, ".py"} or name.startswith(LEFT_ALONE):
        return
    try:
        before = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    after = in_code(before, ".".join(name.split("/")[:-1]), modules) if path.suffix == ".py" else in_text(before)
    if after != before:
        path.write_text(after, encoding="utf-8")


def move(root: Path, files: list[str]) -> None:
    """Each to its place; by way of other names, since a module and a folder may have the same one."""
    for name in sorted(files, key=len, reverse=True):
        new = moved_path(name) if name.endswith(".py") else moved_file(name)
        if new != name:
            (root / new).parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "-C", str(root), "mv", name, f"{new}.moving"], check=True)
    for path in root.rglob("*.moving"):
        subprocess.run(["git", "-C", str(root), "mv", str(path), str(path).removesuffix(".moving")], check=True)


def moved_file(name: str) -> str:
    """A data file goes with its folder."""
    folder, _, last = name.rpartition("/")
    return f"{moved_path(folder)}/{last}" if folder and folder.split("/")[0] in TOP else name


def main() -> int:
    """See the module."""
    root = Path(sys.argv[1]).resolve()
    listed = subprocess.run(["git", "-C", str(root), "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n")
    files = [name for name in listed if name and (root / name).is_file() and not (root / name).is_symlink()]
    modules = frozenset(name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files if name.endswith(".py"))
    if wrong := [old for old in MOVES if old not in modules and not (root / old.replace(".", "/")).is_dir()]:
        print("no such module:", *wrong)
        return 1
    for name in files:
        rewrite(root / name, name, modules)
    move(root, files)
    for room, words in SETTINGS["rooms"].items():
        made = root / room.replace(".", "/") / "__init__.py"
        if not made.exists():
            made.write_text(f'"""{words}"""\n', encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
