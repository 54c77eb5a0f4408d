"""What the gateway reads of a call that it passes on, and the one thing that it changes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kendall.server.http.proxied.endpoints import (
    ENDPOINTS,
    RELAYED,
    ProxiedEndpoint,
    model_of,
    number,
    parse,
    streams,
    whole,
)
from kendall.server.runtime.errors import ApiError
from kendall.server.security.routes import PASSED, WORK, access_of

CHAT, COMPLETIONS = ENDPOINTS["/v1/chat/completions"], ENDPOINTS["/v1/completions"]
RESPONSES, MESSAGES = ENDPOINTS["/v1/responses"], ENDPOINTS["/v1/messages"]
EMBEDDINGS, RERANK, SCORE = (ENDPOINTS[f"/v1/{name}"] for name in ("embeddings", "rerank", "score"))


def read(**values: Any) -> Any:
    return parse(json.dumps(values).encode())


@pytest.mark.parametrize(
    ("endpoint", "body", "limit", "sent"),
    [
        # nothing in force, or the client's own is small enough: the very same bytes
        (CHAT, b'{"max_tokens":  9}', None, None),
        (CHAT, b'{"max_tokens":  9}', 9, None),
        (CHAT, b'{"max_tokens":  9}', 10, None),
        (EMBEDDINGS, b'{"max_tokens":  9}', 5, None),
        # lowered, every other byte as it was
        (CHAT, b'{ "a":[1, 2.0],"max_tokens":9 , "b":"\\u0061"}', 5, (b"[1, 2.0]", b'"\\u0061"')),
        (COMPLETIONS, b"{}", 15, ()),
        (CHAT, b"{}", 5, ()),
        (RESPONSES, b'{"max_output_tokens":6}', 5, ()),
        (RESPONSES, b"{}", 5, ()),
        (MESSAGES, b'{"max_tokens":6}', 5, ()),
    ],
)
def test_only_the_token_limit_changes(
    endpoint: Any, body: bytes, limit: int | None, sent: tuple[bytes, ...] | None
) -> None:
    made = endpoint.clipped(body, parse(body), limit)
    if sent is None:
        assert made is body
        return
    field = endpoint.limits[-1]
    assert json.loads(made) == json.loads(body) | {field: limit}
    assert all(part in made for part in sent)


@pytest.mark.parametrize(("limit", "sent"), [(None, None), (15, 15), (16, 16), (500, 16)])
def test_a_completion_without_a_limit_has_openais(limit: int | None, sent: int | None) -> None:
    """Where one is in force: the default of a server behind may be another, or none."""
    made = json.loads(COMPLETIONS.clipped(b"{}", {}, limit))
    assert made == ({} if sent is None else {"max_tokens": sent})


@pytest.mark.parametrize(
    "body",
    [
        b'{"max_tokens":1000,"prompt":"a","max_tokens":8}',
        b'{"max_\\u0074okens":1000,"prompt":"a","max_tokens":8}',
        b'{"n":64,"prompt":"a","n":1,"max_tokens":8}',
        b'{"prompt":["a","b","c"],"max_tokens":8,"prompt":"a"}',
        b'{"max_tokens":1000, "prompt": "a", "max_tokens": 8}',
    ],
)
def test_of_a_name_that_is_there_twice_the_value_that_was_read_goes_on(body: bytes) -> None:
    """A server that takes the first of them would read what nobody has checked."""
    made, fields = COMPLETIONS.plain(body, parse(body))
    pairs = json.loads(made, object_pairs_hook=list)
    assert len(pairs) == len(fields) == len(dict(pairs))
    assert dict(pairs) == json.loads(body)
    assert COMPLETIONS.sequences(fields) == 1


@pytest.mark.parametrize(
    "body",
    [
        b'{ "prompt" :"a b",\n "max_tokens": 8 ,"stop":[ " ", "\\n" ]}',
        b'{"a b":1,"max_tokens":8}',
        b"{ }",
    ],
)
def test_white_space_is_no_name_twice(body: bytes) -> None:
    assert COMPLETIONS.plain(body, parse(body))[0] is body


@pytest.mark.parametrize(
    ("endpoint", "given", "sent"),
    [
        (CHAT, {"n_predict": 400}, {"max_tokens": 400}),
        (CHAT, {"n_predict": -1, "max_tokens": 9}, {"max_tokens": 9}),
        (CHAT, {"n_predict": 400, "max_completion_tokens": 9}, {"max_completion_tokens": 9}),
        (COMPLETIONS, {"n_predict": "400"}, {"max_tokens": 400}),
        (COMPLETIONS, {"max_completion_tokens": 8, "n_predict": 9}, {"max_tokens": 9}),
        (COMPLETIONS, {"max_completion_tokens": 800, "max_tokens": 9}, {"max_tokens": 9}),
        (COMPLETIONS, {"n_cmpl": 64}, {"n": 64}),
        (CHAT, {"n_cmpl": 64, "n": 2}, {"n": 2}),
        (RESPONSES, {"n_predict": 400}, {"max_output_tokens": 400}),
        (MESSAGES, {"n_predict": 400, "max_tokens": 9}, {"max_tokens": 9}),
        (EMBEDDINGS, {"n_predict": 400, "n_cmpl": 3}, {"n_predict": 400, "n_cmpl": 3}),
    ],
)
def test_a_limit_goes_on_under_its_own_name_alone(
    endpoint: ProxiedEndpoint, given: dict[str, Any], sent: dict[str, Any]
) -> None:
    """llama.cpp heeds `n_predict` before `max_tokens`: the limit in force would not be."""
    body = json.dumps({"model": "m", **given}).encode()
    made, fields = endpoint.plain(body, parse(body))
    assert json.loads(made) == {"model": "m", **sent}
    assert {name: json.loads(bytes(value)) for name, value in fields.items()} == json.loads(made)
    assert (made is body) is (given == sent)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"max_tokens": 9, "max_completion_tokens": 3}, {"max_tokens": 5}),
        ({"max_tokens": 3, "max_completion_tokens": 9}, {"max_completion_tokens": 5}),
        ({"max_tokens": 9, "max_completion_tokens": 8}, {"max_tokens": 5}),
        ({"max_completion_tokens": 9}, {"max_completion_tokens": 5}),
        ({"max_tokens": None}, {"max_tokens": 5}),
        ({"max_tokens": None, "max_completion_tokens": 9}, {"max_tokens": None}),
    ],
)
def test_of_the_two_fields_of_a_chat_those_that_are_there(
    given: dict[str, Any], sent: dict[str, Any]
) -> None:
    """Both, where both are: some servers read the older one."""
    body = json.dumps(given).encode()
    made = json.loads(CHAT.clipped(body, parse(body), 5))
    assert made.keys() == given.keys()
    assert {name: made[name] for name in sent} == sent
    least = made.get("max_completion_tokens") or made["max_tokens"]
    assert least <= 5


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (b"0", b"0"),
        (b"-0", b"-0"),
        (b"null", b"null"),
        (b"6", b"6"),
        (b'"6"', b"6"),
        (b'" 6"', b"6"),
        (b'"6.0"', b"6"),
        (b"6.0", b"6"),
        (b"60e-1", b"6"),
        (b"true", b"1"),
        (b"-1", b"-1"),
        (b"4000000000", b"4000000000"),
        (b"1e12", b"1000000000000"),
    ],
)
def test_a_number_is_sent_as_it_was_read(given: bytes, sent: bytes) -> None:
    """Whatever its spelling; one that is plain keeps its bytes."""
    for endpoint, name in ((CHAT, "n"), (CHAT, "max_tokens"), (RESPONSES, "max_output_tokens")):
        body = b'{"%b": %b, "x":  1.0}' % (name.encode(), given)
        made, fields = endpoint.plain(body, parse(body))
        assert bytes(fields[name]) == sent
        assert (made is body) == (given == sent)
        assert json.loads(made) == {name: json.loads(sent), "x": 1.0}


@pytest.mark.parametrize(
    "given",
    [b"1.5", b'"x"', b'""', b"[6]", b"{}", b"1e400", b'"1e1"', b"9" * 65, b"[" * 90 + b"]" * 90],
)
def test_what_is_no_number_is_refused(given: bytes) -> None:
    for endpoint in (CHAT, COMPLETIONS, MESSAGES):
        body = b'{"max_tokens": %b}' % given
        with pytest.raises(ApiError) as caught:
            endpoint.plain(body, parse(body))
        assert (caught.value.status, caught.value.param) == (400, "max_tokens")
        assert caught.value.message.startswith("max_tokens: got ")
        assert caught.value.message.endswith("expected a whole number, or null")
        assert len(caught.value.message) < 200
    assert EMBEDDINGS.plain(body, parse(body))[0] is body, "it has no such limit"


@pytest.mark.parametrize(
    ("endpoint", "fields", "sent"),
    [
        (COMPLETIONS, {"max_tokens": None}, {"max_tokens": 50}),
        (COMPLETIONS, {"max_tokens": -1}, {"max_tokens": 50}),
        (CHAT, {"max_tokens": -1}, {"max_tokens": 50}),
        (CHAT, {"max_tokens": 2**40}, {"max_tokens": 50}),
        (CHAT, {"max_tokens": 2**40, "max_completion_tokens": 3}, {"max_tokens": 50}),
        (CHAT, {"max_completion_tokens": -1}, {"max_completion_tokens": 50}),
        (CHAT, {"max_completion_tokens": 0}, {}),
        (CHAT, {"max_completion_tokens": None, "max_tokens": 7}, {}),
    ],
)
def test_no_value_passes_the_limit_in_force_by(
    endpoint: Any, fields: dict[str, Any], sent: dict[str, Any]
) -> None:
    body = json.dumps(fields).encode()
    assert json.loads(endpoint.clipped(body, parse(body), 50)) == fields | sent


NUMBERS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 500)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-3, 500).map(float)
    | st.integers(-3, 500).map(str)
    | st.integers(-3, 500).map(lambda value: f" {value}.0 ")
    | st.text(max_size=4)
)
VALUES = st.recursive(
    NUMBERS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
)
PROMPTS = (
    st.lists(NUMBERS, min_size=1, max_size=4)
    | st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4)
    | st.lists(st.text(max_size=3), min_size=1, max_size=4)
    | st.text(min_size=1, max_size=4)
)
IN_FORCE = 100


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, RESPONSES, MESSAGES], ids=lambda e: e.path)
def test_vllm_reads_of_a_call_what_was_read_here(endpoint: ProxiedEndpoint) -> None:
    """For every value of what limits a call: it is refused here, or there, or both read the same
    number of sequences, and a token limit within the one in force.
    """
    reads = vllm_reads(endpoint.path)

    @given(
        st.fixed_dictionaries({}, optional=dict.fromkeys(endpoint.numbers, VALUES)),
        PROMPTS,
        st.sampled_from(["prompt", "prompt_embeds"]),
    )
    def check(values: dict[str, Any], prompt: Any, name: str) -> None:
        given = values | ({name: prompt} if endpoint is COMPLETIONS else {})
        body = json.dumps(given).encode()
        try:
            body, fields = endpoint.plain(body, parse(body))
        except ApiError:
            return
        sent = json.loads(endpoint.clipped(body, fields, IN_FORCE))
        if (read := reads(sent)) is None:
            return
        theirs, limit = read
        assert endpoint.sequences(fields) >= theirs
        if endpoint.choices:
            ours = whole(fields, "n")
            assert (1 if ours is None else ours) == (1 if sent.get("n") is None else sent["n"])
        assert limit is not None
        assert limit <= IN_FORCE

    check()


def vllm_reads(path: str) -> Callable[[dict[str, Any]], tuple[int, int | None] | None]:
    """Of a body: sequences and token limit of each; None where it is refused."""
    warnings.simplefilter("ignore", DeprecationWarning)  # of its libraries; undone after the test
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    good: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    models: dict[str, tuple[Any, dict[str, Any]]] = {
        "/v1/chat/completions": (ChatCompletionRequest, good),
        "/v1/completions": (CompletionRequest, {"model": "m"}),
        "/v1/responses": (ResponsesRequest, {"model": "m", "input": "a"}),
        "/v1/messages": (AnthropicMessagesRequest, good),
    }
    model, rest = models[path]

    def reads(sent: dict[str, Any]) -> tuple[int, int | None] | None:
        try:
            call = model.model_validate(rest | sent)
        except Exception:  # noqa: BLE001 - of vLLM's own validators, too
            return None  # 400, however it is worded
        if path == "/v1/responses":
            return 1, call.max_output_tokens
        if path == "/v1/messages":
            return 1, call.max_tokens
        n = 1 if call.n is None else call.n
        if n < 1:
            return None
        if path == "/v1/completions":
            return n * _prompts_of(call.prompt, call.prompt_embeds), call.max_tokens
        newer = call.max_completion_tokens
        return n, call.max_tokens if newer is None else newer

    return reads


def _prompts_of(prompt: Any, embeds: Any) -> int:
    """As vLLM's renderer has them."""
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    texts = 0 if not prompt else len(prompt) if several else 1
    return texts + (len(embeds) if isinstance(embeds, list) else embeds is not None)


