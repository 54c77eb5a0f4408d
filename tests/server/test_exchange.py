"""One call at a server behind, piece by piece: what its client hears, what its engine and the
server are told, every bound on what is held and taken. Without a connection, on virtual time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from multidict import CIMultiDict

from kendall.policies import Request
from kendall.server.engines.http.exchange import UpstreamExchange, kept, kind_of, pause_of
from kendall.server.engines.proxied import Answered, ProxiedCall, Refused
from tests.virtual_time import run_virtual

MIB = 1 << 20
COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
Piece = bytes | float | Exception  # of an answer; a number: seconds until the next one


def frame(text: str = "t", finish: str | None = None, **more: Any) -> bytes:
    choice = {"text": text, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({"choices": [choice], **more}).encode()


DONE = b"data: [DONE]\n\n"
WHOLE = json.dumps({"choices": [{"text": "abc", "finish_reason": "length"}]}).encode()


def of_size(size: int) -> bytes:
    """A whole answer of so many bytes."""
    return WHOLE + b" " * (size - len(WHOLE))


@dataclass
class Answer:
    """Of the server."""

    pieces: Sequence[Piece]
    status: int = 200
    kind: str = "application/json"
    more: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.headers = CIMultiDict({"Content-Type": self.kind, **self.more})
        self.raw_headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        self.content = SimpleNamespace(iter_any=self._pieces)

    async def _pieces(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, bytes):
                yield piece
            else:
                await asyncio.sleep(piece)


@dataclass
class Scene:
    """A call, its server and its engine, each of which notes what it is told."""

    answer: Answer | Exception
    others: bool = False  # another server takes work
    asks_others: bool = False  # the engine would ask another one after an error
    breaks: bool = False  # streams are held until their end
    limit: float = 1e9  # seconds of silence
    other_model: bool = False
    lost: bool = False  # the server, once it was looked at
    takes: float = 0.0  # seconds that the client has enough for after each piece
    fails: bool = False  # the client's side does
    said: list[tuple[Any, ...]] = field(default_factory=list)  # to the client
    told: list[tuple[Any, ...]] = field(default_factory=list)  # to the server and the engine
    id: int = 0
    name: str = "server 0"
    url: str = "http://s"
    last_fault: str | None = None
    held: int = 0
    most_held: int = 0
    context: int = 1000
    heard_bytes: int = 0
    closed_at: float | None = None  # the connection

    def __post_init__(self) -> None:
        self.breaker = SimpleNamespace(lost=False)
        self.exchange: Any = None

    # the server

    @asynccontextmanager
    async def post(self, path: str, body: bytes, headers: Any) -> AsyncIterator[Any]:
        self.told.append(("post", path, body, headers))
        if isinstance(self.answer, Exception):
            raise self.answer
        try:
            yield self.answer
        finally:
            self.closed_at = asyncio.get_running_loop().time()

    def hear(self) -> None:
        self.heard_bytes += 1
        self.most_held = max(self.most_held, self.held)

    def lose(self, reason: str) -> None:
        self.told.append(("lose", reason))

    def look(self) -> Awaitable[None]:
        self.told.append(("look",))

        async def looked() -> None:
            await asyncio.sleep(0.5)
            self.breaker.lost = self.lost

        return asyncio.ensure_future(looked())

    def trip(self, pause: float, reason: str) -> None:
        self.told.append(("trip", pause, reason))

    def has_other_model(self, asked: str, named: str | None) -> bool:
        self.told.append(("model", asked, named))
        return self.other_model

    # the engine

    def elsewhere(self, upstream: Any) -> bool:
        assert upstream is self
        return self.others

    def refused(self, upstream: Any, status: int) -> bool:
        self.told.append(("refused", status))
        return self.asks_others

    def heard(self, call: Any, answer: Any, upstream: Any, seconds: float) -> None:
        assert (call, upstream) == (self.exchange.call, self)
        self.told.append(("heard", answer.end, round(seconds, 6)))

    def breaks_off(self, upstream: Any) -> bool:
        return self.breaks

    def failed(self, upstream: Any) -> None:
        self.told.append(("failed",))

    def too_long(self, exchange: Any, silent: float) -> bool:
        return silent > self.limit

    def over(self, exchange: Any) -> None:
        assert exchange is self.exchange
        self.told.append(("over",))

    # the client

    def sink(self) -> Any:
        said = self.said

        def more(data: bytes, tokens: int) -> Awaitable[None] | None:
            if self.fails:
                raise RuntimeError("no client")
            said.append(("more", data, tokens))
            return asyncio.ensure_future(asyncio.sleep(self.takes)) if self.takes else None

        def returned(
            reason: str,
            answer: Any = None,
            code: str = "engine_unavailable",
            *,
            cause: str = "failed",
        ) -> None:
            said.append(("returned", reason, answer, code, cause))

        def lost(reason: str, code: str = "engine_unavailable") -> None:
            said.append(("lost", reason, code))

        return SimpleNamespace(
            head=lambda headers, *, streamed: said.append(("head", headers, streamed)),
            more=more,
            answered=lambda end: said.append(("answered", end)),
            refused=lambda answer: said.append(("refused", answer)),
            returned=returned,
            lost=lost,
        )

    def begin(self, call: ProxiedCall, request: Request) -> UpstreamExchange:
        given: Any = self
        self.exchange = UpstreamExchange(
            given, given, call, request, back=self.sink(), on_over=self.over
        )
        made: UpstreamExchange = self.exchange
        return made

    def words(self) -> list[str]:
        """Of what its client heard."""
        return [each[0] for each in self.said]

    @property
    def body(self) -> bytes:
        return b"".join(each[1] for each in self.said if each[0] == "more")

    @property
    def told_of(self) -> list[Any]:
        return [each for each in self.told if each[0] not in ("post", "model", "over")]


def play(
    *pieces: Piece,
    path: str = COMPLETIONS,
    streams: bool = False,
    size: tuple[int, int, int] = (1, 4, 100_000),
    during: Callable[[Scene], Awaitable[None]] | None = None,
    of: dict[str, Any] | None = None,
    **scene: Any,
) -> Scene:
    """The call until it is over. `size`: its sequences, tokens of the prompt and of an answer."""
    first = pieces[0] if pieces else b""
    given = scene.pop("answer", None) or Answer(pieces, **(of or {}))
    made = Scene(first if isinstance(first, Exception) and not of else given, **scene)
    sequences, prompt, output = size

    async def main() -> None:
        request = Request(
            id="a",
            arrived_at=0.0,
            prompt_tokens=prompt,
            max_output_tokens=output,
            sequences=sequences,
        )
        made.begin(ProxiedCall(path, b"{}", (("a", "b"),), model="m", streams=streams), request)
        if during is not None:
            await during(made)
        await asyncio.sleep(1000)
        for _ in range(3000):  # a thread reads a large one
            if ("over",) not in made.told:
                time.sleep(0.001)  # noqa: ASYNC251 - the clock of threads is another one
                await asyncio.sleep(1)
        assert made.told[0] == ("post", path, b"{}", (("a", "b"),))
        assert made.told.count(("over",)) == 1
        assert made.held == scene.get("held", 0), "nothing is held any more"

    run_virtual(main())
    return made


EVENTS = {"kind": "Text/Event-Stream; charset=utf-8"}
HEAD = (("content-type", "application/json"),)
EVENTS_HEAD = (("content-type", EVENTS["kind"]),)
END = Answered("length")


# whole answers


def test_a_whole_answer_goes_on_when_it_is_whole() -> None:
    scene = play(1.5, WHOLE[:9], 2.0, WHOLE[9:])
    assert scene.said == [("head", HEAD, False), ("more", WHOLE, 0), ("answered", END)]
    assert scene.told_of == [("heard", END, 3.5)]
    assert ("model", "m", None) in scene.told
    assert scene.heard_bytes == 3, "its head and its pieces"


@pytest.mark.parametrize(("size", "flows"), [(4 * MIB, False), (4 * MIB + 1, True)])
def test_up_to_4_mib_of_it_are_held(size: int, flows: bool) -> None:
    body = of_size(size)
    scene = play(body[:-5], body[-5:])
    assert scene.said[0] == ("head", HEAD, flows)
    assert (scene.body, scene.words()[-1]) == (body, "answered")


@pytest.mark.parametrize(("others", "flows"), [(64 * MIB - 1000, False), (64 * MIB - 999, True)])
def test_up_to_64_mib_of_all_answers_are_held(others: int, flows: bool) -> None:
    scene = play(of_size(1000), held=others)
    assert scene.said[0] == ("head", HEAD, flows)
    assert scene.body == of_size(1000)
    streamed = play(
        frame(" " * 1000)[:1000], frame(" " * 1000)[1000:], DONE, of=EVENTS, held=others
    )
    assert streamed.said[1][1] == (frame(" " * 1000)[:1000] if flows else frame(" " * 1000))


@pytest.mark.parametrize(("behind", "read"), [(0, True), (1, False)])
def test_usage_is_read_in_the_last_64_kib_of_one_that_flows(behind: int, read: bool) -> None:
    usage = b'"usage": {"prompt_tokens": 3, "completion_tokens": 2}}'
    body = b" " * 5 * MIB + usage + b" " * ((64 << 10) + behind - len(usage))
    for pieces in ([body], [body[: 5 * MIB], body[5 * MIB : -7], body[-7:]]):
        scene = play(*pieces)
        assert scene.said[-1] == ("answered", Answered("stop", 2, 3) if read else Answered("stop"))


# 2 sequences: each 4 KiB for each of 5 tokens, and 256 KiB; 1 MiB beside them
MOST = 2 * (5 * 4096 + (256 << 10)) + MIB


@pytest.mark.parametrize("streamed", [False, True])
def test_one_that_is_larger_than_its_call_can_have_is_given_up(streamed: bool) -> None:
    of, begin = (EVENTS, frame("t", "stop")) if streamed else ({}, WHOLE)
    for more in (0, 1):
        scene = play(begin + b" " * (MOST - len(begin) + more), of=of, size=(2, 2, 3), others=True)
        if not more:
            assert scene.words() == ["head", "more", "answered"]
        else:
            reason = "server 0 answered with more than 1 MiB, beyond what was asked for"
            assert scene.said == [("returned", reason, None, "engine_unavailable", "failed")]


# what is no answer


@pytest.mark.parametrize(
    ("body", "how", "reason"),
    [
        (b"<html>", {}, "answered with something else than JSON"),
        (b"<html>", {"of": {"kind": "text/html"}}, "answered with something else than JSON"),
        (b"<html>", {"of": {"kind": ""}}, "answered with something else than JSON"),
        (
            b"<html>",
            {"of": {"kind": "application/problem+json"}, "path": EMBEDDINGS},
            "answered with something else than JSON",
        ),
        (b"\x00", {"of": {"kind": "audio/wav"}}, "answered without what an answer has"),
        (b'{"choices": []}', {}, "answered without what an answer has"),
        (WHOLE, {"streams": True}, "answered with something else than events"),
        (b'{"error": {"message": "no"}}', {}, "reported an error in its answer"),
    ],
)
def test_a_whole_answer_that_is_none_goes_back_where_another_server_is(
    body: bytes, how: dict[str, Any], reason: str
) -> None:
    """Else it is the client's, with what is wrong with it."""
    for others in (True, False):
        scene = play(body, others=others, **how)
        fault = "" if "error" in reason else reason
        head = (("content-type", how.get("of", {}).get("kind", "application/json")),)
        answer = Refused(200, head, body, fault)
        if others:
            returned = ("returned", f"server 0 {reason}", answer, "engine_unavailable", "failed")
            assert scene.said == [returned]
        else:
            assert scene.said == [("refused", answer)]
        assert scene.told_of == []


