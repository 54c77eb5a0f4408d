"""Which headers go on to a server behind, which come back, and that their bytes are the same."""

from __future__ import annotations

from typing import Any, cast

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from kendall.server.http.proxied.call import passed_headers
from kendall.server.runtime.passed_headers import text_of, written
from tests.server.asgi import Call
from tests.server.passing_gateway import Before, before
from tests.server.upstream_stub import Asked, Stub, answers, frame, play, streams

PROMPT = {"model": "m", "prompt": "hello"}
ODD = {"x-latin": b"\xe9\xe8", "x-utf": "\u20ac \U0001f327".encode(), "x-both": b"\xc3\xa9\xff"}


async def oddly(asked: Asked) -> None:
    """With header values beyond ASCII, or one of the browser's own affairs."""
    lines = [b"HTTP/1.1 200 OK", b"Content-Type: application/json", b"Content-Length: 2"]
    lines += [name.encode() + b": " + value for name, value in ODD.items()]
    asked.writer.write(b"\r\n".join([*lines, b"", b"{}"]))


def sent(*headers: tuple[bytes, bytes], client: Any = ("10.1.2.3", 5)) -> dict[str, str]:
    """What goes on of a call with these."""
    return dict(passed_headers({"type": "http", "headers": headers, "client": client}, "id"))