@given(
    st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=8)),
    st.none() | st.integers(1, 100),
    st.none() | st.integers(1, 100),
)
def test_the_limit_holds_whatever_else_is_there(
    others: dict[str, Any], own: int | None, limit: int | None
) -> None:
    fields = others | ({} if own is None else {"max_tokens": own})
    body = json.dumps(fields).encode()
    made = json.loads(MESSAGES.clipped(body, parse(body), limit))
    if limit is not None and own is None and fields.get("max_tokens") is None:
        assert made == fields | {"max_tokens": limit}
    elif limit is not None and own is not None:
        assert made == fields | {"max_tokens": min(own, limit)}
    else:
        assert made == fields


@pytest.mark.parametrize(
    ("endpoint", "fields", "own"),
    [
        (CHAT, {}, None),
        (CHAT, {"max_tokens": 9}, 9),
        (CHAT, {"max_tokens": 9, "max_completion_tokens": 3}, 3),
        (CHAT, {"max_tokens": 9, "max_completion_tokens": None}, 9),
        (CHAT, {"max_tokens": -1}, None),
        (COMPLETIONS, {"max_tokens": None}, None),
        (COMPLETIONS, {"max_tokens": 0}, 0),
        (COMPLETIONS, {}, 16),
        (COMPLETIONS, {"max_tokens": 9}, 9),
        (RESPONSES, {"max_output_tokens": 9, "max_tokens": 3}, 9),
        (MESSAGES, {"max_tokens": 9}, 9),
        (EMBEDDINGS, {"max_tokens": 9}, None),
    ],
)
def test_the_clients_own_limit(endpoint: Any, fields: dict[str, Any], own: int | None) -> None:
    assert endpoint.own_limit(read(**fields)) == own


