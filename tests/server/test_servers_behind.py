"""The options of `kendall serve --engine http`: what goes together, and what is refused with one
line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kendall.cli
from kendall.policies import SpecError
from kendall.server.admission.settings import OverloadSettings
from kendall.server.engines.http.engine import HttpEngine
from kendall.server.engines.proxied import server_url, server_urls
from kendall.server.operations.reloading import differences
from kendall.server.operations.servers_behind import check_http, http_engine
from kendall.server.operations.serving import choose_engine
from kendall.server.settings import Settings

URL = "http://localhost:8000"


def settings(**given: Any) -> Settings:
    base: dict[str, Any] = {"model": "", "served_model_name": "http", "engine": "http"}
    return Settings(**(base | {"engine_url": (URL,)} | given))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"engine_url": ()},
            "got --engine http without --engine-url; expected the URL of a server with OpenAI's "
            "API, for example --engine-url http://localhost:8000",
        ),
        (
            {"engine": "auto"},
            "got --engine-url with --engine auto; expected --engine http",
        ),
        (
            {"engine": "vllm", "engine_url": (), "engine_api_key": "k"},
            "got --engine-api-key with --engine vllm; expected --engine http",
        ),
        (
            {"engine": "emulated", "engine_url": (), "tokenizer": Path("t")},
            "got --tokenizer with --engine emulated; expected --engine http",
        ),
        (
            {"engine_url": (URL, URL + "/v1")},
            f"got --engine-url {URL} twice; expected each server once",
        ),
        (
            {"replicas": 2},
            "got --replicas 2 with --engine http; expected --engine-url once for each server that "
            "runs already: repeat it",
        ),
        (
            {"allow_forced_lengths": True},
            "got --allow-forced-lengths with --engine http; expected max_tokens and ignore_eos, "
            "where the servers behind have it: leave it out",
        ),
        (
            {"overload": OverloadSettings(queue_events=True)},
            "got --queue-events with --engine http; expected answers that are passed on "
            "unchanged: leave it out",
        ),
        (
            {"overload": OverloadSettings(sse_keep_alive_interval=1.0)},
            "got --sse-keep-alive-interval with --engine http; expected answers that are passed "
            "on unchanged: leave it out",
        ),
        (
            {"engine_args": {"tensor_parallel_size": 2, "max_num_seqs": 4}},
            "got engine argument 'tensor_parallel_size' with --engine http; expected one of "
            "max_num_seqs, max_model_len: the others are those of the servers behind",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], line: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_http(settings(**given), named=False)
    assert str(caught.value) == line


@pytest.mark.parametrize("order", ["sprpt", "mlfq,quantum=8,levels=3", "trail,c=0.8"])
def test_an_order_that_interrupts_does_not_start_before_servers_that_continue_nothing(
    order: str,
) -> None:
    policy = f"continuous:max_batch_size=4,order={order}"
    with pytest.raises(SpecError) as caught:
        choose_engine(settings(policy=policy))
    name = order.partition(",")[0]
    assert str(caught.value).startswith(
        f"got order {name}, which interrupts requests, for an engine that continues no answer "
        "(http); expected fcfs, spjf, "
    )


def test_names_are_those_of_the_servers_behind() -> None:
    with pytest.raises(SpecError, match="got --served-model-name with --engine http"):
        check_http(settings(), named=True)
    check_http(settings(engine="emulated", engine_url=()), named=True)
    check_http(settings(engine_args={"max_num_seqs": 4, "max_model_len": 9}), named=False)


@pytest.mark.parametrize(
    ("url", "root"),
    [
        (URL, URL),
        (URL + "/", URL),
        (URL + "/v1", URL),
        (URL + "/v1/", URL),
        ("https://host/prefix/v1", "https://host/prefix"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_a_url_is_that_of_the_servers_root(url: str, root: str) -> None:
    assert server_url(url) == root


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000", "ftp://host", "http://", "", "http://host:port"),
        *("http://[::1", "http://a..b", "http://127.1", "http://0:1", "http://\0", "http://-a"),
    ],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(SpecError) as caught:
        server_url(url)
    assert str(caught.value) == (
        f"got --engine-url {url!r}; expected http:// or https://, a host and a port, for example "
        "--engine-url http://localhost:8000"
    )


@pytest.mark.parametrize("url", ["http://host?x=1", "http://host#x", "http://host/a b"])
def test_what_follows_the_root_is_refused(url: str) -> None:
    with pytest.raises(SpecError, match="expected no query, no fragment and no blanks"):
        server_url(url)


def test_one_server_by_two_names_is_refused() -> None:
    with pytest.raises(SpecError, match="twice; expected each server once"):
        server_urls(["http://127.0.0.1:8000", "http://localhost:8000"])


def test_a_password_in_a_url_is_refused_and_not_shown() -> None:
    with pytest.raises(SpecError) as caught:
        server_url("http://me:secret@host:8000")
    assert str(caught.value) == (
        "got --engine-url 'host:8000' with a user name before it; expected a key by "
        "--engine-api-key"
    )


def test_the_engine_that_is_chosen() -> None:
    engine, law = choose_engine(settings(engine_args={"max_num_seqs": 4}))
    assert isinstance(engine, HttpEngine)
    assert law is None
    assert isinstance(http_engine(settings(latency="reference")), HttpEngine)


def test_a_tokenizer_that_is_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("no")
    with pytest.raises(SpecError, match="got --tokenizer"):
        http_engine(settings(tokenizer=tmp_path))


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `--show-config` prints."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stop:
            kendall.cli.main(["serve", "--engine", "http", *arguments, "--show-config"])
        assert not stop.value.code
        return capsys.readouterr().out

    return run


def test_the_key_is_shown_nowhere(shown: Callable[..., str]) -> None:
    output = shown("--engine-url", URL, "--engine-api-key", "sk-secret")
    assert "sk-secret" not in output
    assert "engine-api-key = ***" in output
    assert f'engine-url = ["{URL}"]' in output
    assert "sk-secret" not in repr(settings(engine_api_key="sk-secret"))


def test_urls_come_from_the_environment_too(
    shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KENDALL_ENGINE_URL", f"{URL} http://other:1")
    assert f'engine-url = ["{URL}", "http://other:1"]' in shown()


def test_the_names_of_the_servers_are_no_difference_to_the_configuration() -> None:
    read = settings()
    served = read.under(("m", "lora"))
    assert (served.model, served.served_model_name) == ("m", "m")
    assert served.served_model_aliases == ("lora",)
    assert differences(served, read.under(("m", "lora"))) == []
    assert read.under(()) is read
    assert differences(served, dataclasses.replace(served, engine_url=())) == ["--engine-url"]
