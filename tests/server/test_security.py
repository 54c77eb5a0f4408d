"""Who may call what: keys, this machine, limits, texts that tell nothing; and that no route is
forgotten.
"""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families

from kendall.policies import SpecError
from kendall.queueing.choosing.objective import parse_slo
from kendall.remote import is_loopback
from kendall.server.http.bodies import most_containers
from kendall.server.page.assets import load_assets
from kendall.server.runtime.errors import ApiError
from kendall.server.runtime.wording import public
from kendall.server.security.cors import read_origins
from kendall.server.security.exposure import check_exposure, check_tls, warn_of
from kendall.server.security.flags import KeyFlags, read_security
from kendall.server.security.guard import CALLER, Guard
from kendall.server.security.keys import Key, holder, read_keys
from kendall.server.security.routes import ANTHROPIC, EXCEPTIONS, access_of
from kendall.server.security.settings import SecuritySettings, TlsSettings
from kendall.server.telemetry.metrics import MAX_POLICIES
from tests.server.asgi import Call, call, completion, running
from tests.serving import self_signed
from tests.virtual_time import run_virtual

API, ADMIN = "sk-client-0123456789", "sk-admin-0123456789"
API_KEYS, ADMIN_KEYS = (
    read_keys("--api-key", [API, "sk-other-0123456789"], None),
    read_keys("--admin-key", [ADMIN], None),
)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PAGE = (
    "/live/static/{version}/{name:path}",
    "/live/events",
    "/live/history",
)  # a version, a stream, a thread: see below


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def secured(**settings: Any) -> Any:
    return running(security=SecuritySettings(**settings))


# every route is decided


def routes(app: FastAPI) -> list[tuple[str, str]]:
    """Method and path of everything that is served; a mounted application would have to be
    walked too.
    """
    found = [
        (method, route.path)
        for route in app.routes
        for method in sorted(getattr(route, "methods", None) or {"mount"})
    ]
    assert all(isinstance(route, APIRoute) or route.path == "/openapi.json" for route in app.routes)
    return found + [
        ("POST", path) for path in app.direct if path not in {known for _, known in found}
    ]  # type: ignore[attr-defined]


def test_every_exception_is_a_route_and_below_admin_all_are_the_operators() -> None:
    async def main() -> None:
        async with running() as (app, _):
            known = {path for _, path in routes(app)}
            assert set(EXCEPTIONS) <= known
            assert {path for path in known if access_of(path).startswith("admin")} == {
                path for path in known if path.startswith("/admin")
            }
            assert {path for path in known if access_of(path) in ("open", "probe")} == {
                *("/health", "/ready", "/version", "/metrics", "/load", "/", *PAGE)
            }

    run_virtual(main())


@pytest.mark.parametrize("metrics_need_key", [False, True])
def test_without_a_key_only_open_routes_answer(metrics_need_key: bool) -> None:
    """Walks the routes: with keys set, whatever is not open is 401, in OpenAI's form, with the
    way to come.
    """

    async def main() -> None:
        async with secured(
            api_keys=API_KEYS, admin_keys=ADMIN_KEYS, metrics_need_key=metrics_need_key
        ) as (app, _):
            for method, path in routes(app):
                if path in PAGE:
                    continue
                answer = await call(app, method, path, {})
                if access_of(path) == "open" or (
                    access_of(path) == "probe" and not metrics_need_key
                ):
                    assert answer.status == 200, path
                    continue
                assert answer.status == 401, path
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"

    run_virtual(main())


@pytest.mark.parametrize("metrics_need_key", [False, True])
def test_the_pages_files_are_open_and_its_numbers_are_for_whoever_may_read_the_metrics(
    metrics_need_key: bool,
) -> None:
    async def main() -> None:
        async with secured(
            api_keys=API_KEYS, admin_keys=ADMIN_KEYS, metrics_need_key=metrics_need_key
        ) as (app, _):
            path = f"/live/static/{load_assets().version}/app.js"
            assert (await call(app, "GET", path)).status == 200
            assert (await call(app, "GET", "/live/static/old/../../../admin/state")).status == 404
            if metrics_need_key:
                assert (await call(app, "GET", "/live/history")).status == 401
            for key, status in ((None, 401 if metrics_need_key else 200), (API, 200), (ADMIN, 200)):
                stream = Call(app, "GET", "/live/events", None, {} if key is None else bearer(key))
                await stream.started.wait()
                assert stream.status == status
                stream.leave()
                await stream.task

    run_virtual(main())