@pytest.mark.parametrize(
    ("endpoint", "fields", "expected"),
    [
        (CHAT, {}, 1),
        (CHAT, {"n": 3}, 3),
        (CHAT, {"n": None}, 1),
        (CHAT, {"n": 0}, 1),
        (CHAT, {"n": 2, "best_of": 7}, 7),
        (COMPLETIONS, {"prompt": ["a", "b"], "best_of": 3}, 6),
        (COMPLETIONS, {"n": 2, "best_of": None}, 2),
        (RESPONSES, {"n": 5}, 5),
        (MESSAGES, {"n": 5}, 5),
        (CHAT, {"prompt": ["a", "b"]}, 1),
        (COMPLETIONS, {"prompt": ["a", "b"], "prompt_embeds": ["x", "y", "z"]}, 5),
        (COMPLETIONS, {"prompt": None, "prompt_embeds": "x"}, 1),
        (COMPLETIONS, {"prompt": None, "prompt_embeds": ["x", "y"]}, 2),
        (COMPLETIONS, {"prompt": "a", "prompt_embeds": ["x", "y"]}, 3),
        (COMPLETIONS, {"prompt": "a"}, 1),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 2}, 4),
        (COMPLETIONS, {"prompt": [5, 6, 7]}, 1),
        (COMPLETIONS, {"prompt": [[5, 6], [7]]}, 2),
        (COMPLETIONS, {"prompt": []}, 1),
        (COMPLETIONS, {}, 1),
        (RESPONSES, {"input": ["a", "b"]}, 1),
        (EMBEDDINGS, {"input": ["a", "b", "c"], "n": 9}, 3),
        (EMBEDDINGS, {"input": "a"}, 1),
        (EMBEDDINGS, {"messages": [[{"role": "user"}], [{"role": "user"}]]}, 2),
        (RERANK, {"query": "a", "documents": ["b", "c"]}, 2),
        (SCORE, {"text_1": "a", "text_2": ["b", "c"]}, 2),
        (SCORE, {"queries": ["a", "b", "c"], "documents": ["b"]}, 3),
    ],
)
def test_the_sequences_of_a_call(endpoint: Any, fields: dict[str, Any], expected: int) -> None:
    """n of each prompt; a list of token ids is one."""
    assert endpoint.sequences(read(**fields)) == expected


