"""What Kendall imports of vLLM's API server is there, and has the fields that it counts on."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from kendall.server.engines.base import EngineRequest, Sampling
from kendall.server.http.api.newer_endpoints import BEYOND, MessagesRequest, ResponsesRequest
from kendall.server.http.api.schema import ChatRequest, CompletionRequest
from kendall.server.http.openai_tools.others import CountTokensRequest
from kendall.server.runtime.errors import ApiError

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of vLLM's imports
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.left_out
def test_every_import_point_is_there() -> None:
    from kendall.server.openai_tools import vllm_imports

    assert [name for name in vllm_imports.__all__ if not hasattr(vllm_imports, name)] == []


def test_vllm_has_the_fields_that_are_served() -> None:
    """Else they would be ignored."""
    from kendall.server.openai_tools.serving import MODELS

    served = {
        "chat": BEYOND[ChatRequest],
        "completions": BEYOND[CompletionRequest],
        "responses": ResponsesRequest.served,
        "messages": MessagesRequest.served,
        "count_tokens": CountTokensRequest.served,
    }
    for name, fields in served.items():
        assert fields - MODELS[name].model_fields.keys() == set(), name


def test_trap_1_every_parameter_of_vllm_is_mirrored_or_refused() -> None:
    from kendall.server.openai_tools import vllm_imports
    from kendall.server.openai_tools.sampling import LISTS, OWN_RULE, SAME, sampling_of

    plain = vllm_imports.SamplingParams()
    fields = set(vllm_imports.SamplingParams.__struct_fields__)
    assert {*SAME, *LISTS, *OWN_RULE} <= fields
    assert sampling_of(plain, plain, 16).max_tokens == 16
    others: dict[str, Any] = {
        "watermarking": False,
        "repetition_detection": object(),
        "logprob_token_ids": [1],
        "trace_decode_token_ids": [1],
        "spaces_between_special_tokens": False,
        "routed_experts_prompt_start": 1,
        "extra_args": {"a": 1},
        "flat_logprobs": True,
    }
    for name in others.keys() & fields:
        params = vllm_imports.SamplingParams()
        setattr(params, name, others[name])
        with pytest.raises(ApiError) as caught:
            sampling_of(params, plain, 16)
        assert caught.value.param == name


def test_a_prompt_with_images_is_continued_as_it_was_rendered() -> None:
    from kendall.server.engines.vllm.core import prompt_of

    request = EngineRequest(None, [1, 2], Sampling(max_tokens=4), output_token_ids=(3,))  # type: ignore[arg-type]
    assert prompt_of(request)["prompt_token_ids"] == [1, 2, 3]
    rendered = {"type": "multimodal", "mm_kwargs": "an image", "prompt_token_ids": [1, 2]}
    seen = replace(request, rendered=rendered)
    assert prompt_of(seen) == rendered | {"prompt_token_ids": [1, 2, 3]}


def test_exceptions_of_vllm_become_errors_that_clients_can_read() -> None:
    """Trap 6. Before the queue they are the client's; later they are the server's."""
    from vllm.exceptions import VLLMValidationError

    from kendall.server.openai_tools.serving import NOT_RENDERED, VllmServing

    class Chat:
        @staticmethod
        def create_error_response(error: Any) -> Any:
            from vllm.entrypoints.serve import create_error_response

            return create_error_response(error)

    serving = object.__new__(VllmServing)
    serving._state = type("State", (), {"openai_serving_chat": Chat})()  # type: ignore[assignment]
    cases: list[tuple[Exception, bool, tuple[int, str, str | None]]] = [
        (VLLMValidationError("x", parameter="tools"), True, (400, "invalid_request", "tools")),
        (ValueError("x"), True, (400, "invalid_request", None)),
        (NotImplementedError("x"), True, (501, "unsupported", None)),
        (KeyError("role"), True, (400, "invalid_prompt", "messages")),
        (KeyError("role"), False, (500, "internal_error", None)),
        (RuntimeError("x"), True, (500, "internal_error", None)),
    ]
    for error, early, expected in cases:
        told = serving.refusal(error, early=early)
        assert (told.status, told.code, told.param) == expected, error
    assert serving.refusal(KeyError("role"), early=True).message == NOT_RENDERED
    own = ApiError(429, "queue_full", "x")
    assert serving.refusal(own, early=False) is own


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_chat_without_a_template_is_refused_in_the_words_of_the_chat_endpoint(
    wrapped: bool,
) -> None:
    """vLLM's own speak of transformers v4.44."""
    from vllm.renderers.chat_utils import ChatTemplateResolutionError

    from kendall.server.engines.vllm.core import NO_CHAT_TEMPLATE
    from kendall.server.openai_tools.serving import VllmServing

    error: Exception = ChatTemplateResolutionError("As of transformers v4.44, ...")
    if wrapped:
        inner, error = error, ValueError("the prompt cannot be rendered")
        error.__cause__ = inner
    parts: Any = Mock()
    refused = VllmServing(parts, parts).refusal(error, early=True)
    assert (refused.status, refused.code) == (400, "invalid_prompt")
    assert refused.message == NO_CHAT_TEMPLATE
    assert "and a restart of the gateway" in refused.message
