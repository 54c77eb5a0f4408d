"""How a server is named and reached, which key it gets, and what is said of one that does not
answer.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import ssl
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from kendall.policies.text import SpecError
from kendall.queueing.measurement.server_signals import SERVERS, ServerCounters
from kendall.remote import (
    NO_DESCRIPTOR,
    NO_TLS,
    NOT_TRUSTED,
    AdminAccess,
    Trust,
    check_key,
    check_no_credentials,
    checked_host,
    host_url,
    is_loopback,
    key_file,
    key_for_admin,
    key_refusal,
    local_admin_key,
    parse_headers,
    reason,
    server_root,
    unanswered,
)
from kendall.server_metrics import read_counters

DROPPED = httpx.RemoteProtocolError("Server disconnected without sending a response.")


def test_a_connection_that_is_closed_before_the_answer_may_have_wanted_tls() -> None:
    asked = "it closed the connection; does it speak https?"
    assert unanswered(DROPPED, "http://127.0.0.1:1") == asked
    assert unanswered(DROPPED, "HTTP://127.0.0.1:1") == asked


@pytest.mark.parametrize(
    ("error", "url", "expected"),
    [
        (DROPPED, "https://127.0.0.1:1", str(DROPPED)),
        (httpx.ConnectError("no route"), "http://127.0.0.1:1", "no route"),
        (httpx.ConnectError(""), "http://127.0.0.1:1", "ConnectError"),
    ],
)
def test_any_other_error_speaks_for_itself(error: Exception, url: str, expected: str) -> None:
    assert unanswered(error, url) == expected


@pytest.mark.parametrize(
    ("url", "port"),
    [("http://127.0.0.1", 80), ("https://localhost/v1", 443), ("http://localhost:8123", 8123)],
)
def test_the_key_of_a_gateway_on_this_machine_is_that_of_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, port: int
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = key_file(port)
    file.parent.mkdir()
    file.touch(mode=0o600)
    file.write_text("secret", encoding="ascii")
    assert local_admin_key(url) == "secret"
    assert key_for_admin(url, None) == "secret"
    file.chmod(0o640)
    assert local_admin_key(url) is None


def test_a_key_of_another_user_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = key_file(8080)
    file.parent.mkdir()
    file.touch(mode=0o600)
    file.write_text(" secret \n", encoding="ascii")
    assert local_admin_key("http://localhost:8080") == "secret"
    assert AdminAccess().key("http://localhost:8080", "sk") == "secret"
    assert AdminAccess(admin_key="own").key("http://localhost:8080", "sk") == "own"
    monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    assert local_admin_key("http://localhost:8080") is None
    assert AdminAccess().key("http://localhost:8080", "sk") == "sk"


@pytest.mark.parametrize(
    ("runtime", "cache", "folder"),
    [
        ("run", "cache", "run"),
        ("missing", "cache", "cache"),
        ("", "cache", "cache"),
        ("", "", "home/.cache"),
    ],
)
def test_the_key_lies_in_the_runtime_folder_else_in_the_cache(
    runtime: str, cache: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    for name, value in (("XDG_RUNTIME_DIR", runtime), ("XDG_CACHE_HOME", cache)):
        monkeypatch.setenv(name, value and str(tmp_path / value))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert key_file(8080) == tmp_path / folder / "kendall" / "admin-key-8080"


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1/", "http://h:1"),
        ("http://h:1/v1", "http://h:1"),
        ("http://h:1/v1/", "http://h:1"),
        ("https://h/llm/v1", "https://h/llm"),
    ],
)
def test_the_root_of_a_server_is_its_url_without_v1(url: str, root: str) -> None:
    assert server_root(url) == root


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("localhost", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("gateway", False),
    ],
)
def test_a_loopback_is_an_address_of_this_machine_alone(host: str, is_here: bool) -> None:
    assert is_loopback(host) is is_here


@pytest.mark.parametrize(("host", "bare"), [("gpu-1.lab", "gpu-1.lab"), ("[::1]", "::1")])
def test_a_host_is_a_name_or_an_address(host: str, bare: str) -> None:
    assert checked_host(host) == bare
    assert host_url(host, 81) == f"http://{host}:81"


@pytest.mark.parametrize(
    ("host", "end"),
    [
        ("http://h", "http://h; expected a host name or address; --base-url takes a URL"),
        ("h:80", "h:80; expected a host name or address; --port takes the port"),
        ("h/v1:80", "h/v1:80; expected a host name or address; --base-url takes a URL"),
        ("[gpu]", "[gpu]; expected a host name or address; --base-url takes a URL"),
        ("", "''; expected a host name or address; --base-url takes a URL"),
    ],
)
def test_what_is_no_host_is_said_with_what_takes_it(host: str, end: str) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(f'got --host {end}')}$"):
        host_url(host, 81)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "http://u:secret@h",
            (
                "got a URL with a user name or password; expected http://HOST:PORT, with --api-key "
                "KEY for a key"
            ),
        ),
        ("http://[", "got a URL 'http://[': Invalid IPv6 URL; expected http://HOST:PORT"),
        ("http://u:secret@[", "got a URL with an @; expected http://HOST:PORT"),
        (
            "http://h\n",
            "got a URL 'http://h\\n'; expected http://HOST:PORT without control characters",
        ),
    ],
)
def test_a_url_is_refused_without_repeating_a_password(url: str, message: str) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        check_no_credentials(url, "a URL")


def test_an_at_sign_in_a_path_is_no_password() -> None:
    check_no_credentials("http://h/models/@latest", "a URL")


@pytest.mark.parametrize("key", ["two words", "line\n", "schlüssel", "\x7f"])
def test_a_key_that_no_header_can_carry_is_not_repeated(key: str) -> None:
    check_key(None, "--api-key")
    check_key("", "--api-key")
    check_key("sk-!~", "--api-key")
    with pytest.raises(SpecError) as refused:
        check_key(key, "--api-key")
    assert str(refused.value) == (
        f"got --api-key with a key of {len(key)} character{'s' * (len(key) > 1)}; expected "
        "printable ASCII without spaces or line ends"
    )
    for keys in ((key, None), (None, key)):
        with pytest.raises(SpecError, match="printable ASCII"):
            key_for_admin("http://gateway", *keys)


@pytest.mark.parametrize(
    ("status", "message", "line"),
    [
        (
            401,
            "no key; expected a bearer token",
            "no key; expected --key with a key that it accepts",
        ),
        (403, "a client's key", "a client's key; expected --key with a key that it accepts"),
        (403, "no right; expected an admin key", "no right; expected an admin key"),
    ],
)
def test_a_refused_key_is_one_line_with_the_option_for_another(
    status: int, message: str, line: str
) -> None:
    assert (
        key_refusal("http://h", status, message, "--key") == f"http://h answered {status}: {line}"
    )


def test_headers_are_read_without_blanks_and_by_lower_names() -> None:
    given = ["X-Tenant: blue ", "x-empty:", "x-colon: a:b"]
    expected = (("x-tenant", "blue"), ("x-empty", ""), ("x-colon", "a:b"))
    assert parse_headers(given, frozenset({"host"})) == expected


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (
            ["secret"],
            "got --header without a colon; expected NAME:VALUE, for example x-tenant:blue",
        ),
        (["a b:secret"], "got --header a b; expected NAME:VALUE, for example x-tenant:blue"),
        ([":secret"], "got --header ; expected NAME:VALUE, for example x-tenant:blue"),
        (
            ["x:s\x01t"],
            "got --header x with a value of other characters; expected printable ASCII",
        ),
        (["x:é"], "got --header x with a value of other characters; expected printable ASCII"),
        (["Host:h"], "got --header Host; expected a header that the request does not set itself"),
        (["x:1", "X:2"], "got --header X twice; expected it once"),
    ],
)
def test_a_header_that_cannot_be_sent_is_named_without_its_value(
    headers: list[str], message: str
) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(message)}$"):
        parse_headers(headers, frozenset({"host"}))


def test_certificates_are_checked_unless_it_is_said() -> None:
    checked, any_one = (
        Trust().verification("HTTPS://h"),
        Trust(insecure=True).verification("https://h"),
    )
    assert isinstance(checked, ssl.SSLContext)
    assert isinstance(any_one, ssl.SSLContext)
    assert (checked.check_hostname, checked.verify_mode) == (True, ssl.CERT_REQUIRED)
    assert (any_one.check_hostname, any_one.verify_mode) == (False, ssl.CERT_NONE)
    assert Trust().verification("http://https:1") is False
    with pytest.raises(SpecError, match=r"got --insecure with --cacert a\.pem; expected one"):
        Trust(Path("a.pem"), insecure=True)


def test_a_file_without_certificates_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere.pem: No such file or directory; expected a file"):
        Trust(tmp_path / "nowhere.pem").context()
    (tmp_path / "empty.pem").write_text("no certificate")
    with pytest.raises(SpecError, match=r"empty.pem: \[X509.*; expected a file of PEM cert"):
        Trust(tmp_path / "empty.pem").context()


def caused(error: BaseException, *causes: BaseException) -> BaseException:
    """The error, whose cause is the next one, and so on."""
    for outer, inner in zip((error, *causes), causes, strict=False):
        outer.__cause__ = inner
    return error


def untrusted() -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_message = "self-signed certificate"
    return error


def no_handshake() -> ssl.SSLError:
    error = ssl.SSLError(1, "wrong version number")
    error.reason = "WRONG_VERSION_NUMBER"
    return error


REFUSED_THERE = OSError(errno.ECONNREFUSED, "Connection refused")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (caused(OSError("all failed"), REFUSED_THERE), "connection refused"),
        (
            caused(
                OSError(errno.EHOSTUNREACH, "No route"), OSError("two addresses"), REFUSED_THERE
            ),
            "connection refused",
        ),
        (
            caused(OSError(errno.EMFILE, "Too many open files"), REFUSED_THERE),
            NO_DESCRIPTOR,
        ),
        (
            caused(OSError("no name"), socket.gaierror(-2, "Name or service not known")),
            "name or service not known",
        ),
        (BaseExceptionGroup("both", [REFUSED_THERE, ValueError("other")]), "connection refused"),
        (
            caused(OSError("failed"), untrusted()),
            (
                f"{NOT_TRUSTED}: self-signed certificate; --cacert FILE names its authority, "
                "--insecure accepts any"
            ),
        ),
        (
            caused(OSError("failed"), no_handshake()),
            f"{NO_TLS}: WRONG_VERSION_NUMBER; does the server speak https?",
        ),
        (ValueError("a word of its own"), "a word of its own"),
        (ValueError(), "ValueError"),
    ],
)
def test_the_reason_is_the_last_cause_in_the_systems_words(error: Exception, said: str) -> None:
    assert reason(error) == said


def test_an_error_that_came_up_while_another_was_handled_has_that_as_its_reason() -> None:
    error = ValueError("no connection")
    error.__context__ = REFUSED_THERE
    assert reason(error) == "connection refused"


async def unreachable(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("") from REFUSED_THERE


async def silent(_: httpx.Request) -> httpx.Response:
    await asyncio.sleep(600)
    raise AssertionError


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda _: httpx.Response(503), "http://h/metrics answered 503"),
        (
            lambda _: httpx.Response(200, content=bytes((16 << 20) + 1)),
            "http://h/metrics answered more than 16 MiB",
        ),
        (unreachable, "no answer from http://h/metrics: connection refused"),
        (silent, "no answer from http://h/metrics within 0.01 s"),
        (
            lambda _: httpx.Response(200, text="up 1\n"),
            f"http://h/metrics has no queue of {', '.join(each.name for each in SERVERS)}",
        ),
    ],
)
def test_a_server_without_counters_says_why_it_has_none(
    answer: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "AsyncClient", client)
    assert asyncio.run(read_counters("http://h/v1/", limit=0.01)) == said


@pytest.mark.parametrize(("key", "header"), [("sk-1", "Bearer sk-1"), ("", None), (None, None)])
def test_counters_are_read_with_the_key_and_up_to_sixteen_mebibytes(
    key: str | None, header: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[httpx.Request] = []
    counters = b"vllm:num_requests_running 2\nvllm:num_requests_waiting 3\n"
    size = 16 << 20 if key else 0

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, content=counters.ljust(size, b"#"))

    client = partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "AsyncClient", client)
    found = asyncio.run(read_counters("http://h", key))
    assert isinstance(found, ServerCounters)
    assert (found.running, found.waiting) == (2, 3)
    assert str(asked[0].url) == "http://h/metrics"
    assert asked[0].headers.get("authorization") == header
