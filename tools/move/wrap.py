"""Break lines of docstrings and comments that are longer than LIMIT: `wrap.py LIMIT FILE...`."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def wrapped(lines: list[str], limit: int) -> list[str]:
    """What is over goes to the front of the next line of its paragraph."""
    at = 0
    while at < len(lines):
        line = lines[at]
        code = line.lstrip().startswith(('"', 'f"', "(")) and not line.lstrip().startswith('"""')
        if len(line) <= limit or code or "# type: ignore" in line or "noqa" in line:
            at += 1
            continue
        closed = line.rstrip().endswith('"""') and (line.count('"""') == 2 or not line.lstrip().startswith('"""'))
        body, alone = line.rstrip().removesuffix('"""') if closed else line, closed and line.lstrip().startswith('"""')
        indent = line[: len(line) - len(line.lstrip())]
        head, _, rest = body[: limit + 1].rpartition(" ")
        rest += body[limit + 1 :]
        lines[at] = head
        if closed:
            lines[at + 1 : at + 1] = [indent + rest, indent + '"""'] if alone else [f'{indent}{rest}"""']
        elif continues(lines, at + 1, indent):
            lines[at + 1] = f"{indent}{rest} {lines[at + 1].lstrip()}"
        else:
            lines[at + 1 : at + 1] = [indent + rest]
    return lines


def continues(lines: list[str], at: int, indent: str) -> bool:
    """Whether a line is of the same paragraph as the one before it, and of no table."""
    line = lines[at] if at < len(lines) else ""
    plain = line.strip() and not line.strip().startswith(('"""', "-", "*")) and not re.search(r"\S {2,}\S", line)
    return bool(plain) and line[: len(line) - len(line.lstrip())] == indent


for name in sys.argv[2:]:
    file = Path(name)
    before = file.read_text(encoding="utf-8")
    file.write_text("\n".join(wrapped(before.split("\n"), int(sys.argv[1]))), encoding="utf-8")