@pytest.mark.parametrize(
    ("body", "kind"), [(b"\x00", "audio/wav"), (b'{"data": []}', "application/json")]
)
def test_routes_that_generate_nothing_answer_in_any_form(body: bytes, kind: str) -> None:
    scene = play(body, path=EMBEDDINGS, of={"kind": kind}, streams=True)
    assert scene.words() == ["head", "more", "answered"]


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        ({"status": 204}, "answers 204"),
        ({"status": 302}, "answers 302"),
        ({"status": 399}, "answers 399"),
        ({"more": {"Content-Encoding": "gzip"}}, "answered in the encoding gzip"),
        ({"more": {"Content-Encoding": " BR "}}, "answered in the encoding br"),
        ({"more": {"Content-Encoding": 30 * "x"}}, f"answered in the encoding {20 * 'x'}"),
    ],
)
def test_other_good_statuses_and_encodings_are_no_answers(of: dict[str, Any], reason: str) -> None:
    scene = play(WHOLE, of=of)
    assert scene.said == [("returned", f"server 0 {reason}", None, "engine_unavailable", "failed")]


def test_an_answer_may_say_that_it_is_not_encoded() -> None:
    assert play(WHOLE, of={"more": {"Content-Encoding": " Identity"}}).words()[-1] == "answered"