@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        "/v1/nowhere",
        "/v1/completions/",
        "//v1/completions",
        "/V1/completions",
        "/metrics/",
        "/health/x",
        "",
    ],
)
def test_an_unknown_path_needs_a_key(path: str) -> None:
    """A route that is added without a decision is closed, and a path written otherwise opens
    nothing.
    """

    async def main() -> None:
        async with secured(api_keys=API_KEYS) as (app, _):
            assert (await call(app, "POST", path, completion())).status == 401

    run_virtual(main())


# keys


@pytest.mark.parametrize("path", sorted(ANTHROPIC))
def test_anthropics_clients_send_their_keys_in_a_header_of_their_own(path: str) -> None:
    async def main() -> None:
        async with secured(api_keys=API_KEYS) as (app, _):
            for key, status in ((API, 501), (API + "x", 401), ("", 401)):
                asked = await call(
                    app,
                    "POST",
                    path,
                    {"model": "tiny", "messages": []},
                    {"x-api-key": key},
                )
                assert asked.status == status, "the emulated engine does not serve it"
            other = await call(app, "POST", "/v1/completions", completion(), {"x-api-key": API})
            assert other.status == 401

    run_virtual(main())


@pytest.mark.parametrize("path", sorted(ANTHROPIC))
def test_anthropics_clients_are_refused_in_their_own_words(path: str) -> None:
    """Also before the call reaches its route: by the guard, and for another method."""
    other = (404, "not_found_error") if "openai" in path else (405, "invalid_request_error")

    async def main() -> None:
        async with secured(api_keys=API_KEYS, max_body_bytes=100) as (app, _):
            body = {"model": "tiny", "messages": []}
            key = {"x-api-key": API}
            for method, sent, headers, status, kind in (
                ("POST", body, {}, 401, "authentication_error"),
                ("POST", body, {"x-api-key": "wrong"}, 401, "authentication_error"),
                ("POST", body | {"system": "a" * 100}, key, 413, "request_too_large"),
                ("POST", body, key, 501, "invalid_request_error"),
                ("GET", None, key, *other),
            ):
                asked = await call(app, method, path, sent, headers)
                assert asked.status == status
                told = asked.json()
                assert told.keys() == {"type", "error"}
                assert (told["type"], told["error"]["type"]) == ("error", kind)

    run_virtual(main())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_hot_routes_refuse_before_the_body_is_read(path: str) -> None:
    async def main() -> None:
        async with secured(api_keys=API_KEYS) as (app, gateway):
            answered: list[Any] = []

            async def receive() -> Any:
                raise AssertionError("the body was read")

            async def send(message: Any) -> None:
                answered.append(message)

            scope = {
                "type": "http",
                "method": "POST",
                "path": path,
                "headers": [(b"authorization", b"Bearer wrong")],
            }
            await app(scope, receive, send)
            assert answered[0]["status"] == 401
            assert gateway.batcher.unanswered == 0

    run_virtual(main())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer(API), 200),
        (bearer("sk-other-0123456789"), 200),
        (bearer(ADMIN), 200),
        ({"authorization": f"bearer {API}"}, 200),
        (
            {"Authorization": f"Bearer {API}"},
            401,
        ),  # ASGI names headers in small letters; anything else is another header
        ({"authorization": API}, 401),
        ({"authorization": f"Basic {API}"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": ""}, 401),
        ({"authorization": f"Bearer {API}x"}, 401),
        ({"authorization": f"Bearer {API[:-1]}"}, 401),
        ({"x-api-key": API}, 401),
        ({}, 401),
    ],
)
def test_a_call_needs_one_of_the_keys(headers: dict[str, str], status: int) -> None:
    async def main() -> None:
        async with secured(api_keys=API_KEYS, admin_keys=ADMIN_KEYS) as (app, _):
            assert (
                await call(app, "POST", "/v1/completions", completion(), headers)
            ).status == status
            assert (await call(app, "POST", "/v1/chat/completions", CHAT, headers)).status == status
            assert (await call(app, "GET", "/v1/models", None, headers)).status == status

    run_virtual(main())


def test_without_keys_no_key_is_asked_for() -> None:
    async def main() -> None:
        async with running() as (app, _):
            assert (await call(app, "POST", "/v1/completions", completion())).status == 200
            assert (
                await call(app, "POST", "/v1/completions", completion(), bearer("none"))
            ).status == 200

    run_virtual(main())


