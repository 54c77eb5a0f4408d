"""Every status code, header and error body of the HTTP interface."""

from __future__ import annotations

import asyncio

import pytest

from kendall.server.http.api.openapi import STATUSES
from kendall.server.runtime.errors import (
    DROPPED_REASON,
    MAX_RETRY_AFTER,
    ApiError,
    failure_error,
    not_started,
)
from tests.server.asgi import call, completion, running
from tests.server.statuses import ROWS, WIRE_ROWS, Row, WireRow
from tests.virtual_time import run_virtual

DROPPED = {
    "an engine that is coming up": "rejected-no-endpoints",
    "an engine that is lost": "rejected-no-endpoints",
    "an engine lost in the middle of service": "evicted",
    "a gateway that drains": "rejected-shutting-down",
    "patience that runs out in the queue": "rejected-ttl-expired",
}
BACKLOG = ("queue_full", "slo_unattainable", "queue_timeout")


def dropped(row: Row) -> str:
    """llm-d's reason."""
    return DROPPED.get(row.says, "rejected-saturated")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.status}-{row.says.replace(' ', '-')}")
def test_status_headers_and_body_are_as_the_table_says(row: Row) -> None:
    """And it is the call's only outcome: nothing stays in the queue or in the engine."""

    async def main() -> None:
        async with row.gateway() as (app, gateway):
            asked = await row.ask(app, gateway)
            assert asked.status == row.status
            assert asked.headers["content-type"] == "application/json"
            assert asked.headers["x-request-id"]
            error = asked.json()["error"]
            assert asked.json() == {"error": error}
            told = {"kendall"} if row.code in BACKLOG else set()  # where the queue stood
            assert set(error) == {"message", "type", "param", "code"} | told
            assert (error["code"], error["type"], error["param"]) == (row.code, row.type, row.param)
            assert 0 < len(error["message"]) < 1100
            assert "/tmp" not in error["message"]
            assert "Traceback" not in error["message"]
            if row.status in (429, 503):
                assert 1 <= int(asked.headers["retry-after"]) <= MAX_RETRY_AFTER
            else:
                assert "retry-after" not in asked.headers
            own_fault = row.status == 501 or row.code in {
                "engine_error",
                "engine_killed",
            }  # clients would ask again after any other 500
            assert asked.headers.get("x-should-retry") == ("false" if own_fault else None)
            assert asked.headers.get(DROPPED_REASON) == (
                dropped(row) if row.status in (429, 503) else None
            )
            if not row.starting:
                assert (
                    gateway.batcher.unanswered,
                    gateway.batcher.queue_length,
                    gateway.batcher.in_service,
                ) == (0, 0, 0)

    run_virtual(main())


@pytest.mark.parametrize(
    "row", WIRE_ROWS, ids=lambda row: f"{row.status}-{row.says.replace(' ', '-')}"
)
def test_what_never_became_a_request_is_answered_in_the_same_form(row: WireRow) -> None:
    status, headers, body = asyncio.run(row.ask())
    error = body.pop("error")
    assert not body
    assert set(error) == {"message", "type", "param", "code"}
    assert (status, error["code"], error["type"], error["param"]) == (
        row.status,
        row.code,
        row.type,
        row.param,
    )
    assert (headers["content-type"], headers["connection"]) == ("application/json", "close")


def test_every_status_of_the_document_is_in_the_table() -> None:
    assert set(STATUSES) == {row.status for row in ROWS} - {
        405
    }  # no operation has another one's methods


@pytest.mark.parametrize(
    ("asked_for", "sent"), [(None, 1), (0.2, 1), (7.4, 8), (119.5, 120), (1e9, 120)]
)
def test_retry_after_is_whole_seconds_that_clients_will_wait(
    asked_for: float | None, sent: int
) -> None:
    for status in (429, 503):
        headers = ApiError(status, "c", "m", retry_after=asked_for).headers()
        assert headers.pop(DROPPED_REASON) == "rejected-saturated"
        assert headers.pop("retry-after") == str(sent)
        known = None if asked_for is None else str(round(min(asked_for, MAX_RETRY_AFTER) * 1e3))
        assert headers == ({} if known is None else {"retry-after-ms": known})


