"""The section of a page that says what was measured: written from the numbers, between two
marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gateway_cost.judging import Finding

BEGIN, END = "<!-- run:{} -->", "<!-- end:{} -->"


def table(title: str, rounds: int, findings: Sequence[Finding]) -> str:
    """A part's findings, in Markdown."""
    head = ("| | measured | 95 % interval | bound |", "|---|--:|--:|---|")
    rows = [finding.row() for finding in findings]
    return "\n".join([f"{title}; {rounds} rounds:", "", *head, *rows])


def measured_on(report: Mapping[str, Any]) -> str:
    """The machine and the software of a report, in a sentence."""
    hardware = report["hardware"]
    named = [f"{name} {version}" for name, version in report["versions"].items()]
    before = f" `before` is {report['before']}." if "before" in report else ""
    return f"{hardware['cpu']}, {hardware['cores']} cores; {', '.join(named)}.{before}"


def put(content: str, page: Path, name: str) -> None:
    """Put the content in place of what is between the marks of that name. Raises ValueError where
    the page has no place for it.
    """
    text, begin, end = page.read_text(), BEGIN.format(name), END.format(name)
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(
            f"got {page} without one {begin} and one {end}; expected both, around the place of "
            "the section"
        )
    before, _, rest = text.partition(begin)
    page.write_text(f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}")
