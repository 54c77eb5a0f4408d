"""Before and while a run goes on: servers that are not there, not ready, silent, die, or show a
certificate of their own.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import kendall.loadgen.sending.client.endpoint
from kendall.loadgen.commands.load_cli import app
from kendall.loadgen.gateway.gateway_process import GatewayClient, free_port
from kendall.loadgen.sending.client.target import Keys
from kendall.policies.text import SpecError
from kendall.queueing.errors import CommandError
from kendall.queueing.measurement.record import read_run
from kendall.remote import Trust, check_no_credentials
from kendall.server.operations import advise_cli
from kendall.server.operations.calibrate import calibrate
from tests.loadgen.failing_server import failing_server
from tests.serving import self_signed


@pytest.fixture(autouse=True)
def _runs_go_into_a_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(
        str(Path(__file__).parents[2])
    )  # the server is a module of the tests
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    certificate, key = self_signed(tmp_path_factory.mktemp("tls"))
    return str(certificate), str(key)


def load(url: str, *more: str, requests: int = 10) -> Result:
    flags = (
        "--request-rate",
        "500",
        "--num-prompts",
        str(requests),
        "--max-tokens",
        "2",
        "--lateness-budget",
        "mean=999s,p99=999s",
    )
    return CliRunner().invoke(app, ["--base-url", url, *flags, *more])


def local(port: int, scheme: str = "http") -> str:
    return f"{scheme}://127.0.0.1:{port}"


def one_line(result: Result) -> str:
    """What the command says; where it is run by `kendall`, that prints the exception."""
    assert result.exit_code == 1, result.output
    said = result.stderr.removesuffix("\n") or str(result.exception)
    assert "\n" not in said
    return said


def test_nobody_listens_and_nothing_is_written(tmp_path: Path) -> None:
    port = free_port(0)
    said = one_line(load(local(port)))
    assert f"no answer from http://127.0.0.1:{port}/v1/models: connection refused" in said
    assert "--ready-check-timeout" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_server_that_is_not_ready_is_waited_for_where_that_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kendall.loadgen.sending.client.endpoint, "RETRY", 0.05)
    with failing_server("--not-ready", "3") as port:
        assert "answered 503: starting: loading the model" in one_line(load(local(port)))
        result = load(local(port), "--ready-check-timeout", "60", "--json")
        assert result.exit_code == 0, result.output
        assert "waiting at most 60 s" in result.stderr
        assert json.loads(result.stdout)["outcomes"] == {"completed": 10}


def test_a_server_that_never_becomes_ready_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kendall.loadgen.sending.client.endpoint, "RETRY", 0.05)
    result = load(local(free_port(0)), "--ready-check-timeout-sec", "0.2")
    assert result.exit_code == 1
    assert (
        "expected it to be ready within the 0.2 s of --ready-check-timeout"
        in f"{result.stderr}{result.exception}"
    )


@pytest.mark.slow
def test_a_server_that_starts_later_is_loaded(tmp_path: Path) -> None:
    port = free_port(0)
    command = [
        sys.executable,
        "-m",
        "kendall.loadgen.commands.load_cli",
        "--base-url",
        local(port),
        "--ready-check-timeout",
        "120",
    ]
    flags = [
        "--request-rate",
        "100",
        "--num-prompts",
        "5",
        "--max-tokens",
        "2",
        "--output",
        "late.jsonl",
    ]
    with subprocess.Popen(
        [*command, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert b"connection refused; waiting" in process.stderr.readline()
        with failing_server("--port", str(port)):
            assert process.wait(240) == 0
    assert [record.outcome for record in read_run(tmp_path / "late.jsonl")[1]] == ["completed"] * 5


def test_a_silent_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kendall.loadgen.sending.client.endpoint, "ANSWER_LIMIT", 0.3)
    with failing_server("--silent") as port:
        assert "no answer from" in (said := one_line(load(local(port))))
        assert "within 0.3 s" in said


def test_without_the_check_the_requests_tell() -> None:
    result = load(local(free_port(0)), "--ready-check-timeout", "0", "--model", "m", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["outcomes"] == {"failed": 10}


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_run_stops_when_its_server_has_died(processes: str) -> None:
    """The server kills itself at the 40th of 4,000 requests, which take 40 s; what was recorded is
    kept.

    More failed than allowed: status 3, not 1.
    """
    with failing_server("--dies-at", "40") as port:
        result = load(
            local(port),
            "--max-errors",
            "20",
            "--processes",
            processes,
            "--json",
            "--request-rate",
            "100",
            requests=4000,
        )
    found = json.loads(result.stdout)
    assert result.exit_code == 3
    assert found["valid"] is False
    assert any("--max-failed-fraction allows 1 %" in reason for reason in found["reasons"])
    assert any("stopped after" in line and "not sent" in line for line in found["missing"])
    assert 20 <= found["outcomes"]["failed"] < 1000
    records = read_run(Path(found["files"][0]))[1]
    assert sum(found["outcomes"].values()) == len(records) < 2000


def test_a_stopped_run_within_the_allowed_failures_is_incomplete() -> None:
    with failing_server("--dies-at", "40") as port:
        result = load(
            local(port), "--max-errors", "20", "--max-failed-fraction", "1", "--json", requests=4000
        )
    said = json.loads(result.stdout)
    assert result.exit_code == 1, said["reasons"]
    assert said["valid"] is False


@pytest.mark.slow
def test_a_run_goes_on_through_failures_where_that_was_asked() -> None:
    with failing_server("--status", "400") as port:
        assert (
            json.loads(load(local(port), "--json", requests=5000).stdout)["outcomes"]["failed"]
            < 5000
        )
        found = json.loads(load(local(port), "--max-errors", "0", "--json", requests=150).stdout)
        assert found["outcomes"] == {"failed": 150}


def test_refusals_are_answers_and_stop_nothing() -> None:
    with failing_server("--status", "429") as port:
        assert json.loads(load(local(port), "--max-errors", "5", "--json", requests=50).stdout)[
            "outcomes"
        ] == {"rejected": 50}


@pytest.mark.slow
def test_a_certificate_that_is_not_trusted_is_named_as_such(certificate: tuple[str, str]) -> None:
    with failing_server("--tls", *certificate) as port:
        url = local(port, "https")
        said = one_line(load(url))
        assert "certificate is not trusted: self-signed certificate" in said
        assert "--cacert" in said
        assert "refused" not in said
        unchecked = load(url, "--ready-check-timeout", "0", "--model", "m", "--output", "run.jsonl")
        assert unchecked.exit_code == 3  # all failed: more than --max-failed-fraction allows
        assert {
            "certificate is not trusted" in str(record.error)
            for record in read_run(Path("run.jsonl"))[1]
        } == {True}
        for trust in (("--insecure",), ("--cacert", certificate[0])):
            assert load(url, *trust).exit_code == 0


def test_tls_at_one_end_alone_and_files_that_are_no_certificates(
    certificate: tuple[str, str], tmp_path: Path
) -> None:
    with failing_server() as port:
        assert "TLS handshake failed" in one_line(load(local(port, "https")))
    with failing_server("--tls", *certificate) as port:
        assert "does it speak https?" in one_line(load(local(port)))
        for ask in (
            lambda url: advise_cli.ask(url, {}, None, Trust()),
            lambda url: calibrate(url, {}, None, json_output=True),
        ):
            with pytest.raises(
                CommandError,
                match=r"^no answer from http://.* \(it closed the connection; does it speak https",
            ):
                ask(local(port))
    (tmp_path / "empty.pem").write_text("")
    for flags in (
        ("--cacert", "nowhere.pem"),
        ("--cacert", "empty.pem"),
        ("--cacert", "empty.pem", "--insecure"),
    ):
        assert isinstance(load("https://127.0.0.1:9", *flags).exception, SpecError)


def test_the_waiting_time_is_a_number_of_seconds() -> None:
    assert isinstance(
        load("http://127.0.0.1:9", "--ready-check-timeout", "inf").exception, SpecError
    )
    for seconds in ("-1", "nan"):  # no duration: refused before the command runs
        result = load("http://127.0.0.1:9", "--ready-check-timeout", seconds)
        assert result.exit_code == 2
        assert "expected a duration" in " ".join(result.stderr.replace("│", " ").split())
    assert isinstance(load("http://127.0.0.1:9", "--max-errors", "-1").exception, SpecError)
    assert isinstance(load("http://127.0.0.1:99999").exception, SpecError)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_base_urls_may_end_in_v1(ending: str) -> None:
    with failing_server() as port:
        assert load(local(port) + ending).exit_code == 0
        assert (
            load(local(port) + ending, "--ready-check-timeout", "0", "--model", "m").exit_code == 0
        )


def test_no_request_goes_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with failing_server() as port:
        assert load(local(port)).exit_code == 0


def test_other_commands_check_certificates_too(
    certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kendall advise`, `kendall calibrate`, and the client of a sweep; the server is no
    gateway, and says so once it is trusted.
    """

    async def ask(url: str, trust: Trust) -> None:
        async with GatewayClient(url, Keys(trust=trust)) as client:
            await client.ask("GET", "/admin/state")

    questions: tuple[Callable[[str, Trust], object], ...] = (
        lambda url, trust: advise_cli.ask(url, {}, None, trust),
        lambda url, trust: calibrate(
            url, {"speed_only": True}, None, trust=trust, json_output=True
        ),
        lambda url, trust: asyncio.run(ask(url, trust)),
    )
    with failing_server("--tls", *certificate) as port:
        url = local(port, "https")
        for question in questions:
            with pytest.raises(
                Exception,
                match="certificate is not trusted: self-signed certificate; --cacert FILE",
            ):
                question(url, Trust())
            for trust in (Trust(insecure=True), Trust(cacert=Path(certificate[0]))):
                assert "certificate" not in failure(question, url, trust)
            with monkeypatch.context() as environment:
                environment.setenv("SSL_CERT_FILE", certificate[0])
                assert "certificate" not in failure(question, url, Trust())


