"""The start of the http engine: what servers say of themselves, what is wrong with them; and
prompts, which they or a tokenizer count.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kendall.policies import SpecError
from kendall.server.engines.base import Capabilities, EngineStartError, UnsupportedError
from kendall.server.engines.http.prompts import BytesPerToken, PromptCounter, load_tokenizer
from kendall.server.engines.proxied import ProxiedCall
from tests.server.passed import Desk, passed
from tests.server.upstream_stub import Stub, answers, engine_of, sockets, up
from tests.virtual_time import run_with_sockets

# what is assumed of a server that says nothing; seconds between two looks
ASSUMED_CONTEXT, ASSUMED_SEQUENCES, UNKNOWN_TOKENS, AGAIN = 131_072, 64, 2**31, 1.0

METRICS = b"""# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:num_requests_running{model_name="m"} 0.0
"""


async def started(*stubs: Stub, **options: Any) -> Capabilities:
    async with up(*stubs, **options) as engine:
        return await engine.start()


def start(routes: dict[str, Any] | None = None, **options: Any) -> Capabilities:
    """Of one server with these routes besides the usual ones."""
    with sockets() as (stub,):
        stub.routes |= {path: (200, said) for path, said in (routes or {}).items()}
        return run_with_sockets(started(stub, **options))


def test_a_server_that_says_nothing_but_its_model(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kendall.engine"):
        found = start({"/v1/models": {"data": [{"id": "m"}, {"id": "m-lora"}]}})
    assert (found.engine, found.model, found.model_names) == ("http", "m", ("m", "m-lora"))
    assert (found.max_model_len, found.max_num_seqs) == (ASSUMED_CONTEXT, ASSUMED_SEQUENCES)
    assert (found.kv_cache_tokens, found.max_num_batched_tokens) == (UNKNOWN_TOKENS,) * 2
    assert (found.pads, found.servers) == (False, 1)
    assert [each.getMessage() for each in caplog.records] == [
        "no server says how many sequences it serves at once: 64 are assumed for each; set "
        "--max-num-seqs to what they serve"
    ]


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        ({}, {"max_model_len": 1000}),
        ({"/metrics": METRICS}, {"kv_cache_tokens": 1600}),
        (
            {"/metrics": METRICS.replace(b"engine=", b'max_num_seqs="7",engine=')},
            {"max_num_seqs": 7},
        ),
        ({"/metrics": b"other 1\n"}, {"kv_cache_tokens": UNKNOWN_TOKENS}),
        ({"/server_info": {"max_running_requests": 9}}, {"max_num_seqs": 9}),
        (
            {"/server_info": {"vllm_config": {"scheduler": {"max_num_seqs": 5}}}},
            {"max_num_seqs": 5},
        ),
        (
            {"/get_server_info": {"max_running_requests": 9, "x": {"max_running_requests": 3}}},
            {"max_num_seqs": 9},
        ),
        (
            {"/props": {"total_slots": 4, "default_generation_settings": {"n_ctx": 512}}},
            {"max_num_seqs": 4, "max_model_len": 1000},
        ),
        (
            {
                "/v1/models": {"data": [{"id": "m"}]},
                "/props": {"total_slots": 4, "default_generation_settings": {"n_ctx": 512}},
            },
            {"max_num_seqs": 4, "max_model_len": 512},
        ),
        ({"/props": b"no json"}, {"max_num_seqs": ASSUMED_SEQUENCES}),
        ({"/server_info": {"max_running_requests": None}}, {"max_num_seqs": ASSUMED_SEQUENCES}),
        ({"/server_info": {"max_running_requests": 0}}, {"max_num_seqs": ASSUMED_SEQUENCES}),
        ({"/server_info": {"max_num_seqs": True}}, {"max_num_seqs": ASSUMED_SEQUENCES}),
        ({"/server_info": {"max_num_seqs": -1}}, {"max_num_seqs": ASSUMED_SEQUENCES}),
        ({"/server_info": {"max_num_seqs": 1}}, {"max_num_seqs": 1}),
        ({"/server_info": {"max_num_seqs": 2**40}}, {"max_num_seqs": 2**40}),
        ({"/server_info": {"max_num_seqs": 2**40 + 1}}, {"max_num_seqs": ASSUMED_SEQUENCES}),
        (
            {"/metrics": METRICS.replace(b'"16"', b'"0"')},
            {"kv_cache_tokens": UNKNOWN_TOKENS},
        ),
    ],
)
def test_bounds_are_those_that_the_server_says(
    routes: dict[str, Any], said: dict[str, int]
) -> None:
    found = start(routes)
    assert {name: getattr(found, name) for name in said} == said


def test_what_the_operator_says_holds() -> None:
    found = start({"/server_info": {"max_num_seqs": 5}}, max_num_seqs=9, max_model_len=77)
    assert (found.max_num_seqs, found.max_model_len) == (9, 77)


def test_of_several_servers_the_least_holds(caplog: pytest.LogCaptureFixture) -> None:
    with sockets(2) as stubs, caplog.at_level(logging.WARNING, "kendall.engine"):
        for stub, most in zip(stubs, (5, 3), strict=True):
            stub.routes["/server_info"] = (200, {"max_num_seqs": most})
            models = {"data": [{"id": "m", "max_model_len": 100 * most}]}
            stub.routes["/v1/models"] = (200, models)
        found = run_with_sockets(started(*stubs))
    assert (found.servers, found.max_num_seqs, found.max_model_len) == (2, 3, 300)
    assert [each.getMessage() for each in caplog.records] == [
        "the servers serve 3 to 5 sequences at once: 3 are sent to each"
    ]


# what is wrong at the start


@pytest.mark.parametrize(
    ("models", "line"),
    [
        (
            (404, None),
            "got 404 from http://stub-0/v1/models; expected a server with OpenAI's API: "
            "--engine-url is its URL without /v1",
        ),
        (
            (200, {"data": []}),
            "got no model from http://stub-0/v1/models; expected a server with OpenAI's API: "
            "--engine-url is its URL without /v1",
        ),
        ((200, b"<html>"), "got no model from http://stub-0/v1/models; expected a server"),
        ((200, {"data": [{"id": 5}, 7]}), "got no model from http://stub-0/v1/models"),
        (
            (401, None),
            "got 401 from http://stub-0/v1/models; expected a key that it accepts: "
            "--engine-api-key",
        ),
        ((403, None), "got 403 from http://stub-0/v1/models; expected a key"),
        ((402, None), "got 402 from http://stub-0/v1/models; expected a server"),
        ((500, None), "got 500 from http://stub-0/v1/models; expected a server"),
        ((505, None), "got 505 from http://stub-0/v1/models; expected a server"),
    ],
)
def test_what_is_no_such_server_is_refused_with_one_line(
    models: tuple[int, Any], line: str
) -> None:
    with sockets() as (stub,):
        stub.routes["/v1/models"] = models
        with pytest.raises(EngineStartError) as caught:
            run_with_sockets(started(stub))
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_nothing_there_is_told_at_once() -> None:
    async def test(*stubs: Stub) -> None:
        with pytest.raises(EngineStartError) as caught:
            async with up(of=stubs) as engine:
                await engine.start()
        assert asyncio.get_running_loop().time() < 1
        assert str(caught.value) == (
            "got no answer from http://stub-0 (no such file or directory); expected a server with "
            "OpenAI's API there: start it, or correct --engine-url"
        )

    with sockets(2) as stubs:
        run_with_sockets(test(*stubs))


def test_servers_with_different_models_are_refused() -> None:
    with sockets(2) as stubs:
        stubs[1].routes["/v1/models"] = (200, {"data": [{"id": "a"}, {"id": "b"}]})
        with pytest.raises(EngineStartError) as caught:
            run_with_sockets(started(*stubs))
    assert str(caught.value) == (
        "got models 'a', 'b' from http://stub-1; expected model 'm', as before or as the other "
        "--engine-url: start it with the same model, or give it a gateway of its own"
    )


@pytest.mark.parametrize(
    ("route", "status"),
    [("/health", 503), ("/v1/models", 502), ("/v1/models", 503), ("/v1/models", 504)],
)
def test_a_server_that_loads_its_model_is_waited_for(
    route: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(stub: Stub) -> None:
        well, stub.routes[route] = stub.routes[route], (status, None)
        starting = asyncio.ensure_future(started(stub))
        await asyncio.sleep(40)
        assert not starting.done()
        stub.routes[route] = well
        await asyncio.sleep(AGAIN + 0.5)
        assert starting.done()

    with sockets() as (stub,), caplog.at_level(logging.WARNING, "kendall.engine"):
        run_with_sockets(test(stub))
    said = [each.getMessage() for each in caplog.records if "waiting" in each.getMessage()]
    assert said == [f"waiting for http://stub-0: it answers {status} to {route}"] * 2, (
        "twice in 40 s"
    )


def test_one_of_two_is_enough_and_the_other_gets_work_once_it_is_there() -> None:
    async def test(one: Stub, other: Stub) -> None:
        async with up(one, of=(one, other)) as engine:
            serving: list[frozenset[int]] = []
            engine.on_servers = serving.append
            assert (await engine.start()).servers == 2
            assert serving[-1] == {0}
            assert await engine.healthy()
            await other.up()
            await asyncio.sleep(20)
            assert serving[-1] == {0, 1}

    with sockets(2) as stubs:
        run_with_sockets(test(*stubs))


def test_a_server_without_health_is_probed_by_its_models() -> None:
    async def test(stub: Stub) -> None:
        stub.routes["/health"] = (404, None)
        async with up(stub) as engine:
            await engine.start()
            await asyncio.sleep(20)
            assert await engine.healthy()
            asked = [asked.path for asked in stub.asked]
            assert asked.count("/health") == 1
            assert asked.count("/v1/models") > 3

    with sockets() as (stub,):
        run_with_sockets(test(stub))


def test_what_needs_a_tokenizer_is_refused() -> None:
    async def test(stub: Stub) -> None:
        engine = engine_of(stub)
        with pytest.raises(UnsupportedError, match="reads no prompts"):
            engine.decode([1])
        for asked in (engine.encode("a"), engine.encode_chat([], {})):
            with pytest.raises(UnsupportedError, match="reads no prompts"):
                await asked
        with pytest.raises(ConnectionError, match="no server takes work"):
            await engine.relay(ProxiedCall("/tokenize", b"{}"))
        with pytest.raises(ValueError, match="expected an unpadded one"):
            engine.dispatch(0, [], padded=True, joining=False)

    with sockets() as (stub,):
        run_with_sockets(test(stub))


# prompts


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer of one token a word."""
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def fields(**values: Any) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(json.dumps(values), type=dict[str, msgspec.Raw])


