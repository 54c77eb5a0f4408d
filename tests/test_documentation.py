"""The documentation points at what exists."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "docker").glob("*.md"),
        *(ROOT / "requirements").glob("*.md"),
    ]
)
PACKAGES = ("kendall", "policies", "queueing", "server", "loadgen", "papers")
WITH_EXAMPLES = sorted(
    ("" if package in ("kendall", "papers") else "kendall.")
    + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_of_the_docstrings_run_as_python_runs_them(module: str) -> None:
    outcome = doctest.testmod(importlib.import_module(module))
    assert outcome.attempted >= 1
    assert outcome.failed == 0


def test_every_file_that_the_architecture_names_exists() -> None:
    named = re.findall(r"`([\w/]+/(?:\w+\.py)?)`", (ROOT / "docs/architecture.md").read_text())
    assert len(named) > 60
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", ["live", "production", "memory"])
def test_the_heading_of_a_validation_counts_the_cells_of_its_table(page: str) -> None:
    """The README has the same count of the live validation."""
    text = (ROOT / f"docs/why/{page}-validation.md").read_text()
    (heading,) = (line for line in text.splitlines() if re.match(r"## \d+ of \d+", line))
    results = [
        line.split("|")[-2].strip(" *\\")
        for line in text.splitlines()
        if re.match(r"\| `?(single|dynamic|fixed|capped|elastic|continuous)", line)
    ]
    held, short = results.count("holds"), results.count("too short")
    assert re.findall(r"\d+", heading) == [str(n) for n in (held, len(results), short) if n]
    assert heading.startswith(f"## {held} of {len(results)} cells hold")
    if page == "live":
        assert f"| cells that hold | {held} of {len(results)} |" in text
        assert f"{held} of {len(results)} cells hold" in (ROOT / "README.md").read_text()


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name in ("README.md", "gpu-law/llama-7b-h100.md") or f"({name})" in index, name


def test_the_generated_reference_is_what_the_code_says() -> None:
    """`make reference` writes it again."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools/reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    written = reference.pages()
    assert set(written) == {"options.md", "metrics.md", "record.md"}
    for name, text in written.items():
        assert (ROOT / "docs/reference" / name).read_text(encoding="utf-8") == text, name
    for name in ("options.md", "record.md"):  # an option or a field without a word about it
        assert re.findall(r"^.*\|  \|$", written[name], re.MULTILINE) == []


def test_the_page_of_errors_has_every_code_of_the_status_table() -> None:
    from tests.server.statuses import ROWS, WIRE_ROWS

    text = (ROOT / "docs/reference/errors.md").read_text()
    codes = {str(row.code) for row in (*ROWS, *WIRE_ROWS)}
    assert len(codes) > 20
    assert [code for code in sorted(codes) if f"`{code}`" not in text] == []


def test_the_notices_name_every_file_of_others_and_every_package_that_is_asked_for() -> None:
    notices = (ROOT / "THIRD_PARTY_NOTICES.md").read_text()
    for folder in (path for path in ROOT.glob("*/**/vendor") if ".venv" not in path.parts):
        for licence in folder.glob("LICENSE*"):
            assert licence.name in notices, licence
            assert str(folder.relative_to(ROOT)) in notices
    asked = [
        line.split("<")[0]
        for line in (ROOT / "requirements/base.in").read_text().splitlines()
        if line and line[0] not in "#-"
    ]
    assert [name for name in asked if f"| {name} |" not in notices] == []


def test_the_page_of_versions_says_the_versions_that_the_code_has() -> None:
    """Each schema's number, Python's and vLLM's, and the dashboards'."""
    import tomllib

    from grafana_foundation_sdk.models.dashboard import Dashboard

    from kendall.queueing.estimation import estimates
    from kendall.queueing.latency import profile
    from kendall.queueing.measurement import record
    from kendall.server.live import state_file

    text = (ROOT / "docs/reference/versions.md").read_text()
    rows = {
        cells[1].strip(): cells[2].strip()
        for line in text.splitlines()
        if len(cells := line.split("|")) > 3
    }
    for what, module in (
        ("run file", record),
        ("latency profile", profile),
        ("state file", state_file),
        ("estimates", estimates),
    ):
        (version,) = (version for name, version in rows.items() if name.startswith(what))
        assert version == str(module.SCHEMA_VERSION)
    assert rows["Grafana dashboards"] == str(Dashboard().schema_version)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = project["optional-dependencies"]["cuda"][0].partition("==")[2]
    assert f"| vLLM | {pinned.removesuffix('.0')} (pinned" in text
    assert "| Python | 3.11, 3.12 (tested); 3.13, 3.14 without the real engine" in text
    assert project["requires-python"] == ">=3.11,<3.15"
    tested = [name for name in project["classifiers"] if "Python :: 3." in name]
    assert [name.rpartition(" ")[2] for name in tested] == ["3.11", "3.12", "3.13", "3.14"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == project["version"]


def test_the_security_page_says_the_bounds_of_a_body_after_its_answer() -> None:
    from kendall.server.security import early_answer

    assert (
        f"at most {early_answer.MOST_BYTES >> 20} MiB and {early_answer.MOST_SECONDS:g} s, "
        f"or {early_answer.LINGER_BYTES >> 20} MiB and {early_answer.LINGER:g} s"
    ) in (ROOT / "SECURITY.md").read_text()