@pytest.mark.parametrize("status", [199, 600])
def test_a_status_that_is_none_is_a_lost_connection(status: int) -> None:
    scene = play(WHOLE, of={"status": status})
    fault = f"it answered with the status {status}"
    assert scene.told_of == [("lose", f"OSError: {fault}"), ("look",)]
    reason = f"server 0 was lost (OSError: {fault})"
    assert scene.said == [("returned", reason, None, "engine_unavailable", "failed")]


# streams


def test_a_stream_goes_on_from_its_first_line_on() -> None:
    first = frame("a")
    scene = play(first[:5], 1.0, first[5:-2], 1.0, b"\n", frame("b", "length"), DONE, of=EVENTS)
    assert scene.said == [
        ("head", EVENTS_HEAD, True),
        ("more", first[:-1], 1),
        ("more", frame("b", "length"), 1),
        ("more", DONE, 0),
        ("answered", END),
    ]
    assert scene.told_of == [("heard", END, 2.0)]
    assert scene.exchange.streams
    assert scene.heard_bytes == 6


def test_a_stream_of_a_server_whose_streams_break_off_goes_on_at_its_end() -> None:
    pieces = (frame("a"), 1.0, frame("b", "length"), 1.0, DONE)
    scene = play(*pieces, of=EVENTS, breaks=True)
    whole = b"".join(each for each in pieces if isinstance(each, bytes))
    assert scene.said == [("head", EVENTS_HEAD, True), ("more", whole, 2), ("answered", END)]
    long = frame("a" * 3 * MIB)
    scene = play(long, long, frame("b", "length"), of=EVENTS, breaks=True)
    assert [each[1:] for each in scene.said[1:3]] == [(2 * long, 2), (frame("b", "length"), 1)]