def counted(path: str, prompt: bytes, given: dict[str, Any], **options: Any) -> tuple[int, Any]:
    """The tokens, and what the server was asked."""

    async def test(stub: Stub) -> tuple[int, Any]:
        if options.get("tokenizes"):
            stub.routes["/tokenize"] = (200, {"count": 42, "max_model_len": 5, "tokens": []})
        async with up(stub, tokenizer=options.get("tokenizer")) as engine:
            await engine.start()
            stub.frozen = options.get("frozen", False)
            before = len(stub.asked)
            tokens = await engine.prompt_tokens(path, fields(**given), prompt)
            asked = [each for each in stub.asked[before:] if each.method == "POST"]
            return tokens, [each.fields for each in asked]

    with sockets() as (stub,):
        return run_with_sockets(test(stub))


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = [{"role": "user", "content": "a b"}]


def test_a_server_that_tokenises_is_asked() -> None:
    given = {"model": "m", "messages": SAID, "tools": [1], "temperature": 1, "stream": True}
    asked = {"model": "m", "messages": SAID, "tools": [1]}
    assert counted(CHAT, b"x", given, tokenizes=True) == (42, [asked])
    given = {"model": "m", "prompt": "a b", "n": 2}
    asked = {"model": "m", "prompt": "a b"}
    assert counted(COMPLETIONS, b"x", given, tokenizes=True) == (42, [asked])


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/v1/responses", {"input": "a b"}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        (COMPLETIONS, {}),
        (CHAT, {}),
    ],
)
def test_what_it_does_not_take_is_estimated(path: str, given: dict[str, Any]) -> None:
    assert counted(path, b"x" * 41, given, tokenizes=True) == (10, [])