def failure(question: Callable[[str, Trust], object], url: str, trust: Trust) -> str:
    """Of a kind of its own for each command."""
    with pytest.raises(Exception) as told:  # noqa: PT011
        question(url, trust)
    return str(told.value)


@pytest.mark.parametrize("url", ["http://user:secret@[bad", "http://user:sec\x01ret@127.0.0.1:9"])
def test_a_password_in_a_url_that_cannot_be_read_is_not_repeated(url: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_no_credentials(url, "--base-url")
    assert "expected http://HOST:PORT" in str(refused.value)
    assert "user" not in str(refused.value)
    assert "ret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://user:secret@127.0.0.1:9", "--api-key"),
        (
            "127.0.0.1:19001",
            (
                "got --base-url 127.0.0.1:19001; expected http://HOST:PORT, for example "
                "http://127.0.0.1:19001"
            ),
        ),
        (
            "http://127.0.0.1:9/v1/completions",
            "expected the URL without the endpoint's path: http://127.0.0.1:9/v1",
        ),
        ("http://127.0.0.1:9/v1/chat/completions/", "endpoint's path: http://127.0.0.1:9/v1"),
        ("http://127.0.0.1:9/?key=1", "without a query"),
    ],
)
def test_base_urls_that_cannot_be_meant_are_wrong_arguments(url: str, words: str) -> None:
    error = load(url, "--output", "run.jsonl").exception
    assert isinstance(error, SpecError)
    assert words in str(error)
    assert "secret" not in str(error)
    assert not Path("run.jsonl").exists()