def test_only_digests_are_kept_and_all_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant time: the comparison does not stop at the key that fits, and is the library's
    own.
    """
    assert API not in repr(SecuritySettings(api_keys=API_KEYS))
    compared: list[bytes] = []
    monkeypatch.setattr(
        "kendall.server.security.keys.hmac.compare_digest",
        lambda given, kept: compared.append(kept) or given == kept,
    )
    assert holder(API_KEYS, API.encode()) is API_KEYS[0]
    assert compared == [key.digest for key in API_KEYS]
    assert holder(API_KEYS, b"") is None


def test_the_callers_key_has_a_name_for_limits_and_logs() -> None:
    scope: dict[str, Any] = {
        "path": "/v1/completions",
        "method": "POST",
        "headers": [(b"authorization", b"Bearer " + API.encode())],
    }
    assert Guard(SecuritySettings(api_keys=API_KEYS)).rejection(scope) is None
    assert re.fullmatch("[0-9a-f]{8}", scope[CALLER])
    assert scope[CALLER] == API_KEYS[0].name


def test_a_key_file_holds_one_key_per_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# the first\n{API}\n\n  sk-second \n{API}\n")
    keys = read_keys("--api-key", ["sk-third"], file)
    assert [
        holder(keys, each.encode()) is not None
        for each in (API, "sk-second", "sk-third", "# the first", "")
    ] == [True] * 3 + [False] * 2
    assert len(keys) == 3
    file.write_text("# none\n")
    for broken in (file, tmp_path / "nowhere", tmp_path):
        with pytest.raises(SpecError, match="--api-key-file"):
            read_keys("--api-key", [], broken)


@pytest.mark.parametrize("key", ["", " ", "two words", "schlüssel", "line\nbreak"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_printed(key: str) -> None:
    with pytest.raises(SpecError, match="printable ASCII") as refused:
        read_keys("--api-key", [key], None)
    assert key.strip() == "" or key not in str(refused.value)


# the operator's routes


@pytest.mark.parametrize(
    ("key", "status", "code"),
    [
        (ADMIN, 200, None),
        (API, 403, "admin_key_needed"),
        ("wrong", 401, "invalid_api_key"),
        (None, 401, "invalid_api_key"),
    ],
)
def test_with_an_admin_key_only_it_opens_admin(
    key: str | None, status: int, code: str | None
) -> None:
    async def main() -> None:
        async with secured(api_keys=API_KEYS, admin_keys=ADMIN_KEYS) as (app, gateway):
            for method, path, body in (
                ("GET", "/admin/policy", None),
                ("PUT", "/admin/policy", {"policy": "single"}),
            ):
                answer = await call(app, method, path, body, bearer(key) if key else {})
                assert answer.status == status
                assert code is None or answer.json()["error"]["code"] == code
            assert (gateway.batcher.policy_text == "single") == (status == 200)

    run_virtual(main())


def admin_scope(
    client: tuple[str, int] | None = ("127.0.0.1", 5),
    path: str = "/admin/policy",
    version: str = "1.1",
    **headers: str,
) -> dict[str, Any]:
    given = {"host": "localhost:8080"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    raw = [(name.encode(), value.encode()) for name, value in given.items() if value]
    return {
        "path": path,
        "method": "PUT",
        "http_version": version,
        "client": client,
        "headers": raw,
    }


def with_key(scope: dict[str, Any], key: str) -> dict[str, Any]:
    return scope | {"headers": [*scope["headers"], (b"authorization", b"Bearer " + key.encode())]}


def reason_of(refused: Any) -> str | None:
    return None if refused is None else refused.reason


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [
        (admin_scope(), True),
        (admin_scope(("::1", 5), host="[::1]:8080"), True),
        (admin_scope(("::ffff:127.0.0.1", 5)), True),
        (admin_scope(origin="http://localhost:8080"), True),  # the gateway's own page
        (admin_scope(("10.0.0.7", 5)), False),
        (admin_scope(None), False),
        (admin_scope(x_forwarded_for="10.0.0.7"), False),  # a proxy on this machine
        (admin_scope(forwarded="for=10.0.0.7"), False),
        (admin_scope(via="1.1 proxy"), False),
        (admin_scope(x_forwarded_proto="https"), False),
        (
            admin_scope(version="1.0"),
            False,
        ),  # nginx's plain proxy_pass, as most distributions have it
        (admin_scope(sec_fetch_site="same-origin"), True),
        (admin_scope(sec_fetch_site="none"), True),  # an address that was typed
        (
            admin_scope(origin="https://elsewhere.example"),
            False,
        ),  # a page in a browser on this machine
        (admin_scope(origin="http://localhost:3000"), False),  # of another server on this machine
        (admin_scope(origin="http://xlocalhost:8080"), False),  # ends as the gateway's own
        (admin_scope(origin="http://localhost:80801"), False),
        (admin_scope(origin="null"), False),
        (admin_scope(host="elsewhere.example:8080"), False),  # a name that was bound to 127.0.0.1
        (admin_scope(host=""), False),
    ],
)
def test_without_an_admin_key_only_this_machine_may_call_admin(
    scope: dict[str, Any], allowed: bool
) -> None:
    open_guard, keyed = (
        Guard(SecuritySettings(api_keys=keys, made_admin_keys=ADMIN_KEYS))
        for keys in ((), API_KEYS)
    )
    refused = open_guard.rejection(scope)
    assert (refused is None) == allowed
    if refused is not None:
        assert (refused.status_code, json.loads(refused.body)["error"]["code"]) == (
            403,
            "admin_key_needed",
        )
    assert open_guard.rejection(with_key(scope, ADMIN)) is None, "with the key from anywhere"
    assert reason_of(keyed.rejection(scope)) == "no_admin_key", (
        "where there are API keys, this machine needs an admin key"
    )
    assert reason_of(keyed.rejection(with_key(scope, API))) == "not_admin", (
        "and no API key opens it"
    )
    assert keyed.rejection(with_key(scope, ADMIN)) is None


@pytest.mark.parametrize("path", ["/admin/drain", "/admin/calibrate"])
@pytest.mark.parametrize("api_keys", [(), API_KEYS])
def test_trap_draining_and_calibrating_need_the_admin_key_always(
    path: str, api_keys: tuple[Key, ...]
) -> None:
    """An address proves nothing: behind a proxy on this machine every caller has this machine's."""
    guard, scope = (
        Guard(SecuritySettings(api_keys=api_keys, made_admin_keys=ADMIN_KEYS)),
        admin_scope(path=path),
    )
    assert reason_of(guard.rejection(scope)) == "no_admin_key"
    assert reason_of(guard.rejection(with_key(scope, "wrong"))) == "wrong_key"
    assert guard.rejection(with_key(scope, ADMIN)) is None
    assert reason_of(Guard(SecuritySettings()).rejection(scope)) == "no_admin_key", (
        "closed where there is no key at all"
    )


