"""openai-python's own tests of the API's resources, from the source archive of the version that we
test with.

They are not in the wheel, and not copied here: the archive comes from the package index, held to a
hash, once.
"""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.conformance.junit import Case, read
from tests.support import missing

PIN = Path(__file__).with_name("openai.txt")
FILES = ("test_completions.py", "chat/test_completions.py", "test_models.py")
BASE = "tests.api_resources."
STORED = "completions are not stored, so there is nothing to look up, change or delete"
NOT_SERVED = {
    "chat.test_completions.*_retrieve": STORED,
    "chat.test_completions.*_update": STORED,
    "chat.test_completions.*_list": STORED,
    "chat.test_completions.*_list_with_all_params": STORED,
    "chat.test_completions.*_delete": STORED,
    "test_models.*_delete": "models are not deleted over the API",
}
"""Tests of other services than ours: they are to end with 404 or 405."""
REFUSED = {
    "test_completions.*.test_method_create_with_all_params_*": (
        "every parameter at once: best_of=0 is refused by name"
    ),
    "chat.test_completions.*.test_method_create_with_all_params_*": (
        "every parameter at once: audio, functions are refused by name"
    ),
}
"""To end with 400 or 501."""
EXPECTED_FAILURES = {pattern: (reason, {404, 405}) for pattern, reason in NOT_SERVED.items()} | {
    pattern: (reason, {400, 501}) for pattern, reason in REFUSED.items()
}
PASSES_ANYWAY = "*.test_path_params_*"  # the client itself refuses an empty path


def version() -> str:
    """The pinned version."""
    return PIN.read_text().split("==")[1].split()[0]


def expected_failure(case: Case) -> str | None:
    """The pattern of `EXPECTED_FAILURES` that it falls under, if it is to fail."""
    name = case.name.removeprefix(BASE).split("[")[0]
    if fnmatch.fnmatchcase(name, PASSES_ANYWAY):
        return None
    return next(
        (pattern for pattern in EXPECTED_FAILURES if fnmatch.fnmatchcase(name, pattern)), None
    )


def as_expected(case: Case) -> bool:
    """Passed, or failed with the status that was expected of it."""
    pattern = expected_failure(case)
    if pattern is None or not case.failed:
        return pattern is None and not case.failed and not case.skipped
    statuses = {int(code) for code in re.findall(r"Error code: (\d+)", case.message)}
    return bool(statuses) and statuses <= EXPECTED_FAILURES[pattern][1]


def source() -> Path:
    """The unpacked archive; fetched and checked if it is not there yet."""
    home = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kendall" / "conformance"
    )
    folder = home / f"openai-{version()}"
    if not (folder / "tests").is_dir():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            _fetch(Path(scratch))
            with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as archive:
                archive.extractall(scratch, filter="data")
            (Path(scratch) / folder.name).rename(folder)
    return folder


def _fetch(folder: Path) -> None:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
    ]
    command = [
        *pip,
        "--no-binary",
        "openai",
        "--require-hashes",
        "--requirement",
        str(PIN),
        "--dest",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        missing(
            f"openai-python's source ({last[:200]})", "it is fetched from the package index, once"
        )


def run(url: str, report: Path) -> list[Case]:
    """Their tests against the gateway at `url`, as their own script runs them; returns what came
    out.
    """
    folder = source()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-pno:randomly",
        f"--junitxml={report}",
    ]
    command += [f"tests/api_resources/{name}" for name in FILES]
    # their settings make warnings errors, for the versions that they lock
    environment = os.environ | {
        "TEST_API_BASE_URL": f"{url}/v1",
        "DEFER_PYDANTIC_BUILD": "false",
        "PYTHONWARNINGS": "ignore",
    }
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [*command, "-W", "ignore"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return read(report)
