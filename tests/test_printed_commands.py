"""What the documentation, the page and the messages tell a person to type, works."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import kendall.cli
from papers.documents import sections
from tests.printed_commands import LIMIT, ROOT, Line, pages, reader, shell_lines, words

# Lines that are not run here, by their beginning, each with its reason.
SKIPPED = {
    "kendall load --base-url http://localhost:8000": "as kendall serve --engine http",
    "kendall load --base-url http://localhost:8080 --request-rate 2": "before that gateway",
    """curl localhost:8080/v1/chat/completions -d '{"model": "smollm2""": "asks that model",
    'curl -H "Authorization: Bearer ..." localhost:8080/v1/models': "as kubectl",
    "vllm serve": "a model of 16 GB to be fetched",
    **dict.fromkeys(
        (
            "kendall calibrate http://localhost:8000",
            "kendall compare run.jsonl --latency law.json --max-num-seqs",
            "kendall sweep --base-url http://localhost:8000",
        ),
        "before a plain server; tests/loadgen/test_plain_servers.py has one",
    ),
    "kendall serve --engine http": (
        "before a server that runs already; tests/server/test_real_passing.py has one"
    ),
    "kendall watch ": "watches servers that run already; tests/server/test_watch.py has some",
    "curl -i localhost:8080/v1/chat/completions": "asks that server's model",
    "kendall serve tiny --engine ray": "needs the extra ray; tests/server/ray has it",
    "make ": "it made the environment that runs this test; its targets are looked up instead",
    "KENDALL_ADMIN_KEY=... docker ": "as docker",
    "docker ": (
        "no container engine here; tests/test_containers.py holds the commands of images "
        "and compose"
    ),
    "kubectl ": (
        "no cluster here; tests/test_deployment.py renders the overlays and checks them "
        "against the schemas"
    ),
    "uv pip compile ": (
        "resolves against the package index; tests/test_deployment.py holds the locks"
    ),
}
PACKAGES = ("kendall", "server", "loadgen", "queueing", "policies", "papers")
SOURCES = [
    path
    for folder in (
        "kendall",
        "server",
        "loadgen",
        "queueing",
        "policies",
        "papers",
        "tools",
        "grafana",
    )
    for path in (ROOT / folder).rglob("*.py")
]
VALUE = "{}"  # what an f-string puts in, in a text that is looked through
NAMED = re.compile(
    r"\bkendall (?P<command>[a-z]+(?:-[a-z]+)*\b|\{\})(?P<rest>(?: (?:(?!\bkendall )[^`;])*)?)"
)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def commands(page: Path) -> list[Line]:
    return [line for line in shell_lines(page) if not line.text.startswith(tuple(SKIPPED))]


@contextlib.contextmanager
def named(line: Line) -> Iterator[None]:
    """A failure begins with the page, the number and the line."""
    try:
        yield
    except (AssertionError, subprocess.TimeoutExpired) as error:
        raise pytest.fail.Exception(f"{line}\n{error}", pytrace=False) from None


QUICK_PAGE = "README.md"  # the lines of the others take minutes


def with_commands() -> list[Any]:
    found = [(page, str(page.relative_to(ROOT))) for page in pages() if commands(page)]
    return [
        pytest.param(page, id=name, marks=pytest.mark.slow if name != QUICK_PAGE else ())
        for page, name in found
    ]


@pytest.mark.timeout(6 * LIMIT)  # of a page: of a line it is LIMIT
@pytest.mark.parametrize("page", with_commands())
def test_every_printed_line_works(page: Path, tmp_path: Path) -> None:
    """In order, in an empty folder, with nothing in the user's cache, before the emulated
    engine.
    """
    with reader(tmp_path) as someone:
        for line in commands(page):
            with named(line):
                someone.run(line.text)


def rows_with_commands() -> list[Any]:
    """The rows of docs/documents.md; `kendall reproduce` has tests of its own, in tests/papers. A
    command that the product does not have yet has to fail: once it works, its row is to change.
    """
    found = []
    for section in sections():
        for row in section.rows:
            name = f"{section.document}: {row.what}"
            if row.command and not row.command.startswith("kendall reproduce "):
                found.append(pytest.param(row.command, row.shows, id=name))
            if row.pending:
                mark = pytest.mark.xfail(strict=True, raises=SystemExit, reason="pending")
                found.append(pytest.param(row.pending, {}, id=f"{name}, pending", marks=mark))
    return found


