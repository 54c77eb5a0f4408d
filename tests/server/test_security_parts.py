"""Each bound of security at its border, on the parts alone."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import re
import ssl
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from kendall.policies import SpecError
from kendall.server.engines.base import Structured
from kendall.server.http import bounds as protocol
from kendall.server.http.api.checked_call import check_form_size, check_prompt
from kendall.server.http.bounds import (
    LimitedProtocol,
)
from kendall.server.runtime.errors import ApiError
from kendall.server.runtime.wording import brief, excerpt, public
from kendall.server.security import audit
from kendall.server.security.audit import LINES, AuditTrail
from kendall.server.security.cors import cors, read_origins
from kendall.server.security.denials import NO_KEY, REASONS
from kendall.server.security.exposure import no_password, uvicorn_tls, warn_of
from kendall.server.security.flags import KeyFlags, read_security
from kendall.server.security.guard import Guard
from kendall.server.security.keys import holder, read_keys
from kendall.server.security.settings import SecuritySettings, TlsSettings
from tests.virtual_time import run_virtual

KEYS = read_keys("--api-key", ["sk-client-0123456789"], None)


def test_what_holds_unless_an_operator_says_otherwise() -> None:
    found = SecuritySettings()
    assert (found.max_body_bytes, found.max_form_bytes, found.max_form_compile_time) == (
        16 << 20,
        128 << 10,
        5.0,
    )
    assert (found.keyless_admin, found.allow_unauthenticated, found.metrics_need_key) == (
        True,
        False,
        False,
    )
    assert (protocol.MAX_HEADERS, protocol.HEAD_TIMEOUT, protocol.BODY_TIMEOUT) == (
        256,
        30.0,
        120.0,
    )
    assert (
        LimitedProtocol.head_timeout,
        LimitedProtocol.body_timeout,
        LimitedProtocol.answered_timeout,
    ) == (30.0, 120.0, 5.0)
    assert (audit.LINES, audit.MINUTE) == (10, 60.0)


def test_clients_show_a_certificate_where_it_is_said_whose() -> None:
    assert uvicorn_tls(TlsSettings()) == {}
    own, theirs = (
        uvicorn_tls(TlsSettings(certfile=Path("c"), ca_certs=ca)) for ca in (None, Path("a"))
    )
    assert (own["ssl_certfile"], own["ssl_ca_certs"], own["ssl_cert_reqs"]) == (
        Path("c"),
        None,
        ssl.CERT_NONE,
    )
    assert (theirs["ssl_ca_certs"], theirs["ssl_cert_reqs"]) == ("a", ssl.CERT_REQUIRED)


# keys


@pytest.mark.parametrize(("text", "short"), [("x" * 15, True), ("x" * 16, False)])
def test_a_key_of_sixteen_characters_is_long_enough(
    text: str, short: bool, caplog: pytest.LogCaptureFixture
) -> None:
    keys = read_keys("--api-key", [text], None)
    assert keys[0].short == short
    for settings in (SecuritySettings(api_keys=keys), SecuritySettings(admin_keys=keys)):
        caplog.clear()
        warn_of("127.0.0.1", settings)
        assert (f"keys {keys[0].name} have fewer than 16 characters" in caplog.text) == short
    assert (len(keys[0].name), keys[0].name == keys[0].digest.hex()[:8]) == (8, True)


def test_the_same_key_twice_is_one_and_each_is_found() -> None:
    keys = read_keys(
        "--api-key", ["one-key-0123456789", "two-key-0123456789", "one-key-0123456789"], None
    )
    assert len(keys) == 2
    assert [
        holder(keys, text) for text in (b"one-key-0123456789", b"two-key-0123456789", b"no")
    ] == [*keys, None]


@pytest.mark.parametrize(
    ("host", "settings", "warned"),
    [
        ("127.0.0.1", SecuritySettings(), None),
        ("0.0.0.0", SecuritySettings(), "anyone who can reach 0.0.0.0 can use this gateway"),
        ("", SecuritySettings(), "anyone who can reach this machine can use this gateway"),
        (
            "0.0.0.0",
            SecuritySettings(api_keys=KEYS),
            "keys and prompts cross the network unencrypted",
        ),
        ("127.0.0.1", SecuritySettings(api_keys=KEYS), None),
        ("127.0.0.1", SecuritySettings(key_files=(Path("/nowhere"),)), None),
        ("0.0.0.0", SecuritySettings(api_keys=KEYS, tls=TlsSettings(certfile=Path("x"))), None),
    ],
)
def test_what_is_weak_is_said(
    host: str, settings: SecuritySettings, warned: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of(host, settings)
    assert [record.getMessage().startswith(warned or "-") for record in caplog.records] == (
        [] if warned is None else [True]
    )


def flags(host: str = "127.0.0.1", **about: Any) -> SecuritySettings:
    keys = {field.name for field in dataclasses.fields(KeyFlags)}
    plain: dict[str, Any] = {
        "max_body_bytes": 9,
        "max_form_bytes": 8,
        "max_form_compile_time": 7.0,
        "max_connections_per_address": 6,
    }
    return read_security(
        host,
        SecuritySettings(**plain | {name: about[name] for name in about.keys() - keys}),
        KeyFlags(**{name: about[name] for name in about.keys() & keys}),
    )


def test_flags_become_settings(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# whose\n\n sk-client-0123456789 \n")
    found = flags(
        api_key_file=file,
        admin_key=("sk-admin-0123456789",),
        metrics_need_key=True,
        max_prompt_tokens=5,
    )
    assert (found.api_keys, found.key_files, found.keyless_admin) == (KEYS, (file,), True)
    assert (found.max_body_bytes, found.max_form_bytes, found.max_form_compile_time) == (9, 8, 7.0)
    assert (found.max_connections_per_address, found.max_prompt_tokens, found.metrics_need_key) == (
        6,
        5,
        True,
    )
    assert flags("0.0.0.0", allow_unauthenticated=True).keyless_admin is False
    assert flags(admin_key=("sk-admin-0123456789",), metrics_need_key=True).metrics_need_key
    assert flags(api_key=("sk-admin-0123456789",), metrics_need_key=True).metrics_need_key
    with pytest.raises(SpecError, match="--metrics-need-key without a key"):
        flags(metrics_need_key=True)
    with pytest.raises(SpecError, match="without an API key"):
        flags("0.0.0.0")
    with pytest.raises(ValueError, match="password"):
        no_password()


# the guard


@pytest.mark.parametrize(
    ("length", "refused"),
    [
        (None, False),
        (b"1000", False),
        (b"1001", True),
        (b"0", False),
        (b"000000000000000999", False),  # eighteen digits
        (b"0000000000000000999", True),  # nineteen are never read
        (b"9" * 5000, True),
        (b"x", False),  # the parser's own matter
    ],
)
def test_a_body_is_as_large_as_its_head_may_say(length: bytes | None, refused: bool) -> None:
    guard = Guard(SecuritySettings(max_body_bytes=1000))
    headers = [
        (b"content-type", b"application/json"),
        *([] if length is None else [(b"content-length", length)]),
    ]
    found = guard.rejection({"path": "/v1/completions", "method": "POST", "headers": headers})
    assert (found is not None) == refused
    if found is not None:
        assert found.status_code == 413
        assert "more than 1000 bytes" in json.loads(found.body)["error"]["message"]


@pytest.mark.parametrize(
    ("value", "token"),
    [
        (b"Bearer sk-client-0123456789", True),
        (b"bearer  sk-client-0123456789 ", True),
        (b"Basic sk-client-0123456789", False),
        (b"sk-client-0123456789", False),
        (b"Bearer ", False),
    ],
)
def test_a_key_comes_as_a_bearer_token(value: bytes, token: bool) -> None:
    scope: dict[str, Any] = {
        "path": "/v1/models",
        "method": "GET",
        "headers": [(b"authorization", value)],
    }
    assert (Guard(SecuritySettings(api_keys=KEYS)).rejection(scope) is None) == token
    assert (scope.get("kendall.api_key") == KEYS[0].name) == token


def test_an_options_request_and_the_pages_files_need_no_key() -> None:
    guard = Guard(SecuritySettings(api_keys=KEYS, metrics_need_key=True))
    for method, path, taken in (
        ("OPTIONS", "/v1/models", True),
        ("GET", "/live/static/1/page.js", True),
        ("GET", "/health", True),
        ("GET", "/metrics", False),
        ("GET", "/v1/models", False),
    ):
        assert (guard.rejection({"path": path, "method": method, "headers": []}) is None) == taken
    assert (
        Guard(SecuritySettings(api_keys=KEYS)).rejection(
            {"path": "/metrics", "method": "GET", "headers": []}
        )
        is None
    )
    operated = Guard(SecuritySettings(admin_keys=KEYS, metrics_need_key=True))
    for path, taken in (("/metrics", False), ("/v1/models", True)):
        assert (
            operated.rejection({"path": path, "method": "GET", "headers": []}) is None
        ) == taken, "an admin key is no key of clients"


# limits, origins


def test_a_prompt_and_a_form_are_refused_beyond_their_bound() -> None:
    check_prompt(10**9, None)
    check_prompt(100, 100)
    with pytest.raises(
        ApiError, match="got a prompt of 101 tokens; expected at most 100"
    ) as refused:
        check_prompt(101, 100)
    assert (refused.value.status, refused.value.code, refused.value.param) == (
        400,
        "context_length_exceeded",
        "prompt",
    )
    form = Structured("regex", "ä" * 10)
    check_form_size(form, 22, "guided_regex")  # two bytes each, and quotes
    with pytest.raises(
        ApiError, match="got a structured-output definition of 22 bytes; expected at most 21"
    ) as refused:
        check_form_size(form, 21, "guided_regex")
    assert (refused.value.status, refused.value.param) == (400, "guided_regex")
    check_form_size(None, 0, None)


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        (None, ()),
        ("[]", ()),
        ('["*"]', ("*",)),
        ('["https://a", "http://b:8080"]', ("https://a", "http://b:8080")),
        ('["ftp://a"]', None),
        ('["https://"]', None),
        ('["https://a/"]', None),
        ('["https://a?b"]', None),
        ('["https://a#b"]', None),
        ('["https://[a"]', None),
        ('["https://a", 1]', None),
        ('"*"', None),
        ("{", None),
    ],
)
def test_an_origin_is_a_scheme_and_a_host(
    text: str | None, origins: tuple[str, ...] | None
) -> None:
    if origins is None:
        with pytest.raises(SpecError, match="JSON list of origins"):
            read_origins(text)
    else:
        assert read_origins(text) == origins
        app: Any = object()
        assert (cors(app, origins) is None) == (not origins)


# words


def test_a_text_is_cut_at_its_bound() -> None:
    assert (brief("x" * 80), brief("x" * 81)) == ("x" * 80, "x" * 77 + "...")
    assert (brief("abcde", 5), brief("abcdef", 5)) == ("abcde", "ab...")
    assert public("a " * 300) == "a " * 300
    assert public("a " * 301) == ("a " * 301)[:597] + "..."
    assert public("b" * 80) == "b" * 80
    assert public("b" * 81) == "b" * 77 + "..."
    assert public("got '" + "c d" * 40 + "'") == "got '" + ("c d" * 40)[:77] + "...'"


def test_an_excerpt_has_four_entries_and_eighty_characters() -> None:
    assert excerpt([1, 2, 3, 4]) == "[1, 2, 3, 4]"
    assert excerpt([1, 2, 3, 4, 5]) == "[1, 2, 3, 4, ...]"
    assert excerpt(dict.fromkeys("abcd", 1)) == "{'a': 1, 'b': 1, 'c': 1, 'd': 1}"
    assert excerpt(dict.fromkeys("abcde", 1)) == "{'a': 1, 'b': 1, 'c': 1, 'd': 1, ...}"
    assert len(excerpt("x" * 1000)) == 80
    assert (excerpt([[[[1]]]]), excerpt([[[[[1]]]]])) == ("[[[[1]]]]", "[[[[[...]]]]]")
    assert excerpt("x" * 78) == repr("x" * 78)


# the audit trail


def test_ten_lines_a_minute_and_the_number_of_those_withheld(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counter = Counter("denied", "", ["reason"], registry=CollectorRegistry())
    trail = AuditTrail(counter)
    scope = {"method": "GET", "path": "/", "headers": []}
    withheld = re.compile(r"; (\d+) more since the last such line$")

    async def at(instant: float, calls: int) -> list[int]:
        """How many were withheld before each line that is written."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(start + instant - loop.time())
        caplog.clear()
        for _ in range(calls):
            trail.denied(scope, NO_KEY.reason)
        said = [withheld.search(record.getMessage()) for record in caplog.records]
        return [0 if more is None else int(more[1]) for more in said]

    async def main() -> None:
        nonlocal start
        start = asyncio.get_running_loop().time()
        assert await at(0.0, LINES + 3) == [0] * 10
        assert await at(59.9, 1) == []
        assert await at(60.0, 11) == [4] + [0] * 9
        assert await at(119.9, 1) == []
        assert await at(120.0, 1) == [2]

    start = 0.0
    run_virtual(main())
    samples = [sample for metric in counter.collect() for sample in metric.samples]
    counts = {s.labels["reason"]: s.value for s in samples if s.name == "denied_total"}
    assert counts[NO_KEY.reason] == LINES + 3 + 1 + 11 + 1 + 1


def test_who_called_is_told_with_what_a_proxy_says(caplog: pytest.LogCaptureFixture) -> None:
    counter = Counter("denied", "", ["reason"], registry=CollectorRegistry())
    trail = AuditTrail(counter)
    assert {
        sample.labels["reason"] for metric in counter.collect() for sample in metric.samples
    } == set(REASONS)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "method": "GET",
        "path": "/admin/state",
        "headers": [(b"forwarded", b"for=1.2.3.4")],
    }
    assert trail.changing(scope, send) is send
    changing = trail.changing(scope | {"method": "PUT", "kendall.api_key": "abc"}, send)
    assert changing is not send

    async def main() -> None:
        for message in (
            {"type": "http.response.start", "status": 200},
            {"type": "http.response.body", "body": b""},
        ):
            await changing(message)

    with caplog.at_level(logging.INFO):
        run_virtual(main())
    assert [record.getMessage() for record in caplog.records] == [
        (
            "admin: PUT /admin/state from an unknown address (forwarded for 'for=1.2.3.4') with "
            "admin key abc: 200"
        )
    ]
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert NO_KEY.reason == "no_key"
