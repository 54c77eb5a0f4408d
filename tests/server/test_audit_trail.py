"""Who was refused, and who changed what: counted, logged within a rate, named by the digest of
the key.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re

import pytest

from kendall.server.runtime.logs import JsonFormatter
from kendall.server.security.audit import LINES, MINUTE
from kendall.server.security.denials import REASONS
from kendall.server.security.keys import read_keys
from kendall.server.security.settings import SecuritySettings
from tests.server.asgi import Call, call, completion, running
from tests.virtual_time import run_virtual

API, ADMIN = "sk-client-0123456789", "sk-admin-0123456789"
KEYS = SecuritySettings(
    api_keys=read_keys("--api-key", [API], None), admin_keys=read_keys("--admin-key", [ADMIN], None)
)
NAME = KEYS.admin_keys[0].name


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def denied(app: object) -> dict[str, float]:
    metrics = (await call(app, "GET", "/metrics")).body.decode()  # type: ignore[arg-type]
    return {
        reason: float(count)
        for reason, count in re.findall(
            r'kendall_denied_calls_total\{reason="(\w+)"\} (\S+)', metrics
        )
    }


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "kendall.audit"]


def test_every_denial_is_counted_by_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running(security=KEYS) as (app, _):
            assert await denied(app) == dict.fromkeys(REASONS, 0.0), (
                "each is there from the start, for alerts"
            )
            await call(app, "POST", "/v1/completions", completion(), {})
            await call(app, "POST", "/v1/completions", completion(), bearer("guessed-key-0123"))
            await call(app, "GET", "/admin/state", None, {})
            await call(app, "GET", "/admin/state", None, bearer(API))
            await call(
                app, "GET", "/admin/state", None, bearer(ADMIN) | {"sec-fetch-site": "cross-site"}
            )
            assert (
                await call(app, "POST", "/v1/completions", completion(), bearer(API))
            ).status == 200
            assert await denied(app) == {
                "no_key": 1.0,
                "wrong_key": 1.0,
                "no_admin_key": 1.0,
                "not_admin": 1.0,
                "elsewhere": 0.0,
                "other_page": 1.0,
                "other_name": 0.0,
            }
        async with running() as (app, _):
            await call(app, "GET", "/admin/state", None, {"x-forwarded-for": "10.0.0.7"})
            assert (await denied(app))["elsewhere"] == 1.0

    with caplog.at_level(logging.INFO):
        run_virtual(main())
    told = lines(caplog)
    assert "denied (no_key): POST /v1/completions from 127.0.0.1" in told
    assert any(
        line.startswith(
            "denied (elsewhere): GET /admin/state from 127.0.0.1 (forwarded for '10.0.0.7')"
        )
        for line in told
    )
    assert not any("guessed-key" in line or API in line or ADMIN in line for line in told)


def test_trap_denials_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A thousand a minute are ten lines; the first of the next minute tells of the others.
    Another reason has its own ten.
    """

    async def main() -> None:
        async with running(security=KEYS) as (app, _):
            for _ in range(1000):
                await call(app, "GET", "/v1/models", None, bearer("guessed"))
            await call(app, "GET", "/v1/models", None, {})
            await asyncio.sleep(MINUTE + 1)
            await call(app, "GET", "/v1/models", None, bearer("guessed"))
            assert (await denied(app))["wrong_key"] == 1001.0

    with caplog.at_level(logging.INFO):
        run_virtual(main())
    wrong = [line for line in lines(caplog) if "wrong_key" in line]
    assert len(wrong) == LINES + 1
    assert wrong[-1].endswith(f"; {1000 - LINES} more since the last such line")
    assert sum("no_key" in line for line in lines(caplog)) == 1


def test_changes_and_drains_are_logged_with_key_address_and_outcome(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with running(security=KEYS) as (app, _):
            for method, path, body in (
                ("GET", "/admin/policy", None),
                ("PUT", "/admin/policy", {"policy": "single"}),
                ("PUT", "/admin/policy", {"policy": "nonsense"}),
                ("POST", "/admin/drain", None),
            ):
                await call(app, method, path, body, bearer(ADMIN))
        async with running() as (app, _):
            await call(app, "PUT", "/admin/policy", {"policy": "single"})

    with caplog.at_level(logging.INFO):
        run_virtual(main())
    assert lines(caplog) == [
        f"admin: PUT /admin/policy from 127.0.0.1 with admin key {NAME}: 200",
        f"admin: PUT /admin/policy from 127.0.0.1 with admin key {NAME}: 400",
        f"admin: POST /admin/drain from 127.0.0.1 with admin key {NAME}: 200",
        "admin: PUT /admin/policy from 127.0.0.1 without a key: 200",
    ]
    facts = json.loads(
        JsonFormatter().format(
            next(record for record in caplog.records if record.name == "kendall.audit")
        )
    )
    assert {
        name: facts[name] for name in ("event", "method", "route", "key", "address", "status")
    } == {
        "event": "admin",
        "method": "PUT",
        "route": "/admin/policy",
        "key": NAME,
        "address": "127.0.0.1",
        "status": 200,
    }


@pytest.mark.parametrize(
    "path",
    ["/v1/" + "x" * 5000, "/v1/\nadmin: PUT /admin/policy by admin key", "/v1/\x1b[2J\u2028"],
)
def test_what_a_client_sends_makes_no_line_of_its_own(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with running(security=KEYS) as (app, _):
            made = Call(app, "GET", path, None, {"x-forwarded-for": "1\x0b2" * 500})
            await made.task
            assert made.status == 401

    with caplog.at_level(logging.INFO):
        run_virtual(main())
    (line,) = lines(caplog)
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert len(line) < 300