@pytest.mark.parametrize(
    ("host", "given", "keyless"),
    [
        ("127.0.0.1", {}, True),
        ("localhost", {}, True),
        ("127.0.0.1", {"api_key": [API]}, False),
        ("127.0.0.1", {"admin_key": [ADMIN]}, False),
        ("0.0.0.0", {"allow_unauthenticated": True}, False),
        ("0.0.0.0", {"api_key": [API]}, False),
    ],
)
def test_this_machine_needs_no_key_only_where_no_other_reaches_the_gateway_and_none_was_given(
    host: str, given: dict[str, Any], keyless: bool
) -> None:
    allowed = bool(given.get("allow_unauthenticated"))
    keys = {name: value for name, value in given.items() if name in ("api_key", "admin_key")}
    plain = SecuritySettings(
        allow_unauthenticated=allowed,
        max_body_bytes=2048,
        max_form_bytes=2048,
        max_form_compile_time=5.0,
    )
    found = read_security(host, plain, KeyFlags(**keys))
    assert (Guard(found).rejection(admin_scope()) is None) == keyless


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize(
    "path", ["/admin/advice", "/admin/policy", "/admin/drain", "/admin/nowhere"]
)
def test_trap_no_page_of_another_origin_calls_admin_with_or_without_a_key(
    site: str, path: str
) -> None:
    """An <img> of any page sent GET /admin/advice, and each held the live prediction for
    seconds.
    """
    for api_keys in ((), API_KEYS):
        guard = Guard(
            SecuritySettings(
                api_keys=api_keys,
                made_admin_keys=ADMIN_KEYS,
                allowed_origins=("https://chat.example",),
            )
        )
        scope = admin_scope(path=path, sec_fetch_site=site, origin="https://chat.example")
        for asked in (scope, with_key(scope, ADMIN)):
            assert reason_of(guard.rejection(asked)) == "other_page"