@pytest.mark.parametrize(
    ("code", "status", "kind", "headers"),
    [
        ("queue_timeout", 429, "rate_limit_error", ("1", "rejected-ttl-expired")),
        ("queue_full", 429, "rate_limit_error", ("1", "rejected-saturated")),
        ("engine_unavailable", 503, "server_error", ("1", "rejected-no-endpoints")),
        ("shutting_down", 503, "server_error", ("1", "rejected-shutting-down")),
        ("invalid_request", 400, "invalid_request_error", None),
        ("deadline_exceeded", 504, "server_error", None),
        ("first_token_timeout", 504, "server_error", None),
        ("sequence_stalled", 504, "server_error", None),
        ("engine_error", 500, "server_error", {"x-should-retry": "false"}),
        ("engine_killed", 500, "server_error", {"x-should-retry": "false"}),
        ("internal_error", 500, "server_error", None),
    ],
)
def test_a_failure_has_its_status_its_type_and_what_a_client_does_then(
    code: str, status: int, kind: str, headers: tuple[str, str] | dict[str, str] | None
) -> None:
    error = failure_error(code, "it failed")
    assert error.status == status
    assert error.body() == {
        "error": {"message": "it failed", "type": kind, "param": None, "code": code}
    }
    if isinstance(headers, tuple):
        retry, reason = headers
        assert error.headers() == {"retry-after": retry, DROPPED_REASON: reason}
    else:
        assert error.headers() == (headers or {})


@pytest.mark.parametrize(
    ("status", "kind", "headers"),
    [
        (400, "invalid_request_error", {}),
        (401, "authentication_error", {"www-authenticate": "Bearer"}),
        (403, "permission_error", {}),
        (404, "not_found_error", {}),
        (409, "invalid_request_error", {}),
        (499, "invalid_request_error", {}),
        (500, "server_error", {}),
        (501, "server_error", {"x-should-retry": "false"}),
    ],
)
def test_a_status_has_its_type(status: int, kind: str, headers: dict[str, str]) -> None:
    error = ApiError(status, "c", "m", param="p" * 81, details={"queue_length": 3})
    assert error.headers() == headers
    assert error.body()["error"] == {
        "message": "m",
        "type": kind,
        "param": "p" * 77 + "...",
        "code": "c",
        "kendall": {"queue_length": 3},
    }


def test_while_the_first_engine_comes_up_clients_come_back_after_five_seconds() -> None:
    error = not_started()
    assert (error.status, error.code) == (503, "engine_unavailable")
    assert error.message == "the engine is starting; wait until /ready answers 200"
    assert error.headers()["retry-after"] == "5"


@pytest.mark.parametrize("stream", [False, True])
def test_a_good_answers_headers(stream: bool) -> None:
    async def main() -> None:
        async with running() as (app, _):
            asked = await call(app, "POST", "/v1/completions", completion(stream=stream))
            assert asked.status == 200
            assert asked.headers["content-type"] == (
                "text/event-stream; charset=utf-8" if stream else "application/json"
            )
            assert asked.headers["x-request-id"].startswith("cmpl-")
            assert float(asked.headers["x-kendall-queueing-delay-ms"]) == 0
            assert asked.headers["x-llm-d-flow-queue-duration-ms"] == "0"
            assert asked.headers["server-timing"].startswith("queue;dur=0.0")
            assert ("service;dur=" in asked.headers["server-timing"]) is not stream
            if stream:
                assert (asked.headers["cache-control"], asked.headers["x-accel-buffering"]) == (
                    "no-cache",
                    "no",
                )
            else:
                assert int(asked.headers["content-length"]) == len(asked.body)

    run_virtual(main())


def test_health_is_empty_and_open_while_the_engine_comes_up() -> None:
    async def main() -> None:
        starting = next(row for row in ROWS if row.starting)
        async with starting.gateway() as (app, _):
            health = await call(app, "GET", "/health")
            assert (health.status, health.body) == (200, b"")
            ready = await call(app, "GET", "/ready")
            assert (ready.status, ready.headers["retry-after"]) == (503, "5")
            models = (await call(app, "GET", "/v1/models")).json()["data"]
            assert [entry["id"] for entry in models] == ["tiny"]
            assert (await call(app, "GET", "/load")).json() == {"server_load": 0}

    run_virtual(main())
