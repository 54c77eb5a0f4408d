"""`make audit`: what pip-audit reports is read, and an audit that could not be made never passes
for one.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
REPORT = {
    "dependencies": [
        {"name": "good", "version": "1", "vulns": []},
        {
            "name": "bad",
            "version": "2",
            "vulns": [
                {"id": "GHSA-1", "fix_versions": ["3", "4"]},
                {"id": "GHSA-2", "fix_versions": []},
            ],
        },
        {"name": "torch", "skip_reason": "not found"},
    ]
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit_tool", ROOT / "tools/audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stand_in(code: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        "import sys; output = sys.argv[sys.argv.index('--output') + 1]; " + code,
    ]


def test_a_report_is_read(tool: ModuleType) -> None:
    found = tool.audit(
        ROOT / "requirements/dev.txt",
        stand_in(f"open(output, 'w').write({json.dumps(json.dumps(REPORT))}); sys.exit(1)"),
    )
    assert tool.read_report(found) == (
        ["bad 2: GHSA-1 (fixed in 3, 4); GHSA-2 (fixed in no version)"],
        2,
        1,
    )


def test_no_report_is_no_audit(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        tool.audit(Path("x"), stand_in("print('no connection', file=sys.stderr); sys.exit(1)"))
        == "no connection"
    )
    assert "status 3" in tool.audit(Path("x"), stand_in("sys.exit(3)"))
    assert tool.audit(Path("x"), ["/nowhere/pip-audit"])
    monkeypatch.setattr(tool, "_environment", lambda: Path("/nowhere/python"))
    assert tool.main() == tool.NOT_AUDITED == 75
    assert "THE DEPENDENCIES WERE NOT CHECKED" in capsys.readouterr().err


@pytest.mark.parametrize(("vulnerable", "status"), [(False, 0), (True, 1)])
def test_the_status_says_what_was_found(
    vulnerable: bool, status: int, tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    report: dict[str, Any] = REPORT if vulnerable else {"dependencies": REPORT["dependencies"][:1]}
    monkeypatch.setattr(tool, "_environment", lambda: Path("python"))
    monkeypatch.setattr(tool, "audit", lambda *_: report)
    assert tool.main() == status


@pytest.mark.parametrize(("status", "passes"), [(0, True), (1, False), (2, False), (75, True)])
def test_continuous_integration_breaks_on_a_finding_and_not_on_a_database_out_of_reach(
    status: int, passes: bool
) -> None:
    script = (ROOT / ".ci/run").read_text()
    lines = [line for line in script.splitlines() if "tools/audit.py" in line]
    assert len(lines) == 1
    assert "set -euo pipefail" in script
    stand_in = (
        f"set -euo pipefail\n{lines[0].replace('python3 tools/audit.py', f'(exit {status})')}"
    )
    assert (subprocess.run(["bash", "-c", stand_in], check=False).returncode == 0) == passes


def test_every_lock_is_audited(tool: ModuleType) -> None:
    assert {
        path.name
        for path in (ROOT / "requirements").glob("*.txt")
        if not path.name.startswith("overrides")
    } == set(tool.LOCKS)