def test_trap_allowed_origins_open_chat_and_not_admin() -> None:
    async def main() -> None:
        page = {"origin": "https://chat.example"}
        async with secured(
            allowed_origins=("https://chat.example", "*"), made_admin_keys=ADMIN_KEYS
        ) as (app, gateway):
            asks = page | {
                "access-control-request-method": "PUT",
                "access-control-request-headers": "authorization",
            }
            for method, body, headers in (
                ("OPTIONS", None, asks),
                ("PUT", {"policy": "single"}, page),
                ("GET", None, page),
            ):
                answer = await call(app, method, "/admin/policy", body, headers)
                assert answer.status in (403, 405), method
                assert "access-control-allow-origin" not in answer.headers
            assert gateway.batcher.policy_text != "single"
            served = await call(
                app,
                "POST",
                "/v1/completions",
                completion(),
                page | {"content-type": "application/json"},
            )
            assert (served.status, "access-control-allow-origin" in served.headers) == (200, True)

    run_virtual(main())


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/openai/v1/completions", "/tokenize"]
)
@pytest.mark.parametrize(
    ("headers", "taken"),
    [
        ({"content-type": "application/json"}, True),
        (
            {"content-type": "Application/JSON; charset=utf-8", "origin": "http://localhost:8080"},
            True,
        ),
        ({"content-type": "application/x-www-form-urlencoded"}, True),  # `curl -d`
        ({}, True),
        ({"content-type": "text/plain"}, False),  # a form of any page
        ({"content-type": "multipart/form-data; boundary=x"}, False),
        (
            {
                "content-type": "application/x-www-form-urlencoded",
                "origin": "https://elsewhere.example",
            },
            False,
        ),
        ({"origin": "null"}, False),  # fetch with a Blob
        ({"sec-fetch-site": "cross-site"}, False),
    ],
)
def test_trap_without_keys_a_page_cannot_send_work_without_asking(
    path: str, headers: dict[str, str], taken: bool
) -> None:
    """A browser sends text/plain, forms and nameless bodies of any page at once; for JSON it
    asks first, and is told no.
    """
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"path": path, "method": "POST", "headers": raw}
    refused = Guard(SecuritySettings()).rejection(scope)
    assert (refused is None) == taken
    if refused is not None:
        error = json.loads(refused.body)["error"]
        assert (refused.status_code, error["code"]) == (400, "unsupported_media_type")
        assert "without the content type" in error["message"]
    assert Guard(SecuritySettings(api_keys=API_KEYS)).rejection(with_key(scope, API)) is None, (
        "a page has no key"
    )


@pytest.mark.parametrize(
    ("host", "origin", "taken"),
    [
        ("evil.example", "http://evil.example", False),  # its own name, bound to this address
        ("evil.example:8080", "http://Evil.example:8080", False),
        ("evil.example.", "http://evil.example.", False),
        ("evil.example:8080", "null", False),  # a page that hides its origin
        ("localhost:8080", "null", True),
        ("chat.example", "https://chat.example", True),  # in --allowed-origins
        ("localhost:8080", "http://localhost:8080", True),
        ("10.0.0.7:8080", "http://10.0.0.7:8080", True),
        ("[::1]:8080", "http://[::1]:8080", True),
        ("gateway:8080", "http://gateway:8080", True),  # nobody owns a name of one label
        ("box.local", "http://box.local", True),
        ("localhost:8080", "http://elsewhere.example", True),  # the browser asked first
        ("evil.example", None, True),  # no page
    ],
)
def test_trap_without_keys_a_page_cannot_call_by_a_name_of_its_own(
    host: str, origin: str | None, taken: bool
) -> None:
    raw = [(b"host", host.encode()), (b"content-type", b"application/json")]
    raw += [] if origin is None else [(b"origin", origin.encode())]
    scope = {"path": "/v1/completions", "method": "POST", "headers": raw}
    settings = SecuritySettings(allowed_origins=("https://chat.example",))
    refused = Guard(settings).rejection(scope)
    assert (None if refused is None else reason_of(refused)) == (None if taken else "other_name")
    assert Guard(SecuritySettings(api_keys=API_KEYS)).rejection(with_key(scope, API)) is None


@pytest.mark.parametrize(
    ("host", "loopback"),
    [(host, True) for host in ("127.0.0.1", "127.8.9.1", "localhost", "::1")]
    + [
        (host, False)
        for host in (
            "0.0.0.0",
            "::",
            "",
            "192.168.1.4",
            "gateway",
            "localhost.example",
            "127.0.0.1.example",
        )
    ],
)
def test_a_door_to_other_machines_needs_a_key_or_a_word(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback
    check_exposure(host, SecuritySettings(api_keys=API_KEYS))
    check_exposure(host, SecuritySettings(allow_unauthenticated=True))
    if loopback:
        check_exposure(host, SecuritySettings())
        return
    with pytest.raises(
        SpecError,
        match=r"got --host .* without an API key; expected .*--api-key.*--allow-unauthenticated",
    ):
        check_exposure(host, SecuritySettings(admin_keys=ADMIN_KEYS))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o600])