def test_a_server_that_does_not_answer_in_time_is_not_waited_for() -> None:
    given = {"model": "m", "prompt": "a b"}
    assert counted(COMPLETIONS, b"x" * 40, given, tokenizes=True, frozen=True) == (10, [given])


def test_a_count_is_believed_up_to_65536_tokens_more_than_there_are_bytes() -> None:
    """Of one that counts more, or not in two seconds, nothing is asked for half a minute."""

    async def test(stub: Stub) -> None:
        text, prompt = fields(model="m", prompt="a b"), b"x" * 40
        stub.routes["/tokenize"] = (200, {"count": 40 + 65_536})
        async with up(stub) as engine:
            await engine.start()

            async def tokens() -> tuple[int, int]:
                before = len(stub.asked)
                found = await engine.prompt_tokens(COMPLETIONS, text, prompt)
                return found, sum(each.method == "POST" for each in stub.asked[before:])

            assert await tokens() == (40 + 65_536, 1)
            stub.routes["/tokenize"] = (200, {"count": 40 + 65_537})
            assert [await tokens() for _ in range(2)] == [(10, 1), (10, 0)]
            await asyncio.sleep(29.9)
            assert await tokens() == (10, 0)
            await asyncio.sleep(0.2)
            stub.frozen = True
            began = asyncio.get_running_loop().time()
            assert await tokens() == (10, 1)
            assert asyncio.get_running_loop().time() - began == pytest.approx(2.0)
            assert await tokens() == (10, 0)

    with sockets() as (stub,):
        run_with_sockets(test(stub))


