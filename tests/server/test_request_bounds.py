"""The bounds of a request, each at its border, on a connection that is no socket."""

from __future__ import annotations

import asyncio
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from kendall.server.http import bounds as protocol
from kendall.server.http.bounds import LimitedProtocol, fault_of_head

# as documented
MAX_HEAD_BYTES, MAX_HEADERS, CHUNK_FRAMING, ANSWERED_BYTES = 65_536, 256, 16, 1_048_576


class Transport:
    """What the protocol does to its transport."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


class Bare(LimitedProtocol):
    """The bounds alone, on no socket."""

    def __init__(self, *, cycle: Any = None, pipeline: Any = ()) -> None:
        self.timers: list[float] = []
        loop: Any = SimpleNamespace(call_later=self._later, time=lambda: 0.0)
        with asyncio.Runner() as runner:
            runner.run(self._begin())
        self.transport: Any = Transport()
        self.cycle, self._pipeline, self.loop = cycle, pipeline, loop
        self.headers: Any = []
        self.parser: Any = SimpleNamespace(get_http_version=lambda: "1.1")

    async def _begin(self) -> None:
        config = uvicorn.Config(lambda: None)
        config.loaded_app = None
        super().__init__(config, ServerState())

    def _later(self, seconds: float, _: Any) -> Any:
        self.timers.append(seconds)
        return SimpleNamespace(cancel=lambda: self.timers.append(-seconds))

    @property
    def answer(self) -> tuple[int, str] | None:
        head, _, body = self.transport.written.partition(b"\r\n\r\n")
        if not head:
            return None
        assert b"content-length: %d" % len(body) in head
        assert b"connection: close" in head
        return int(head.split()[1]), json.loads(body)["error"]["code"]


def cycle(*, over: bool = False, begun: bool = False, body: bytes = b"") -> Any:
    return SimpleNamespace(
        response_complete=over, response_started=begun or over, body=bytearray(body)
    )


@pytest.mark.parametrize(("count", "fault"), [(MAX_HEADERS, None), (MAX_HEADERS + 1, 431)])
def test_a_head_has_so_many_headers(count: int, fault: int | None) -> None:
    of = Bare()
    of.headers = [(b"host", b"x")] + [(b"h", b"x")] * (count - 1)
    found = fault_of_head(of.headers, of.parser)
    assert (None if found is None else found[0]) == fault


@pytest.mark.parametrize(
    ("hosts", "version", "fault"),
    [
        (1, "1.1", None),
        (0, "1.1", 400),
        (2, "1.1", 400),
        (0, "1.0", None),
        (1, "1.0", None),
        (2, "1.0", 400),
    ],
)
def test_a_head_names_one_host(hosts: int, version: str, fault: int | None) -> None:
    of = Bare()
    of.headers = [(b"host", b"x")] * hosts
    of.parser = SimpleNamespace(get_http_version=lambda: version)
    found = fault_of_head(of.headers, of.parser)
    assert (None if found is None else found[0]) == fault


@pytest.mark.parametrize(("beyond", "refused"), [(0, False), (1, True)])
def test_trailers_and_extensions_are_as_long_as_a_head(beyond: int, refused: bool) -> None:
    """Readings of a body without framing add nothing, and plain chunks less than they are
    allowed.
    """
    of = Bare(cycle=cycle())
    of._in_body = True
    of._weigh(1000, 1000)
    of._weigh(1000, 1000 + CHUNK_FRAMING)
    of._weigh(MAX_HEAD_BYTES - 500, 100)
    of._weigh(600 + beyond, 200)
    assert of._framing_bytes == MAX_HEAD_BYTES - 200 + beyond
    of._weigh(200, 0)
    assert (of.answer, of.transport.closed) == (
        ((431, "head_too_large"), True) if refused else (None, False)
    )


@pytest.mark.parametrize(("beyond", "closed"), [(0, False), (1, True)])
def test_a_mebibyte_is_read_behind_an_answer(beyond: int, closed: bool) -> None:
    of = Bare(cycle=cycle(over=True))
    of._weigh(ANSWERED_BYTES - 1, 0)
    of._weigh(1 + beyond, 0)
    assert (of.transport.closed, of.transport.written) == (closed, b"")


def test_a_piece_of_a_body_counts_with_what_frames_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Bare()
    monkeypatch.setattr(protocol.StampedProtocol, "on_body", lambda *_: None)
    of.on_body(b"x" * 100)
    of.on_body(b"x")
    assert of._body_bytes == 101 + 2 * 16


@pytest.mark.parametrize(
    ("about", "answered"),
    [
        ({"cycle": None}, True),
        ({"cycle": cycle(over=True)}, True),
        ({"cycle": cycle()}, False),
        ({"cycle": cycle(), "body": True}, True),
        ({"cycle": cycle(begun=True), "body": True}, False),
        ({"cycle": cycle(), "body": True, "pipeline": [1]}, False),
    ],
)
def test_a_refusal_is_written_unless_an_answer_has_begun(
    about: dict[str, Any], answered: bool
) -> None:
    of = Bare(cycle=about["cycle"], pipeline=about.get("pipeline", ()))
    of._in_body = about.get("body", False)
    of._refuse(408, "request_timeout", "too slow")
    assert (of.answer, of.transport.closed) == (
        (408, "request_timeout") if answered else None,
        True,
    )
    written = of.transport.written
    of._refuse(408, "request_timeout", "again")
    assert of.transport.written == written, "it is closing"


@pytest.mark.parametrize(
    ("about", "answer", "closed", "timers"),
    [
        ({"head": True}, (408, "request_timeout"), True, []),
        ({"cycle": cycle(), "body": True}, (408, "request_timeout"), True, []),
        ({}, None, True, []),
        (
            {"cycle": cycle(), "head": True},
            None,
            False,
            [120.0],
        ),  # behind one that is being answered
        ({"cycle": cycle(over=True), "head": True, "pipeline": [1]}, None, False, [120.0]),
        ({"cycle": cycle(over=True), "head": True}, (408, "request_timeout"), True, []),
    ],
)
def test_what_is_too_slow_is_told_or_let_go(
    about: dict[str, Any], answer: Any, closed: bool, timers: list[float]
) -> None:
    of = Bare(cycle=about.get("cycle"), pipeline=about.get("pipeline", ()))
    of._in_head, of._in_body = about.get("head", False), about.get("body", False)
    of._too_slow()
    assert (of.answer, of.transport.closed, of.timers) == (answer, closed, timers)
    of.transport.closed = True
    of._too_slow()
    assert of.timers == timers


def test_the_body_of_an_answered_request_is_dropped_and_its_rest_has_five_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol.StampedProtocol, "on_response_complete", lambda _: None)
    of = Bare(cycle=cycle(over=True, body=b"abc"))
    of._in_body = True
    of._set_deadline(120.0)
    of.on_response_complete()
    assert (of.cycle.body, of.timers) == (bytearray(), [120.0, -120.0, 5.0])
    whole = Bare(cycle=cycle(over=True, body=b"abc"))
    whole.on_response_complete()
    assert (whole.cycle.body, whole.timers) == (bytearray(), [])
    for closing, over in ((True, True), (False, False)):
        kept = Bare(cycle=cycle(over=over, body=b"abc"))
        kept._in_body, kept.transport.closed = True, closing
        kept.on_response_complete()
        assert (kept.cycle.body, kept.timers) == (bytearray(b"abc"), [])


@pytest.mark.parametrize(
    ("about", "idle", "between"),
    [
        ({}, True, False),
        ({"cycle": cycle(over=True)}, True, True),
        ({"cycle": cycle()}, False, False),
        ({"cycle": cycle(over=True), "pipeline": [1]}, False, True),
    ],
)
def test_a_connection_is_idle_between_an_answer_and_the_next_request(
    about: dict[str, Any], idle: bool, between: bool
) -> None:
    of = Bare(**about)
    assert (of.idle, of._between()) == (idle, between)
    of.rest()
    assert not of._between(), "the connection rests"


@pytest.mark.parametrize(("reader", "closed"), [(None, True), (False, True), (True, False)])
def test_an_idle_connection_is_hung_up_unless_its_next_request_is_there(
    reader: bool | None, closed: bool
) -> None:
    of = Bare()
    of._plain = None if reader is None else SimpleNamespace(has_unread=lambda: reader)  # type: ignore[assignment]
    of.hang_up()
    assert of.transport.closed == closed


@pytest.mark.parametrize(("beyond", "refused"), [(0, False), (1, True)])
def test_a_head_is_64_kibibytes_beyond_its_first_reading(
    beyond: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol.StampedProtocol, "on_message_begin", lambda _: None)
    monkeypatch.setattr(
        protocol.StampedProtocol,
        "data_received",
        lambda self, data, _=None: data == b"first" and self.on_message_begin(),
    )
    of = Bare()
    of.data_received(b"first")
    assert (of._in_head, of._head_bytes, of.timers) == (True, 0, [30.0])
    of.data_received(b"x" * (MAX_HEAD_BYTES - 1))
    assert of.answer is None
    of.data_received(b"x" * (1 + beyond))
    assert (of.answer is not None) == refused
    assert of.timers == [30.0], "one timer for all of it"
    assert math.isfinite(of.timers[0])
