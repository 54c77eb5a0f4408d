"""What servers behind say of themselves may be anything: it costs no server for good, and no start.
A server whose model changes is noticed; the key goes where it was meant to go.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kendall.server.engines.base import EngineStartError
from kendall.server.engines.http.engine import HttpEngine
from kendall.server.engines.http.pool import HttpOptions
from tests.server.passing_gateway import Before, before
from tests.server.upstream_stub import USAGE, Asked, Stub, answers, frame, in_turn, play, up
from tests.serving import self_signed

# seconds; tokens
EVERY, ASSUMED_CONTEXT = 5.0, 131_072

DEEP = b"[" * 100_000
PROMPT = {"model": "m", "prompt": "hello", "max_tokens": 8}
MODELS = "/v1/models"


async def states(kendall: Before) -> list[tuple[str, str | None]]:
    servers = (await kendall.get("/admin/servers"))["servers"]
    return [(each["state"], each["last_fault"]) for each in servers]


ODD = [
    ("/props", DEEP),
    ("/server_info", b'{"a":' * 50_000),
    ("/get_server_info", b'{"max_num_seqs": NaN}'),
    ("/props", b'{"n_ctx": Infinity, "total_slots": -Infinity}'),
    ("/props", b'{"n_ctx": 1e400}'),
    ("/props", b'{"n_ctx": %b}' % (b"9" * 4000)),
    ("/props", b'{"n_ctx": %b}' % (b"9" * 5000)),
    ("/metrics", b"\xff\xfe" * 1000),
    ("/metrics", b'vllm:cache_config_info{block_size="x",num_gpu_blocks="inf"} 1.0'),
    ("/tokenize", DEEP),
    ("/tokenize", b'{"count": NaN}'),
    (MODELS, b'{"data": [{"id": "m", "max_model_len": Infinity}]}'),
    (MODELS, b'{"data": [{"id": "m", "max_model_len": [1]}, 5, {"id": 5}, null]}'),
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("path", "body"), ODD)
def test_an_odd_fact_is_none(path: str, body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """At the start, and where a server comes back."""

    async def test(stub: Stub) -> None:
        stub.behave = answers()
        stub.routes[path] = (200, body)
        async with before(stub) as kendall:
            context = kendall.gateway.batcher.capabilities.max_model_len
            assert context in (1000, ASSUMED_CONTEXT)
            assert (await kendall.answer(PROMPT)).status == 200
            stub.down()
            await asyncio.sleep(2 * EVERY + 1)
            await stub.up()
            assert (await kendall.answer(PROMPT)).status == 200
            assert await states(kendall) == [("serving", None)]

    play(test)
    assert not [each for each in caplog.records if each.exc_info]


@pytest.mark.parametrize(
    "body", [DEEP, b"[1]", b'{"data": 5}', b'{"data": [{"id": NaN}]}', b"\xff"]
)
def test_a_start_without_a_model_that_can_be_read_says_so_in_one_line(body: bytes) -> None:
    async def test(stub: Stub) -> None:
        stub.routes[MODELS] = (200, body)
        async with up(stub) as engine:
            with pytest.raises(EngineStartError) as caught:
                await engine.start()
            assert str(caught.value).startswith("got no model from http://stub-0/v1/models; ")
            assert "\n" not in str(caught.value)

    play(test)


@pytest.mark.parametrize("body", [DEEP, b"\xff", b'{"data": 5}', b"x" * (9 << 20)])
def test_a_list_of_models_that_cannot_be_read_takes_no_work_from_a_server(body: bytes) -> None:
    """It answers /health, and calls; and is as good as new when the list is repaired."""

    async def test(one: Stub, other: Stub) -> None:
        one.behave = other.behave = answers(after=0.1)
        async with before(one, other, engine={"max_num_seqs": 1}) as kendall:
            good, one.routes[MODELS] = one.routes[MODELS], (200, body)
            await asyncio.sleep(3 * EVERY)
            assert await states(kendall) == [("serving", None)] * 2
            one.down()
            await asyncio.sleep(2 * EVERY + 1)
            await one.up()
            await asyncio.sleep(30)
            (state, fault), _ = await states(kendall)
            assert state == "lost"
            assert fault is not None
            assert "/v1/models" in fault, "what it is, and not what it was"
            one.routes[MODELS] = good
            await asyncio.sleep(10)
            assert await states(kendall) == [("serving", None)] * 2

    play(test, stubs=2)


def test_an_error_that_nobody_thought_of_ends_no_probes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said, and the next probe finds the server as it is."""
    get, broken = aiohttp.ClientSession.get, False

    def fails(self: aiohttp.ClientSession, *given: Any, **options: Any) -> Any:
        if broken:
            raise LookupError("nobody thought of it")
        return get(self, *given, **options)

    async def test(stub: Stub) -> None:
        nonlocal broken
        stub.behave = answers()
        async with before(stub) as kendall:
            broken = True
            await asyncio.sleep(4 * EVERY)
            assert not kendall.gateway.lifecycle.ready
            broken = False
            assert (await kendall.answer(PROMPT)).status == 200
            assert await states(kendall) == [("serving", None)]

    monkeypatch.setattr(aiohttp.ClientSession, "get", fails)
    play(test)
    said = [each.getMessage() for each in caplog.records if each.exc_info]
    assert said
    assert len(said) == 3, "two probes, and once at the restart"
    assert all("it is repeated" in each or "cannot be read (said once)" in each for each in said)


