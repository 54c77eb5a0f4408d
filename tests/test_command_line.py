"""`kendall` itself: its help, completion of shells, exit statuses, and errors that are one line
each.
"""

from __future__ import annotations

import http.server
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kendall import cli
from kendall.queueing.latency.profile import find_profile

ROOT = Path(__file__).resolve().parent.parent
HELP = re.compile(r"[│╭╰╮╯─\s]+")
LAW = "k1=0.001,k2=0.01,k3=0.0001,k4=0.002"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    return int(stop.value.code or 0)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(*arguments) == 0
    return capsys.readouterr().out


def words(text: str) -> str:
    """Without frames and breaks of lines."""
    return HELP.sub(" ", text)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str, status: int) -> str:
    assert run(*arguments) == status
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("kendall: ")
    return lines[0].removeprefix("kendall: ")


# help


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_shows_every_text_as_it_is_written_at_80_columns_without_a_terminal(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = shown(capsys, name, "--help")
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    seen = words(out).replace(" ", "")
    for parameter in cli.command_of(name).params:
        text = (parameter.help or "").replace("\\[", "[")
        assert words(text).replace(" ", "") in seen, (parameter.name, text)
        assert parameter.help, parameter.name


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_description_of_a_command_fills_its_lines(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of the source, which are longer than 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.strip() for line in shown(capsys, name, "--help").partition("╭")[0].splitlines()]
    for line, following in itertools.pairwise(lines):
        if line and following and "Usage" not in line:
            assert len(f"{line} {following.split()[0]}") > 78, line


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_names_no_type_of_python(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, name, "--help")
    assert re.findall(r"<(?:bool|str|int|float|list|Path)\b", out) == []
    assert re.findall(r"default: (?:True|\d+\.0)\]", out) == []


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_option_of_help_is_a_sentence(name: str) -> None:
    """A capital or a name of a value first, a full stop last."""
    begins = re.compile(r"[A-Z0-9/`<]|\w+_\w+|\w+ \||\w+ \(")
    texts = [parameter.help for parameter in cli.command_of(name).params]
    assert [text for text in texts if not text.endswith(".") or not begins.match(text)] == []


def test_square_brackets_survive(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a table [engine-args] for vLLM" in words(shown(capsys, "serve", "--help"))


@pytest.mark.parametrize("name", ["serve", "load", "sweep"])
def test_long_help_is_in_panels_of_a_dozen_or_two(name: str) -> None:
    panels: dict[str | None, int] = {}
    for parameter in cli.command_of(name).params:
        if parameter.param_type_name == "option":
            panels[parameter.rich_help_panel] = panels.get(parameter.rich_help_panel, 0) + 1
    assert None not in panels
    assert max(panels.values()) <= 16


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_says_which_status_a_refused_key_has(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "2 an invalid argument or a key that a server refuses" in words(
        shown(capsys, name, "--help")
    )


def test_what_a_package_leaves_out_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "reproduce", ("left_out.command", "of a clone"))
    said = complaint(capsys, "reproduce", "all", status=1)
    assert "got `kendall reproduce` of an installed package; expected a clone" in said


def test_help_command_is_command_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        shown(capsys, "help", "advise")
        == shown(capsys, "advise", "--help")
        == shown(capsys, "advise", "-h")
    )
    assert (
        shown(capsys, "help", "advise", "--help")
        == shown(capsys, "--help", "advise")
        == shown(capsys, "advise", "--help")
    )
    assert shown(capsys, "help") == shown(capsys, "--help") == shown(capsys, "-h")
    assert (
        shown(capsys, "help")
        == shown(capsys, "help", "--help")
        == shown(capsys, "help", "-h")
        == shown(capsys, "help", "help")
    )
    assert shown(capsys, "help", "--install-completion") == shown(capsys, "help")
    assert "did you mean 'serve'?" in complaint(capsys, "help", "serv", status=2)


def test_the_list_of_commands_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "help")
    assert max(map(len, out.splitlines())) <= 80
    assert shown(capsys, "help", "help") == out


def test_the_list_of_commands_wraps_to_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = shown(capsys, "help")
    assert max(map(len, text.splitlines())) <= 60
    assert words(text) == words(shown_wide(monkeypatch, capsys))


def shown_wide(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    return shown(capsys, "help")


def test_a_mistyped_variable_is_taken_for_one_of_the_same_command_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KENDALL_POLICI", "single")
    assert complaint(capsys, "serve", status=2).endswith("did you mean 'KENDALL_POLICY'?")


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("KENDALL_BAR", None),
        ("KENDALL_XYZ", None),
        ("KENDALL_QUUX", None),
        ("KENDALL_SERVE_FOO", None),
        ("KENDALL_PROT", "KENDALL_PORT"),
        ("KENDALL_SERVE_PROT", "KENDALL_SERVE_PORT"),
        ("KENDALL_SEVRE_PORT", "KENDALL_SERVE_PORT"),
        ("KENDALL_REQUEST_TIMEOTU", "KENDALL_REQUEST_TIMEOUT"),
    ],
)
def test_what_all_variables_begin_with_does_not_make_them_alike(
    variable: str,
    near: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, "1")
    expected = f"got {variable} in the environment; expected the name of an option"
    assert complaint(capsys, "serve", status=2) == expected + (
        f"; did you mean {near!r}?" if near else ""
    )