def test_the_prompt_is_the_bytes_of_its_fields() -> None:
    body = b'{"tools":[ 1],"model":"m","messages" : [{"content":"\\u0061"}]}'
    assert CHAT.prompt_of(parse(body)) == b'[{"content":"\\u0061"}],[ 1]'
    assert COMPLETIONS.prompt_of(parse(body)) == b""


@pytest.mark.parametrize(
    ("value", "as_number", "as_whole"),
    [
        (5, 5.0, 5),
        (2.5, 2.5, None),
        (0, None, 0),
        (-3, None, -3),
        (True, None, None),
        ("5", None, None),
        (None, None, None),
        (2**31, 2.0**31, 2**31),
        ([[1] * 100], None, None),
        (10**63, 1e63, 10**63),  # 64 bytes
        (10**64, None, None),
        (0.5, 0.5, None),
    ],
)
def test_values_that_the_gateway_reads(
    value: Any, as_number: float | None, as_whole: int | None
) -> None:
    fields = read(a=value)
    assert (number(fields, "a"), whole(fields, "a")) == (as_number, as_whole)
    assert number(fields, "b") is whole(fields, "b") is None


@pytest.mark.parametrize(
    ("value", "asked"),
    [(True, True), ("true", True), (1, True), (False, False), (None, False), ("x", False)],
)
def test_whether_events_are_asked_for(value: Any, asked: bool) -> None:
    assert streams(read(stream=value)) is asked
    assert streams(read()) is False


