"""Every command that speaks to a gateway can send its keys, and none writes them anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kendall import cli
from kendall.loadgen.gateway.gateway_process import (
    GatewayClient,
    GatewayError,
    GatewayProcess,
    free_port,
)
from kendall.loadgen.sending.client.target import Keys
from kendall.loadgen.sweep.gateway import GivenGateway
from kendall.policies.text import SpecError
from kendall.server.operations import advise_cli
from kendall.server.operations.calibrate import calibrate
from tests.serving import started

API, ADMIN = "sk-client-0123456789", "sk-admin-0123456789"
LAW = "k1=0.1e-3,k2=0.5e-3,k3=10e-6,k4=0.2e-3"


@dataclass
class Served:
    url: str
    folder: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("keys")
    arguments = [
        *(
            "tiny",
            "--engine",
            "emulated",
            "--latency",
            LAW,
            "--prediction-interval",
            "0",
            "--record-file",
            str(folder / "records.jsonl"),
        ),
        *(
            "--api-key",
            API,
            "--admin-key",
            ADMIN,
            "--metrics-need-key",
            "--log-format",
            "json",
            "--allow-forced-lengths",
        ),
    ]
    gateway = GatewayProcess(arguments, free_port(0), folder / "gateway.log")
    with started(gateway):
        yield Served(gateway.url, folder)


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    return int(stop.value.code or 0)


@pytest.mark.slow
def test_load_sends_its_key_and_writes_it_nowhere(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (
        "load",
        "--base-url",
        served.url,
        "--request-rate",
        "100",
        "--num-prompts",
        "5",
        "--output-tokens",
        "deterministic:value=3",
    )
    assert status(*asked) == 2
    assert capsys.readouterr().err.endswith(
        "answered 401: invalid_api_key: got no API key; expected --api-key with a key that it "
        "accepts\n"
    )
    assert status(*asked, "--api-key", "wrong") == 2
    assert status(*asked, "--api-key", API, "--save-result", str(tmp_path / "run.jsonl")) == 0
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    assert not any(API.encode() in content for content in written)


@pytest.mark.slow
def test_advise_and_calibrate_send_the_admin_key(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = ("calibrate", served.url, "--speed-only", "--output", str(tmp_path / "profile.json"))
    for command in (("advise", served.url), measure):
        assert status(*command) == 2
        told = capsys.readouterr().err
        assert "answered 401" in told
        assert told.endswith("; expected --admin-key with a key that it accepts\n")
        assert told.count("expected") == 1
        assert status(*command, "--api-key", API) == 2
        assert "answered 403" in capsys.readouterr().err
    assert (
        status("advise", served.url, "--admin-key", ADMIN) == 1
    )  # it is let in, and has nothing to advise from
    assert status(*measure, "--admin-key", ADMIN) == 0  # against the law in force


@pytest.mark.slow
def test_calibrate_measures_with_the_admin_key_and_writes_it_nowhere(
    served: Served, tmp_path: Path
) -> None:
    """Long answers: in a few tokens a busy machine hides what a token costs, and no law fits."""
    profile = (
        "--repeats",
        "3",
        "--max-batch-size",
        "4",
        "--max-output-tokens",
        "64",
        "--output",
        str(tmp_path / "profile.json"),
    )
    assert status("calibrate", served.url, *profile, "--admin-key", ADMIN) == 0
    assert ADMIN not in (tmp_path / "profile.json").read_text()


@pytest.mark.thinned(4)
@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_questions_go_to_the_gateway_itself_under_any_form_of_its_url(
    served: Served, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not through a proxy, and with or without /v1: the client of sweeps, `kendall advise`,
    `kendall calibrate`.
    """
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    url = served.url + ending

    async def main() -> None:
        async with GatewayClient(url, Keys(API, ADMIN)) as client:
            assert await client.is_ready()
            assert "policy" in await client.ask("GET", "/admin/state")

    asyncio.run(main())
    with pytest.raises(SpecError, match="answered 403"):
        advise_cli.ask(url, {}, API)
    with pytest.raises(SpecError, match="answered 403"):
        calibrate(url, {"speed_only": True}, None, key=API, json_output=True)