def test_calibrate_prints_a_law_that_fits_80_columns() -> None:
    from io import StringIO

    from kendall.queueing.commands.terminal import console
    from kendall.queueing.latency.law import parse_law
    from kendall.queueing.latency.profile import Profile
    from kendall.server.operations.calibrate import show

    law = parse_law(
        "k1=0.00012345678901234567,k2=0.0012345678901234567,k3=1.2345678901234567e-05,k4=0.0023456789012345678"
    )
    to = StringIO()
    show(Profile(name="x", law=law, r2=0.99, mape=0.01), Path("x.json"), console(to))
    lines = to.getvalue().splitlines()
    assert " ".join(" ".join(lines).split()).startswith(
        "law k1=0.0001235, k2=0.001235, k3=1.235e-05, k4=0.002346 fit"
    )
    assert max(map(len, lines)) <= 80


def test_calibrate_says_the_speed_first_where_only_that_was_measured() -> None:
    from io import StringIO

    from kendall.queueing.commands.terminal import console
    from kendall.queueing.latency.law import parse_law
    from kendall.queueing.latency.profile import Profile
    from kendall.server.operations.calibrate import show

    to = StringIO()
    show(
        Profile(name="x", law=parse_law(f"{LAW},speed=0.663"), r2=0.99, mape=0.01),
        "not saved",
        console(to),
        speed_only=True,
    )
    said = " ".join(to.getvalue().split())
    assert said.startswith(
        "speed 0.663: batches take 0.663 times as long as the law says (the law itself was "
        "not measured again) law k1="
    )
    assert "speed=" not in said


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "-V") == shown(capsys, "--version")
    assert shown(capsys, "-V") == shown(capsys, "help", "--version") == shown(capsys, "help", "-V")
    assert re.fullmatch(r"kendall \d\S*\n", shown(capsys, "-V"))


# completion


def completed(text: str, home: Path) -> list[str]:
    """What bash would offer for this line, by a process of its own."""
    found = text.split(" ")
    environment = os.environ | {
        "_KENDALL_COMPLETE": "complete_bash",
        "COMP_WORDS": text,
        "COMP_CWORD": str(len(found) - 1),
        "HOME": str(home),
    }
    command = [sys.executable, "-m", "kendall"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=True, cwd=ROOT
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kendall s", ["serve", "sweep", "simulate"]),
        ("kendall help au", ["audit"]),
        ("kendall --ve", ["--version"]),
        ("kendall serve --autopilot", ["--autopilot", "--autopilot-policies"]),
        ("kendall predict --policy single --arr", ["--arrival-rate"]),
        ("kendall nothing --p", []),
    ],
)
def test_shells_complete_commands_and_options(
    line: str, offered: list[str], tmp_path: Path
) -> None:
    found = completed(line, tmp_path)
    assert set(offered) <= set(found)
    assert all(word.startswith(line.rpartition(" ")[2]) for word in found)
    assert bool(found) == bool(offered)


def test_a_shell_is_offered_commands_with_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from kendall.completion import Root, answer

    root = Root({"predict": "predict a delay"}, str.upper)
    assert root.list_commands(None) == ["predict", "help"]
    assert [root.get_command(None, name) for name in ("predict", "other")] == ["PREDICT", None]
    behind = root.get_command(None, "help")
    assert isinstance(behind, Root)
    for group in (root, behind):
        offered = [(each.value, each.help) for each in group.shell_complete(None, "")]
        assert offered == [("predict", "predict a delay"), ("help", "Show the help of a command.")]
    assert [each.value for each in root.shell_complete(None, "--")] == [
        *("--help", "--version", "--install-completion", "--show-completion")
    ]
    assert [each.help for each in root.shell_complete(None, "--ver")] == ["Show the version."]
    monkeypatch.delenv("_KENDALL_COMPLETE", raising=False)
    assert answer(root) is None