def test_a_tokenizer_counts_where_no_server_does(words: Path) -> None:
    prompt = json.dumps([{"role": "user", "content": ["a b", {"text": "c"}], "n": 5}]).encode()
    given = {"model": "m", "messages": SAID}
    options = {"tokenizer": str(words)}
    assert counted(CHAT, prompt, given, **options) == (4, []), "user, a, b, c"
    assert counted(CHAT, prompt, given, tokenizes=True, **options)[0] == 42
    assert counted(CHAT, b'"' + b"a " * 9000 + b'"', given, **options) == (9000, [])


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"prompt": [5, 6, 7]}, 3),
        ({"prompt": [[5, 6], [7]]}, 3),
        ({"input": [5, 6]}, 2),
        ({"prompt": []}, 0),
    ],
)
def test_token_ids_are_counted(given: dict[str, Any], tokens: int) -> None:
    assert counted(COMPLETIONS, b"x", given, tokenizes=True) == (tokens, [])


def test_servers_that_count_take_turns_and_are_not_asked_for_what_is_known() -> None:
    async def test(*stubs: Stub) -> None:
        for stub in stubs:
            stub.routes["/tokenize"] = (200, {"count": 42, "max_model_len": 5, "tokens": []})
        async with up(*stubs) as engine:
            await engine.start()
            before = [len(stub.asked) for stub in stubs]
            text, ids = fields(model="m", prompt="a text"), fields(model="m", prompt=[5, 6, 7])
            for _ in range(4):  # as the gateway asks
                assert engine.known_prompt_tokens(ids, b"[5,6,7]") == 3
                assert engine.known_prompt_tokens(text, b'"a text"') is None
                assert await engine.prompt_tokens(COMPLETIONS, text, b'"a text"') == 42
            counted = [
                sum(each.method == "POST" for each in stub.asked[start:])
                for stub, start in zip(stubs, before, strict=True)
            ]
            assert counted == [2, 2]

    with sockets(2) as stubs:
        run_with_sockets(test(*stubs))


@pytest.mark.parametrize("tokenizer", [False, True])
def test_without_a_server_that_counts_only_a_tokenizer_is_waited_for(
    tokenizer: bool, words: Path
) -> None:
    async def test(stub: Stub) -> None:
        async with up(stub, tokenizer=words if tokenizer else None) as engine:
            await engine.start()
            known = engine.known_prompt_tokens(fields(prompt="a text"), b"x" * 400)
            assert known == (None if tokenizer else 100)

    with sockets() as (stub,):
        run_with_sockets(test(stub))


def test_the_ratio_follows_what_the_servers_count() -> None:
    ratio = BytesPerToken()
    assert ratio.tokens(400) == 100
    assert ratio.tokens(1) == 1
    for _ in range(400):
        ratio.learn(300, 150)
    assert ratio.tokens(400) == pytest.approx(200, abs=1)
    ratio.learn(0, 5)
    ratio.learn(5, 0)
    assert ratio.tokens(400) == pytest.approx(200, abs=1)


def test_answers_teach_the_ratio() -> None:
    async def test(stub: Stub) -> None:
        stub.behave = answers(
            {"choices": [{"text": ""}], "usage": {"prompt_tokens": 50}}, after=0.0
        )
        async with up(stub) as engine:
            desk = Desk("continuous", engine, await engine.start())
            for number in range(300):
                call = passed(str(number))
                assert call.call is not None
                sized = msgspec.structs.replace(call.call, prompt_bytes=100)
                desk.take(msgspec.structs.replace(call, call=sized))
                await desk.batcher.answered()
            assert await engine.prompt_tokens(CHAT, {}, b"x" * 100) == pytest.approx(50, abs=2)
            assert desk.records["7"].prompt_tokens == 50

    with sockets() as (stub,):
        run_with_sockets(test(stub))


@pytest.mark.parametrize("name", ["folder", "file"])
def test_a_tokenizer_is_read_from_a_folder_or_a_file(name: str, words: Path) -> None:
    path = words.parent if name == "folder" else words
    assert load_tokenizer(str(path)).encode("a b").ids == [1, 2]


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{")
    with pytest.raises(SpecError, match=r"got --tokenizer .*cannot be read.*expected a tokenizer"):
        load_tokenizer(str(broken))


def test_nothing_is_asked_without_a_server() -> None:
    asked = PromptCounter(None).tokens(None, CHAT, fields(messages=SAID), b"x" * 8)
    assert asyncio.run(asked) == 2
