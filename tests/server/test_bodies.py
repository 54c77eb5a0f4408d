"""Large bodies: their values are counted off the event loop, too many are refused before a
parser builds them, and the rest is served.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kendall.server.http import bodies
from kendall.server.http.bodies import (
    AT_ONCE,
    MOST_VALUES,
    count_containers,
    count_values,
    parsed,
)
from kendall.server.runtime.errors import ApiError
from tests.server.asgi import Call, call, completion, running

MIB = 1 << 20
BOMB = b'{"x": [' + b"[],{}," * (14 * MIB // 6) + b"1]}"
NUMBERS = b'{"x": [' + b"1," * (7 * MIB) + b"1]}"
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.sampled_from('",[{\\}]é\n a'), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(st.sampled_from('",[{\\x'), max_size=6), inner, max_size=5)
    ),
    max_leaves=40,
)


def structure(value: Any) -> int:
    """Commas and opening brackets that a value is written with, as they are counted."""
    if not isinstance(value, list | dict):
        return 0
    return (
        4  # each list and object
        + max(0, len(value) - 1)
        + sum(map(structure, value.values() if isinstance(value, dict) else value))
    )


@settings(max_examples=60, deadline=None)
@given(JSON, st.booleans(), st.integers(1, 9))
def test_values_are_counted_whatever_strings_hold_and_wherever_a_piece_ends(
    value: Any, ascii_only: bool, piece: int
) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "PIECE", piece)
        assert count_values(body, 10**9) == structure(value)
    assert count_values(body, 10**9) == structure(value)


@settings(max_examples=60, deadline=None)
@given(JSON)
def test_lists_and_objects_are_counted_whatever_strings_hold(value: Any) -> None:
    def containers(part: Any) -> int:
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return isinstance(part, list | dict) + sum(map(containers, inner))

    body = json.dumps(value).encode()
    assert count_containers(body, 10**9) == containers(value)


def test_brackets_in_texts_count_for_nothing() -> None:
    async def main() -> None:
        assert await parsed(json.dumps("[{" * 40_000).encode(), len, 100) > 80_000

    asyncio.run(main())


def test_counting_ends_at_the_bound() -> None:
    body = b"[" + b"1," * 8_000_000
    assert MOST_VALUES < count_values(body, MOST_VALUES) <= MOST_VALUES + bodies.PIECE
    nested = b"[" * 8_000_000
    assert count_containers(nested, 1000) == bodies.PIECE == 65_536
    assert count_containers(nested[: 2 * bodies.PIECE], bodies.PIECE) == 2 * bodies.PIECE, (
        "a bound that is met is not passed"
    )
    assert count_values(body[: 2 * bodies.PIECE], 4 + 32_767) == 4 + 65_535


@pytest.mark.parametrize(("size", "on_the_loop"), [(262_144, True), (262_145, False)])
def test_a_large_body_is_parsed_in_a_thread(size: int, on_the_loop: bool) -> None:
    async def main() -> None:
        thread = await parsed(b" " * size, lambda _: threading.get_ident())
        assert (thread == threading.get_ident()) is on_the_loop

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "context", "most"),
    [
        (NUMBERS, None, r"262144 JSON values \(a list or an object counts for 4\)"),
        (NUMBERS, 500_000, r"1000000 JSON values \(a list or an object counts for 4\)"),
        (BOMB, None, "32768 lists and objects"),
        (BOMB, 1000, "8096 lists and objects"),
        (b"[" * 8097, 1000, "8096 lists and objects"),
    ],
)
def test_a_body_of_too_many_values_reaches_no_parser(
    body: bytes, context: int | None, most: str
) -> None:
    """Fourteen megabytes of small values, as one field that nobody reads; few bytes, too."""

    async def main() -> None:
        with pytest.raises(ApiError, match=f"more than {most}; expected fewer") as refused:
            await parsed(body, lambda _: pytest.fail("it was parsed"), context)
        assert (refused.value.status, refused.value.code) == (413, "too_many_values")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("taken", "one_more", "context"),
    [
        (b"[" * 4096, b"[", 0),
        (b"[" * 8096, b"[", 1000),
        (b"[" * 32_768, b"[", None),
        (b"[" * 32_768, b"[", 10**6),
        (b"[" + b"1," * (2**18 - 4), b",", None),
        (b"[" + b"1," * (2**18 - 4), b",", 2**17),
        (b"[" + b"1," * 599_996, b",", 300_000),
    ],
)
def test_as_many_values_as_a_body_may_have_are_parsed(
    taken: bytes, one_more: bytes, context: int | None
) -> None:
    async def main() -> None:
        assert await parsed(taken, len, context) == len(taken)
        with pytest.raises(ApiError, match="got a body of more than"):
            await parsed(taken + one_more, len, context)

    asyncio.run(main())


def test_the_event_loop_runs_on_while_values_are_counted() -> None:
    """Counting each piece of the body waits for one more turn of the event loop; it would never
    end on the event loop itself.
    """
    turned, in_time = threading.Event(), list[bool]()

    class Paced(bytes):
        def __getitem__(self, part: Any) -> Any:
            turned.clear()
            in_time.append(all(in_time) and turned.wait(30))
            return super().__getitem__(part)

    async def main() -> None:
        async def others() -> None:
            while True:
                turned.set()
                await asyncio.sleep(0)

        watching = asyncio.create_task(others())
        await parsed(Paced(NUMBERS), len, 10**9)
        watching.cancel()

    asyncio.run(main())
    assert in_time == [True] * math.ceil(len(NUMBERS) / bodies.PIECE), (
        "others were served meanwhile"
    )
    assert bodies.PIECE <= 1 << 16, (
        "which hold the interpreter's lock for a fraction of a millisecond each"
    )


def test_large_calls_of_few_values_are_served_and_those_of_many_are_refused() -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            text = 'a line, [with] {brackets}, "quotes" and \\backslashes\\ \n' * 30_000
            assert len(text) > AT_ONCE
            assert (await call(app, "POST", "/v1/completions", completion(user=text))).status == 200
            many = completion(metadata=[[0]] * 400_000)
            refused = await call(app, "POST", "/v1/completions", many)
            assert (refused.status, refused.json()["error"]["code"]) == (413, "too_many_values")
            assert "connection" not in refused.headers, "its body was read to the end"
            for path in ("/tokenize", "/detokenize"):
                assert (await call(app, "POST", path, many)).json()["error"][
                    "code"
                ] == "too_many_values"
            assert gateway.batcher.unanswered == 0

    asyncio.run(main())


def test_a_model_of_a_long_context_takes_as_many_token_ids_as_fit() -> None:
    async def main() -> None:
        async with running() as (app, gateway):
            gateway.batcher.recovery.resume(
                dataclasses.replace(gateway.batcher.capabilities, max_model_len=MIB)
            )
            ids = completion(prompt=[100] * 400_000)
            answer = await call(app, "POST", "/v1/completions", ids)
            assert answer.json()["error"]["code"] == "context_length_exceeded", (
                "the model's own bound, not the body's"
            )

    asyncio.run(main())


def test_a_long_text_is_tokenised_in_a_thread_and_texts_of_tokens_are_made_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kendall.server.engines import emulated

    threads: list[int] = []
    of = emulated.token_ids_of
    monkeypatch.setattr(
        emulated, "token_ids_of", lambda text: threads.append(threading.get_ident()) or of(text)
    )

    async def main() -> None:
        async with running() as (app, gateway):
            here = threading.get_ident()
            short = await call(app, "POST", "/tokenize", {"prompt": "some words"})
            long = await call(app, "POST", "/tokenize", {"prompt": "word " * 30_000})
            assert (short.json()["count"], long.json()["count"]) == (2, 30_000)
            assert threads[0] == here != threads[1]
            made = 0
            decode = gateway.engine.decode

            def counting(ids: list[int]) -> str:
                nonlocal made
                made += 1
                return decode(ids)

            gateway.engine.decode = counting  # type: ignore[method-assign,assignment]
            asked = Call(
                app, "POST", "/tokenize", {"prompt": "word " * 5000, "return_token_strs": True}
            )
            seen = set()
            while not asked.task.done():
                seen.add(made)
                await asyncio.sleep(0)
            assert len(asked.json()["token_strs"]) == made == 5000
            assert len(seen) > 10, "others had their turn"

    asyncio.run(main())