def test_header_values_come_back_byte_by_byte(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever their encoding: on an answer, on one with an error status, on a relayed one."""

    async def test(stub: Stub) -> None:
        stub.behave = oddly
        del stub.routes["/tokenize"]
        async with before(stub) as kendall:
            for path in ("/v1/completions", "/tokenize"):
                call = await kendall.answer(PROMPT, path)
                assert (call.status, call.body) == (200, b"{}")
                found = {name: call.headers[name].encode("latin-1") for name in ODD}
                assert found == ODD

    play(test)
    assert not [each for each in caplog.records if each.exc_info]


@pytest.mark.parametrize(
    "value",
    [*ODD.values(), "\U0010ffe9 \U0010ff80".encode(), b"\xf4\x8f\xbf", b"", b"plain"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_header_values_go_on_byte_by_byte(path: str, value: bytes) -> None:
    async def test(stub: Stub) -> None:
        stub.behave = answers()
        del stub.routes["/tokenize"]
        async with before(stub) as kendall:
            call = Raw(kendall, path, (b"x-odd", value))
            await call.task
            assert call.status == 200
            assert stub.calls[-1].headers["x-odd"] == value.decode("latin-1").lower()

    play(test)


class Raw(Call):
    """A call with a header that is no text."""

    def __init__(self, kendall: Before, path: str, header: tuple[bytes, bytes]) -> None:
        async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
            scope["headers"].append(header)
            await kendall.app(scope, receive, send)

        super().__init__(cast("FastAPI", app), "POST", path, PROMPT, {})


@given(st.binary(max_size=40))
def test_every_value_is_written_as_it_came(value: bytes) -> None:
    assert written(text_of(value).encode()) == value


def test_what_a_connection_header_names_stays_with_its_connection() -> None:
    found = sent(
        (b"connection", b"keep-alive, X-Hop , x-other"),
        (b"x-hop", b"1"),
        (b"x-other", b"2"),
        (b"x-mine", b"3"),
    )
    assert found.keys() == {"x-mine", "x-forwarded-for", "content-type", "x-request-id"}

    async def test(stub: Stub) -> None:
        stub.behave = answers(connection="X-Hop, keep-alive", x_hop="1", x_own="2")
        async with before(stub) as kendall:
            call = await kendall.answer(PROMPT)
            assert "x-hop" not in call.headers
            assert call.headers["x-own"] == "2"

    play(test)


def test_a_connection_header_takes_nothing_of_the_gateways_own() -> None:
    named = b"content-type, x-request-id, x-forwarded-for"
    found = sent((b"connection", named), (b"x-forwarded-for", b"1.2.3.4"))
    assert (found["content-type"], found["x-request-id"]) == ("application/json", "id")
    assert found["x-forwarded-for"] == "1.2.3.4, 10.1.2.3"


@pytest.mark.parametrize(
    ("before_it", "client", "value"),
    [
        ([], ("10.1.2.3", 5), "10.1.2.3"),
        ([b"1.2.3.4"], ("10.1.2.3", 5), "1.2.3.4, 10.1.2.3"),
        ([b"1.2.3.4, 5.6.7.8", b"9.9.9.9"], ("::1", 5), "1.2.3.4, 5.6.7.8, 9.9.9.9, ::1"),
        ([b"1.2.3.4"], None, "1.2.3.4"),
        ([], None, None),
    ],
)
def test_the_client_is_added_to_those_that_a_call_came_through(
    before_it: list[bytes], client: Any, value: str | None
) -> None:
    headers = [(b"x-forwarded-for", each) for each in before_it]
    assert sent(*headers, client=client).get("x-forwarded-for") == value


ITS_ORIGIN: dict[str, Any] = {
    "location": "http://inside:8000/",
    "set_cookie": "a=b",
    "access_control_allow_origin": "*",
    "access_control_allow_credentials": "true",
    "access_control_expose_headers": "*",
    "cross_origin_resource_policy": "cross-origin",
    "clear_site_data": "*",
    "refresh": "0; url=http://inside",
    "strict_transport_security": "max-age=1",
    "alt_svc": "h3=':443'",
}


@pytest.mark.parametrize("status", [200, 302, 404])
def test_what_a_server_tells_browsers_of_its_own_origin_does_not_come_back(status: int) -> None:
    async def test(stub: Stub) -> None:
        stub.behave = answers({}, status, x_own="1", **ITS_ORIGIN)
        del stub.routes["/tokenize"]
        async with before(stub) as kendall:
            for path in ("/v1/completions", "/tokenize"):
                call = await kendall.answer(PROMPT, path)
                if (path, status) == ("/v1/completions", 302):  # which is no answer
                    assert call.status == 503
                else:
                    assert (call.status, call.headers["x-own"]) == (status, "1")
                assert not {name.replace("_", "-") for name in ITS_ORIGIN} & call.headers.keys()

    play(test)


def test_an_answer_has_each_of_the_gateways_headers_once() -> None:
    async def test(stub: Stub) -> None:
        theirs: dict[str, Any] = {
            "x_request_id": "theirs",
            "date": "now",
            "server": "them",
            "x_own": "1",
        }
        stub.behave = answers(**theirs)
        del stub.routes["/tokenize"]
        async with before(stub) as kendall:
            for path in ("/v1/completions", "/tokenize"):
                names = await named(kendall, path)
                assert len(names) == len(set(names))
                assert {"x-request-id", "content-length", "content-type", "x-own"} <= set(names)
                assert not {"date", "server"} & set(names)

    play(test)


async def named(kendall: Before, path: str) -> list[str]:
    """The names of an answer's headers, as they are sent."""
    found: list[str] = []

    class Watched(Call):
        async def _send(self, message: dict[str, Any]) -> None:
            found.extend(name.decode() for name, _ in message.get("headers", ()))
            await super()._send(message)

    call = Watched(kendall.app, "POST", path, PROMPT, {"x-request-id": "mine"})
    await call.task
    assert call.headers["x-request-id"] == "mine"
    return found


@pytest.mark.parametrize(("theirs", "sent"), [({}, "no"), ({"x_accel_buffering": "yes"}, "yes")])
def test_a_stream_is_not_buffered_unless_its_server_wants_it(
    theirs: dict[str, str], sent: str
) -> None:
    async def behave(asked: Asked) -> None:
        asked.begin(**theirs)
        asked.piece(frame("a", "stop"))
        asked.end()

    async def test(stub: Stub) -> None:
        stub.behave = behave
        async with before(stub) as kendall:
            call = await kendall.answer(PROMPT | {"stream": True})
            assert call.headers["x-accel-buffering"] == sent
            stub.behave = answers()
            assert "x-accel-buffering" not in (await kendall.answer(PROMPT)).headers

    play(test)


def test_a_stream_has_the_same_headers() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = streams()
        async with before(stub) as kendall:
            call = await kendall.answer(PROMPT | {"stream": True}, origin="http://page")
            assert not [name for name in call.headers if name.startswith("access-control")]

    play(test)