@pytest.mark.parametrize(("size", "at_once"), [(4 * MIB, True), (4 * MIB + 1, False)])
def test_up_to_4_mib_of_a_stream_are_held(size: int, at_once: bool) -> None:
    last = b"\n\n" + frame("t", "stop")
    first = frame("a" * (size - len(frame("")) + 2)).rstrip()
    assert len(first) == size
    scene = play(first, last, of=EVENTS)
    assert scene.said[1][1] == (first + last if at_once else first)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([DONE], "sent a stream without an event"),
        ([], "sent a stream without an event"),
        ([b"<html>\n"], "sent something else than events"),
        ([b"data: {\n"], "sent something else than events"),
    ],
)
def test_a_stream_of_no_use_goes_back_before_any_of_it_went_on(
    pieces: list[bytes], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = play(*pieces, of=EVENTS, streams=True)
    assert caplog.messages == [f"server 0 (http://s): an answer is of no use: it {reason}"]
    assert scene.said == [("returned", f"server 0 {reason}", None, "engine_unavailable", "failed")]
    assert scene.told_of == []


def test_a_stream_that_ends_without_an_end_has_failed() -> None:
    reason = "server 0 ended a stream without finish_reason and without [DONE]"
    scene = play(frame("a"), of=EVENTS)
    assert scene.said[1:] == [
        ("more", frame("a"), 1),
        ("lost", reason, "engine_unavailable"),
    ]
    assert scene.told_of == [("failed",)]
    held = play(frame("a"), of=EVENTS, breaks=True)
    assert held.said == [("returned", reason, None, "engine_unavailable", "failed")]
    for last in (DONE, DONE.rstrip(), frame("b", "stop").rstrip()):
        assert play(frame("a"), last, of=EVENTS).words()[-1] == "answered", last


def test_an_error_in_a_stream_goes_back_where_another_server_is() -> None:
    error = b'data: {"error": {"message": "no"}}\n\n'
    scene = play(error, DONE, of=EVENTS, others=True)
    answer = Refused(200, EVENTS_HEAD, error)
    reason = "server 0 reported an error in its answer"
    assert scene.said == [("returned", reason, answer, "engine_unavailable", "failed")]
    alone = play(error, of=EVENTS)
    assert alone.said == [
        ("head", EVENTS_HEAD, True),
        ("more", error, 0),
        ("refused", Refused(200, (), b"")),
    ]
    assert alone.told_of == []


# error statuses


@pytest.mark.parametrize("status", [429, 502, 503, 504])
@pytest.mark.parametrize(("asks", "pause", "cause"), [(None, 1.0, "failed"), ("7", 7.0, "busy")])
def test_a_busy_server_is_left_alone_where_another_is(
    status: int, asks: str | None, pause: float, cause: str
) -> None:
    of = {"status": status, "more": {} if asks is None else {"Retry-After": asks}}
    scene = play(b"{}", of=of, others=True)
    answer = Refused(status, kept(Answer((), **of).raw_headers), b"{}")
    reason = f"server 0 answers {status}"
    assert scene.said == [("returned", reason, answer, "engine_unavailable", cause)]
    assert scene.told_of == [("refused", status), ("trip", pause, f"it answers {status}")]
    alone = play(b"{}", of=of)
    assert alone.said == [("refused", answer)]
    looks = [("look",)] if status >= 500 else []
    assert alone.told_of == [("refused", status), *looks]


@pytest.mark.parametrize("status", [400, 401, 428, 430, 499, 500, 501, 505, 599])
def test_another_error_goes_back_where_the_engine_asks_another_server(status: int) -> None:
    for asks in (True, False):
        scene = play(b"{", b"}", of={"status": status}, others=True, asks_others=asks)
        answer, reason = Refused(status, HEAD, b"{}"), f"server 0 answers {status}"
        returned = ("returned", reason, answer, "engine_unavailable", "failed")
        assert scene.said == [returned if asks else ("refused", answer)]
        looks = [("look",)] if status >= 500 else []
        assert scene.told_of == [("refused", status), *looks]


@pytest.mark.parametrize(("size", "taken"), [(MIB, True), (MIB + 1, False)])
def test_an_error_has_a_mebibyte_at_most(size: int, taken: bool) -> None:
    scene = play(b" " * size, of={"status": 500})
    if taken:
        assert scene.said == [("refused", Refused(500, HEAD, b" " * size))]
    else:
        reason = "server 0 answered 500 with more than 1 MiB"
        assert scene.said == [("returned", reason, None, "engine_unavailable", "failed")]


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        (None, 1.0),
        ("", 1.0),
        ("0", 0.0),
        ("2.5", 2.5),
        ("-1", 1.0),
        ("inf", 1.0),
        ("nan", 1.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 1.0),
    ],
)
def test_a_busy_server_says_how_long_in_seconds(said: str | None, seconds: float) -> None:
    assert pause_of(said) == seconds


