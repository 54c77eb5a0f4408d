"""Schemathesis, by its command, on the document that the gateway itself gives out."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.junit import Case, read
from tests.conformance.served import ADMIN_KEY

CONFIG = Path(__file__).with_name("schemathesis.toml")
DOCUMENTED = '"504"]'  # the end of what a call may be answered with
NO_FORMS = '"501", "504"]'  # the emulated engine keeps to no form of answers and says so
SEPARATELY = "^/admin/"
NEVER = {
    "/v1/embeddings": "tiny has none, which 404 says",
    "/admin/drain": "it ends the service",
    "/admin/calibrate": "it takes the engine for as long as it lasts",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of the command."""

    good: bool
    cases: list[Case]
    output: str


def run(url: str, folder: Path, *, engine: str, admin: bool, max_examples: int) -> Outcome:
    """All checks on the routes for clients, or on those for operators: a limit set there would
    change the answers here.
    """
    config, report = folder / f"schemathesis-{admin}.toml", folder / f"schemathesis-{admin}.xml"
    settings = CONFIG.read_text()
    if engine == "emulated":
        settings = settings.replace(DOCUMENTED, NO_FORMS)
    config.write_text(settings)
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "--config-file",
        str(config),
        "--no-color",
        "run",
        f"{url}/openapi.json",
    ]
    command += [
        "--max-examples",
        str(max_examples),
        "--warnings",
        "off",
        "--report",
        "junit",
        "--report-junit-path",
        str(report),
    ]
    command += ["--include-path-regex" if admin else "--exclude-path-regex", SEPARATELY]
    command += ["--header", f"Authorization: Bearer {ADMIN_KEY}"] if admin else []
    for path in NEVER:
        command += ["--exclude-path", path]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=1800
    )
    cases = read(report) if report.exists() else []
    return Outcome(done.returncode == 0, cases, done.stdout + done.stderr)