def test_sweep_comes_in_with_its_keys(served: Served) -> None:
    async def main() -> None:
        gateway = GivenGateway(served.url, Keys(API, ADMIN))
        await gateway.start()
        assert gateway.record_file == served.folder / "records.jsonl"
        await gateway.stop()
        for keys, refused in ((Keys(), "401"), (Keys(API), "403"), (Keys(None, "wrong"), "401")):
            async with GatewayClient(served.url, keys) as client:
                assert await client.is_ready()
                with pytest.raises(GatewayError, match=refused):
                    await client.ask("GET", "/admin/state")

    asyncio.run(main())


def test_a_refused_key_ends_every_command_with_status_2(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says what was got and expected, once each."""
    sweep = (
        "sweep",
        "--base-url",
        served.url,
        "--policies",
        "single",
        "--request-rates",
        "9",
        "--output",
        str(tmp_path / "sweep"),
    )
    load = ("load", "--base-url", served.url, "--request-rate", "9", "--no-save")
    measure = ("calibrate", served.url, "--speed-only", "--output", str(tmp_path / "profile.json"))
    for command in (load, sweep, ("advise", served.url), measure):
        for key in ((), ("--api-key", "wrong"), *([("--api-key", API)] if command != load else [])):
            assert status(*command, *key) == 2, (command, key)
            told = capsys.readouterr().err
            assert "answered 40" in told
            assert told.count("expected") == told.count("got ") == 1
    assert not (tmp_path / "sweep").exists()


def test_keys_are_not_shown() -> None:
    assert API not in repr(Keys(API, ADMIN))
    assert ADMIN not in repr(Keys(API, ADMIN))


def test_the_log_of_a_gateway_is_json_and_holds_no_key(served: Served) -> None:
    import json

    lines = (served.folder / "gateway.log").read_text().splitlines()
    messages = [json.loads(line)["message"] for line in lines]
    assert any(message.startswith("ready: emulated engine") for message in messages)
    assert not any(key in line for line in lines for key in (API, ADMIN))


NOWHERE = "http://127.0.0.1:9"
UNSENDABLE = ("ä b", "clé", "two words", "line\nend", "bell\a", "sk-\udcff")


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("command", "options"),
    [
        (
            (
                "load",
                "--base-url",
                NOWHERE,
                "--request-rate",
                "20",
                "--num-prompts",
                "5",
                "--no-save",
            ),
            ("--api-key",),
        ),
        (
            (
                "sweep",
                "--base-url",
                NOWHERE,
                "--policies",
                "single",
                "--request-rates",
                "9",
                "--dry-run",
            ),
            ("--api-key", "--admin-key"),
        ),
        (("advise", NOWHERE), ("--api-key", "--admin-key")),
        (("calibrate", NOWHERE), ("--api-key", "--admin-key")),
    ],
)
def test_a_key_that_no_header_can_carry_is_a_wrong_argument(
    command: tuple[str, ...],
    options: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a flag and from the environment; the message does not repeat the key."""
    for option in options:
        for key in UNSENDABLE:
            assert status(*command, option, key) == 2
            told = capsys.readouterr().err
            assert told.startswith(f"kendall: got {option} with a key of {len(key)} character")
            assert key not in told
        variable = "KENDALL_" + option.strip("-").replace("-", "_").upper()
        with monkeypatch.context() as environment:
            environment.setenv(variable, "sk-1234\n")
            assert status(*command) == 2
        assert f"({option} came from {variable})" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://[::1", "http://gate\nway:80"])
def test_a_url_that_cannot_be_read_is_a_wrong_argument(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ("load", "--request-rate", "20", "--no-save", "--base-url"),
        ("sweep", "--base-url"),
        ("advise",),
        ("calibrate",),
    ):
        assert status(*command, url) == 2
        told = capsys.readouterr().err
        assert told.startswith("kendall: got ")
        assert "expected http://HOST:PORT" in told