def test_the_model_that_is_asked_for() -> None:
    assert model_of(read(model="m")) == "m"
    assert model_of(read(model="m" * 1022)) == "m" * 1022, "1,024 bytes with its marks"
    assert model_of(read(model="m" * 1023)) == ""
    assert model_of(read(model=5)) == model_of(read(model="m" * 2000)) == model_of(read()) == ""


def test_a_number_beyond_all_that_can_be_read_is_there_and_none() -> None:
    """What is asked for is not what a server takes where nothing is."""
    fields = parse(b'{"n": 1e400, "stream": 1e400, "model": 1e400}')
    assert (number(fields, "n"), whole(fields, "n"), model_of(fields)) == (None, None, "")
    assert streams(fields) is False


@pytest.mark.parametrize(("digits", "taken"), [(64, True), (65, False)])
def test_a_number_has_64_bytes_at_most(digits: int, taken: bool) -> None:
    given = b"1" + b"0" * (digits - 1)
    body = b'{"n": ' + given + b"}"
    if taken:
        assert CHAT.parts(body)[2] == 10 ** (digits - 1)
    else:
        with pytest.raises(ApiError, match="expected a whole number, or null"):
            CHAT.parts(body)


@pytest.mark.parametrize("body", [b"", b"{", b"5", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert caught.value.message.endswith("expected a JSON object")


def test_every_route_has_its_access() -> None:
    """And its body makes the server behind work."""
    paths = {*ENDPOINTS, *RELAYED}
    assert {access_of(path) for path in {*paths, *PASSED}} == {"client"}
    assert {*paths, *PASSED} <= WORK
