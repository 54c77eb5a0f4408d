"""Are vulnerabilities known in the packages that the locks pin? `python3 tools/audit.py`, which is
`make audit`.

pip-audit, in an environment of its own, asks OSV. Standard library only. Exit status: 0 none known;
1 some are, each is printed; 75 the audit could not be made (no network, database not reachable):
said in capitals, never taken for a pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOL = "pip-audit==2.10.0"
ENVIRONMENT = ROOT / ".venv-audit"
LOCKS = ("cpu.txt", "cuda.txt", "emulated.txt", "dev.txt")
NONE_KNOWN, SOME_KNOWN, NOT_AUDITED = 0, 1, 75  # the last as EX_TEMPFAIL
TIMEOUT = 600.0  # seconds for one lock


def main() -> int:
    """Every lock in turn; the exit status."""
    python = _environment()
    if python is None:
        return _not_audited(f"{TOOL} could not be installed")
    command = [
        str(python),
        "-m",
        "pip_audit",
        "--no-deps",
        "--disable-pip",
        "--vulnerability-service",
        "osv",
        "--progress-spinner",
        "off",
    ]
    found: list[str] = []
    for name in LOCKS:
        report = audit(ROOT / "requirements" / name, command)
        if isinstance(report, str):
            return _not_audited(f"{name}: {report}")
        lines, checked, skipped = read_report(report)
        print(
            f"audit: {name}: {checked} packages, {len(lines)} with known vulnerabilities, "
            f"{skipped} not in the database"
        )
        found += [f"{name}: {line}" for line in lines]
    for line in found:
        print(line, file=sys.stderr)
    return SOME_KNOWN if found else NONE_KNOWN


def audit(lock: Path, command: Sequence[str]) -> dict[str, Any] | str:
    """pip-audit's report about a lock, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "report.json"
        arguments = [
            *command,
            "--requirement",
            str(lock),
            "--format",
            "json",
            "--output",
            str(output),
        ]
        try:
            done = subprocess.run(
                arguments, capture_output=True, text=True, check=False, timeout=TIMEOUT
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        if not output.exists() or not output.stat().st_size:
            said = done.stderr.strip().splitlines()
            return (
                said[-1]
                if said
                else f"pip-audit ended with status {done.returncode} and wrote nothing"
            )
        report: dict[str, Any] = json.loads(output.read_text())
    return report


def read_report(report: dict[str, Any]) -> tuple[list[str], int, int]:
    """A line for every package with known vulnerabilities, how many were checked, how many could
    not be.
    """
    packages = report["dependencies"]
    checked = [package for package in packages if "skip_reason" not in package]
    lines = []
    for package in checked:
        ids = [
            f"{each['id']} (fixed in {', '.join(each['fix_versions']) or 'no version'})"
            for each in package["vulns"]
        ]
        if ids:
            lines.append(f"{package['name']} {package['version']}: {'; '.join(ids)}")
    return lines, len(checked), len(packages) - len(checked)


def _environment() -> Path | None:
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / TOOL
    if not stamp.exists():
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        if subprocess.run(
            [python, "-m", "pip", "install", "--quiet", TOOL], check=False
        ).returncode:
            return None
        stamp.touch()
    return python


def _not_audited(reason: str) -> int:
    print(f"audit: NOT MADE: {reason}", file=sys.stderr)
    print(
        "audit: THE DEPENDENCIES WERE NOT CHECKED for known vulnerabilities; run `make audit` "
        "where OSV can be reached",
        file=sys.stderr,
    )
    return NOT_AUDITED


if __name__ == "__main__":
    sys.exit(main())
