"""The section of a page that says what was measured: written from the numbers, between two
marks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- run:{} -->", "<!-- end:{} -->"
TITLES = {
    "engine": (
        "On the real engine, continuous, beside `vllm serve` of the same version, model and "
        "engine arguments"
    ),
    "edge": "On an engine that takes no time, beside a bare FastAPI handler",
    "proxy": "Before a server that takes no time, beside other proxies",
}


def write(report: Mapping[str, Any], page: Path, name: str = "gateway") -> None:
    """Put the section in place of the one of that name; see `put`."""
    put(section(report), page, name)


def put(content: str, page: Path, name: str) -> None:
    """The content in place of what is between the marks of that name. Raises ValueError where the
    page has no place for it.
    """
    text, begin, end = page.read_text(), BEGIN.format(name), END.format(name)
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(
            f"got {page} without one {begin} and one {end}; expected both, around the place of "
            "the section"
        )
    before, _, rest = text.partition(begin)
    page.write_text(f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}")


def section(report: Mapping[str, Any]) -> str:
    """Tables of the parts that were measured, and what they were measured on."""
    parts = [_part(title, report[name]) for name, title in TITLES.items() if name in report]
    return "\n\n".join([*parts, _machine(report)])


def _part(title: str, part: Mapping[str, Any]) -> str:
    lines = [
        f"{title}; {part['rounds']} rounds:",
        "",
        "| | measured | 95 % interval | bound |",
        "|---|--:|--:|---|",
    ]
    return "\n".join(lines + [_line(finding) for finding in part["findings"]])


def _line(finding: Mapping[str, Any]) -> str:
    found, unit = finding["found"], f" {finding['unit']}" if finding["unit"] else ""
    return (
        f"| {finding['what']} | {found['value']:.4g}{unit} | "
        f"{_interval(found['low'], found['high'])} | {_bound(finding)} |"
    )


def _interval(low: float, high: float) -> str:
    return f"{low:.4g} to {high:.4g}" if math.isfinite(high) else ""


def _bound(finding: Mapping[str, Any]) -> str:
    if finding["holds"] is None and not finding["undecided"]:
        return ""
    least, most = finding["at_least"], finding["upper_end_at_most"]
    asked = f">= {least:.3g}" if least is not None else f"upper end <= {most:.3g} {finding['unit']}"
    return f"{asked}: {finding['undecided'] or ('holds' if finding['holds'] else '**broken**')}"


def _machine(report: Mapping[str, Any]) -> str:
    before = f" `before` is {report['before']}." if "before" in report else ""
    return measured_on(report["hardware"], report["versions"]) + before


def measured_on(hardware: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """The machine and the software, in a sentence."""
    named = [f"{name} {version}" for name, version in versions.items()]
    return f"{hardware['cpu']}, {hardware['cores']} cores; {', '.join(named)}."