def test_the_wait_for_a_silent_server_is_no_longer_than_asked() -> None:
    """The limit of one answer, 10 s, is cut to the time left."""
    with failing_server("--silent") as port:
        said = one_line_last(load(local(port), "--ready-check-timeout", "0.2"))
    (limit,) = re.findall(r"/v1/models within ([0-9.]+) s;", said)
    assert float(limit) <= 0.2
    assert "the 0.2 s of --ready-check-timeout" in said


def one_line_last(result: Result) -> str:
    assert result.exit_code == 1, result.output
    return str(result.exception)


def test_without_a_check_and_without_a_model_the_model_is_asked_for() -> None:
    said = one_line(load(local(free_port(0)), "--ready-check-timeout", "0"))
    assert said.endswith("its model is unknown: give --model")
    assert "within the 0 s" not in said


@pytest.mark.slow
def test_a_page_or_a_redirect_in_the_place_of_models_is_named() -> None:
    with failing_server("--html") as port:
        said = one_line(load(local(port)))
        assert (
            "answered 200 with text/html, not with a list of models; expected a list of models: "
            "correct --base-url"
        ) in said
    with failing_server("--moved", "http://elsewhere/v1") as port:
        assert (
            "redirects to http://elsewhere/v1; expected the server itself: give that address as "
            "--base-url"
        ) in one_line(load(local(port)))
        result = load(local(port), "--ready-check-timeout", "0", "--model", "m", "--json")
        assert (
            json.loads(result.stdout)["failures"]["first_error"]
            == "307 redirects to http://elsewhere/v1; redirects are not followed"
        )
