"""axe-core's accessibility rules, run inside a page."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.page.browser import Page

_SOURCE = Path(__file__).parent / "vendor" / "axe.min.js"
_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@cache
def _source() -> str:
    return _SOURCE.read_text(encoding="utf-8")


async def violations(page: Page) -> list[str]:
    """One line for each element that breaks a rule: the rule, the element, what axe says about
    it.
    """
    if not await page.ask("'axe' in window"):
        await page.ask(f"{_source()}; 1")
    options = json.dumps(
        {"runOnly": {"type": "tag", "values": _TAGS}, "resultTypes": ["violations"]}
    )
    found: dict[str, Any] = await page.ask(
        f"axe.run(document, {options}).then(found => ({{broken: found.violations, kept: "
        f"found.passes.length}}))"
    )
    assert found["kept"] > 20, "axe has applied its rules"
    nodes = [(rule["id"], node) for rule in found["broken"] for node in rule["nodes"]]
    return [
        f"{rule}: {' '.join(map(str, node['target']))}: {node['failureSummary']}"
        for rule, node in nodes
    ]