def test_a_media_type_is_read_without_its_parameters() -> None:
    given: Any = Answer((), kind=" Text/Event-Stream ;charset=x")
    assert kind_of(given) == "text/event-stream"
    given.headers.clear()
    assert kind_of(given) == ""


# connections


def test_a_call_that_broke_off_goes_back_once_it_is_known_whether_the_server_is_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for lost, cause in ((False, "failed"), (True, "gone")):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            scene = play(ConnectionResetError(104, "reset"), lost=lost)
        fault = "connection reset by peer"
        assert scene.told_of == [("lose", fault), ("look",)]
        reason = f"server 0 was lost ({fault})"
        assert scene.said == [("returned", reason, None, "engine_unavailable", cause)]
        assert caplog.messages == [f"server 0 (http://s): a call broke off: {fault}"]


def test_an_answer_that_broke_off_is_lost_at_once() -> None:
    scene = play(frame("a"), TimeoutError(), of=EVENTS)
    reason = "server 0 was lost (no answer in time)"
    assert scene.said[-1] == ("lost", reason, "engine_unavailable")
    assert scene.told_of == [("lose", "no answer in time"), ("failed",)]


def test_a_fault_of_the_gateway_ends_the_call(caplog: pytest.LogCaptureFixture) -> None:
    scene = play(frame("a"), of=EVENTS, fails=True)
    reason = "internal error of the gateway"
    assert scene.said[-1] == ("lost", reason, "engine_unavailable")
    assert "internal error while a call was passed on" in caplog.messages