def test_key_files_that_others_can_read_are_warned_of(
    mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{API}\n")
    file.chmod(mode)
    settings = SecuritySettings(api_keys=API_KEYS, key_files=(file, tmp_path / "gone"))
    with caplog.at_level(logging.WARNING):
        warn_of("127.0.0.1", settings)
    assert (f"chmod 600 {file}" in caplog.text) == bool(mode & 0o004)
    assert API not in caplog.text


# CORS


def test_cors_is_off_unless_pages_are_named() -> None:
    async def main() -> None:
        page = {"origin": "https://chat.example"}
        asks = page | {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        async with secured(api_keys=API_KEYS) as (app, _):
            assert (
                "access-control-allow-origin"
                not in (await call(app, "GET", "/health", None, page)).headers
            )
            assert (await call(app, "OPTIONS", "/v1/completions", None, asks)).status == 405
        async with secured(api_keys=API_KEYS, allowed_origins=("https://chat.example",)) as (
            app,
            _,
        ):
            asked = await call(app, "OPTIONS", "/v1/completions", None, asks)
            assert (asked.status, asked.headers["access-control-allow-origin"]) == (
                200,
                "https://chat.example",
            )
            refused = await call(app, "POST", "/v1/completions", completion(), page)
            assert (refused.status, refused.headers["access-control-allow-origin"]) == (
                401,
                "https://chat.example",
            )
            served = await call(
                app, "POST", "/v1/completions", completion(stream=True), page | bearer(API)
            )
            assert (served.status, served.headers["access-control-allow-origin"]) == (
                200,
                "https://chat.example",
            )
            assert (
                "access-control-allow-origin"
                not in (
                    await call(app, "GET", "/health", None, {"origin": "https://other.example"})
                ).headers
            )

    run_virtual(main())


def test_a_client_behind_the_cors_layer_can_still_leave() -> None:
    async def main() -> None:
        async with secured(allowed_origins=("*",)) as (app, gateway):
            page = {"origin": "https://chat.example", "content-type": "application/json"}
            leaving = Call(
                app, "POST", "/v1/completions", completion(max_tokens=500, stream=True), page
            )
            await asyncio.sleep(0.01)
            leaving.leave()
            await leaving.task
            assert (gateway.batcher.in_service, gateway.batcher.unanswered) == (0, 0)

    run_virtual(main())


@pytest.mark.parametrize(
    "text",
    [
        "*",
        "https://a.example",
        '"*"',
        "[1]",
        '["a.example"]',
        '["https://a.example/path"]',
        "{}",
        "[",
        '["https://["]',
    ],
)
def test_origins_are_a_json_list(text: str) -> None:
    with pytest.raises(SpecError, match="JSON list"):
        read_origins(text)
    assert read_origins('["https://a.example:8443", "*"]') == ("https://a.example:8443", "*")
    assert read_origins(None) == ()


# limits


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_body_that_is_too_large_is_413_by_its_length_or_as_it_comes(path: str) -> None:
    async def main() -> None:
        async with secured(max_body_bytes=2048) as (app, gateway):
            body = completion(user="x" * 3000)
            announced = await call(app, "POST", path, body, {"content-length": "3100"})
            unannounced = await call(app, "POST", path, body)
            absurd = await call(app, "POST", path, body, {"content-length": "9" * 40})
            for answer in (announced, unannounced, absurd):
                assert (answer.status, answer.json()["error"]["code"]) == (413, "body_too_large")
            assert gateway.batcher.unanswered == 0
            assert (
                await call(app, "POST", "/v1/completions", completion(), {"content-length": "90"})
            ).status == 200

    run_virtual(main())


def test_a_prompt_is_at_most_what_the_operator_says() -> None:
    async def main() -> None:
        async with secured(max_prompt_tokens=10) as (app, _):
            assert (
                await call(app, "POST", "/v1/completions", completion(prompt=[5] * 10))
            ).status == 200
            longer = await call(app, "POST", "/v1/completions", completion(prompt=[5] * 11))
            assert (longer.status, longer.json()["error"]["code"]) == (
                400,
                "context_length_exceeded",
            )
            assert "at most 10" in longer.json()["error"]["message"]

    run_virtual(main())


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": "tiny", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"model": "tiny", "prompt": [1], "max_tokens": ' + b"9" * 100_000 + b"}",
        b'{"model": "tiny", "prompt": [' + b"9" * 5000 + b"]}",
    ],
    ids=["lists", "objects", "nested prompt", "large number", "large token"],
)
def test_json_without_end_is_one_400(body: bytes) -> None:
    """pydantic bounds the depth, and the length of numbers."""

    async def main() -> None:
        async with running() as (app, gateway):
            answer = await call(app, "POST", "/v1/completions", body)
            many = body.count(b"[") + body.count(b"{") > most_containers(gateway.context)
            assert answer.status == (413 if many else 400), "they are counted before it is parsed"
            assert len(answer.body) < 1500
            assert gateway.batcher.unanswered == 0

    run_virtual(main())


# what errors tell