def answer(text: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """The JSON that a command prints; of `kendall serve` its settings. Raises SystemExit where it
    fails.
    """
    _, *arguments = words(text)
    arguments += ["--show-config"] if arguments[0] == "serve" else []
    try:
        kendall.cli.main([*arguments, "--json"])
    except SystemExit as end:
        if end.code != 0:
            raise
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shows"), rows_with_commands())
def test_a_command_of_the_page_of_documents_answers_what_its_note_says(
    command: str, shows: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """To the digits printed there, with one more for another machine's arithmetic."""
    found = answer(command, capsys)
    for name, printed in shows.items():
        value = found
        for key in name.split("."):
            value = value[key]
        step = 10.0 ** -len(printed.partition(".")[2])
        assert float(printed) == pytest.approx(value, abs=0.6 * step), name


@pytest.mark.slow
@pytest.mark.engine
def test_the_first_page_works_on_the_real_engine(tmp_path: Path) -> None:
    with reader(tmp_path, engine="auto") as someone:
        for line in commands(ROOT / "README.md"):
            with named(line):
                someone.run(line.text)


@pytest.mark.slow
def test_a_misspelt_line_fails(tmp_path: Path) -> None:
    with reader(tmp_path) as someone:
        for text in (
            "kendall predcit --arrival-rate 1",
            "kendall reproduce --lst",
            "kendall serve tiny --polcy single",
        ):
            with pytest.raises(AssertionError, match="exit status 2"):
                someone.run(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("kendall serve tiny\n", "kendall sevre tiny\n"),
        ("""/v1/completions -d '{"model": "tiny\"""", """/v1/completion -d '{"model": "tiny\""""),
    ],
)
def test_a_misspelt_line_in_a_page_fails_the_test_of_the_page(
    right: str, wrong: str, tmp_path: Path
) -> None:
    text = (ROOT / "README.md").read_text()
    assert right in text
    (copy := tmp_path / "README.md").write_text(text.replace(right, wrong, 1))
    (folder := tmp_path / "reader").mkdir()
    with pytest.raises(
        pytest.fail.Exception, match=rf"^README\.md:\d+: .*{re.escape(wrong.strip())}"
    ):
        test_every_printed_line_works(copy, folder)


def test_a_printed_curl_line_that_gets_an_http_error_fails(tmp_path: Path) -> None:
    every = [line.text for page in pages() for line in commands(page)]
    # those with a key are for a gateway that was started with one, and have a test of their page
    printed = [text for text in every if text.startswith("curl ") and "Authorization" not in text]
    assert len(printed) >= 3
    with reader(tmp_path) as someone:
        someone.run("kendall serve tiny")
        for text in printed:
            someone.run(text)
            with pytest.raises(AssertionError, match="exit status 22"):
                someone.run(re.sub(r"(localhost:8080/\S+)", r"\1x", text))


@cache
def flags(command: str) -> frozenset[str]:
    options = kendall.cli.command_of(command).params
    return frozenset(
        flag for option in options for flag in (*option.opts, *option.secondary_opts)
    ) | {"--help"}


def misnamed(text: str) -> list[str]:
    """Commands and flags in a text that do not exist."""
    found = []
    for match in NAMED.finditer(text):
        command = match["command"]
        if command == "help":
            continue
        if command not in {VALUE, *kendall.cli.COMMANDS}:
            found.append(f"kendall {command}")
            continue
        known = (
            frozenset().union(*map(flags, kendall.cli.COMMANDS))
            if command == VALUE
            else flags(command)
        )
        found += [
            f"kendall {command} {flag}"
            for flag in FLAG.findall(match["rest"].partition(" # ")[0])
            if flag not in known
        ]
    return found


def texts(source: str) -> Iterator[str]:
    """Every text of a module, an f-string as one text with `VALUE` where a value is put in."""
    tree = ast.parse(source)
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    inside = {id(part) for node in joined for part in node.values}
    for node in joined:
        yield "".join(
            part.value if isinstance(part, ast.Constant) else VALUE for part in node.values
        )
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            yield node.value


def test_what_is_looked_for_in_texts() -> None:
    assert misnamed("`kendall load --request-rate 5`, then `kendall advise URL --slo ...`") == []
    assert misnamed("`kendall laod`; `kendall load --rate 5`") == [
        "kendall laod",
        "kendall load --rate",
    ]
    assert misnamed("kendall load (kendall comprae reads it); kendall {} --hlep") == [
        "kendall comprae",
        "kendall {} --hlep",
    ]


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ('say(f"`kendall sweep --resum {folder}` continues")', ["kendall sweep --resum"]),
        (
            'say(f"differences: kendall compare --sweeep {shlex.quote(folder)}", soft_wrap=True)',
            ["kendall compare --sweeep"],
        ),
        ('say(f"one command, as in `kendall {name} --hlep`")', ["kendall {} --hlep"]),
        ('say("to continue: kendall sweep " "--resum FOLDER.")', ["kendall sweep --resum"]),
        (
            'say("kendall: cannot write"); say(f"`kendall {name}`"); say(f"{n} of `kendall sweep '
            '--resume {folder!r:>{width}}`")',
            [],
        ),
    ],
)
def test_texts_are_looked_through_wherever_values_are_put_in(source: str, wrong: list[str]) -> None:
    assert [found for text in texts(source) for found in misnamed(text)] == wrong


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_in_the_prose_exists(page: Path) -> None:
    inline = re.findall(
        r"`((?:kendall|make|curl) [^`]*)`",
        re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL),
    )
    fenced = [line.text for line in shell_lines(page)]
    assert [wrong for text in [*inline, *fenced] for wrong in misnamed(text)] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for text in [*inline, *fenced]:
        if text.startswith("make "):
            asked = [word for word in words(text)[1:] if "=" not in word]
            assert set(asked) <= targets, text


def test_every_command_in_a_message_exists() -> None:
    """In backticks or not, in any text of the sources: help, errors, log lines, dashboards,
    alerts, the page.
    """
    found = [
        f"{path.relative_to(ROOT)}: {wrong}"
        for path in SOURCES
        for text in texts(path.read_text())
        for wrong in misnamed(text)
    ]
    found += [f"rules.yml: {wrong}" for wrong in misnamed((ROOT / "docker/rules.yml").read_text())]
    for path in (ROOT / "server/page/static").glob("*.js"):
        found += [
            f"{path.name}: {wrong}"
            for text in re.findall(r"(kendall [^`<\"]*)", path.read_text())
            for wrong in misnamed(text)
        ]
    assert found == []