def test_one_that_is_not_wanted_any_more_says_nothing_and_one_whose_server_is_gone_goes_back() -> (
    None
):
    async def cancelled(scene: Scene) -> None:
        await asyncio.sleep(1.0)
        scene.exchange.cancel()
        scene.exchange.lose("gone")
        scene.limit = -1.0
        scene.exchange.look()

    scene = play(5.0, WHOLE, during=cancelled)
    assert (scene.said, scene.told_of, scene.closed_at) == ([], [], 1.0)

    async def gone(scene: Scene) -> None:
        await asyncio.sleep(1.0)
        scene.breaker.lost = True
        scene.exchange.lose("it is gone")
        scene.exchange.lose("again")
        scene.exchange.cancel()

    scene = play(5.0, WHOLE, during=gone)
    assert scene.said == [("returned", "it is gone", None, "engine_unavailable", "gone")]
    assert scene.closed_at == 1.0


# silence


def looks(scene: Scene, *instants: float) -> Awaitable[None]:
    """At these seconds."""

    async def main() -> None:
        now = 0.0
        for instant in instants:
            await asyncio.sleep(instant - now)
            now = instant
            scene.exchange.look()

    return main()


@pytest.mark.parametrize("others", [False, True])
def test_a_call_that_is_silent_for_too_long_is_given_up(
    others: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        scene = play(
            99.0,
            WHOLE,
            limit=10.0,
            others=others,
            during=lambda made: looks(made, 10.0, 10.6, 12.0),
        )
    reason = "server 0 sent no answer for 11 s"
    returned = ("returned", reason, None, "sequence_stalled", "failed")
    assert scene.said == [returned if others else ("lost", reason, "sequence_stalled")]
    assert (scene.last_fault, scene.closed_at) == (reason, 10.6)
    assert scene.told_of == []
    assert caplog.messages == [f"server 0 (http://s): a call is given up: {reason}"]


def test_events_are_signs_of_life_and_comments_are_none() -> None:
    scene = play(
        *(frame("a"), 8.0, frame("b"), 8.0, b": still here\n\n", 99.0),
        of=EVENTS,
        limit=10.0,
        during=lambda made: looks(made, 9.0, 17.0, 18.5),
    )
    reason = "server 0 sent no event for 10 s"
    assert scene.said[-1] == ("lost", reason, "sequence_stalled")
    assert scene.told_of == [("failed",)]


def test_bytes_of_a_large_whole_answer_are_signs_of_life() -> None:
    scene = play(
        *(of_size(4 * MIB + 1), 8.0, b" ", 8.0, b" ", 99.0),
        limit=10.0,
        during=lambda made: looks(made, 9.0, 17.0, 27.0),
    )
    assert scene.said[-1] == ("lost", "server 0 sent no answer for 11 s", "sequence_stalled")


def test_the_time_that_a_client_takes_is_not_the_servers() -> None:
    """Neither its silence nor its speed."""
    scene = play(
        *(frame("a"), 4.0, frame("b", "length")),
        of=EVENTS,
        takes=20.0,
        limit=10.0,
        during=lambda made: looks(made, 15.0, 22.0),
    )
    assert scene.words() == ["head", "more", "more", "answered"]
    assert scene.told_of == [("heard", END, 4.0)]


# another model


def test_an_answer_of_another_model_waits_until_the_server_was_looked_at() -> None:
    for of, pieces in (({}, [WHOLE]), (EVENTS, [frame("a", "length")])):
        scene = play(*pieces, of=of, other_model=True)
        assert scene.told_of == [("look",), ("heard", END, 0.5)]
        assert scene.words() == ["head", "more", "answered"]

    async def lost(scene: Scene) -> None:
        await asyncio.sleep(0.2)
        scene.exchange.lose("it has another model")

    scene = play(WHOLE, other_model=True, during=lost)
    assert scene.words() == ["returned"]
