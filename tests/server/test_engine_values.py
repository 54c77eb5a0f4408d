"""What the gateway and its engines hand each other: limits of a request, bounds of an engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kendall.policies import Request
from kendall.policies.core import UNBOUNDED
from kendall.queueing.engine_bounds import EngineBounds
from kendall.server.engines.base import (
    Capabilities,
    EngineRequest,
    Sampling,
    Structured,
    Token,
    TokenStream,
    describe_engine,
)
from kendall.server.engines.proxied import ProxiedCall, in_trace


def request(asked: int | None, limit: int = 50) -> EngineRequest:
    return EngineRequest(
        Request(id="r", arrived_at=0.0, prompt_tokens=2, max_output_tokens=limit),
        (1, 2),
        Sampling(max_tokens=limit, seed=4),
        asked_output_tokens=asked,
    )


@pytest.mark.parametrize(
    ("asked", "limit", "made", "most"),
    [
        (None, 5, 0, 50),  # the gateway's limit does not hold for it
        (80, None, 0, 80),
        (80, 100, 0, 80),
        (80, 80, 0, 80),
        (80, 79, 0, 79),
        (80, 20, 19, 20),
        (80, 20, 20, 21),  # the token after those that are made
        (80, 20, 30, 31),
        (50, None, 0, 50),
        (80, 50, 0, 50),
    ],
)
def test_the_gateways_limit_holds_up_to_what_the_client_asked_for(
    asked: int | None, limit: int | None, made: int, most: int
) -> None:
    before = request(asked)
    found = before.under(limit, made)
    assert (found.request.max_output_tokens, found.sampling.max_tokens) == (most, most)
    assert (found is before) == (most == 50)
    assert msgspec.structs.replace(found, request=before.request, sampling=before.sampling) == (
        before
    )
    assert found.sampling.seed == 4


def test_without_made_tokens_a_limit_leaves_none_less_than_itself() -> None:
    assert request(80).under(1).request.max_output_tokens == 1
    assert request(80).under(0).request.max_output_tokens == 1


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({}, False),
        ({"structured": Structured("regex", "a")}, True),
        ({"allowed_token_ids": ()}, True),
        ({"bad_words": ("x",)}, True),
        ({"logit_bias": {1: 0.5}}, True),
        ({"logit_bias": {}}, False),
        ({"stop_token_ids": (1,)}, True),
        ({"thinking_token_budget": 0}, True),
        ({"prompt_logprobs": 0}, True),
        ({"logprobs": 5, "seed": 3, "stop": ("x",), "temperature": 0.0}, False),
    ],
)
def test_what_depends_on_the_model_is_checked_before_it_queues(
    fields: dict[str, Any], needed: bool
) -> None:
    assert Sampling(max_tokens=1, **fields).needs_check is needed


def test_only_a_forced_length_does_not_end_by_itself() -> None:
    assert request(5).ends_by_itself
    assert not msgspec.structs.replace(request(5), forced_output_tokens=3).ends_by_itself


def test_a_stream_without_a_listener_says_nothing() -> None:
    stream = TokenStream("r")
    stream.push([Token(1, "a")])
    stream.end("stop")
    stream.fail("lost")
    assert (stream.request_id, stream.cached_tokens, stream.prompt_logprobs) == ("r", 0, None)


def capabilities(**more: Any) -> Capabilities:
    given: dict[str, Any] = {
        "engine": "vllm",
        "model": "m",
        "max_model_len": 1000,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 500,
        "kv_cache_tokens": 3000,
        "eos_token_ids": frozenset({0}),
        "vocab_size": 9,
    }
    return Capabilities(**given | more)


def test_an_engine_is_described_by_what_its_law_depends_on() -> None:
    described = {
        "engine": "vllm",
        "emulated": False,
        "model": "name",
        "max_model_len": 1000,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 500,
        "kv_cache_tokens": 3000,
        "servers": 1,
    }
    assert describe_engine(capabilities(), "name") == described
    emulated = describe_engine(capabilities(engine="emulated", servers=3), "name")
    assert emulated == described | {"engine": "emulated", "emulated": True, "servers": 3}
    more = describe_engine(capabilities(pads=False, chunked_prefill=True), "name")
    assert more == described | {"pads": False, "step_tokens": 500}


@pytest.mark.parametrize(
    ("more", "reserved", "bounds"),
    [
        ({}, 100, {"batch_tokens": 500, "max_context_tokens": 3000, "reserved_tokens": 100}),
        ({}, UNBOUNDED, {"batch_tokens": 500, "max_context_tokens": 3000}),
        ({"kv_cache_tokens": UNBOUNDED}, 100, {"batch_tokens": 500}),
        (
            {"max_num_batched_tokens": 2**31, "chunked_prefill": True},
            100,
            {"step_tokens": 2**31, "max_context_tokens": 3000, "reserved_tokens": 100},
        ),
        (
            {"max_num_batched_tokens": 2**31 - 1},
            100,
            {"batch_tokens": 2**31 - 1, "max_context_tokens": 3000, "reserved_tokens": 100},
        ),
    ],
)
def test_models_of_the_queue_have_the_bounds_that_bind(
    more: dict[str, Any], reserved: int, bounds: dict[str, int]
) -> None:
    unbound = {"step_tokens": None, "batch_tokens": None, "max_context_tokens": None}
    expected = EngineBounds(max_num_seqs=4, **unbound | {"reserved_tokens": None} | bounds)
    assert capabilities(**more).bounds(reserved) == expected


@pytest.mark.parametrize(
    ("more", "context", "prompt", "reserved"),
    [
        ({}, 1000, 500, 375),  # 3000 // (2 * 4)
        ({"chunked_prefill": True}, 1000, 999, 375),
        ({"max_num_batched_tokens": 2000}, 1000, 999, 375),
        ({"kv_cache_tokens": 300}, 300, 299, 37),
        ({"kv_cache_tokens": 3999}, 1000, 500, 499),
        ({"kv_cache_tokens": 4000}, 1000, 500, UNBOUNDED),
        ({"kv_cache_tokens": 7}, 7, 6, 1),
    ],
)
def test_the_largest_context_and_the_longest_prompt(
    more: dict[str, Any], context: int, prompt: int, reserved: int
) -> None:
    found = capabilities(**more)
    assert (found.largest_context, found.longest_prompt) == (context, prompt)
    assert found.reserved_tokens == reserved


def test_a_traced_call_has_the_headers_of_its_trace_in_place_of_the_clients() -> None:
    headers = (("accept", "x"), ("traceparent", "theirs"), ("tracestate", "b"), ("trace", "c"))
    call = ProxiedCall("/v1/completions", b"{}", headers)
    assert in_trace(call, {}) is call
    assert in_trace(call, {"traceparent": "ours"}).headers == (
        ("accept", "x"),
        ("trace", "c"),
        ("traceparent", "ours"),
    )