LONG = "y" * 5000
WORDS = "some words " * 500


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", completion(model=LONG)),
        ("POST", "/v1/completions", completion(model=WORDS)),
        ("POST", "/v1/completions", completion(model="it's " + WORDS)),
        ("POST", "/v1/completions", completion(temperature=WORDS)),
        ("POST", "/v1/completions", completion(**{LONG: 1})),
        ("POST", "/v1/completions", completion(**{WORDS: 1})),
        ("POST", "/v1/completions", completion(stream=True, stream_options={WORDS: True})),
        ("POST", "/v1/completions", completion(logit_bias={WORDS: 1})),
        ("POST", "/v1/chat/completions", CHAT | {"messages": [{"role": WORDS}, {"content": 5}]}),
        ("PUT", "/admin/policy", {"policy": LONG}),
        ("PUT", "/admin/policy", {"policy": f"fixed:batch_size={LONG}"}),
        ("PUT", "/admin/policy", {WORDS: 1}),
        ("GET", f"/{LONG}", None),
        ("GET", f"/{WORDS}", None),
    ],
)
def test_an_error_repeats_at_most_80_characters_of_what_was_sent(
    method: str, path: str, body: object
) -> None:
    async def main() -> None:
        async with running() as (app, _):
            answer = await call(app, method, path, body)
            assert answer.status in (400, 404, 501)
            assert len(answer.body) < 1500
            text = answer.body.decode()
            assert "y" * 81 not in text
            assert WORDS[:81] not in text

    run_virtual(main())


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("cannot open /srv/models/llama/config.json", "cannot open (path)"),
        ("in '/home/user/x.py', line 3", "in '(path)', line 3"),
        ("<Engine object at 0x7f3a2b1c4d5e> failed", "<Engine object at (address)> failed"),
        ("POST /v1/chat/completions: Not Found", "POST /v1/chat/completions: Not Found"),
        ("GET /admin/policy: no", "GET /admin/policy: no"),
        (
            "this gateway's model is not 'a'; its operator's is 'b'",
            "this gateway's model is not 'a'; its operator's is 'b'",
        ),
        ("see https://docs.example/a/b/c", "see https://docs.example/a/b/c"),
        ("meta-llama/Llama-3.1-8B is 1/2 of 3/4", "meta-llama/Llama-3.1-8B is 1/2 of 3/4"),
    ],
)
def test_an_error_tells_no_path_and_no_address(message: str, told: str) -> None:
    assert public(message) == told
    assert ApiError(500, "x", message).body()["error"]["message"] == told


