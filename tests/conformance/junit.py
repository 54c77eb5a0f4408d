"""Outcomes from a JUnit report, which both suites write."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Case:
    """One test of a suite."""

    name: str
    failed: bool
    skipped: bool
    message: str


def read(report: Path) -> list[Case]:
    """Every test in the report."""
    cases = []
    for node in ET.parse(report).getroot().iter("testcase"):
        bad = [child for child in node if child.tag in ("failure", "error")]
        skipped = any(child.tag == "skipped" for child in node)
        name = f"{node.get('classname', '')}.{node.get('name', '')}".lstrip(".")
        message = "\n".join(f"{child.get('message', '')}\n{child.text or ''}" for child in bad)
        cases.append(Case(name, bool(bad), skipped, message))
    return cases