# models


def named(model: str) -> dict[str, Any]:
    return {"model": model, "choices": [{"text": "a", "finish_reason": "stop"}], "usage": USAGE}


def test_a_server_that_lists_another_model_gets_no_work_until_it_has_the_first_one_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(one: Stub, other: Stub) -> None:
        async with before(one, other) as kendall:
            good, one.routes[MODELS] = one.routes[MODELS], (200, {"data": [{"id": "another"}]})
            await asyncio.sleep(EVERY + 1)
            (state, fault), second = await states(kendall)
            assert state == "lost"
            assert fault is not None
            assert "'another'" in fault
            assert "expected model 'm'" in fault
            assert second == ("serving", None)
            one.routes[MODELS] = good
            await asyncio.sleep(10)
            assert await states(kendall) == [("serving", None)] * 2

    with caplog.at_level(logging.WARNING, "kendall.engine"):
        play(test, stubs=2)
    said = [each.getMessage() for each in caplog.records if "is lost" in each.getMessage()]
    assert said == [
        "server 0 (http://stub-0) is lost: it has model 'another' now; expected model 'm'"
    ]


def test_adapters_may_come_and_go() -> None:
    async def test(stub: Stub) -> None:
        stub.routes[MODELS] = (200, {"data": [{"id": "m"}, {"id": "lora"}]})
        async with before(stub) as kendall:
            for names in (["m"], ["m", "lora", "other"], ["other", "m"]):
                stub.routes[MODELS] = (200, {"data": [{"id": name} for name in names]})
                await asyncio.sleep(EVERY + 1)
                assert await states(kendall) == [("serving", None)]
            stub.down()
            await asyncio.sleep(2 * EVERY + 1)
            await stub.up()
            await asyncio.sleep(10)
            assert await states(kendall) == [("serving", None)], "and is taken back with them"

    play(test)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_of_another_model_reaches_nobody(streamed: bool) -> None:
    """Between two probes: the server is asked when its answers name another model than before."""

    def as_model(model: str) -> Any:
        async def behave(asked: Asked) -> None:
            if not streamed:
                asked.whole(named(model))
                return
            asked.begin()
            asked.piece(b"data: %b\n\n" % json.dumps(named(model)).encode())
            asked.piece(b"data: [DONE]\n\n")
            asked.end()

        return behave

    async def test(one: Stub, other: Stub) -> None:
        one.behave = other.behave = as_model("m")
        async with before(one, other, engine={"max_num_seqs": 1}) as kendall:
            await asyncio.gather(*(kendall.answer(PROMPT) for _ in range(2)))
            one.behave = as_model("another")
            one.routes[MODELS] = (200, {"data": [{"id": "another"}]})
            for _ in range(5):
                call = await kendall.answer(PROMPT | {"stream": streamed})
                assert (call.status, b"another" in call.body) == (200, False)
            assert (await states(kendall))[0][0] == "lost"

    play(test, stubs=2)


def test_a_name_that_changes_while_the_models_stay_is_no_other_model() -> None:
    """An alias that its provider points elsewhere."""

    async def test(stub: Stub) -> None:
        stub.behave = in_turn(*[answers(named(f"m-{day}"), after=0.1) for day in (1, 1, 2, 2)])
        async with before(stub) as kendall:
            for _ in range(4):
                assert (await kendall.answer(PROMPT)).status == 200
            assert await states(kendall) == [("serving", None)]

    play(test)


# counts of prompts


@pytest.mark.parametrize("said", [DEEP, b'{"count": 1e12}', b'{"count": 999999999}', b"\xff"])
def test_a_count_of_tokens_that_cannot_be_is_not_believed(said: bytes) -> None:
    async def test(stub: Stub) -> None:
        stub.routes["/tokenize"] = (200, {"count": 1})
        stub.behave = answers()
        async with before(stub) as kendall:
            stub.routes["/tokenize"] = (200, said)
            assert (await kendall.answer(PROMPT)).status == 200

    play(test)


def test_a_server_that_does_not_count_holds_up_one_call_and_not_each() -> None:
    async def test(stub: Stub) -> None:
        stub.routes["/tokenize"] = (200, {"count": 1})
        async with before(stub) as kendall:
            del stub.routes["/tokenize"]  # it is one of the calls now
            stub.behave = answers(after=0.1)
            stub.routes["/tokenize"] = (200, b"x" * (9 << 20))
            waits = []
            for _ in range(4):
                began = kendall.gateway.now()
                assert (await kendall.answer(PROMPT)).status == 200
                waits.append(kendall.gateway.now() - began)
            asked = [each for each in stub.asked if each.path == "/tokenize"]
            assert len(asked) == 2, "at the start, and once"

    play(test)