def test_no_word_of_our_own_is_so_long_that_it_would_be_cut_as_a_clients() -> None:
    """A word of more than 80 characters is cut; those of our messages may be written beside a
    quote or a comma.
    """
    root = Path(__file__).parents[2]
    long = []
    for path in (
        path for room in ("policies", "queueing", "server") for path in (root / room).rglob("*.py")
    ):
        texts = [
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        words = [
            word for text in texts if "\\" not in text for word in text.split()
        ]  # expressions have backslashes
        long += [f"{path.name}: {word}" for word in words if len(word) > 75]
    assert long == []


@pytest.mark.parametrize("text", ["x", "p99_queueing_delay=soon", "p99_queueing_delay=-1s"])
def test_an_slo_is_refused_over_http_in_the_words_of_the_command_line(text: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_slo(text)
    assert public(str(refused.value)) == str(refused.value)


def test_no_error_text_is_longer_than_its_bound_nor_slow_to_make() -> None:
    """Texts of quotes, slashes and backslashes, which are hard on expressions: time grows no
    faster than the text.
    """
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = "".join(rng.choice(list("'\"\\/ax0 ."), size=rng.integers(5000)))
        assert len(public(text)) <= 600
    for text in ("'" * 10**6, "/a" * 10**6, "\\" * 10**6, "'\\" * 10**6, "0x" * 10**6):
        assert len(public(text)) <= 600


def test_an_engine_that_refuses_with_a_path_in_its_words_does_not_tell_it() -> None:
    async def main() -> None:
        async with running("single") as (app, gateway):

            def refuse(*_: object, **__: object) -> Any:
                raise RuntimeError(
                    "cannot open /srv/models/secret/weights.bin <object at 0x7fabcdef1234>"
                )

            gateway.engine.dispatch = refuse
            answer = await call(app, "POST", "/v1/completions", completion())
            assert answer.status == 500
            assert b"/srv" not in answer.body
            assert b"0x7f" not in answer.body

    run_virtual(main())


def test_a_calibration_that_measured_too_little_is_refused_with_what_to_do() -> None:
    """One batch size cannot tell the law's terms apart: nothing in the gateway failed."""

    async def main() -> None:
        async with running() as (app, gateway):
            asked = await call(app, "POST", "/admin/calibrate", {"repeats": 2, "max_batch_size": 1})
            assert asked.status == 409
            error = asked.json()["error"]
            assert error["code"] == "no_law_fits"
            assert "expected a grid of sizes and lengths: measure again" in error["message"]
            assert (await call(app, "POST", "/v1/completions", completion())).status == 200
            assert not gateway.latency.calibrating

    run_virtual(main())


# what logs and metrics tell


@pytest.mark.parametrize("prompts", [False, True])
def test_prompts_are_logged_only_where_it_is_asked_for(
    prompts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from kendall.server.runtime.logs import LogSettings

    async def main() -> None:
        async with running(logs=LogSettings(prompts=prompts)) as (app, gateway):
            secret = {
                "model": "tiny",
                "messages": [{"role": "user", "content": "XYZZY"}],
                "max_tokens": 2,
            }
            assert (await call(app, "POST", "/v1/chat/completions", secret)).status == 200
            assert (
                await call(app, "POST", "/v1/completions", completion(prompt="XYZZY"))
            ).status == 200
            await call(app, "POST", "/v1/completions", completion(prompt="XYZZY", n=-1))
            gateway.engine.dispatch = lambda *_, **__: 1 / 0
            await call(app, "POST", "/v1/completions", completion(prompt="XYZZY"))

    with caplog.at_level(logging.DEBUG):
        run_virtual(main())
    told = [
        record
        for record in caplog.records
        if "XYZZY" in record.getMessage() or "XYZZY" in str(record.__dict__)
    ]
    assert bool(told) == prompts


LABELS = {  # each with the most values it may have in one family
    "policy": MAX_POLICIES + 1,
    "outcome": 5,
    "le": 64,
    "stat": 7,
    "method": 8,
    "assumption": 16,
    "verdict": 3,
    "check": 8,
    "kind": 16,
    "term": 3,
    "reason": 16,
    "stage": 8,
    "max_output_tokens": 1,
    "epoch": 1,
    "engine": 1,
    "model": 1,
    "version": 1,
}


def test_every_label_has_a_bound_whatever_clients_and_operators_send() -> None:
    """A new label must be given its bound here; requests and policies beyond the bound do not
    break one.
    """

    async def main() -> str:
        async with running() as (app, gateway):
            for size in range(1, MAX_POLICIES + 6):
                await call(
                    app,
                    "PUT",
                    "/admin/policy",
                    {"policy": f"capped:max_batch_size={size}", "max_output_tokens": size},
                )
                await call(
                    app,
                    "POST",
                    "/v1/completions",
                    completion(user=f"u{size}"),
                    {"x-request-id": f"r{size}"},
                )
                await call(app, "POST", f"/v1/{size}", completion(model=f"m{size}"))
            assert gateway.batcher.unanswered == 0
            return (await call(app, "GET", "/metrics")).body.decode()

    values: dict[tuple[str, str], set[str]] = {}
    for family in text_string_to_metric_families(run_virtual(main())):
        if family.name.startswith("vllm:"):  # vLLM's own, where another test has loaded it
            continue
        for sample in family.samples:
            for label, value in sample.labels.items():
                values.setdefault((family.name, label), set()).add(value)
    assert "other" in values["kendall_requests", "policy"]
    for (family, label), found in values.items():
        assert label in LABELS, f"label {label!r} of {family} has no bound"
        assert len(found) <= LABELS[label], (family, label)


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> TlsSettings:
    certfile, keyfile = self_signed(tmp_path_factory.mktemp("tls"))
    return TlsSettings(keyfile=keyfile, certfile=certfile)


def test_tls_files_are_checked_before_anything_starts(
    certificate: TlsSettings, tmp_path: Path
) -> None:
    check_tls(TlsSettings())
    check_tls(certificate)
    (tmp_path / "junk").write_text("junk")
    broken: list[Callable[[], TlsSettings]] = [
        lambda: TlsSettings(keyfile=certificate.keyfile),
        lambda: TlsSettings(ca_certs=certificate.certfile),
        lambda: TlsSettings(certfile=tmp_path / "nowhere", keyfile=certificate.keyfile),
        lambda: TlsSettings(certfile=tmp_path / "junk", keyfile=certificate.keyfile),
        lambda: TlsSettings(certfile=certificate.certfile),
        lambda: TlsSettings(
            certfile=certificate.certfile, keyfile=certificate.keyfile, ca_certs=tmp_path / "junk"
        ),
    ]
    for make in broken:
        with pytest.raises(SpecError, match=r"--ssl-certfile|TLS files"):
            check_tls(make())


def test_short_keys_are_named_by_digest_not_by_text() -> None:
    key: Key = read_keys("--api-key", ["short"], None)[0]
    assert key.short
    assert "short" not in key.name
