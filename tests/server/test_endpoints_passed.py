"""What the gateway reads of a call that it passes on, and the one thing that it changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.http.passing.endpoints import (
    ENDPOINTS,
    RELAYED,
    clipped,
    count,
    number,
    own_limit,
    parse,
    prompt_of,
    sequences,
    whole,
)
from server.runtime.errors import ApiError
from server.security.routes import DECISIONS, PASSED, WORK

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
        (COMPLETIONS, b"{}", 16, None),
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
    made = clipped(body, endpoint, parse(body), limit)
    if sent is None:
        assert made is body
        return
    field = endpoint.limits[-1]
    assert json.loads(made) == json.loads(body) | {field: limit}
    assert all(part in made for part in sent)


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"max_tokens": 9, "max_completion_tokens": 3}, {"max_tokens": 9}),
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
    """The newer one counts where both are."""
    body = json.dumps(given).encode()
    made = json.loads(clipped(body, CHAT, parse(body), 5))
    assert made.keys() == given.keys()
    assert {name: made[name] for name in sent} == sent
    least = made.get("max_completion_tokens") or made["max_tokens"]
    assert least <= 5


@pytest.mark.parametrize("bad", [0, -1, 1.5, "9", True, [9], 2**40])
def test_a_limit_that_cannot_be_read_is_left_to_the_server_behind(bad: Any) -> None:
    body = json.dumps({"max_tokens": bad}).encode()
    assert clipped(body, MESSAGES, parse(body), 5) is body


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
    made = json.loads(clipped(body, MESSAGES, parse(body), limit))
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
        (COMPLETIONS, {}, 16),
        (COMPLETIONS, {"max_tokens": 9}, 9),
        (RESPONSES, {"max_output_tokens": 9, "max_tokens": 3}, 9),
        (MESSAGES, {"max_tokens": 9}, 9),
        (EMBEDDINGS, {"max_tokens": 9}, None),
    ],
)
def test_the_clients_own_limit(endpoint: Any, fields: dict[str, Any], own: int | None) -> None:
    assert own_limit(endpoint, read(**fields)) == own


@pytest.mark.parametrize(
    ("endpoint", "fields", "expected"),
    [
        (CHAT, {}, 1),
        (CHAT, {"n": 3}, 3),
        (CHAT, {"n": None}, 1),
        (CHAT, {"n": 0}, 1),
        (CHAT, {"n": "x", "prompt": ["a", "b"]}, 1),
        (COMPLETIONS, {"prompt": "a"}, 1),
        (COMPLETIONS, {"prompt": ["a", "b"], "n": 2}, 4),
        (COMPLETIONS, {"prompt": [5, 6, 7]}, 1),
        (COMPLETIONS, {"prompt": [[5, 6], [7]]}, 2),
        (COMPLETIONS, {"prompt": []}, 1),
        (COMPLETIONS, {}, 1),
        (RESPONSES, {"input": ["a", "b"]}, 1),
        (EMBEDDINGS, {"input": ["a", "b", "c"], "n": 9}, 3),
        (EMBEDDINGS, {"input": "a"}, 1),
        (RERANK, {"query": "a", "documents": ["b", "c"]}, 2),
        (SCORE, {"text_1": "a", "text_2": ["b", "c"]}, 2),
    ],
)
def test_the_sequences_of_a_call(endpoint: Any, fields: dict[str, Any], expected: int) -> None:
    """n of each prompt; a list of token ids is one."""
    assert sequences(endpoint, read(**fields)) == expected


def test_the_prompt_is_the_bytes_of_its_fields() -> None:
    body = b'{"tools":[ 1],"model":"m","messages" : [{"content":"\\u0061"}]}'
    assert prompt_of(CHAT, parse(body)) == b'[{"content":"\\u0061"}],[ 1]'
    assert prompt_of(COMPLETIONS, parse(body)) == b""


@pytest.mark.parametrize(
    ("value", "as_number", "as_whole", "as_count"),
    [
        (5, 5.0, 5, 5),
        (2.5, 2.5, None, None),
        (0, None, 0, None),
        (-3, None, -3, None),
        (True, None, None, None),
        ("5", None, None, None),
        (None, None, None, None),
        (2**31, 2.0**31, 2**31, None),
    ],
)
def test_values_that_the_gateway_reads(
    value: Any, as_number: float | None, as_whole: int | None, as_count: int | None
) -> None:
    fields = read(a=value)
    assert (number(fields, "a"), whole(fields, "a"), count(fields, "a")) == (
        as_number,
        as_whole,
        as_count,
    )
    assert number(fields, "b") is whole(fields, "b") is count(fields, "b") is None


@pytest.mark.parametrize("body", [b"", b"{", b"5", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert caught.value.message.endswith("expected a JSON object")


def test_every_route_has_its_access() -> None:
    """And its body makes the server behind work."""
    paths = {*ENDPOINTS, *RELAYED}
    assert paths <= DECISIONS.keys() | PASSED.keys()
    assert not DECISIONS.keys() & PASSED.keys()
    assert paths <= WORK