# the key


def test_the_key_goes_to_the_origins_of_the_start_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def test(one: Stub, other: Stub) -> None:
        async with before(
            one, other, of=(one, other), engine={"at_first": 1, "key": "secret"}
        ) as kendall:
            urls = {"urls": ["http://stub-0", "http://stub-1"]}
            engine: Any = kendall.gateway.engine
            engine.serve_on(urls["urls"])
            await asyncio.sleep(2)
            assert all("secret" in asked.headers["authorization"] for asked in one.asked)
            assert other.asked
            assert not any("authorization" in asked.headers for asked in other.asked)

    with caplog.at_level(logging.WARNING, "kendall.engine"):
        play(test, stubs=2)
    assert "server 1 (http://stub-1) is not sent --engine-api-key" in caplog.text
    assert "secret" not in caplog.text


# certificates


def test_a_certificate_that_is_not_trusted_is_told_so(tmp_path: Path) -> None:
    certfile, keyfile = self_signed(tmp_path)

    async def test() -> str:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certfile, keyfile)
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        engine = HttpEngine(HttpOptions(urls=(f"https://127.0.0.1:{port}",)))
        try:
            await engine.start()
        except EngineStartError as error:
            return str(error)
        finally:
            await engine.stop()
            server.close()
        return ""

    said = asyncio.run(test())
    assert "(its certificate is not trusted: self-signed certificate)" in said


def test_a_server_without_tls_is_told_so() -> None:
    async def test() -> str:
        async def plain(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(plain, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        engine = HttpEngine(HttpOptions(urls=(f"https://127.0.0.1:{port}",)))
        try:
            await engine.start()
        except EngineStartError as error:
            return str(error)
        finally:
            await engine.stop()
            server.close()
        return ""

    assert "(no TLS connection: " in asyncio.run(test())


# the ends of streams


def test_a_stream_without_a_last_event_is_a_failure_that_its_client_is_told() -> None:
    async def behave(asked: Asked) -> None:
        asked.begin()
        asked.piece(frame("t1"))
        asked.end()

    async def test(stub: Stub) -> None:
        stub.behave = behave
        async with before(stub) as kendall:
            call = await kendall.answer(PROMPT | {"stream": True})
            first, error, done = call.events()
            assert (first["choices"][0]["text"], done) == ("t1", "[DONE]")
            assert error["error"]["code"] == "engine_unavailable"
            assert "ended a stream without finish_reason" in error["error"]["message"]
            (record,) = kendall.records
            assert (record.outcome, record.output_tokens) == ("failed", 1)

    play(test)


@pytest.mark.parametrize("last", [frame("", "stop"), b"data: [DONE]\n\n"])
def test_either_last_word_is_enough(last: bytes) -> None:
    async def behave(asked: Asked) -> None:
        asked.begin()
        asked.piece(frame("t1"))
        asked.piece(last)
        asked.end()

    async def test(stub: Stub) -> None:
        stub.behave = behave
        async with before(stub) as kendall:
            call = await kendall.answer(PROMPT | {"stream": True})
            assert call.body == frame("t1") + last
            assert [record.outcome for record in kendall.records] == ["completed"]

    play(test)


# usage


@pytest.mark.parametrize(
    ("usage", "prompt", "output"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 8}, 5, 8),
        ({"prompt_tokens": 5, "completion_tokens": 10_000_000}, 5, 8),
        ({"prompt_tokens": 5, "completion_tokens": 5_000}, 5, 8),
        ({"prompt_tokens": 5, "completion_tokens": -3}, 5, 8),
        ({"prompt_tokens": 5, "completion_tokens": 7.0}, 5, 7),
        ({"prompt_tokens": 5, "completion_tokens": 7.5}, 5, 8),
        ({"prompt_tokens": 5, "completion_tokens": "7"}, 5, 8),
        ({"prompt_tokens": 5, "completion_tokens": True}, 5, 8),
        ({"prompt_tokens": 999_999, "completion_tokens": 8}, 7, 8),
        ({"prompt_tokens": -1, "completion_tokens": 8}, 7, 8),
        ([1], 7, 8),
        (5, 7, 8),
    ],
)
def test_usage_that_cannot_be_true_is_not_believed(usage: Any, prompt: int, output: int) -> None:
    """The limit is 8 tokens, the context 1,000, and the answer ended at its limit."""

    async def test(stub: Stub) -> None:
        said = {"choices": [{"text": "abc", "finish_reason": "length"}], "usage": usage}
        stub.behave = answers(said, after=0.1)
        async with before(stub) as kendall:
            call = await kendall.answer(PROMPT | {"prompt": [1] * 7})
            assert call.json() == said, "the client has what the server wrote"
            (record,) = kendall.records
            assert (record.prompt_tokens, record.output_tokens) == (prompt, output)

    play(test)