def test_the_names_of_commands_are_completed_without_importing_one() -> None:
    code = (
        "import sys, os; os.environ |= {'_KENDALL_COMPLETE': 'complete_bash', 'COMP_WORDS': "
        "'kendall ', 'COMP_CWORD': '1'}\nfrom kendall.cli import main\ntry: main([])\nexcept "
        "SystemExit: print(sorted(name for name in sys.modules if name in ('numpy', 'fastapi', "
        "'msgspec')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert set(cli.COMMANDS) <= set(done.stdout.split())


def test_a_prediction_of_a_batch_policy_waits_for_no_optimisation_library() -> None:
    """scipy.optimize takes a quarter of a second to import, a third of the whole command."""
    asked = (
        "['predict', '--policy', 'capped:max_batch_size=8', '--arrival-rate', '1', "
        f"'--output-tokens', 'geometric:mean=100', '--latency', '{LAW}', '--json']"
    )
    code = (
        f"import sys\nfrom kendall.cli import main\ntry: main({asked})\nexcept SystemExit as end: "
        "print(end.code, 'scipy.optimize' in sys.modules, 'numba' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 False False"


def test_bash_itself_completes_with_the_script_that_is_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = shown(capsys, "--show-completion", "bash")
    launcher = tmp_path / "kendall"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -m kendall "$@"\n')
    launcher.chmod(0o755)
    asks = (
        f"{script}\nCOMP_WORDS=(kendall serve --max-m) COMP_CWORD=2\n_kendall_completion "
        f"kendall\necho ${{COMPREPLY[*]}}"
    )
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", asks],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.strip() == "--max-model-len", done.stderr


@pytest.mark.parametrize(
    ("shell", "written"),
    [("bash", ".bash_completions/kendall.sh"), ("fish", ".config/fish/completions/kendall.fish")],
)
def test_completion_is_installed(
    shell: str,
    written: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert str(tmp_path / written) in shown(capsys, "--install-completion", shell)
    assert "_KENDALL_COMPLETE=complete_" in (tmp_path / written).read_text()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_that_cannot_be_installed_is_one_line(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for home, why in (
        ("/proc/nohome", "No such file or directory"),
        (str(tmp_path / "file"), "(Not a directory|File exists)"),
    ):
        monkeypatch.setenv("HOME", home)
        said = complaint(capsys, "--install-completion", shell, status=1)
        assert re.fullmatch(
            rf"cannot write {home}\S*: {why}; "
            rf"`kendall --show-completion {shell}` prints the script",
            said,
        )


def test_completion_for_a_user_without_a_home_or_a_shell_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("PATH", str(tmp_path))
    said = complaint(capsys, "--install-completion", "pwsh", status=1)
    assert said == (
        "cannot run pwsh: No such file or directory; `kendall --show-completion pwsh` prints "
        "the script"
    )
    monkeypatch.setattr(Path, "home", homeless)
    said = complaint(capsys, "--install-completion", "bash", status=1)
    assert said.startswith(
        "cannot install completion: Could not determine home directory; `kendall "
        "--show-completion bash`"
    )


def test_a_shell_without_completion_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "--show-completion", "bsh", status=2).endswith("did you mean 'bash'?")


# exit statuses and errors


@pytest.fixture
def nobody() -> Iterator[str]:
    """A URL where nobody listens, and nobody else can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("advise", "{url}"),
        ("calibrate", "{url}"),
        ("load", "--base-url", "{url}", "--request-rate", "5", "--num-prompts", "5"),
        ("load", "--base-url", "{url}", "--request-rate", "5", "--num-prompts", "5", "--json"),
    ],
)
def test_where_nobody_listens_every_command_ends_with_status_1(
    arguments: tuple[str, ...],
    nobody: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    said = complaint(capsys, *(argument.format(url=nobody) for argument in arguments), status=1)
    assert nobody in said


class Starting(http.server.BaseHTTPRequestHandler):
    """A gateway whose engine is starting."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(503)
        self.end_headers()
        self.wfile.write(
            b'{"error": {"message": "the engine is starting", "code": "engine_unavailable"}}'
        )

    do_GET = do_POST = answer  # noqa: N815 - http.server's names

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def starting() -> Iterator[str]:
    """The URL of such a gateway."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Starting)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("command", ["advise", "calibrate"])
def test_a_gateway_whose_engine_is_starting_is_status_1(
    command: str, starting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        complaint(capsys, command, starting, status=1)
        == f"{starting} answered 503: the engine is starting"
    )


def test_a_port_in_use_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = complaint(
            capsys, "serve", "--engine", "emulated", "--port", str(taken.getsockname()[1]), status=1
        )
    assert "expected a free address" in said


def test_serve_says_where_it_listens_before_the_engine_starts(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kendall.policies.text import SpecError
    from kendall.server.operations import serving

    def no_engine(*_: Any) -> Any:
        raise SpecError("no engine")

    monkeypatch.setattr(serving, "choose_engine", lambda _: (None, None))
    monkeypatch.setattr(serving, "Gateway", no_engine)
    monkeypatch.setattr("kendall.server.operations.cli.configure_logs", lambda _: None)
    caplog.set_level("INFO", logger="kendall")
    assert complaint(capsys, "serve", "--port", "0", status=2) == "no engine"
    said = next(
        record.getMessage() for record in caplog.records if "listening" in record.getMessage()
    )
    assert re.fullmatch(
        r"listening on http://127\.0\.0\.1:\d+; the engine starts \(/ready answers 200 when it "
        r"serves\)",
        said,
    )


def test_serve_ends_with_what_its_engine_said_where_that_does_not_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kendall.queueing.latency.law import parse_law
    from kendall.server.engines.base import EngineStartError
    from kendall.server.engines.emulated import EmulatedEngine
    from kendall.server.operations import serving

    async def no_room(_: Any) -> Any:
        raise EngineStartError("got 1 GiB of memory; expected 2 GiB")

    monkeypatch.setattr(EmulatedEngine, "start", no_room)
    monkeypatch.setattr(serving, "choose_engine", lambda _: (EmulatedEngine(parse_law(LAW)), None))
    monkeypatch.setattr("kendall.server.operations.cli.configure_logs", lambda _: None)
    said = complaint(capsys, "serve", "--port", "0", status=2)
    assert said == "got 1 GiB of memory; expected 2 GiB"


@pytest.mark.parametrize("target", ["localhost:9442", "127.0.0.1:8080/v1", "[::1]:8080"])
def test_calibrate_says_at_once_that_an_address_is_no_url(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(capsys, "calibrate", target, status=2)
    assert said.startswith(
        f"got {target}; expected the URL of a running `kendall serve`, for example http://"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_calibrate_shows_what_it_measured_where_it_cannot_be_saved(
    flags: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from kendall.queueing.latency.law import parse_law
    from kendall.queueing.latency.profile import Profile
    from kendall.server.operations import calibrate as command

    profile = Profile(name="x", law=parse_law(LAW), r2=0.99, mape=0.01)
    monkeypatch.setattr(command, "_remote", lambda *_: profile)
    place = tmp_path / "x.json"
    place.symlink_to("/dev/full")
    with pytest.raises(SystemExit) as exit_status:
        cli.main(["calibrate", "http://127.0.0.1:8080", "--output", str(place), *flags])
    out, err = capsys.readouterr()
    assert exit_status.value.code == 1
    assert err.startswith(f"kendall: cannot write {place}")
    if flags:
        assert msgspec.json.decode(out)["law"]["k4"] == profile.law.k4
    else:
        assert out.startswith("law ")
        assert "profile   not saved" in out


def test_a_sweep_of_nobody_ends_with_status_1_and_writes_nothing(
    nobody: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ("--base-url", nobody, "--latency", LAW, "--request-rates", "2", "--num-prompts", "5")
    said = complaint(
        capsys, "sweep", "single", *flags, "--output", str(tmp_path / "sweep"), status=1
    )
    assert said.startswith(f"no gateway serves at {nobody}: ")
    assert not (tmp_path / "sweep").exists()


MODEL = ("--output-tokens", "geometric:mean=64", "--latency", LAW)
OPTIMIZE = ("optimize", "--arrival-rate", "1", *MODEL, "--target")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ("serve", "--port", "99999"),
            ("got --port 99999", "expected a whole number from 0 to 65535"),
        ),
        (("serve", "--port=-1"), ("got --port -1", "expected a whole number from 0 to 65535")),
        (("serve", "--port", "eighty"), ("got --port eighty", "expected a whole number")),
        (
            ("serve", "--patience", "5 parsecs"),
            ("got --patience 5 parsecs", "expected a duration", "100ms"),
        ),
        (
            ("serve", "--what-if-interval", "100ms"),
            ("got --what-if-interval 100ms", "at least 1 s"),
        ),
        (("calibrate", "--repeats", "1"), ("got --repeats 1", "from 2 to 100")),
        (
            ("optimize", "--target", "servers", *MODEL),
            ("got no --arrival-rate", "requests per second"),
        ),
        (
            ("optimize", "--target", "batch-size", *MODEL),
            ("got no --arrival-rate", "requests per second"),
        ),
        (
            ("optimize", "--target", "arrival-rate", *MODEL),
            ("got the default --objective delay for arrival-rate; expected throughput or",),
        ),
        (
            ("optimize", "--target", "arrival-rate", "--objective", "delay", *MODEL),
            ("got --objective delay for arrival-rate; ",),
        ),
        ((*OPTIMIZE, "servers"), ("got the default --objective delay for servers; expected slo",)),
        (
            (*OPTIMIZE, "max-output-tokens"),
            ("got the default --objective delay for max-output-tokens; expected",),
        ),
        (
            (*OPTIMIZE, "batch-size"),
            (
                "got the default --policy single; expected fixed, capped, elastic or continuous: "
                "they have a",
            ),
        ),
        (
            (*OPTIMIZE, "batch-size", "--policy", "single"),
            ("got --policy single; expected fixed, capped",),
        ),
        (
            (*OPTIMIZE, "policy", "--theta", "0.3"),
            ("got --theta with the default --objective delay; expected --objective v1 or v2",),
        ),
        (
            (*OPTIMIZE, "policy", "--slo", "p99_queueing_delay=1s", "--theta=1"),
            ("got --theta with the default --objective slo; ",),
        ),
        (
            (*OPTIMIZE, "policy", "--objective", "slo"),
            ("got --objective slo without an SLO; expected",),
        ),
        (
            (*OPTIMIZE, "policy", "--objective", "v1", "--theta", "3"),
            ("got --theta 3; expected a number from 0 to 1",),
        ),
        (
            (*OPTIMIZE, "policy", "--objective", "v2", "--loss-cost", "-1"),
            ("got --loss-cost -1; expected a finite number >= 0",),
        ),
        (
            (
                *OPTIMIZE,
                "max-output-tokens",
                "--objective",
                "clipped",
                "--max-clipped-fraction",
                "1",
            ),
            ("got --max-clipped-fraction 1; expected a number from 0 to below 1",),
        ),
        (
            (*OPTIMIZE, "max-output-tokens", "--objective", "clipped", "--max-output-tokens", "0"),
            ("got --max-output-tokens 0; expected a whole number, at least 1",),
        ),
        (("predict", "--arrival-rate", "1", *MODEL), ("got no --policy; expected --policy TEXT",)),
        (
            ("predict", "--policy", "single", "--arrival-rate", "x", *MODEL),
            ("got --arrival-rate x; expected a number",),
        ),
        (
            (
                "predict",
                "--policy",
                "single",
                "--arrival-rate",
                "1",
                "--output-tokens",
                "64",
                "--latency",
                LAW,
            ),
            ("got lengths '64'", "did you mean deterministic:value=64?"),
        ),
        (
            (
                "predict",
                "--policy",
                "single",
                "--arrival-rate",
                "1",
                "--output-tokens",
                "geometric:mean=9",
                "--latency",
                "a=20ms,c=1",
            ),
            ("got a='20ms'", "expected seconds without a unit: a=0.02"),
        ),
        (
            (
                "predict",
                "--policy",
                "single",
                "--arrival-rate",
                "1",
                "--output-tokens",
                "geometric:mean=9",
                "--latency",
                "nobodys-model",
            ),
            ("in seconds", "shipped: ", "tiny", "`kendall calibrate MODEL` makes one"),
        ),
        (("summary",), ("got no RUN_FILE; expected run files of `kendall load`",)),
        (("advise",), ("got no URL; expected URL of a running gateway",)),
        (("reproduce",), ("got no WHAT; expected all | yang",)),
        (
            ("optimize", "--target", "batchsize", *MODEL),
            ("got --target 'batchsize'", "did you mean 'batch-size'?"),
        ),
        (
            (
                "predict",
                "--policy",
                "single",
                "--arrival-rate",
                "1",
                "--output-tokens",
                "geometric:mean=9",
                "--latency",
                "./x.json",
            ),
            ("'./x.json': no such file",),
        ),
        (
            (
                "predict",
                "--policy",
                "single",
                "--arrival-rate",
                "1",
                "--output-tokens",
                "geometric:mean=9",
                "--latency",
                "./",
            ),
            ("got latency './', a folder; expected the file of a profile",),
        ),
        (
            (
                "predict",
                "--policy",
                "single",
                "--arrival-rate",
                "1",
                "--output-tokens",
                "geometric:mean=9",
                "--latency",
                __file__,
            ),
            ("a file that is not a profile",),
        ),
        (("serve", ""), ("got an empty MODEL; expected `tiny`",)),
        (("serve", "", "--engine", "emulated"), ("got an empty MODEL; expected `tiny`",)),
        (("calibrate", ""), ("got an empty MODEL; expected `tiny`",)),
        (("calibrate", "ftp://x"), ("got ftp://x; expected the URL of a running `kendall serve`",)),
        (
            ("load", "--request-rate", "5", "--base-url", ""),
            ("got --base-url ''; expected http://HOST:PORT",),
        ),
        (
            ("sweep", "--request-rates", "5", "--base-url", ""),
            ("got --base-url ''; expected http://HOST:PORT",),
        ),
        (
            ("predict", "--policy", "single", "--arrival-rate", "-1", *MODEL),
            ("got --arrival-rate -1.0; expected requests per second > 0",),
        ),
        (
            ("predict", "--policy", "single", "--arrival-rate", "1", "--servers", "0", *MODEL),
            ("got --servers 0; expected",),
        ),
        (
            (
                "simulate",
                "--policy",
                "single",
                "--arrival-rate",
                "1",
                "--num-requests",
                "1",
                *MODEL,
            ),
            ("got --num-requests 1; expected",),
        ),
        (
            ("predict", "--policy", "capped:max_batch_size=0", "--arrival-rate", "1", *MODEL),
            ("got max_batch_size=0 for policy capped",),
        ),
        (
            ("help", "predict", "extra"),
            ("got 'extra' too many; expected one command, as in `kendall help predict`",),
        ),
        (
            ("--versoin",),
            (
                "got --versoin; expected a command or one of --help, --version",
                "did you mean --version?",
            ),
        ),
        (("load",), ("got no arrivals; expected one of --request-rate, ",)),
        (
            ("predict", "--policy", "single", *MODEL),
            (
                "got no arrivals; expected one of three: set --arrival-rate (requests per "
                "second), set --arrivals, or set --trace",
            ),
        ),
        (
            ("simulate", "--policy", "single", "--arrivals", "poisson:rate=inf", *MODEL),
            ("got --arrivals poisson:rate=inf, which all come at once; expected a finite mean",),
        ),
        (
            ("predict", "--policy", "single", "--arrival-rate", "1", "--latency", LAW),
            ("got no lengths; expected their distribution: set --output-tokens",),
        ),
        (
            ("predict", "--policy", "single", "--trace", "gone.csv", *MODEL),
            ("got --output-tokens geometric:mean=64 and --trace gone.csv; expected one",),
        ),
        (
            ("predict", "--policy", "single", "--trace", "gone.csv", "--latency", LAW),
            ("got trace gone.csv: No such file or directory; expected a file of one of azure",),
        ),
        (("prdict",), ("got command 'prdict'", "did you mean 'predict'?")),
        (
            ("compare", "--output", "report.docx", "run.jsonl"),
            ("got --output report.docx", ".html"),
        ),
        (
            ("load", "--rate", "20"),
            ("got --rate; expected an option of `kendall load`; did you mean --request-rate?",),
        ),
        (
            ("predict", "--rate", "20"),
            ("did you mean --arrival-rate? `kendall predict --help` lists them",),
        ),
        (("load", "--requset-rate", "20"), ("got --requset-rate", "did you mean --request-rate?")),
        (
            ("load", "-x"),
            ("got -x; expected an option of `kendall load`; `kendall load --help` lists them",),
        ),
        (("load", "one", "two"), ("got 'one two' too many; expected options only",)),
        (
            ("load", "--request-rate", "5", "6"),
            ("got '6' behind --request-rate 5; expected --request-rate 5 alone",),
        ),
        (
            ("demo", "--policy", "single", "fixed"),
            ("got 'fixed' behind --policy single; expected --policy single --policy fixed",),
        ),
        (
            ("serve", "tiny", "--policy", "single", "dynamic"),
            ("got 'dynamic' behind --policy single; expected --policy single alone",),
        ),
        (
            ("demo", "--engine", "vllm", "emulated"),
            ("got 'emulated' behind --engine vllm; expected --engine vllm alone",),
        ),
        (
            ("serve", "tiny", "--slo", "p99_queueing_delay=2s", "mean_queueing_delay=1s"),
            ("expected --slo p99_queueing_delay=2s,mean_queueing_delay=1s",),
        ),
        (
            ("load", "--lateness-budget", "mean=1ms", "p99=5ms"),
            ("expected --lateness-budget mean=1ms,p99=5ms",),
        ),
        (
            ("load", "--percentile-metrics", "ttft", "x"),
            ("expected --percentile-metrics ttft,x",),
        ),
        (("load", "--json", "two"), ("got 'two' too many; expected options only",)),
        (("serve", "tiny", "more"), ("got 'more' too many; expected one MODEL and options",)),
        (
            ("predict", "--policy"),
            (
                "got --policy without a value; expected --policy TEXT: batching policy: single | "
                "dynamic",
            ),
        ),
        (("load", "--json=3"), ("got --json with a value; expected --json alone",)),
        (
            ("predict", "--policy", "capped:8", "--arrival-rate", "1", *MODEL),
            ("expected key=value, for example capped:max_batch_size=8",),
        ),
        (
            ("predict", "--policy", "fixed:", "--arrival-rate", "1", *MODEL),
            ("after the colon, for example fixed:batch_size=8",),
        ),
        (
            (
                "predict",
                "--policy",
                "single",
                "--arrival-rate",
                "1",
                "--output-tokens",
                "geometric:64",
                "--latency",
                LAW,
            ),
            ("got '64' in 'geometric:64'; expected key=value, for example geometric:mean=64",),
        ),
        (
            ("load", "--request-rate", "5", "--host", "http://127.0.0.1", "--port", "19000"),
            (
                "got --host http://127.0.0.1; expected a host name or address; --base-url takes a "
                "URL",
            ),
        ),
        (
            ("load", "--request-rate", "5", "--host", ""),
            ("got --host ''; expected a host name or address",),
        ),
        (
            ("load", "--request-rate", "5", "--host", "h:80"),
            ("got --host h:80; expected a host name or address; --port takes the port",),
        ),
        (
            ("serve", "--host", "http://127.0.0.1"),
            ("got --host http://127.0.0.1; expected a host name or address",),
        ),
        (
            ("serve", "--host", "127.0.0.1:80"),
            ("got --host 127.0.0.1:80; expected a host name or address; --port takes the port",),
        ),
        (
            ("load", "--arrivals", "mmpp:5"),
            ("expected key=value, for example mmpp:rates=5/50,durations=10/1",),
        ),
        (("load", "--request-rate", "5", "--duration", "3x"), ("1.5min (or 1.5m)",)),
        (
            ("compare", "--html", "new/", "run.jsonl"),
            ("got --html new/; expected a file, for example new/report.html",),
        ),
        (
            ("load", "--request-rate", "5", "--html", "new.out", "--csv", "./new.out"),
            ("got --html and --csv with new.out; expected two files",),
        ),
        (
            ("calibrate", "tiny", "--output", "new/"),
            ("got --output new/; expected a file, for example new/law.json",),
        ),
        (("serve", "--record-file", "/tmp"), ("got --record-file /tmp; expected a file",)),
        (
            ("serve", "--state-file", __file__),
            (f"got --state-file {__file__}, which is not a state file; expected a state file of",),
        ),
        (
            ("load", "--request-rate", "5", "--save-timetable", "new/"),
            ("got --save-timetable new/; expected a file",),
        ),
        (
            ("load", "--request-rate", "5", "--result-dir", __file__),
            ("got --result-dir ", "expected a folder"),
        ),
        (("sweep", "--output", __file__), ("got --output ", "expected a folder")),
        (("demo", "--output", __file__), ("got --output ", "expected a folder")),
        (
            ("reproduce", "chapter-case", "--output", __file__),
            ("got --output ", "expected a folder"),
        ),
    ],
)
def test_what_is_wrong_is_one_line_with_what_was_got_and_what_is_expected(
    arguments: tuple[str, ...], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(capsys, *arguments, status=2)
    for part in parts:
        assert part in said


def test_of_a_long_value_eighty_characters_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    number = "expected a whole number from 0 to 65535"
    said = complaint(capsys, "serve", "--port", "x" * 99, status=2)
    assert said == f"got --port {'x' * 80}; {number}"
    said = complaint(capsys, "serve", "tiny", "y" * 99, status=2)
    assert said.startswith(f"got '{'y' * 79} too many; expected one MODEL and options; `kendall")
    said = complaint(capsys, "load", "--request-rate", "5" * 99, "6" * 99, status=2)
    assert said == (
        f"got '{'6' * 79} behind --request-rate {'5' * 80}; expected "
        f"--request-rate {'5' * 99} alone"
    )
    file = tmp_path / "serve.toml"
    file.write_text("port = 70000\n")
    said = complaint(capsys, "serve", "--config", str(file), status=2)
    assert said == f"got --port 70000 from {file}; {number}"
    said = complaint(capsys, "serve", "--max-body-bytes", "1023", status=2)
    assert said == "got --max-body-bytes 1023; expected a whole number >= 1024"
    said = complaint(capsys, "serve", "--max-clipped-fraction", "1", status=2)
    assert said == "got --max-clipped-fraction 1; expected a number from 0 to 0.999"
    monkeypatch.setenv("KENDALL_PORT", "z" * 99)
    said = complaint(capsys, "serve", status=2)
    assert said == f"got --port '{'z' * 79} from KENDALL_PORT; {number}"


@pytest.mark.parametrize(
    ("arguments", "default"),
    [
        (("sweep", "--policies", "dynamic", "--loads", "0.3"), "runs/sweep"),
        (("demo",), "runs/demo"),
    ],
)
def test_a_default_folder_that_cannot_be_written_is_called_the_default(
    arguments: tuple[str, ...],
    default: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir("/proc/self")
    expected = (
        rf"got the default --output {default}; expected a folder that can be written to "
        r"\(.*\); --output PATH sets another"
    )
    assert re.fullmatch(expected, complaint(capsys, *arguments, status=2))


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_with_colons_is_a_host(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # bound without listening: nobody answers here
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        said = complaint(
            capsys,
            "load",
            "--request-rate",
            "5",
            "--no-save",
            "--host",
            host,
            "--port",
            port,
            status=1,
        )
    assert said.startswith(f"no answer from http://[::1]:{port}/v1/models: ")


def test_a_flag_that_says_what_comes_overrides_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """KENDALL_ARRIVALS and KENDALL_OUTPUT_TOKENS are meant for `kendall load` too."""
    trace = "tests/loadgen/samples/azure_2023.csv"
    monkeypatch.chdir(Path(__file__).parent.parent)
    monkeypatch.setenv("KENDALL_ARRIVALS", "mmpp:rates=1/2,durations=1/1")
    monkeypatch.setenv("KENDALL_OUTPUT_TOKENS", "geometric:mean=64")
    monkeypatch.setenv("KENDALL_PROMPT_TOKENS", "geometric:mean=64")
    queue = ("--policy", "single", "--latency", LAW, "--json")
    models = [
        msgspec.json.decode(shown(capsys, "simulate", *queue, *flags))["model"]
        for flags in (("--arrival-rate", "1"), ("--trace", trace), ("--num-requests", "2000"))
    ]
    assert models == ["M/G/1", "G/G/1", "MMPP/G/1"]


def test_an_option_from_the_environment_is_not_called_a_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KENDALL_OPTIMIZE_OBJECTIVE", "delay")
    said = complaint(capsys, *OPTIMIZE, "servers", status=2)
    assert said.startswith("got --objective delay for servers; ")
    assert said.endswith("(--objective came from KENDALL_OPTIMIZE_OBJECTIVE)")


def test_optimize_with_patience_says_which_requests_each_mean_is_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    note = "sojourn time and first token: of the requests that are served"
    choices = ("policy", "--candidates", "single")
    assert run(*OPTIMIZE, *choices, "--patience", "0.3") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        f"a lost request counts as its patience in the queueing delay and in the score; {note}"
        in shown
    )
    assert run(*OPTIMIZE, *choices) == 0
    assert note not in " ".join(capsys.readouterr().out.split())


def test_one_choice_is_one_choice(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("servers", "--slo", "mean_queueing_delay=1us", "--largest")
    assert complaint(capsys, *OPTIMIZE, *flags, "1", status=3).startswith(
        "tried 1 choice of servers: "
    )
    assert complaint(capsys, *OPTIMIZE, *flags, "2", status=3).startswith(
        "tried 2 choices of servers: "
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("load", "--request-rate", "5", "--base-url", "http://user:hidden@host"),
        ("sweep", "--request-rates", "5", "--base-url", "http://user:hidden@host"),
        ("sweep", "--dry-run", "--request-rates", "5", "--base-url", "http://user:hidden@host"),
        ("advise", "http://user:hidden@host"),
        ("calibrate", "http://user:hidden@host"),
    ],
)
def test_a_url_with_a_password_is_refused_without_repeating_it(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(capsys, *arguments, status=2)
    assert (
        "with a user name or password; expected http://HOST:PORT, with --api-key KEY for a key"
        in said
    )
    assert "hidden" not in said


def test_optimize_without_a_rate_where_none_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--target",
        "arrival-rate",
        "--objective",
        "slo",
        "--slo",
        "p99_queueing_delay=500ms",
        *MODEL,
    )
    assert shown(capsys, "optimize", *flags).startswith("arrival-rate for slo\n")


def test_a_law_in_milliseconds_draws_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--policy",
        "single",
        "--arrival-rate",
        "0.001",
        "--output-tokens",
        "deterministic:value=1",
        "--json",
    )
    assert run("predict", *flags, "--latency", "a=20,c=1") == 0
    assert capsys.readouterr().err == (
        "kendall: warning: the latency law takes 20 s per token; its coefficients are seconds (20 "
        "ms is 0.02)\n"
    )
    assert run("predict", *flags, "--latency", "a=0.02,c=0.1") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("flag", "variable"),
    [("--output", "KENDALL_SWEEP_OUTPUT"), ("--result-dir", "KENDALL_RESULT_DIR")],
)
def test_the_folder_of_a_sweep_has_two_names_on_the_command_line_and_in_the_environment(
    flag: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kendall.loadgen.commands import sweep_cli

    found: list[Path] = []
    plan = sweep_cli._plan

    def remember(*arguments: Any) -> Any:
        found.append(arguments[-1])
        return plan(*arguments)

    monkeypatch.setattr(sweep_cli, "_plan", remember)
    monkeypatch.setattr("kendall.loadgen.sweep.dry_run.print_plan", lambda *_: None)
    assert run("sweep", "--dry-run", flag, "here") == 0
    monkeypatch.setenv(variable, "there")
    assert run("sweep", "--dry-run") == 0
    assert found == [Path("here"), Path("there")]


# an output that cannot be written

PREDICT = (
    "predict",
    "--policy",
    "single",
    "--arrival-rate",
    "2",
    "--output-tokens",
    "deterministic:value=20",
    "--latency",
    LAW,
)


def piped(stdout: Any, *arguments: str, unbuffered: str = "") -> tuple[int, str]:
    command, settings = (
        [sys.executable, "-m", "kendall", *arguments],
        os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    found = subprocess.run(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=settings,
        timeout=240,
        check=False,
    )
    return found.returncode, found.stderr


LOAD = ("load", "--request-rate", "5", "--no-save")
QUEUE = ("--policy", "single", "--arrival-rate", "1", "--latency", "reference")


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ((*LOAD, "--output-tokens"), "set --max-tokens"),
        ((*LOAD, "--prompt-tokens"), "choose a law of shorter lengths"),
        (("sweep", "--dry-run", "--output-tokens"), "choose a law of shorter lengths"),
        (("sweep", "--dry-run", "--prompt-tokens"), "choose a law of shorter lengths"),
        (("compare", "run.jsonl", "--output-tokens"), "choose a law of shorter lengths"),
        (("predict", *QUEUE, "--output-tokens"), "set --max-output-tokens"),
        (("simulate", *QUEUE, "--output-tokens"), "set --max-output-tokens"),
        (
            ("predict", *QUEUE, "--output-tokens", "geometric:mean=9", "--prompt-tokens"),
            "choose a law of shorter lengths",
        ),
    ],
)
def test_a_law_that_is_too_long_names_what_this_command_has_for_it(
    arguments: tuple[str, ...], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("lognormal:mu=12,sigma=5", "geometric:mean=1e30"):
        assert complaint(capsys, *arguments, text, status=2).endswith(
            f"; expected at most 1e-12: {remedy}"
        )


@pytest.mark.parametrize("command", ["predict", "simulate"])
def test_a_load_that_is_always_infinite_names_the_flag_of_the_limit(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = (
        "--policy",
        "dynamic",
        "--arrival-rate",
        "1",
        "--latency",
        LAW,
        "--output-tokens",
        "pareto:alpha=1.5,minimum=20",
    )
    assert complaint(capsys, command, *queue, status=2).endswith(
        "; bound the batch size, or set --max-output-tokens"
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    "arguments",
    [
        PREDICT,
        (*PREDICT, "--json"),
        ("help",),
        ("--version",),
        ("--show-completion", "bash"),
        ("predict", "--help"),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout_is_one_line_and_status_1(
    arguments: tuple[str, ...], unbuffered: str
) -> None:
    with Path("/dev/full").open("w") as full:
        found = piped(full, *arguments, unbuffered=unbuffered)
    assert found == (1, "kendall: cannot write to stdout: No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [PREDICT, (*PREDICT, "--json"), ("--version",)])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_closed_the_pipe_gets_no_message(
    arguments: tuple[str, ...], unbuffered: str
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert piped(writing, *arguments, unbuffered=unbuffered) == (1, "")
    finally:
        os.close(writing)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_stderr_leaves_the_exit_status() -> None:
    command = [sys.executable, "-m", "kendall", "summary", "none.jsonl"]
    with Path("/dev/full").open("w") as full:
        assert (
            subprocess.run(
                command, stdout=subprocess.PIPE, stderr=full, cwd=ROOT, timeout=240, check=False
            ).returncode
            == 2
        )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_file_that_cannot_be_written_is_not_taken_for_stdout(tmp_path: Path) -> None:
    from kendall.policies import parse_policy
    from kendall.queueing.measurement.record import Header, write_run
    from tests.loadgen.driver import drive

    write_run(
        tmp_path / "run.jsonl",
        Header(writer="simulator"),
        drive(parse_policy("dynamic"), 40.0, n=300),
    )
    (tmp_path / "report.png").symlink_to("/dev/full")
    for option, path in (
        ("--csv", "/dev/full"),
        ("--html", "/dev/full"),
        ("--picture", str(tmp_path / "report.png")),
    ):
        found = piped(subprocess.DEVNULL, "compare", str(tmp_path / "run.jsonl"), option, path)
        assert found == (1, f"kendall: cannot write {path}: No space left on device\n")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("name", ["yang-fig3.json", "yang-fig3.png"])
def test_a_file_in_a_folder_that_cannot_be_written_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    status, said = piped(
        subprocess.DEVNULL, "reproduce", name.partition(".")[0], "--output", str(tmp_path)
    )
    assert status == 1
    assert (
        said.splitlines()[-1] == f"kendall: cannot write {tmp_path / name}: No space left on device"
    )


# what a text can name


def test_policies_lists_what_a_policy_text_can_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Each as its text has it, so that errors are not the only place that names them."""
    out = shown(capsys, "policies")
    for name in ("single", "dynamic", "fixed:batch_size=INTEGER", "elastic", "continuous"):
        assert re.search(rf"^{name}", out, re.MULTILINE), name
    assert "order: fcfs, spjf" in out
    listed = json.loads(shown(capsys, "policies", "--json"))["policies"]
    assert [each["name"] for each in listed][:2] == ["single", "dynamic"]
    assert out == shown(capsys, "check-policy")


def test_policies_has_those_of_a_module_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("1 / 0")
    module = str(tmp_path / "mine.py")
    said = complaint(capsys, "policies", "--policy-module", module, status=2)
    assert "division by zero" in said


def test_profiles_lists_those_shipped_and_the_users_own_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "kendall" / "profiles"
    shipped = json.loads(shown(capsys, "profiles", "--json"))["profiles"]
    assert {each["source"] for each in shipped} == {"shipped"}
    names = [each["name"] for each in shipped]
    assert {"tiny", "reference", "llama-7b-h100"} <= set(names)
    law = next(each["law"] for each in shipped if each["name"] == "reference")
    assert law["k4"] == 0.00092
    folder.mkdir(parents=True)
    own = find_profile("reference").profile
    msgspec.structs.replace(own, name="tiny", model="mine").save(folder / "tiny.json")
    msgspec.structs.replace(own, name="another").save(folder / "another.json")
    (folder / "broken.json").write_text("{")
    mine = json.loads(shown(capsys, "profiles", "--json"))["profiles"]
    assert sorted([*names, "another"]) == [each["name"] for each in mine]
    assert {each["name"] for each in mine if each["source"] == "cache"} == {"another", "tiny"}
    cli_out = shown(capsys, "profiles")
    assert f"tiny, {folder / 'tiny.json'}" in words(cli_out)
    assert "k1=0.0003,k2=0.0014" in cli_out


def test_profiles_says_which_file_is_no_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "kendall" / "profiles"
    folder.mkdir(parents=True)
    (folder / "broken.json").write_text("{")
    assert run("profiles", "--json") == 0
    told = capsys.readouterr()
    assert "broken.json, a file that is not a profile" in told.err
    assert "broken" not in told.out


@pytest.mark.parametrize("name", ["policies", "profiles"])
def test_a_command_that_lists_shows_two_examples(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = words(shown(capsys, name, "--help"))
    assert out.count("`kendall ") == 2 or out.count("kendall predict") == 1
    assert "Examples:" in out
